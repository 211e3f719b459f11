from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from lab.consumer import demo_outcome
from lab.demo.progress import Display
from lab.demo.run import NUMBER_DIGITS, VALUE_BYTES, DemoPlan, DemoRun, make_value, read_plan
from lab.program import START_SECONDS
from marq.settings.client import ClientSettings


def test_a_value_has_its_size_and_begins_with_its_number() -> None:
    value = make_value(4711)

    assert len(value) == VALUE_BYTES
    assert int(value[:NUMBER_DIGITS]) == 4711


def outcomes(attempt: int) -> Counter[object]:
    """Outcomes of 5,000 messages of a queue at an attempt."""
    return Counter(demo_outcome(place, attempt) for place in range(5_000))


def test_every_tenth_message_of_each_queue_is_forgotten_at_its_first_delivery() -> None:
    assert outcomes(1)["forget"] == 500
    assert outcomes(2)["forget"] == 0


def test_some_fail_twice_and_some_always() -> None:
    assert [outcomes(attempt)[RuntimeError] for attempt in range(1, 6)] == [105, 105, 5, 5, 5]


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
    display = Display(Console(file=io.StringIO()), 1)

    run = DemoRun(DemoPlan(limit_seconds=limit), "kafka:9092", "demo-1", tmp_path, 4, display, None)

    settings = ClientSettings.read(None, {}, environment=run.environment)
    assert (settings.bootstrap_servers, settings.connect_timeout_ms) == ("kafka:9092", wait * 1000)
