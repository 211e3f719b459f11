"""The checker finds planted defects of real consumers and workers."""

from __future__ import annotations

from typing import Any

import pytest

from lab.faults.delays import FEW
from lab.faults.mix import Mix
from lab.faults.scenario import Scenario, play
from lab.stage import Stage
from marq_worker.broker import EmbeddedBroker

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]


async def planted(stage: Stage, _: Any) -> None:
    await stage.worker("--planted")
    await stage.consumer("--manner=patient")
    mix = Mix(stage, delayed=1.0)
    mix.start()
    await stage.delivered_more(FEW)
    await mix.stop()


async def test_a_worker_that_is_early_and_delivers_cancelled_messages_is_found_out(broker: EmbeddedBroker) -> None:
    result = await play(Scenario("planted", "", "", planted), broker)

    assert not result.passed
    violations = result.statistics["violations"]
    assert violations["early"] > 0
    # A copy of a message that the log says is cancelled.
    assert violations["transaction"] > 0


async def careless(stage: Stage, _: Any) -> None:
    await stage.worker()
    stage.load()
    victim = await stage.consumer("--careless", "--die-at=in-handler", "--die-after=30")
    await stage.dead(victim)
    await stage.consumer()
    await stage.delivered_more(100)


async def test_a_consumer_that_commits_without_acquiring_is_found_out(broker: EmbeddedBroker) -> None:
    result = await play(Scenario("careless", "", "", careless), broker)

    assert not result.passed
    assert result.statistics["lost"] > 0


async def hasty(stage: Stage, _: Any) -> None:
    await stage.worker()
    stage.load()
    # Twice the time between two messages of a key, so that a message waits when the one before it ends.
    await stage.consumer("--hasty", "--manner=patient", "--work=2")
    await stage.delivered_more(5 * FEW)


async def test_a_consumer_that_delivers_before_the_ack_of_the_message_before_is_found_out(
    broker: EmbeddedBroker,
) -> None:
    result = await play(Scenario("hasty", "", "", hasty), broker)

    assert not result.passed
    assert result.statistics["violations"]["order"] > 0
