"""Workers, one message or a list of them at a time: what the end of a handler means, and how much is at hand."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from marq import DecodeError, Reject, Retry
from marq.consumer.handler_pool import _CANCELLED, BURST_S, HandlerPool
from marq.core.redeliver_or_dead_letter import release_delay_ms
from marq.core.storage.rows import row_key
from marq.leases.message import Message
from marq.settings.queue import QueueSettings
from marq.wire.markers import BACKOFF
from tests.unit.client.fakes import LIMIT_S, P0, P1, Hanging, Rig, spin

Work = Callable[[Rig, Callable[[Sequence[Message]], Any]], HandlerPool]


def one_by_one(rig: Rig, handler: Callable[[Sequence[Message]], Any]) -> HandlerPool:
    async def handle(message: Message) -> None:
        await handler([message])

    return rig.work(handle)


def in_lists(rig: Rig, handler: Callable[[Sequence[Message]], Any]) -> HandlerPool:
    async def handle(messages: list[Message]) -> None:
        await handler(messages)

    return rig.work_on_batches(handle)


@pytest.fixture(params=[one_by_one, in_lists])
def work(request: pytest.FixtureRequest) -> Work:
    """Start one worker that gets messages one by one, or in lists."""
    found: Work = request.param
    return found


class PanicException(BaseException):
    """What extensions written in Rust raise."""


class Unprintable(Exception):
    """An error whose text can't be made."""

    def __str__(self) -> str:
        raise PanicException


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("x"), (BACKOFF, True, "KeyError: 'x'")),
        (PanicException("index"), (BACKOFF, True, "PanicException: index")),
        (SystemExit(4), (BACKOFF, True, "RuntimeError: SystemExit in the handler: 4")),
        (GeneratorExit(), (BACKOFF, True, "RuntimeError: GeneratorExit in the handler: ")),
        (Unprintable(), (BACKOFF, True, "Unprintable: <unprintable>")),
        (Retry(delay=3), (3_000, True, "")),
        (Retry(), (BACKOFF, True, "")),
        (Reject("why"), "why"),
    ],
)
async def test_an_exception_decides_on_messages_without_an_outcome(make_rig, work, error, expected) -> None:
    rig = make_rig()
    rig.add(3)

    async def handler(messages) -> None:
        for message in messages:
            if message.offset == 1:
                await message.ack(wait=False)
        raise error

    pool = work(rig, handler)
    await rig.settler.until(lambda: len(rig.ended) == 3)
    await pool.stop(1)

    assert {**rig.released, **rig.rejected} == {0: expected, 2: expected}
    assert rig.acked == [1]


async def failed_and_went_on(rig: Rig, pool: HandlerPool, text: str) -> None:
    """Check that message 0 fails with this text, and that the same task acks the next message."""
    await rig.settler.until(lambda: bool(rig.released))
    rig.add([1])
    await rig.settler.until(lambda: bool(rig.acked))
    await pool.stop(1)

    assert rig.released == {0: (BACKOFF, True, text)}
    assert rig.acked == [1]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StopIteration, "RuntimeError: StopIteration in the handler: "),
        (GeneratorExit, "RuntimeError: GeneratorExit in the handler: "),
        (PanicException("index"), "PanicException: index"),
    ],
    ids=["StopIteration", "GeneratorExit", "panic"],
)
@pytest.mark.parametrize("lists", [False, True])
async def test_what_a_plain_function_raises_fails_its_messages_and_frees_its_task(make_rig, lists, error, text) -> None:
    """With StopIteration, the call would never end. GeneratorExit would end the task, and so the whole consumer."""
    rig = make_rig()
    rig.add(1)

    def handler(work) -> None:
        messages = work if lists else [work]
        if messages[0].offset == 0:
            raise error

    await failed_and_went_on(rig, rig.work_on_batches(handler) if lists else rig.work(handler), text)


async def await_an_exit() -> None:
    """Await what Python closes a coroutine with; a closed coroutine can't wait again."""
    failed = asyncio.get_running_loop().create_future()
    failed.set_exception(GeneratorExit())
    await failed


async def cancel_itself() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("fail", "text"),
    [
        (await_an_exit, "RuntimeError: GeneratorExit in the handler: "),
        (cancel_itself, f"RuntimeError: {_CANCELLED}"),
    ],
)
async def test_an_end_of_a_coroutine_that_is_not_ours_is_an_error_of_its_handler(make_rig, work, fail, text) -> None:
    rig = make_rig()
    rig.add(1)

    async def handler(messages) -> None:
        if messages[0].offset == 0:
            await fail()

    await failed_and_went_on(rig, work(rig, handler), text)


async def test_a_message_that_has_its_outcome_is_not_acked(make_rig, work) -> None:
    rig = make_rig()
    rig.add(4)

    async def handler(messages) -> None:
        for message in messages:
            if message.offset == 1:
                await message.release(7, wait=False)
            elif message.offset == 2:
                await message.reject("bad", wait=False)

    pool = work(rig, handler)
    await rig.settler.until(lambda: len(rig.ended) == 4)
    await pool.stop(1)

    assert (rig.acked, rig.released, rig.rejected) == ([0, 3], {1: (7_000, True, "")}, {2: "bad"})


def charge() -> None:
    raise KeyError("no such customer")


async def failing(messages: Sequence[Message]) -> None:
    charge()


async def failing_in_a_thread(messages: Sequence[Message]) -> None:
    await asyncio.to_thread(charge)


@pytest.mark.parametrize("handler", [failing, failing_in_a_thread])
async def test_a_failure_is_logged_once_with_its_traceback_and_without_the_payload(
    make_rig, work, caplog, handler
) -> None:
    rig = make_rig()
    rig.add(1, value=b"payload")

    pool = work(rig, handler)
    await rig.settler.until(lambda: bool(rig.released))
    await pool.stop(1)

    (record,) = [each for each in caplog.records if each.name == "marq"]
    assert record.levelname == "WARNING"
    wait_s = release_delay_ms(1, True, BACKOFF, QueueSettings(), row_key("q", P0, 0)) / 1000
    assert record.getMessage() == (
        f"queue q: attempt 1 of 5 failed, retry in {wait_s:.3g} s: KeyError: 'no such customer' (t/0/0)"
    )
    assert "in charge" in caplog.text
    assert "handler_pool" not in (record.exc_text or "")
    assert "payload" not in caplog.text


@pytest.mark.parametrize(
    ("outcome", "lines"),
    [
        (Retry(delay=7), []),
        (Reject("why"), ["queue q: attempt 1 of 5 was rejected, now a dead letter: why (t/0/0)"]),
        (
            DecodeError("not JSON"),
            ["queue q: attempt 1 of 5 could not be decoded, now a dead letter: not JSON (t/0/0)"],
        ),
    ],
    ids=["Retry", "Reject", "DecodeError"],
)
async def test_retry_is_not_logged_and_rejections_are_without_a_traceback(
    make_rig, work, caplog, outcome, lines
) -> None:
    rig = make_rig()
    rig.add(1)

    async def handler(messages) -> None:
        try:
            charge()
        except KeyError as error:
            raise outcome from error

    pool = work(rig, handler)
    await rig.settler.until(lambda: bool(rig.released or rig.rejected))
    await pool.stop(1)

    records = [record for record in caplog.records if record.name == "marq"]
    assert [record.getMessage() for record in records] == lines
    assert [record.exc_info for record in records if record.exc_info] == []


async def leave_a_cancellation_behind() -> None:
    """Do what a library does that cancels the task for a timeout, and does not undo it."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


async def test_after_a_cancellation_that_a_library_has_left_behind_a_worker_goes_on(make_rig, work) -> None:
    rig = make_rig()

    async def handler(messages) -> None:
        if messages[0].offset == 0:
            await leave_a_cancellation_behind()
        if messages[0].offset == 1:
            async with asyncio.TaskGroup() as group:
                group.create_task(failing(messages))
        if messages[0].offset == 2:
            await leave_a_cancellation_behind()
            raise asyncio.CancelledError

    pool = work(rig, handler)
    for offset in range(4):
        rig.add([offset])
        await rig.settler.until(lambda offset=offset: offset in rig.ended)
    await pool.stop(1)

    assert rig.acked == [0, 3]
    assert rig.released[1][2].startswith("ExceptionGroup")
    assert rig.released[2][2] == f"RuntimeError: {_CANCELLED}"


async def test_a_worker_that_a_handler_has_cancelled_before_it_returned_goes_on(make_rig, work) -> None:
    rig = make_rig()

    async def handler(_: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    pool = work(rig, handler)
    for offset in range(2):
        rig.add([offset])
        await rig.settler.until(lambda offset=offset: offset in rig.acked)
    await pool.stop(1)

    assert rig.acked == [0, 1]


async def test_a_pool_whose_task_fails_does_not_wait_for_the_others(make_rig, monkeypatch) -> None:
    def defective(_: object) -> None:
        raise RuntimeError("a defect of the pool")

    async def handler(_: object) -> None: ...

    monkeypatch.setattr("marq.consumer.handler_pool._finish", defective)
    rig = make_rig()
    rig.add(1)
    pool = rig.work(handler, concurrency=2)

    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(RuntimeError, match="a defect of the pool"):
            await pool.done()
    await pool.stop(0)


# --- what runs, and operators who cancel it ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counted", "expected"), [(False, (0, False, "")), (True, (BACKOFF, True, "cancelled by an operator"))]
)
async def test_a_handler_that_an_operator_cancels_releases_its_message_and_its_task_goes_on(
    make_rig, work, counted: bool, expected: tuple[int, bool, str]
) -> None:
    rig, waiting, cancelling = make_rig(), Hanging(), []
    rig.add(1)

    async def handler(messages) -> None:
        task = asyncio.current_task()
        assert task is not None
        cancelling.append(task.cancelling())
        if messages[0].offset == 0:
            await waiting(messages)

    pool = work(rig, handler)
    await asyncio.wait_for(waiting.begun.wait(), LIMIT_S)
    pool.cancel("t/0/1", counted=counted)
    pool.cancel("t/0/0", counted=counted)
    pool.cancel("t/0/0", counted=not counted)
    await rig.settler.until(lambda: bool(rig.released))
    rig.add([1])
    await rig.settler.until(lambda: bool(rig.acked))
    await pool.stop(1)

    assert rig.released == {0: expected}
    assert (rig.acked, cancelling) == ([1], [0, 0])


async def test_a_handler_that_returns_although_an_operator_cancels_it_acks_its_message(make_rig, work) -> None:
    rig, waiting, cancelling = make_rig(), Hanging(), []
    rig.add(2)

    async def handler(messages) -> None:
        task = asyncio.current_task()
        assert task is not None
        cancelling.append(task.cancelling())
        if not waiting.begun.is_set():
            with suppress(asyncio.CancelledError):
                await waiting(messages)
        if messages[-1].offset == 2:
            raise asyncio.CancelledError

    pool = work(rig, handler)
    await asyncio.wait_for(waiting.begun.wait(), LIMIT_S)
    pool.cancel("t/0/0", counted=False)
    await rig.settler.until(lambda: rig.acked == [0, 1])
    # The operator's cancellation does not apply to the next call.
    rig.add([2])
    await rig.settler.until(lambda: bool(rig.released))
    await pool.stop(1)

    assert rig.released == {2: (BACKOFF, True, f"RuntimeError: {_CANCELLED}")}
    assert set(cancelling) == {0}


async def test_a_stop_may_follow_an_operator_s_cancellation(make_rig, work) -> None:
    rig, waiting = make_rig(), Hanging()
    rig.add(1)
    pool = work(rig, waiting)
    await asyncio.wait_for(waiting.begun.wait(), LIMIT_S)

    pool.cancel("t/0/0", counted=True)
    await pool.stop(0)
    await rig.settled()

    # Interrupted either way; the stop is not an attempt.
    assert list(rig.released) == [0]
    assert all(task.done() for task in pool.tasks)


async def test_a_plain_function_is_not_cancelled_because_its_thread_goes_on(make_rig) -> None:
    rig, begun, go_on = make_rig(), threading.Event(), threading.Event()
    rig.add(1)

    def handler(message) -> None:
        begun.set()
        go_on.wait(LIMIT_S)

    pool = rig.work(handler)
    assert await asyncio.to_thread(begun.wait, LIMIT_S)
    [(message, _)] = pool.calls()
    pool.cancel("t/0/0", counted=True)
    go_on.set()
    await rig.settler.until(lambda: bool(rig.acked))
    await pool.stop(1)

    assert (pool.cancellable(message), rig.released) == (False, {})


async def test_what_handlers_do_now_and_for_how_long(make_rig, work) -> None:
    rig, waiting = make_rig(), Hanging()
    rig.add(1)
    pool = work(rig, waiting)
    before = pool.calls()
    await asyncio.wait_for(waiting.begun.wait(), LIMIT_S)

    rig.clock.now_s += 7
    during = pool.calls()
    waiting.go_on.set()
    await rig.settler.until(lambda: bool(rig.acked))
    await spin()

    assert [(message.id, seconds) for message, seconds in during] == [("t/0/0", 7.0)]
    assert (before, pool.calls(), pool.cancellable(during[0][0])) == ([], [], True)
    await pool.stop(1)


async def test_the_time_of_a_call_is_without_the_calls_before_it(make_rig) -> None:
    rig, seen = make_rig(), list[float]()
    rig.add(100)

    async def handler(message: Message) -> None:
        # A task takes several messages in a row, without a pause.
        [(_, seconds)] = pool.calls()
        seen.append(seconds)
        rig.clock.now_s += BURST_S / 10

    pool = rig.work(handler)
    await rig.settler.until(lambda: len(rig.acked) == 100)
    await pool.stop(1)

    assert seen == [0.0] * 100


# --- how much is at hand ----------------------------------------------------------------------------------------------


async def hang(_: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(("max_in_flight", "held"), [(100, 10), (7, 7)])
async def test_with_slow_handlers_twice_the_concurrency_is_held_and_never_more_than_max_in_flight(
    make_rig, max_in_flight: int, held: int
) -> None:
    rig = make_rig(max_in_flight=max_in_flight)
    rig.add(1_000)

    pool = rig.work(hang, 5)
    await rig.acquirer.until(lambda: rig.receiver.prefetch.in_flight > 0)
    for _ in range(5):
        rig.clock.now_s += 1
        rig.receiver.demand()
        await spin(100)

    assert rig.receiver.prefetch.in_flight == held
    await pool.stop(0)


async def test_a_fast_handler_soon_has_many_at_hand(make_rig) -> None:
    rig = make_rig(max_in_flight=1_000)
    rig.add(5_000)

    async def handler(message) -> None:
        rig.clock.now_s += 0.0001

    pool = rig.work(handler, 4)
    await rig.settler.until(lambda: len(rig.acked) == 5_000)
    await pool.stop(1)

    assert max(len(each.offsets) for each in rig.acquirer.of(object)) > 100


async def test_workers_step_aside_for_others(make_rig) -> None:
    rig = make_rig()
    rig.add(900)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def slow_without_waiting(message) -> None:
        rig.clock.now_s += 0.01

    task = asyncio.create_task(others())
    pool = rig.work(slow_without_waiting)
    await rig.settler.until(lambda: len(rig.acked) > 100)
    await pool.stop(1)
    task.cancel()

    assert turns > 50


# --- lists ------------------------------------------------------------------------------------------------------------


class Sizes:
    """A handler that notes the lengths of its lists."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def __call__(self, messages: Sequence[Message]) -> None:
        self.sizes.append(len(messages))


async def test_a_list_has_what_is_there_and_is_never_longer_than_it_may_be(make_rig) -> None:
    rig, handler = make_rig(), Sizes()
    rig.add(50)
    pool = rig.work_on_batches(handler)
    await rig.settler.until(lambda: len(rig.acked) == 50)
    rig.add(range(50, 300))
    await rig.settler.until(lambda: len(rig.acked) == 300)
    await pool.stop(1)

    assert handler.sizes[0] == 50
    assert max(handler.sizes) == 100
    assert sum(handler.sizes) == 300


async def test_where_there_is_a_backlog_the_lists_of_a_slow_handler_are_full(make_rig) -> None:
    rig = make_rig(max_in_flight=10_000)
    rig.add(3_000)
    rig.add(3_000, P1)
    sizes: list[int] = []

    async def handler(messages) -> None:
        sizes.append(len(messages))
        rig.clock.now_s += 1
        await rig.acquirer.until(lambda: len(rig.acquired) >= min(sum(sizes) + 500, 6_000))
        await spin()

    pool = rig.work_on_batches(handler, max_messages=500, most=10_000)
    await rig.settler.until(lambda: len(rig.acked) == 6_000)
    await pool.stop(1)

    assert sizes == [500] * 12


async def test_no_more_is_held_for_lists_than_may_be_in_flight(make_rig) -> None:
    rig, handler = make_rig(max_in_flight=150), Hanging()
    rig.add(1_000)

    pool = rig.work_on_batches(handler, 4, most=150)
    await asyncio.wait_for(handler.begun.wait(), LIMIT_S)
    await spin(50)

    assert pool._demand == 150
    assert rig.receiver.prefetch.in_flight == 150
    await pool.stop(0)


async def add_separately(rig: Rig, *batches: tuple[Sequence[int], Any]) -> None:
    """Add records so that each batch has a lease of its own."""
    for offsets, source in batches:
        before = len(rig.acquirer.written)
        rig.add(offsets, source)
        await rig.acquirer.until(lambda: len(rig.acquirer.written) > before)  # noqa: B023
    await spin()


async def test_one_list_may_have_messages_of_several_leases(make_rig) -> None:
    rig, gate = make_rig(), asyncio.Event()
    lists: list[list[tuple[int, int]]] = []

    async def handler(messages) -> None:
        lists.append([(each.partition, each.offset) for each in messages])
        await gate.wait()

    pool = rig.work_on_batches(handler)
    await add_separately(rig, ([0], P0), ([1, 2], P0), ([0, 1], P1))
    gate.set()
    await rig.settler.until(lambda: len(rig.acked) == 5)
    await pool.stop(1)

    assert lists == [[(0, 0)], [(0, 1), (0, 2), (1, 0), (1, 1)]]
    assert rig.receiver.prefetch.in_flight == 0


async def test_a_handler_that_takes_messages_out_of_its_list_acks_them_all_the_same(make_rig) -> None:
    rig = make_rig()
    rig.add(5)

    async def handler(messages) -> None:
        while messages:
            messages.pop()

    pool = rig.work_on_batches(handler)
    await rig.settler.until(lambda: rig.acked == list(range(5)))
    await pool.stop(1)


async def test_a_list_that_fails_is_logged_once_with_its_length(make_rig, caplog) -> None:
    rig = make_rig()
    rig.add(3)

    pool = rig.work_on_batches(failing)
    await rig.settler.until(lambda: bool(rig.released))
    await pool.stop(1)

    (record,) = [each for each in caplog.records if "failed" in each.getMessage()]
    assert record.getMessage().endswith(": KeyError: 'no such customer' (t/0/0 and 2 more messages)")


async def test_messages_whose_lease_ended_before_their_list_began_are_left_out(make_rig) -> None:
    rig, sizes, go_on = make_rig(), Sizes(), asyncio.Event()

    async def handler(messages) -> None:
        await sizes(messages)
        await go_on.wait()

    pool = rig.work_on_batches(handler)
    await add_separately(rig, ([0], P0), ([1, 2], P0))
    rig.clock.now_s += 30
    await add_separately(rig, ([0, 1, 2], P1))
    go_on.set()
    await rig.settler.until(lambda: len(rig.acked) >= 3)
    await pool.stop(1)

    assert sizes.sizes == [1, 3]


# --- stops ------------------------------------------------------------------------------------------------------------


class Blocking:
    """A plain function that ends when the test says so."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, message: Message) -> None:
        self.begun.set()
        assert self.go_on.wait(LIMIT_S)


async def test_a_stop_names_the_handler_it_waits_for_and_acks_what_a_thread_ends_in_time(make_rig, caplog) -> None:
    caplog.set_level(logging.INFO, "marq")
    rig, handler = make_rig(), Blocking()
    rig.add(1)
    pool = rig.work(handler)
    await asyncio.to_thread(handler.begun.wait, LIMIT_S)

    stopping = asyncio.create_task(pool.stop(LIMIT_S))
    await spin()
    waiting, released = caplog.messages[-1], rig.released
    handler.go_on.set()
    await stopping
    await rig.settled()

    name = f"queue=q handler={__name__}:Blocking.<Blocking> messages=1"
    assert waiting == f"waiting up to {LIMIT_S:g} s for running handlers: {name}"
    assert (rig.acked, released, rig.released) == ([0], {}, {})


async def test_a_stop_releases_what_a_thread_has_not_ended_in_time_and_says_that_it_continues(make_rig, caplog) -> None:
    rig, handler = make_rig(), Blocking()
    rig.add(1)
    pool = rig.work(handler)
    await asyncio.to_thread(handler.begun.wait, LIMIT_S)

    await pool.stop(0.001)
    handler.go_on.set()
    await rig.settled()

    assert (rig.acked, rig.released) == ([], {0: (0, False, "")})
    name = f"queue=q handler={__name__}:Blocking.<Blocking> messages=1 ids=t/0/0"
    assert f"threads can't be cancelled and continue: {name}" in caplog.text


async def test_a_stop_without_running_handlers_logs_nothing(make_rig, caplog) -> None:
    caplog.set_level(logging.INFO, "marq")
    rig = make_rig()
    pool = rig.work(Hanging())

    await pool.stop(LIMIT_S)

    assert "running handlers" not in caplog.text
