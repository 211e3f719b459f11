from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from lab.demo.plan import VALUE_BYTES, Conduct, Plan, make_value, read_number, read_plan
from lab.demo.run import START_SECONDS, programs
from marq.settings.client import ClientSettings


def test_a_value_has_its_size_and_gives_its_number_back() -> None:
    value = make_value(4711)

    assert len(value) == VALUE_BYTES
    assert read_number(value) == 4711


@pytest.mark.parametrize("value", [None, b"", b"x" * 200, make_value(1)[:-1], make_value(1)[:-1] + b"!"])
def test_a_damaged_value_has_no_number(value: bytes | None) -> None:
    assert read_number(value) is None


def test_a_message_in_the_wrong_queue_is_not_the_plans() -> None:
    plan = Plan(messages=100, queues=20)

    assert plan.number("demo-03", make_value(23)) == 23
    assert plan.number("demo-04", make_value(23)) is None
    assert plan.number("demo-03", make_value(103)) is None


def test_every_tenth_message_of_each_queue_is_forgotten_at_its_first_delivery() -> None:
    plan = Plan()

    conduct = Counter((plan.queue(number), plan.conduct(number, 1)) for number in range(plan.messages))

    assert {count for (_, each), count in conduct.items() if each is Conduct.FORGET} == {500}
    assert Conduct.FORGET not in {plan.conduct(number, 2) for number in range(plan.messages)}


def test_some_fail_twice_and_some_always() -> None:
    plan = Plan()

    failing = [sum(plan.conduct(n, attempt) is Conduct.FAIL for n in range(plan.messages)) for attempt in range(1, 6)]

    assert failing == [2_100, 2_100, 100, 100, 100]


def test_sizes_come_from_the_command_line_then_from_the_environment() -> None:
    plan = read_plan(["--messages=500"], {"DEMO_MESSAGES": "700", "DEMO_LEASE": "2.5"})

    assert (plan.messages, plan.lease_seconds, plan.queues) == (500, 2.5, 20)


@pytest.mark.parametrize(
    "environment",
    [
        {"DEMO_MESSAGES": "many"},
        {"DEMO_MESSAGES": "0"},
        {"DEMO_QUEUES": "0"},
        {"DEMO_LEASE": "nan"},
        {"DEMO_LIMIT": "nan"},
        {"DEMO_LIMIT": "inf"},
        {"DEMO_HELD": "-1"},
    ],
)
def test_a_wrong_size_is_refused(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_plan([], environment)

    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "wait"), [(0.5, START_SECONDS), (900.0, 900.0)])
def test_each_program_waits_for_the_broker_as_long_as_the_demo_does(tmp_path: Path, limit: float, wait: float) -> None:
    workers, consumers = programs(Plan(limit_seconds=limit), tmp_path, {"MARQ_BOOTSTRAP_SERVERS": "kafka:9092"})

    for program in [*workers, *consumers]:
        settings = ClientSettings.read(None, {}, environment=program.environment)
        assert (settings.bootstrap_servers, settings.connect_timeout_ms) == ("kafka:9092", wait * 1000)
