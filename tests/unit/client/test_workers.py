from __future__ import annotations

import asyncio
import threading

import pytest

from marq import Reject, Retry
from marq.core.markers import BACKOFF, Ack, Release, Source
from marq.core.markers import Reject as RejectBatch
from marq.workers import Workers
from tests.unit.client.fakes import FakeRecord, Rig, spin

P0 = Source("t", 0)


def workers(rig: Rig, handler, concurrency: int = 2) -> Workers:
    crew = Workers(rig.shelf, rig.flow.outbox, handler, concurrency)
    crew.start()
    rig.flow.demand()
    return crew


def acked(rig: Rig) -> list[int]:
    return sorted(offset for each in rig.settler.of(Ack) for offset in each.offsets)


async def test_a_handler_that_returns_acks(make_rig) -> None:
    rig = make_rig()
    rig.reader.add(P0, *[FakeRecord(offset) for offset in range(50)])

    async def handler(message) -> None:
        pass

    crew = workers(rig, handler)
    await rig.settler.until(lambda: acked(rig) == list(range(50)))
    await crew.stop(1)

    assert rig.flow.held == 0


async def test_a_plain_function_runs_in_a_thread(make_rig) -> None:
    rig = make_rig()
    rig.reader.add(P0, FakeRecord(0))
    names: list[str] = []

    crew = workers(rig, lambda message: names.append(threading.current_thread().name))
    await rig.settler.until(lambda: acked(rig) == [0])
    await crew.stop(1)

    assert names[0].startswith("marq-handler")


async def test_what_a_handler_raises_decides(make_rig) -> None:
    rig = make_rig()
    rig.reader.add(P0, *[FakeRecord(offset) for offset in range(4)])

    async def handler(message) -> None:
        if message.offset == 0:
            raise Retry(delay=7)
        if message.offset == 1:
            raise Reject("why")
        if message.offset == 2:
            raise KeyError("payload is not logged")

    crew = workers(rig, handler)
    await rig.settler.until(lambda: rig.flow.held == 0 and acked(rig) == [3] and bool(rig.settler.of(RejectBatch)))
    await crew.stop(1)

    released = {
        offset: (delay, error)
        for each in rig.settler.of(Release)
        for offset, delay, error in zip(each.offsets, each.delays_ms, each.errors, strict=True)
    }
    assert released == {0: (7_000, ""), 2: (BACKOFF, "KeyError: 'payload is not logged'")}
    assert list(rig.settler.of(RejectBatch)[0].reasons) == ["why"]


def charge() -> None:
    raise KeyError("no such customer")


async def test_a_handler_that_fails_is_one_record_of_the_log_with_the_traceback_and_without_the_payload(
    make_rig, caplog
) -> None:
    rig = make_rig()
    rig.reader.add(P0, FakeRecord(0, value=b"payload"))

    async def handler(message) -> None:
        charge()

    crew = workers(rig, handler)
    await rig.settler.until(lambda: bool(rig.settler.of(Release)))
    await crew.stop(1)

    (record,) = caplog.records
    assert record.levelname == "ERROR"
    for part in ("queue=q", "id=t/0/0", "attempt=1", "in handler", "in charge", "KeyError: 'no such customer'"):
        assert part in caplog.text
    assert "payload" not in caplog.text


async def test_a_plain_function_that_fails_leaves_its_traceback_too(make_rig, caplog) -> None:
    rig = make_rig()
    rig.reader.add(P0, FakeRecord(0))

    crew = workers(rig, lambda message: charge())
    await rig.settler.until(lambda: bool(rig.settler.of(Release)))
    await crew.stop(1)

    assert "in charge" in caplog.text


@pytest.mark.parametrize("outcome", [Retry(delay=7), Reject("why")], ids=["Retry", "Reject"])
async def test_an_outcome_that_a_handler_raises_is_no_failure_in_the_log(make_rig, caplog, outcome) -> None:
    rig = make_rig()
    rig.reader.add(P0, FakeRecord(0))

    async def handler(message) -> None:
        try:
            charge()
        except KeyError as error:
            raise outcome from error

    crew = workers(rig, handler)
    await rig.settler.until(lambda: bool(rig.settler.of(Release) or rig.settler.of(RejectBatch)))
    await crew.stop(1)

    assert caplog.records == []


async def test_a_handler_that_decided_itself_is_not_acked_again(make_rig) -> None:
    rig = make_rig()
    rig.reader.add(P0, FakeRecord(0), FakeRecord(1))

    async def handler(message) -> None:
        if message.offset == 0:
            await message.release(3, wait=False)

    crew = workers(rig, handler)
    await rig.settler.until(lambda: acked(rig) == [1] and bool(rig.settler.of(Release)))
    await crew.stop(1)

    assert acked(rig) == [1]


async def test_handlers_that_run_at_the_stop_get_the_grace(make_rig) -> None:
    rig = make_rig()
    rig.reader.add(P0, FakeRecord(0))
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def handler(message) -> None:
        begun.set()
        await go_on.wait()

    crew = workers(rig, handler)
    await asyncio.wait_for(begun.wait(), 60)
    stopping = asyncio.create_task(crew.stop(5))
    await spin()
    go_on.set()
    await stopping

    await rig.settler.until(lambda: acked(rig) == [0])


async def test_a_handler_that_outlasts_the_grace_is_cancelled_and_its_attempt_does_not_count(make_rig) -> None:
    rig = make_rig()
    rig.reader.add(P0, FakeRecord(0))
    begun = asyncio.Event()

    async def handler(message) -> None:
        begun.set()
        await asyncio.Event().wait()

    crew = workers(rig, handler)
    await asyncio.wait_for(begun.wait(), 60)
    await crew.stop(0)

    await rig.settler.until(lambda: bool(rig.settler.of(Release)))
    (batch,) = rig.settler.of(Release)
    assert (list(batch.offsets), list(batch.delays_ms), batch.counted) == ([0], [0], False)


async def test_a_cancellation_that_is_not_ours_is_an_error_of_the_handler(make_rig) -> None:
    rig = make_rig()
    rig.reader.add(P0, FakeRecord(0), FakeRecord(1))

    async def handler(message) -> None:
        if message.offset == 0:
            raise asyncio.CancelledError

    crew = workers(rig, handler, 1)
    await rig.settler.until(lambda: acked(rig) == [1] and bool(rig.settler.of(Release)))
    await crew.stop(1)

    assert rig.settler.of(Release)[0].counted


@pytest.mark.parametrize(("max_in_flight", "held"), [(100, 10), (7, 7)])
async def test_with_slow_handlers_twice_the_concurrency_is_held_and_never_more_than_max_in_flight(
    make_rig, max_in_flight: int, held: int
) -> None:
    rig = make_rig(max_in_flight=max_in_flight)
    rig.reader.add(P0, *[FakeRecord(offset) for offset in range(1_000)])

    async def handler(message) -> None:
        await asyncio.Event().wait()

    crew = workers(rig, handler, 5)
    await rig.acquirer.until(lambda: rig.flow.held > 0)
    for _ in range(5):
        rig.clock.now_s += 1
        rig.flow.demand()
        await spin(100)

    assert rig.flow.held == held
    await crew.stop(0)


async def test_a_slow_handler_does_not_hoard(make_rig) -> None:
    rig = make_rig(max_in_flight=1_000)
    rig.reader.add(P0, *[FakeRecord(offset) for offset in range(1_000)])

    async def handler(message) -> None:
        await asyncio.Event().wait()

    crew = workers(rig, handler, 4)
    await rig.acquirer.until(lambda: rig.flow.held > 0)
    rig.clock.now_s += 10
    rig.flow.demand()
    await spin(100)

    assert 4 <= rig.flow.held <= 8
    await crew.stop(0)


async def test_a_fast_handler_soon_has_many_at_hand(make_rig) -> None:
    rig = make_rig(max_in_flight=1_000)
    rig.reader.add(P0, *[FakeRecord(offset) for offset in range(20_000)])

    async def handler(message) -> None:
        rig.clock.now_s += 0.0001

    crew = workers(rig, handler, 4)
    await rig.settler.until(lambda: sum(len(each.offsets) for each in rig.settler.of(Ack)) == 20_000)
    await crew.stop(1)

    assert max(len(each.offsets) for each in rig.acquirer.of(object)) > 100


async def test_workers_step_aside_for_others(make_rig) -> None:
    rig = make_rig()
    rig.reader.add(P0, *[FakeRecord(offset) for offset in range(900)])
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def slow_without_waiting(message) -> None:
        rig.clock.now_s += 0.01

    task = asyncio.create_task(others())
    crew = workers(rig, slow_without_waiting, 1)
    await rig.settler.until(lambda: len(acked(rig)) > 100)
    await crew.stop(1)
    task.cancel()

    assert turns > 50
