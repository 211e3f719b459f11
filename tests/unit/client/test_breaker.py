"""The circuit breaker of a queue: when it opens and closes, and which attempts count meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest

import marq
from marq.consumer.prefetch import PrefetchBuffer
from marq.leases.circuit_breaker import QueueBreaker
from marq.settings.queue import Breaker, QueueSettings
from marq.wire.markers import Acquire
from tests.unit.client.fakes import LIMIT_S, P0, Clock, FakeRecord, Rig, spin

RULES = QueueSettings(breaker=Breaker(failure_rate=0.5, window=4, reset_timeout_ms=30_000))


class Down(Exception):
    pass


async def end(message: marq.Message, error: Exception | None = None) -> None:
    """End a message as an `async with` does."""
    try:
        async with message:
            if error is not None:
                raise error
    except Down:
        pass


async def fail(rig: Rig, count: int) -> None:
    for message in await rig.take(count):
        await end(message, Down("no answer"))


def released(rig: Rig) -> dict[int, tuple[bool, int]]:
    """By offset: whether the attempt counts, and the delay."""
    return {offset: (counted, delay_ms) for offset, (delay_ms, counted, _) in rig.released.items()}


def make(make_rig, records: int, rules: QueueSettings = RULES, **changes) -> Rig:
    rig = make_rig(queue=lambda _: rules, **changes)
    rig.add(records)
    return rig


def state(rig: Rig) -> str:
    return rig.receiver.gate.breakers["q"].state


async def test_it_opens_at_a_failure_rate_and_releases_prefetched_messages(make_rig) -> None:
    rig = make(make_rig, 20, max_in_flight=10)
    rig.buffer.handler_demand = 10
    first, second, third, fourth, *_ = await rig.take(5)

    for message, error in ((first, None), (second, None), (third, Down()), (fourth, Down())):
        assert state(rig) == "closed"
        await end(message, error)
    await rig.settled()
    # A consumer asks for messages and gets none.
    rig.receiver.demand()
    await spin(50)

    assert state(rig) == "open"
    assert not rig.buffer.ready
    assert rig.receiver.prefetch.in_flight == 1
    assert released(rig) == {
        # The first failure after a success counts as the message's own.
        2: (True, -1),
        3: (False, 30_000),
        **dict.fromkeys(range(5, 10), (False, 30_000)),
    }
    assert max(max(each.offsets) for each in rig.acquirer.of(Acquire)) == 9


async def test_after_the_pause_one_message_is_let_through_and_its_success_closes(make_rig) -> None:
    rig = make(make_rig, 20, max_in_flight=4)
    await fail(rig, 4)
    assert state(rig) == "open"
    await rig.settled()
    rig.buffer.call_demand += 3
    rig.receiver.demand()

    await rig.clock.advance(29)
    assert not rig.buffer.ready
    await rig.clock.advance(1)
    assert state(rig) == "half-open"
    await spin(50)
    assert len(rig.buffer.ready) == 1
    [test] = await rig.take(1)
    await spin()
    assert not rig.buffer.ready

    await test.ack()
    await spin(50)

    assert state(rig) == "closed"
    assert rig.buffer.ready


async def test_a_failed_trial_restarts_the_pause_and_costs_no_attempt(make_rig) -> None:
    rig = make(make_rig, 20, max_in_flight=4)
    await fail(rig, 4)

    for openings in range(2, 10):
        await rig.clock.advance(30)
        await fail(rig, 1)
        assert state(rig) == "open"
        assert rig.receiver.gate.breakers["q"].openings == openings
    await rig.settled()

    assert {counted for counted, _ in released(rig).values()} == {False}


@pytest.mark.parametrize("how", ["release", "reject", "retry", "lost"])
async def test_a_test_that_says_nothing_makes_way_for_another_one(make_rig, how: str) -> None:
    rig = make(make_rig, 20, max_in_flight=4, max_lease_ms=30_000)
    await fail(rig, 4)
    await rig.clock.advance(30)
    [test] = await rig.take(1)

    if how == "release":
        await test.release(0)
    elif how == "reject":
        await test.reject()
    elif how == "retry":
        await end(test, marq.Retry(delay=1))
    else:
        await rig.clock.advance(31)
    [other] = await rig.take(1)

    assert state(rig) == "half-open"
    assert other.offset != test.offset
    await other.ack()
    assert state(rig) == "closed"


async def test_a_retry_because_of_an_exception_is_a_failure_and_one_without_is_none(make_rig) -> None:
    rig = make(make_rig, 10, max_in_flight=10)
    messages = await rig.take(10)

    for message in messages[:5]:
        await end(message, marq.Retry(delay=2))
    assert state(rig) == "closed"
    for message in messages[5:9]:
        async with message:
            try:
                raise Down("no answer")
            except Down:
                raise marq.Retry(delay=60)  # noqa: B904
    await rig.settled()

    assert state(rig) == "open"
    assert released(rig)[0] == (True, 2_000)
    assert released(rig)[8] == (False, 60_000)


async def test_permanent_errors_do_not_open_the_breaker(make_rig) -> None:
    rig = make(make_rig, 10, QueueSettings(breaker=RULES.breaker, errors={f"{__name__}.Down": None}))

    await fail(rig, 10)

    assert state(rig) == "closed"


async def test_handlers_that_began_before_it_opened_decide_nothing_any_more(make_rig) -> None:
    rig = make(make_rig, 10, max_in_flight=10)
    messages = await rig.take(10)
    for message in messages[:4]:
        await end(message, Down())

    await end(messages[4])
    await end(messages[5], Down())
    await rig.clock.advance(30)
    await end(messages[6])
    await end(messages[7], Down())
    await rig.settled()

    assert state(rig) == "half-open"
    assert released(rig)[5] == released(rig)[4 - 1] == (False, 30_000)
    assert released(rig)[7] == (False, -1)


async def test_a_call_with_many_messages_fails_once(make_rig) -> None:
    rig = make(make_rig, 40, max_in_flight=20)
    calls: list[int] = []

    async def handle(messages: list[marq.Message]) -> None:
        calls.append(len(messages))
        if len(calls) > 1:
            raise Down

    pool = rig.work_on_batches(handle, max_messages=5, most=20)
    await rig.settler.until(lambda: "q" in rig.receiver.gate.breakers and state(rig) == "open")
    await rig.settler.until(lambda: rig.receiver.prefetch.in_flight == 0)
    await pool.stop(0)

    # A success, then three failures of calls: of those the first one counted, for all of its messages.
    assert len(calls) == 4
    assert sum(counted for counted, _ in released(rig).values()) == calls[1]


async def test_handlers_that_hang_until_their_leases_are_lost_open_it(make_rig) -> None:
    rig = make(make_rig, 8, max_in_flight=4, max_lease_ms=30_000)

    async def handle(message: marq.Message) -> None:
        await asyncio.Event().wait()

    pool = rig.work(handle, 4)
    await spin(50)
    await rig.clock.advance(31)
    await spin(50)

    assert state(rig) == "open"
    await pool.stop(0)


async def test_a_test_message_whose_handler_hangs_until_its_lease_is_lost_restarts_the_pause(make_rig) -> None:
    rig = make(make_rig, 20, max_in_flight=4, max_lease_ms=30_000)
    await fail(rig, 4)
    begun: list[float] = []

    async def handle(message: marq.Message) -> None:
        begun.append(rig.clock() - began_s)
        await asyncio.Event().wait()

    began_s = rig.clock()
    pool = rig.work(handle, 4)
    await rig.clock.advance(60)
    assert (begun, state(rig)) == ([30], "open")
    await rig.clock.advance(29)
    assert (begun, state(rig)) == ([30], "open")
    await rig.clock.advance(1)

    assert (begun, state(rig)) == ([30, 90], "half-open")
    assert rig.receiver.gate.breakers["q"].openings == 2
    await pool.stop(0)


@pytest.mark.parametrize("lists", [False, True])
async def test_plain_functions_that_hang_until_their_leases_are_lost_open_it(make_rig, lists: bool) -> None:
    rig = make(make_rig, 8, max_in_flight=4, max_lease_ms=30_000)
    go_on = threading.Event()

    def handle(work: object) -> None:
        go_on.wait(LIMIT_S)

    pool = rig.work_on_batches(handle, 4, max_messages=1) if lists else rig.work(handle, 4)
    await rig.acquirer.until(lambda: len(rig.acquired) == 4)
    await spin(50)
    await rig.clock.advance(31)

    assert state(rig) == "open"
    go_on.set()
    await rig.settler.until(lambda: len(rig.acked) == 4)
    assert state(rig) == "open"
    assert rig.receiver.gate.breakers["q"].openings == 1
    await pool.stop(0)


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("error", [None, Down("no answer")])
async def test_the_end_of_a_plain_function_whose_lease_was_lost_does_not_count(
    make_rig, lists: bool, error: Exception | None
) -> None:
    # Two failures open it; a success in between would not let them.
    rules = QueueSettings(breaker=Breaker(failure_rate=1, window=2, reset_timeout_ms=30_000))
    rig = make(make_rig, 1, rules, max_lease_ms=30_000)
    go_on, ended = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle(work: marq.Message | list[marq.Message]) -> None:
        [message] = work if isinstance(work, list) else [work]
        if message.offset == 1:
            raise Down("later")
        go_on.wait(LIMIT_S)
        loop.call_soon_threadsafe(ended.set)
        if error is not None:
            raise error

    pool = rig.work_on_batches(handle, max_messages=1) if lists else rig.work(handle)
    await rig.acquirer.until(lambda: rig.acquired == [0])
    await spin(50)
    await rig.clock.advance(31)
    go_on.set()
    await ended.wait()
    await spin(50)
    assert state(rig) == "closed"
    rig.add([1])
    await rig.settler.until(lambda: 1 in rig.released)
    await pool.stop(0)

    assert state(rig) == "open"
    assert not released(rig)[1][0], "nothing has succeeded since the lease was lost"


async def test_an_ack_after_the_end_of_the_lease_is_no_success(make_rig) -> None:
    rig = make(make_rig, 2, max_lease_ms=30_000)
    late, _ = await rig.take(2)
    await rig.clock.advance(31)

    with pytest.raises(marq.LeaseLost):
        await late.ack()
    rig.add([2])
    [other] = await rig.take(1)
    await end(other, Down())
    await rig.settled()

    assert not released(rig)[2][0]


async def test_a_list_of_which_some_leases_are_lost_fails_once(make_rig) -> None:
    rules = QueueSettings(breaker=Breaker(failure_rate=0.5, window=2, reset_timeout_ms=30_000))
    rig = make(make_rig, 1, rules, max_in_flight=10, max_lease_ms=60_000)
    calls: list[list[int]] = []

    async def handle(messages: list[marq.Message]) -> None:
        calls.append([message.offset for message in messages])
        await asyncio.Event().wait()

    rig.buffer.call_demand += 1
    rig.receiver.demand()
    await rig.acquirer.until(lambda: rig.acquired == [0])
    await rig.clock.advance(10)
    rig.add([1])
    rig.buffer.call_demand += 1
    rig.receiver.demand()
    await rig.acquirer.until(lambda: rig.acquired == [0, 1])
    await spin(50)
    pool = rig.work_on_batches(handle, max_messages=2)
    await spin(50)
    await rig.clock.advance(50)
    await rig.settler.until(lambda: 1 in rig.released)
    await pool.stop(0)

    assert calls == [[0, 1]]
    assert state(rig) == "closed"


async def test_a_message_that_is_released_repeatedly_waits_longer(make_rig) -> None:
    rig = make_rig(("q", "other"), queue=lambda _: RULES)
    rig.add(4)
    await fail(rig, 4)

    counts = (b"0", b"1", b"3000")
    rig.reader.add(P0, *[FakeRecord(4 + n, headers=(("marq-uncounted", count),)) for n, count in enumerate(counts)])
    rig.reader.add(P0, FakeRecord(7, key=b"other"))
    await rig.take(1, "other")
    await spin(50)
    await rig.settled()

    assert [released(rig)[offset][1] for offset in (4, 5, 6)] == [30_000, 60_000, 300_000]


async def test_settings_may_take_it_away_or_change_it_while_it_is_open(make_rig) -> None:
    said = [RULES]
    rig = make_rig(queue=lambda _: said[0], max_in_flight=4)
    rig.add(20)
    await fail(rig, 4)
    assert state(rig) == "open"

    said[0] = QueueSettings()
    rig.receiver.apply_settings()
    taken = await rig.take(4)

    assert len(taken) == 4
    assert not rig.receiver.gate.breakers


async def test_the_window_of_a_buffer_at_most_doubles_however_many_queues_with_breakers_share_it(make_rig) -> None:
    queues, buffer = [f"q{number}" for number in range(10)], PrefetchBuffer("group")
    rig = make_rig(queues, buffer=buffer, queue=lambda _: RULES, started=False)
    buffer.handler_demand = 1
    buffer.window.busy(rig.clock())
    rig.clock.now_s += 0.001
    buffer.window.finished(1, rig.clock(), idle=False)

    # then: a single fast message does not fill the buffer
    assert [rig.receiver.gate.room(1_000, 0) for _ in range(3)] == [2, 4, 8]


async def test_a_breaker_that_a_change_has_replaced_holds_back_no_messages(make_rig) -> None:
    said = [RULES]
    rig = make_rig(queue=lambda _: said[0], max_in_flight=10)
    rig.buffer.handler_demand = 10
    rig.add(10)
    taken = await rig.take(4)

    said[0] = QueueSettings(breaker=Breaker(failure_rate=0.5, window=100, reset_timeout_ms=30_000))
    rig.receiver.apply_settings()
    for message in taken:
        await end(message, Down("no answer"))
    await rig.settled()

    assert taken[0]._batch.breaker.state == "open"
    assert state(rig) == "closed"
    assert sorted(rig.released) == [0, 1, 2, 3]
    assert len(rig.buffer.ready) == 6


@pytest.mark.parametrize("successes", [10, 15])
async def test_a_failure_after_a_success_that_filled_the_window_is_settled_and_handlers_go_on(
    make_rig, successes: int
) -> None:
    rig = make(make_rig, 0, QueueSettings(breaker=Breaker(), max_attempts=1))
    failing = {*range(10), 10 + successes}
    last = max(failing)
    calls: list[int] = []

    def handle(message: marq.Message) -> None:
        calls.append(message.offset)
        if message.offset in failing:
            raise Down

    pool = rig.work(handle)
    rig.add(last + 1)
    await rig.settler.until(lambda: last in rig.ended)
    await rig.clock.advance(30)
    rig.add([last + 1])
    await rig.settler.until(lambda: last + 1 in rig.acked)
    await pool.stop(0)

    assert calls == list(range(last + 2))
    assert state(rig) == "closed"
    if successes == 10:
        # Half of the last 20 outcomes are failures.
        assert released(rig)[last] == (False, 30_000)
        assert rig.receiver.gate.breakers["q"].openings == 1
    else:
        # The attempt counts, and it was the only one: the tracker dead-letters the message.
        assert released(rig)[last] == (True, -1)
        assert rig.receiver.gate.breakers["q"].openings == 0


@pytest.mark.parametrize(
    ("failure_rate", "window", "failures"), [(0.5, 20, 10), (0.5, 3, 2), (0.55, 100, 55), (0.01, 4, 1), (1, 3, 3)]
)
def test_it_opens_at_the_failure_with_which_the_rate_is_reached(
    failure_rate: float, window: int, failures: int
) -> None:
    breaker = QueueBreaker("q", Breaker(failure_rate, window), Clock(), lambda queue: None)
    for _ in range(2 * window):
        breaker.succeeded([])

    for _ in range(failures - 1):
        breaker.failed([])
        assert breaker.state == "closed"
    breaker.failed([])

    assert breaker.state == "open"


async def test_it_opens_only_after_a_window_of_outcomes_since_it_was_last_closed(make_rig) -> None:
    rig = make(make_rig, 20, max_in_flight=4)
    for _ in range(2):
        await fail(rig, 3)
        assert state(rig) == "closed"
        await fail(rig, 1)
        assert state(rig) == "open"
        await rig.clock.advance(30)
        [test] = await rig.take(1)
        await test.ack()
        assert state(rig) == "closed"
