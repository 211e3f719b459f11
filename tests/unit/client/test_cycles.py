"""The cycles of a receiver: how many run at a time, and when the next one may begin."""

from __future__ import annotations

import asyncio

import pytest

from marq.consumer import receiver as module
from marq.consumer.receiver import MAX_CYCLES, ON_DEMAND_S, Cycle, Cycles, FetchedRecords
from marq.kafka.queue_records import serving
from marq.kafka.records import Records
from tests.unit.client.fakes import P0, P1, FakeRecord


def running() -> Cycle:
    cycle = Cycle(None, (), (), 1.0, {}, (), {}, 1, 1, None)
    cycle.task = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
    return cycle


async def test_cycles_overlap_if_messages_are_prefetched() -> None:
    cycles = Cycles()
    for _ in range(MAX_CYCLES):
        assert not cycles.have_to_end(waiting=1)
        cycles.begin(running(), now_s=1.0)

    assert cycles.have_to_end(waiting=1)
    assert not cycles.have_to_end(waiting=0)
    assert cycles.rest_s(now_s=1.0) == 0.0


async def test_on_demand_one_cycle_runs_at_a_time() -> None:
    cycles = Cycles(on_demand=True)
    assert not cycles.have_to_end(waiting=1)

    cycles.begin(running(), now_s=1.0)

    assert cycles.have_to_end(waiting=0)


async def test_on_demand_the_next_cycle_waits_for_further_calls() -> None:
    cycles = Cycles(on_demand=True)
    assert cycles.rest_s(now_s=1.0) == 0.0

    cycles.begin(running(), now_s=1.0)

    assert cycles.rest_s(now_s=1.0) == pytest.approx(ON_DEMAND_S)
    assert cycles.rest_s(now_s=1.0 + ON_DEMAND_S) == 0.0


@pytest.mark.parametrize("kept", [0, 2])
def test_records_that_were_kept_back_and_those_that_were_dropped_are_read_again(monkeypatch, kept: int) -> None:
    monkeypatch.setattr(module, "MAX_HELD_RECORDS", kept)
    fetched = FetchedRecords(serving("t", ["q"], {}))

    def put(start: int, end: int) -> None:
        read = Records.of([FakeRecord(offset) for offset in range(start, end)])
        fetched.put({P0: read, P1: read})

    put(5, 7)
    fetched.hold([P0])
    put(7, 9)
    put(9, 11)

    assert fetched.held
    assert list(fetched.records[P1].offsets) == list(range(5, 11))
    assert fetched.clear() == {P0: 5, P1: 5}
    assert not fetched.held
