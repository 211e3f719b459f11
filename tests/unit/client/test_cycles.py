"""The cycles of a receiver: how many run at a time, and when the next one may begin."""

from __future__ import annotations

import asyncio

import pytest

from marq.consumer.cycles import MAX_CYCLES, ON_DEMAND_S, Cycle, Cycles


def running() -> Cycle:
    return Cycle({}, 1, 1, asyncio.get_running_loop().create_future())


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
