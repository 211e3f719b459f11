"""Handlers whose message's lease is over while they run."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import pytest

from marq.wire.markers import BACKOFF, Ack
from tests.unit.client.fakes import LIMIT_S, P1, Rig, spin


class Handler:
    """Waits with the first message until the test says otherwise; notes what came."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.cancelled: list[int] = []
        self.ended: list[int] = []
        self.why: list[str] = []
        #: How often its task was cancelled before each call.
        self.cancelling: list[int] = []

    async def __call__(self, message) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.cancelling.append(task.cancelling())
        try:
            if message.offset == 0:
                self.begun.set()
                await self.go_on.wait()
        except asyncio.CancelledError as error:
            self.cancelled.append(message.offset)
            self.why.append(str(error))
            await self.interrupted(error)
        self.ended.append(message.offset)

    async def of_lists(self, messages) -> None:
        await self(messages[0])

    async def interrupted(self, error: asyncio.CancelledError) -> None:
        raise error


async def working(make_rig, handler, *, lists: bool = False, **changes):
    """Return a rig with one message, and a worker that has begun with it."""
    rig = make_rig(**changes)
    rig.add(1)
    pool = rig.work_on_batches(handler.of_lists) if lists else rig.work(handler)
    if isinstance(handler, Handler):
        await asyncio.wait_for(handler.begun.wait(), LIMIT_S)
    return rig, pool


async def lose(rig: Rig, after_s: float = 30) -> None:
    """Let the leases run out."""
    rig.clock.now_s += after_s
    rig.receiver.writer.lose_expired()
    await rig.receiver.writer.renew()


async def add(rig: Rig, offset: int) -> None:
    rig.add([offset])
    await rig.settler.until(lambda: offset in rig.acked)


class Swallowing(Handler):
    async def interrupted(self, error: asyncio.CancelledError) -> None:
        pass


class Failing(Handler):
    async def interrupted(self, error: asyncio.CancelledError) -> None:
        raise RuntimeError("while it cleaned up")


class Careless(Handler):
    """Does what a library does that cancels the task for a timeout, and does not undo it."""

    async def __call__(self, message) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        await super().__call__(message)


@pytest.mark.parametrize(
    ("kind", "acked", "cancelling"),
    [
        (Handler, [1], 0),
        # It did its work in the end: the ack is written, too late or not.
        (Swallowing, [0, 1], 0),
        (Failing, [1], 0),
        (Careless, [1], 1),
    ],
)
@pytest.mark.parametrize("lists", [False, True])
async def test_however_a_handler_ends_whose_lease_is_over_it_releases_nothing_and_harms_no_other_message(
    make_rig, caplog, kind: type[Handler], acked: list[int], cancelling: int, lists: bool
) -> None:
    rig, pool = await working(make_rig, handler := kind(), lists=lists)

    await lose(rig)
    await add(rig, 1)
    await pool.stop(1)

    place = "queue=q id=t/0/0 partition=0 offset=0 attempt=1"
    assert (handler.cancelled, handler.why) == ([0], [f"the lease expired: {place}"])
    logged = [each for each in caplog.messages if "lease lost" in each]
    assert logged == [f"lease lost, its handler is cancelled: {place}"]
    assert (rig.acked, rig.released) == (acked, {})
    assert handler.cancelling == [cancelling] * 2
    assert not pool._interrupted


async def test_a_stop_at_the_same_moment_wins_and_releases_uncounted(make_rig) -> None:
    rig, pool = await working(make_rig, Handler())

    rig.clock.now_s += 30
    rig.receiver.writer.lose_expired()
    await pool.stop(0)

    await rig.settler.until(lambda: bool(rig.released))
    assert [(offset, counted) for offset, (_, counted, _) in rig.released.items()] == [(0, False)]
    assert all(task.cancelled() for task in pool.tasks)


async def test_a_stop_while_a_cancelled_handler_cleans_up_wins(make_rig) -> None:
    cleaning = asyncio.Event()

    class Cleaning(Handler):
        async def interrupted(self, error: asyncio.CancelledError) -> None:
            cleaning.set()
            await asyncio.Event().wait()

    rig, pool = await working(make_rig, Cleaning())
    await lose(rig)
    await asyncio.wait_for(cleaning.wait(), LIMIT_S)

    await pool.stop(0)

    assert all(task.cancelled() for task in pool.tasks)


async def test_a_lease_lost_during_a_stop_ends_the_handler_within_the_shutdown_timeout(make_rig) -> None:
    handler = Handler()
    rig, pool = await working(make_rig, handler)

    stopping = asyncio.create_task(pool.stop(60))
    await spin()
    await lose(rig)
    await asyncio.wait_for(stopping, LIMIT_S)

    assert handler.cancelled == [0]
    assert rig.released == {}


async def test_a_lease_that_is_lost_while_a_stop_cancels_does_not_cancel_twice(make_rig) -> None:
    counts: list[int] = []

    class Cleaning(Handler):
        async def interrupted(self, error: asyncio.CancelledError) -> None:
            await spin()
            task = asyncio.current_task()
            assert task is not None
            counts.append(task.cancelling())
            raise error

    rig, pool = await working(make_rig, Cleaning())
    stopping = asyncio.create_task(pool.stop(0))
    await spin(5)
    await lose(rig)
    await stopping

    assert counts == [1]


async def test_timeouts_and_task_groups_of_handlers_go_on_working(make_rig) -> None:
    ends: list[str] = []
    begun = asyncio.Event()

    async def handler(message) -> None:
        if message.offset == 0:
            try:
                async with asyncio.timeout(3600), asyncio.TaskGroup() as group:
                    group.create_task(asyncio.Event().wait())
                    begun.set()
            except TimeoutError:
                ends.append("timeout")
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise
        else:
            try:
                async with asyncio.timeout(0):
                    await asyncio.Event().wait()
            except TimeoutError:
                ends.append("timeout of its own")

    rig, pool = await working(make_rig, handler)
    await asyncio.wait_for(begun.wait(), LIMIT_S)
    await lose(rig)
    await add(rig, 1)
    await pool.stop(1)

    assert ends == ["cancelled", "timeout of its own"]


async def test_only_handlers_of_messages_that_are_lost_are_cancelled(make_rig) -> None:
    rig, handler = make_rig(), Handler()
    rig.add(1)
    pool = rig.work(handler, 2)
    await asyncio.wait_for(handler.begun.wait(), LIMIT_S)
    handler.begun.clear()
    rig.clock.now_s += 20
    rig.add(1, P1)
    await asyncio.wait_for(handler.begun.wait(), LIMIT_S)

    rig.settler.refuse = 1
    await lose(rig, 10)
    await spin()

    assert handler.cancelled == [0]
    handler.go_on.set()
    await rig.settler.until(lambda: bool(rig.acked))
    assert [each.source for each in rig.settler.of(Ack)] == [P1]
    await pool.stop(1)


@pytest.mark.parametrize(("renewed_s", "max_lease_s", "lost_s"), [(300, 30, 300), (None, 60, 60)])
async def test_a_handler_is_cancelled_at_the_end_of_its_own_lease_or_of_max_lease(
    make_rig, renewed_s, max_lease_s, lost_s
) -> None:
    class Renewing(Handler):
        async def __call__(self, message) -> None:
            if renewed_s is not None:
                await message.renew(renewed_s)
            await super().__call__(message)

    handler = Renewing()
    rig, pool = await working(make_rig, handler, max_lease_ms=max_lease_s * 1_000)

    for _ in range(lost_s // 10 - 1):
        await lose(rig, 10)
    await spin()
    assert handler.cancelled == []

    await lose(rig, 11)
    await spin()
    assert handler.cancelled == [0]
    await pool.stop(1)


async def test_a_handler_that_has_decided_itself_is_not_cancelled(make_rig) -> None:
    class Deciding(Handler):
        async def __call__(self, message) -> None:
            rig.settler.gate.clear()
            await message.ack(wait=False)
            await super().__call__(message)

    rig, handler = make_rig(), Deciding()
    rig.add(1)
    pool = rig.work(handler)
    await asyncio.wait_for(handler.begun.wait(), LIMIT_S)

    rig.clock.now_s += 30
    rig.receiver.writer.lose_expired()
    await spin()

    assert handler.cancelled == []
    handler.go_on.set()
    rig.settler.gate.set()
    await rig.settler.until(lambda: rig.acked == [0])
    await pool.stop(1)


# The last renewal was at the beginning, or at 80 s.
@pytest.mark.parametrize(("before_s", "left_s"), [(0, 30), (85, 25)])
async def test_a_lost_lease_is_noticed_while_a_renewal_waits_for_the_broker(make_rig, before_s, left_s) -> None:
    handler = Handler()
    rig, pool = await working(make_rig, handler)
    await rig.clock.advance(before_s)
    rig.settler.gate.clear()

    await rig.clock.advance(left_s - 0.1)
    assert handler.cancelled == []

    await rig.clock.advance(0.2)
    assert handler.cancelled == [0]
    rig.settler.gate.set()
    await pool.stop(0)


async def test_a_shorter_lease_that_comes_later_is_watched_first(make_rig) -> None:
    handler, short = Handler(), Handler()
    rig, pool = await working(make_rig, handler, queues=("q", "r"), leases_ms={"q": 300_000, "r": 3_000})
    other = rig.work(short, queue="r")
    rig.settler.gate.clear()
    rig.add(1, P1, key=b"r")
    await asyncio.wait_for(short.begun.wait(), LIMIT_S)

    await rig.clock.advance(3.1)

    assert (handler.cancelled, short.cancelled) == ([], [0])
    rig.settler.gate.set()
    await asyncio.gather(pool.stop(0), other.stop(0))


async def test_a_message_whose_own_lease_is_the_shorter_one_is_lost_with_that(make_rig) -> None:
    handler = Handler()
    rig, pool = await working(make_rig, handler)
    [(message,)] = pool._current
    # Its own RENEW came after the shared one.
    message._batch.own_expiry_s = {0: rig.clock() + 5}

    rig.clock.now_s += 5
    rig.receiver.writer.lose_expired()
    await spin()

    assert handler.cancelled == [0]
    await pool.stop(1)


async def test_a_handler_that_ignores_a_stop_is_left_and_its_message_released(
    make_rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("marq.consumer.handler_pool.CLEAN_UP_S", 0.01)

    class Stubborn(Handler):
        async def interrupted(self, error: asyncio.CancelledError) -> None:
            await self.go_on.wait()

    handler = Stubborn()
    rig, pool = await working(make_rig, handler)

    await asyncio.wait_for(pool.stop(0), LIMIT_S)

    await rig.settler.until(lambda: bool(rig.released))
    assert not rig.released[0][1]
    assert "handler continues although it was cancelled: queue=q id=t/0/0 partition=0 offset=0" in caplog.text
    handler.go_on.set()
    await asyncio.wait(pool.tasks, timeout=LIMIT_S)
    assert rig.acked == []


async def test_what_is_still_held_of_a_list_that_lost_a_lease_comes_back_after_the_backoff(make_rig) -> None:
    rig, handler, gate = make_rig(), Handler(), asyncio.Event()

    async def handle(messages) -> None:
        await gate.wait()
        if len(messages) > 2:
            await handler.of_lists(messages)

    async def read(offsets: list[int], *source: object) -> None:
        before = len(rig.acquirer.written)
        rig.add(offsets, *source)
        await rig.acquirer.until(lambda: len(rig.acquirer.written) > before)

    pool = rig.work_on_batches(handle)
    await read([0])
    # The second list has a message that was acquired 20 s before its others.
    await read([0], P1)
    rig.clock.now_s += 20
    await read([1, 2])
    await spin()
    gate.set()
    await asyncio.wait_for(handler.begun.wait(), LIMIT_S)

    rig.clock.now_s += 10
    rig.receiver.writer.lose_expired()
    await rig.settler.until(lambda: bool(rig.released))
    await pool.stop(1)

    assert handler.cancelled == [0]
    assert {offset: each[:2] for offset, each in rig.released.items()} == dict.fromkeys([1, 2], (BACKOFF, True))
    assert rig.released[1][2].startswith("LeaseLost: ")


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "marq")


async def test_prefetched_messages_with_ended_leases_are_not_subtracted_from_those_in_handlers(make_rig) -> None:
    rig = make_rig()
    rig.add(10)
    await rig.take(1)
    prefetch = rig.receiver.prefetch
    rig.buffer.handler_demand = 5
    rig.receiver.demand()
    await spin()
    assert prefetch.in_flight > prefetch.processing == 1

    rig.settler.gate.clear()
    await rig.clock.advance(60)

    assert (prefetch.in_flight, prefetch.processing, len(rig.buffer.ready)) == (0, 0, 0)
