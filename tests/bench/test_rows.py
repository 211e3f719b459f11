"""The rows that measure Marq by itself: what they judge, and how they talk with their processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.bars import Bar
from bench.children import Child
from bench.clients.markers import markers
from bench.clients.stamps import percentiles, read_stamp, stamped
from bench.processes import Meter, memory_bytes
from bench.rows import latency, redelivery, scale, send, tracker
from bench.settings import Size
from bench.suite import Bench, Medians
from broker.embedded import EmbeddedBroker
from marq.core.marker_codec import decode
from marq.core.markers import Ack, Acquire
from marq.core.names import Names

REDELIVERED = {"lateness_p50_ms": 60.0, "lateness_p99_ms": 250.0, "all_acked_seconds": 6.5, "duplicates": 0.0}


def unmet(bars: list[Bar]) -> list[float]:
    return [bar.found for bar in bars if not bar.met]


def test_figures_at_their_limits_meet_the_bars_and_worse_ones_do_not() -> None:
    good: Medians = {latency.STEADY: {"p50_ms": 5.0, "p99_ms": 40.0}}
    bad: Medians = {latency.STEADY: {"p50_ms": 5.1, "p99_ms": 40.1}}
    assert (unmet(latency.bars(good)), unmet(latency.bars(bad))) == ([], [5.1, 40.1])

    good = {redelivery.QUIET: REDELIVERED, redelivery.BUSY: REDELIVERED}
    bad = {redelivery.QUIET: {**REDELIVERED, "duplicates": 1.0}, redelivery.BUSY: REDELIVERED}
    assert (unmet(redelivery.bars(good)), unmet(redelivery.bars(bad))) == ([], [1.0])

    rates = {
        two: {scale.ONE: {"messages_per_second": 100.0}, scale.TWO: {"messages_per_second": two}}
        for two in (95.0, 94.0)
    }
    assert [unmet(scale.bars(found)) for found in rates.values()] == [[], [0.94]]


def test_each_message_has_an_acquire_and_an_ack_behind_it() -> None:
    written = [decode(record) for record in markers(Names("p"), 1, 1_200, 200, "acquire,ack")]

    assert [type(each) for each in written] == [Acquire, Ack] * 3
    acquired = [offset for each in written if isinstance(each, Acquire) for offset in each.offsets]
    acked = [offset for each in written if isinstance(each, Ack) for offset in each.offsets]
    assert acquired == acked == list(range(1_200))


def test_a_message_says_when_it_was_to_be_sent() -> None:
    assert read_stamp(stamped(7, 12.5, 200)) == (7, 12.5)
    assert len(stamped(7, 12.5, 200)) == 200
    assert percentiles([float(each) for each in range(100)]) == {"p50_ms": 50.0, "p99_ms": 99.0, "max_ms": 99.0}


def test_a_process_that_fails_says_why() -> None:
    with Child("bench.clients.send", "nowhere") as child, pytest.raises(SystemExit, match="IndexError"):
        child.said()


def test_what_a_process_takes_is_counted() -> None:
    meter = Meter({"this": [os.getpid()]})
    while meter.seconds()["this"] == 0:
        sum(range(100_000))

    assert memory_bytes(os.getpid(), "VmHWM") >= memory_bytes(os.getpid(), "VmRSS") > 1 << 20


@pytest.fixture
def bench(broker: EmbeddedBroker, tmp_path: Path) -> Bench:
    return Bench(broker.bootstrap_servers, tmp_path, Size(4_000, 1, frozenset()), print, broker)


@pytest.mark.parametrize("way", ["send_many", "send"])
def test_sending_is_measured(bench: Bench, way: str) -> None:
    assert send.send(bench, way)["messages_per_second"] > 0


def test_a_tracker_writes_and_deletes_each_row(bench: Bench) -> None:
    figures = tracker.written(bench)

    assert figures["markers_per_second"] > 0
    assert figures["changelog_bytes_per_message"] > 200


def test_two_consumers_and_two_workers_share_the_work(bench: Bench) -> None:
    figures = scale.drained(bench, 2)

    assert 0.5 <= figures["largest_share"] < 1
    assert min(figures.values()) > 0
