"""The suite: turns, medians, skipped systems, failures; and the parts that its measurements share."""

from __future__ import annotations

import asyncio
import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lab.bench.__main__ import ROWS, chosen, exit_code
from lab.bench.client import ReceivedMessages, percentiles, read_stamp, stamped
from lab.bench.rows.drain import quorum_queue
from lab.bench.rows.throughput import send_all
from lab.bench.rows.tracker import marker_records
from lab.bench.suite import Bar, Bench, BenchRow, Measurements, RowOutcome, Size, Skipped, UsageError, _take_turns, kept
from lab.program import BenchClient, RunError
from lab.resources import Meter, memory_bytes
from marq.wire.marker_codec import decode
from marq.wire.markers import Ack, Acquire
from marq.wire.names import Names

SIZE = Size(1_000, 3)


def nowhere(tmp_path: Path, lines: list[str] | None = None) -> Bench:
    no_broker: Any = None
    return Bench("nowhere", tmp_path, SIZE, (lines if lines is not None else []).append, no_broker)


def test_systems_take_turns_in_alternating_order_and_medians_count(tmp_path: Path) -> None:
    order: list[tuple[str, int]] = []
    numbers = {"a": count(10), "b": count(20)}

    def system(name: str, bench: Bench) -> Measurements:
        order.append((name, bench.size.messages))
        return {"rate": float(next(numbers[name]))}

    systems = {name: lambda bench, name=name: system(name, bench) for name in "ab"}
    outcome = RowOutcome(BenchRow("row", "what", systems, warm=10))
    _take_turns(outcome, nowhere(tmp_path))

    assert order == [(name, 10) for name in "ab"] + [(name, 1_000) for name in "abbaab"]
    assert outcome.medians == {"a": {"rate": 12.0}, "b": {"rate": 22.0}}


def test_a_system_that_is_not_there_is_skipped_once_and_the_others_are_measured(tmp_path: Path) -> None:
    lines: list[str] = []

    def missing(bench: Bench) -> Measurements:
        raise Skipped("no broker on this machine")

    outcome = RowOutcome(BenchRow("row", "what", {"missing": missing, "there": lambda bench: {"rate": 1.0}}, runs=2))
    _take_turns(outcome, nowhere(tmp_path, lines))

    assert outcome.skipped == {"missing": "no broker on this machine"}
    assert [line for line in lines if "SKIPPED" in line] == ["row missing: SKIPPED: no broker on this machine"]
    assert {name: len(runs) for name, runs in outcome.runs.items()} == {"there": 2}


def test_a_name_stands_for_a_row_or_a_family_and_an_unknown_one_is_refused() -> None:
    rows = [BenchRow(name, "", {}) for name in ("drain", "work-1ms", "work-10ms", "worker")]
    delays = BenchRow("delays", "", {}, by_name=True)

    assert [row.name for row in chosen(rows, Size(only=frozenset({"work"})))] == ["work-1ms", "work-10ms"]
    assert chosen([*rows, delays], Size()) == rows
    assert chosen([*rows, delays], Size(only=frozenset({"delays"}))) == [delays]
    with pytest.raises(UsageError, match="no row drian"):
        chosen(rows, Size(only=frozenset({"drian"})))


def test_the_size_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"MESSAGES": "50000", "RUNS": "", "ONLY": "drain,work", "VALUE_BYTES": "1000"}.items():
        monkeypatch.setenv(name, text)

    assert Size.from_environment() == Size(50_000, 5, frozenset({"drain", "work"}), value_bytes=1_000)


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_a_number_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RUNS", text)

    with pytest.raises(UsageError, match=f"RUNS must be a number of at least 1, got {text}"):
        Size.from_environment()


def test_the_exit_code_tells_a_failure_from_an_unmet_bar() -> None:
    row = BenchRow("row", "", {})
    met, unmet = Bar("what", 2.0, 1.0, "times", at_least=True), Bar("what", 2.0, 1.0, "s")

    assert exit_code([RowOutcome(row, bars=[met])]) == 0
    assert exit_code([RowOutcome(row, bars=[met, unmet])]) == 2
    assert exit_code([RowOutcome(row, bars=[unmet]), RowOutcome(row, error="broken")]) == 1


def test_a_bar_is_met_at_its_limit_even_if_sums_of_cpu_times_are_not_exact() -> None:
    found = (1.1 - 1.0) * 10

    assert found > 1.0
    assert Bar("share of a core", found, 1.0, "%").met
    assert Bar("share of a core", 2.0 - found, 1.0, "%", at_least=True).met
    assert not Bar("share of a core", 1.000001, 1.0, "%").met


def test_a_result_keeps_every_run_and_says_which_bars_are_met() -> None:
    row = BenchRow("row", "what it is", {})
    bars = [Bar("rate", 0.7, 0.55, "times", at_least=True)]

    found = kept([RowOutcome(row, {"a": [{"rate": 1.0}, {"rate": 3.0}]}, bars=bars), RowOutcome(row, error="broken")])

    assert found["rows"]["row"]["error"] == "broken"
    assert found["failed"] == ["row"]
    assert found["bars"] == [
        {"row": "row", "what": "rate", "found": 0.7, "limit": 0.55, "unit": "times", "at_least": True, "met": True}
    ]


def test_each_row_has_a_name_of_its_own_and_says_what_it_is() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.what and row.systems for row in ROWS)


async def test_a_share_of_the_messages_takes_time() -> None:
    received = ReceivedMessages(2, 10_000.0, 100)

    await asyncio.wait_for(received.work((101).to_bytes(8, "big")), 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(received.work((200).to_bytes(8, "big")), 0.01)


def test_without_a_rabbitmq_that_row_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RABBITMQ_URL", raising=False)

    with pytest.raises(Skipped, match="RABBITMQ_URL is not set"):
        quorum_queue(nowhere(tmp_path))


def test_each_message_has_an_acquire_and_an_ack_behind_it() -> None:
    written = [decode(record) for record in marker_records(Names("p"), 1, 1_200, 200, "acquire,ack")]

    assert [type(batch) for batch in written] == [Acquire, Ack] * 3
    acquired = [offset for batch in written if isinstance(batch, Acquire) for offset in batch.offsets]
    acked = [offset for batch in written if isinstance(batch, Ack) for offset in batch.offsets]
    assert acquired == acked == list(range(1_200))


def test_a_message_says_when_it_was_to_be_sent() -> None:
    assert read_stamp(stamped(7, 12.5, 200)) == (7, 12.5)
    assert len(stamped(7, 12.5, 200)) == 200
    assert percentiles([float(number) for number in range(100)]) == {"p50_ms": 50.0, "p99_ms": 99.0, "max_ms": 99.0}


def test_a_process_that_fails_says_why() -> None:
    with BenchClient(send_all, "nowhere") as client, pytest.raises(RunError, match="TypeError"):
        client.read()


def test_what_a_process_takes_is_counted() -> None:
    meter = Meter({"this": [os.getpid()]})
    while meter.seconds()["this"] == 0:
        sum(range(100_000))

    # Not compared with each other: the kernel sums up each of them with some delay.
    assert min(memory_bytes(os.getpid(), "VmRSS"), memory_bytes(os.getpid(), "VmHWM")) > 1 << 20
