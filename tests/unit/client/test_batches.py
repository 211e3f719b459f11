"""Handlers that take lists of messages."""

from __future__ import annotations

import asyncio
import threading

import pytest

from marq import Reject, Retry
from marq.batches import BatchWorkers
from marq.core.markers import BACKOFF, Ack, Acquire, Release, Renew, Source
from marq.core.markers import Reject as RejectBatch
from tests.unit.client.fakes import FakeRecord, Rig, spin

P0, P1 = Source("t", 0), Source("t", 1)
LIMIT_S = 60.0


def workers(rig: Rig, handler, max_messages: int = 100, concurrency: int = 1, most: int = 1_000) -> BatchWorkers:
    crew = BatchWorkers(rig.shelf, rig.flow.outbox, handler, concurrency, max_messages, most)
    crew.start()
    rig.flow.demand()
    return crew


def add(rig: Rig, count: int, source: Source = P0, start: int = 0) -> None:
    rig.reader.add(source, *[FakeRecord(offset) for offset in range(start, start + count)])


def acked(rig: Rig) -> list[int]:
    return sorted(offset for each in rig.settler.of(Ack) for offset in each.offsets)


def released(rig: Rig) -> dict[int, tuple[int, bool, str]]:
    return {
        offset: (delay, each.counted, error)
        for each in rig.settler.of(Release)
        for offset, delay, error in zip(each.offsets, each.delays_ms, each.errors, strict=True)
    }


class Hanging:
    """Waits until it is cancelled."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, batch) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


async def test_a_handler_gets_what_is_there_and_all_of_it_is_acked(make_rig) -> None:
    rig = make_rig()
    add(rig, 50)
    sizes: list[int] = []

    async def handler(batch) -> None:
        sizes.append(len(batch))

    crew = workers(rig, handler)
    await rig.settler.until(lambda: acked(rig) == list(range(50)))
    await crew.stop(1)

    assert sizes == [50]
    assert rig.flow.held == 0


async def test_a_batch_is_never_longer_than_it_may_be(make_rig) -> None:
    rig = make_rig()
    add(rig, 250)
    sizes: list[int] = []

    async def handler(batch) -> None:
        sizes.append(len(batch))

    crew = workers(rig, handler, max_messages=100)
    await rig.settler.until(lambda: len(acked(rig)) == 250)
    await crew.stop(1)

    assert max(sizes) == 100
    assert sum(sizes) == 250


async def test_where_there_is_a_backlog_the_batches_of_a_slow_handler_are_full(make_rig) -> None:
    rig = make_rig(max_in_flight=10_000)
    add(rig, 3_000)
    add(rig, 3_000, P1)
    sizes: list[int] = []

    def acquired() -> int:
        return sum(len(each.offsets) for each in rig.acquirer.of(Acquire))

    async def handler(batch) -> None:
        sizes.append(len(batch))
        rig.clock.now_s += 1
        await rig.acquirer.until(lambda: acquired() >= min(sum(sizes) + 500, 6_000))
        await spin()

    crew = workers(rig, handler, max_messages=500, most=10_000)
    await rig.settler.until(lambda: len(acked(rig)) == 6_000)
    await crew.stop(1)

    assert sizes == [500] * 12


async def test_no_more_is_held_than_may_be_in_flight(make_rig) -> None:
    rig = make_rig(max_in_flight=150)
    add(rig, 1_000)
    handler = Hanging()

    crew = workers(rig, handler, max_messages=100, concurrency=4, most=150)
    await asyncio.wait_for(handler.begun.wait(), LIMIT_S)
    await spin(50)

    assert crew._demand == 150
    assert rig.flow.held == 150
    await crew.stop(0)


async def test_one_batch_may_have_messages_of_several_leases_and_queues(make_rig) -> None:
    rig = make_rig()
    gate = asyncio.Event()
    batches: list[list[tuple[int, int]]] = []

    async def handler(batch) -> None:
        batches.append([(each.partition, each.offset) for each in batch])
        await gate.wait()

    add(rig, 1)
    crew = workers(rig, handler)
    await rig.acquirer.until(lambda: len(rig.acquirer.written) == 1)
    add(rig, 2, start=1)
    await rig.acquirer.until(lambda: len(rig.acquirer.written) == 2)
    add(rig, 2, P1)
    await rig.acquirer.until(lambda: len(rig.acquirer.written) == 3)
    await spin()
    gate.set()
    await rig.settler.until(lambda: rig.flow.held == 0 and len(acked(rig)) == 5)
    await crew.stop(1)

    assert batches == [[(0, 0)], [(0, 1), (0, 2), (1, 0), (1, 1)]]


async def test_messages_with_an_outcome_of_their_own_keep_it(make_rig) -> None:
    rig = make_rig()
    add(rig, 5)

    async def handler(batch) -> None:
        await batch[1].release(7, wait=False)
        await batch[2].reject("bad", wait=False)
        await batch[3].ack(wait=False)

    crew = workers(rig, handler)
    await rig.settler.until(lambda: rig.flow.held == 0 and bool(rig.settler.of(Ack)))
    await crew.stop(1)

    assert acked(rig) == [0, 3, 4]
    assert released(rig) == {1: (7_000, True, "")}
    assert [(list(each.offsets), list(each.reasons)) for each in rig.settler.of(RejectBatch)] == [([2], ["bad"])]


async def test_a_handler_that_takes_messages_out_of_its_list_acks_them_all_the_same(make_rig) -> None:
    rig = make_rig()
    add(rig, 5)

    async def handler(batch) -> None:
        while batch:
            batch.pop()

    crew = workers(rig, handler)
    await rig.settler.until(lambda: acked(rig) == list(range(5)))
    await crew.stop(1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("x"), (BACKOFF, True, "KeyError: 'x'")),
        (Retry(delay=3), (3_000, True, "")),
        (Retry(), (BACKOFF, True, "")),
    ],
)
async def test_what_a_handler_raises_releases_all_that_have_no_outcome(make_rig, error, expected) -> None:
    rig = make_rig()
    add(rig, 3)

    async def handler(batch) -> None:
        await batch[1].ack(wait=False)
        raise error

    crew = workers(rig, handler)
    await rig.settler.until(lambda: rig.flow.held == 0 and bool(rig.settler.of(Release)))
    await crew.stop(1)

    assert released(rig) == {0: expected, 2: expected}
    assert acked(rig) == [1]


async def test_a_reject_makes_dead_letters_of_all_that_have_no_outcome(make_rig) -> None:
    rig = make_rig()
    add(rig, 3)

    async def handler(batch) -> None:
        await batch[0].ack(wait=False)
        raise Reject("no such tenant")

    crew = workers(rig, handler)
    await rig.settler.until(lambda: rig.flow.held == 0 and bool(rig.settler.of(RejectBatch)))
    await crew.stop(1)

    (batch,) = rig.settler.of(RejectBatch)
    assert (list(batch.offsets), list(batch.reasons)) == ([1, 2], ["no such tenant"] * 2)


async def test_a_batch_that_fails_is_logged_once_without_its_values(make_rig, caplog) -> None:
    rig = make_rig()
    add(rig, 3)

    async def handler(batch) -> None:
        raise RuntimeError("no connection")

    crew = workers(rig, handler)
    await rig.settler.until(lambda: bool(rig.settler.of(Release)))
    await crew.stop(1)

    (record,) = [each for each in caplog.records if "failed" in each.getMessage()]
    assert record.getMessage() == (
        "handler failed: queue=q id=t/0/0 partition=0 offset=0 attempt=1 messages=3 decided=0"
        " error=RuntimeError: no connection"
    )
    assert record.exc_info is not None


async def test_at_a_stop_a_handler_gets_the_grace(make_rig) -> None:
    rig = make_rig()
    add(rig, 3)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def handler(batch) -> None:
        begun.set()
        await go_on.wait()

    crew = workers(rig, handler)
    await asyncio.wait_for(begun.wait(), LIMIT_S)
    stopping = asyncio.create_task(crew.stop(60))
    await spin()
    go_on.set()
    await stopping

    await rig.settler.until(lambda: acked(rig) == [0, 1, 2])


async def test_a_handler_that_is_cancelled_by_a_stop_releases_at_once_and_uncounted(make_rig) -> None:
    rig = make_rig()
    add(rig, 3)
    handler = Hanging()

    crew = workers(rig, handler)
    await asyncio.wait_for(handler.begun.wait(), LIMIT_S)
    await crew.stop(0)

    await rig.settler.until(lambda: bool(rig.settler.of(Release)))
    assert released(rig) == dict.fromkeys(range(3), (0, False, ""))


async def test_a_plain_function_runs_in_a_thread(make_rig) -> None:
    rig = make_rig()
    add(rig, 3)
    names: list[str] = []

    crew = workers(rig, lambda batch: names.append(threading.current_thread().name))
    await rig.settler.until(lambda: acked(rig) == [0, 1, 2])
    await crew.stop(1)

    assert names[0].startswith("marq-handler")


async def test_messages_whose_lease_ran_out_on_the_shelf_are_left_out(make_rig) -> None:
    rig = make_rig()
    sizes: list[int] = []
    go_on = asyncio.Event()

    async def handler(batch) -> None:
        sizes.append(len(batch))
        await go_on.wait()

    add(rig, 1)
    crew = workers(rig, handler)
    await rig.acquirer.until(lambda: len(rig.acquirer.written) == 1)
    add(rig, 2, start=1)
    await rig.acquirer.until(lambda: len(rig.acquirer.written) == 2)
    await spin()
    rig.clock.now_s += 30
    add(rig, 3, P1)
    await rig.acquirer.until(lambda: len(rig.acquirer.written) == 3)
    await spin()
    go_on.set()
    await rig.settler.until(lambda: any(each.source == P1 for each in rig.settler.of(Ack)))
    await crew.stop(1)

    assert sizes == [1, 3]


async def test_leases_are_renewed_while_a_handler_runs(make_rig) -> None:
    rig = make_rig()
    add(rig, 3)
    handler = Hanging()

    crew = workers(rig, handler)
    await asyncio.wait_for(handler.begun.wait(), LIMIT_S)
    await rig.clock.advance(100)

    assert not handler.cancelled.is_set()
    assert all(list(each.offsets) == [0, 1, 2] for each in rig.settler.of(Renew))
    await crew.stop(0)


async def test_a_handler_whose_leases_are_lost_is_cancelled_and_its_worker_goes_on(make_rig) -> None:
    rig = make_rig()
    add(rig, 3)
    hanging = Hanging()

    async def handler(batch) -> None:
        if batch[0].partition == 0:
            await hanging(batch)

    crew = workers(rig, handler)
    await asyncio.wait_for(hanging.begun.wait(), LIMIT_S)
    rig.settler.gate.clear()
    await rig.clock.advance(31)
    assert hanging.cancelled.is_set()

    rig.settler.gate.set()
    add(rig, 2, P1)
    await rig.settler.until(lambda: bool(rig.settler.of(Ack)))
    await crew.stop(1)
    assert rig.settler.of(Release) == []


async def test_what_is_still_held_of_a_batch_that_lost_a_lease_comes_back_after_the_backoff(make_rig) -> None:
    rig = make_rig()
    add(rig, 2)
    go_on, hanging = asyncio.Event(), Hanging()

    async def handler(batch) -> None:
        if len(batch) > 2:
            await hanging(batch)
        await go_on.wait()

    crew = workers(rig, handler)
    await rig.acquirer.until(lambda: len(rig.acquirer.written) == 1)
    add(rig, 1, start=2)
    await rig.acquirer.until(lambda: len(rig.acquirer.written) == 2)
    rig.clock.now_s += 20
    add(rig, 2, P1)
    await rig.acquirer.until(lambda: len(rig.acquirer.written) == 3)
    await spin()
    go_on.set()
    await asyncio.wait_for(hanging.begun.wait(), LIMIT_S)

    # Of the second batch, one message was acquired 20 s before the others.
    rig.flow.renewal._lose_expired(rig.clock() + 10)
    await asyncio.wait_for(hanging.cancelled.wait(), LIMIT_S)
    await rig.settler.until(lambda: bool(rig.settler.of(Release)))
    await crew.stop(1)

    ((batch),) = rig.settler.of(Release)
    assert batch.source == P1
    assert released(rig) == dict.fromkeys([0, 1], (BACKOFF, True, batch.errors[0]))
    assert batch.errors[0].startswith("LeaseLost: ")
