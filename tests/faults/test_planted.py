"""The checker finds planted defects of real consumers and workers."""

from __future__ import annotations

import re
from functools import partial

import pytest

from lab.faults.mix import mix
from lab.faults.scenario import Scenario, ScenarioResult, Step, begin, play
from lab.faults.scenarios import CONCURRENCY, FEW, PATIENT, dies_at, fair, limited, prioritised
from lab.stage import Stage
from marq_worker.broker import EmbeddedBroker

#: The option of a program with a defect.
PLANTED = "--install=tests.faults.planted"
#: Rates below that of the load on any machine.
LOW_RATES = 'limits = { rate = "4/s", per_key = { rate = "1/s" } }\n'

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]


def played(broker: EmbeddedBroker, setup: Step, *faults: Step) -> ScenarioResult:
    return play(Scenario("planted", faults, setup), broker)


def test_a_worker_that_is_early_and_delivers_cancelled_messages_is_found_out(broker: EmbeddedBroker) -> None:
    setup = begin([f"{PLANTED}:early_and_disobedient"], [PATIENT], load=partial(mix, delayed=1.0), some=FEW)

    result = played(broker, setup)

    assert not result.passed
    violations = result.statistics["violations"]
    assert violations["early"] > 0
    # A copy of a message that the log says is cancelled.
    assert violations["transaction"] > 0


@pytest.mark.parametrize(
    ("lines", "options", "wrong"),
    [
        (CONCURRENCY, ["--manner=slow", f"{PLANTED}:forgetful"], "of_key: [3-9] ran at a time, 2 may"),
        (LOW_RATES, [f"{PLANTED}:hurried"], "the queue: [0-9]+ began within 5 s"),
    ],
    ids=["forgetful", "hurried"],
)
def test_consumers_that_exceed_limits_are_found_out(
    broker: EmbeddedBroker, lines: str, options: list[str], wrong: str
) -> None:
    result = play(limited("planted", lines, *options), broker)

    assert not result.passed
    assert re.search(wrong, "\n".join(result.wrong))


def test_a_consumer_whose_busiest_key_keeps_its_turn_is_found_out(broker: EmbeddedBroker) -> None:
    result = play(fair("planted", f"{PLANTED}:loyal"), broker)

    assert "of another key" in result.wrong[0]


@pytest.mark.parametrize(
    ("defect", "wrong"),
    [("greedy", "urgent messages while lower ones waited"), ("level", "urgent messages began before lower ones")],
)
def test_a_consumer_that_is_wrong_about_priorities_is_found_out(
    broker: EmbeddedBroker, defect: str, wrong: str
) -> None:
    result = play(prioritised("planted", f"{PLANTED}:{defect}"), broker)

    assert wrong in result.wrong[0]


async def careless(stage: Stage) -> None:
    await dies_at("in-handler", 30, f"{PLANTED}:careless")(stage)
    await stage.consumer()


def test_a_consumer_that_commits_without_acquiring_is_found_out(broker: EmbeddedBroker) -> None:
    result = played(broker, begin(consumers=[], some=0), careless)

    assert not result.passed
    assert result.statistics["lost"] > 0


def test_a_consumer_that_delivers_before_the_ack_of_the_message_before_is_found_out(
    broker: EmbeddedBroker,
) -> None:
    # Twice the time between two messages of a key, so that a message waits when the one before it ends.
    result = played(broker, begin(consumers=[[f"{PLANTED}:hasty", "--manner=patient", "--work=2"]]))

    assert not result.passed
    assert result.statistics["violations"]["order"] > 0
