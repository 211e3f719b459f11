"""The receiver of a queue with ordering, on fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest

from marq.client.outcomes import Reject
from marq.consumer import ordering, receiver
from marq.consumer.acquire import acquisitions
from marq.consumer.ordering import delivered_again
from marq.consumer.starts import NOTED_AFTER_S
from marq.core.storage.rows import State
from marq.kafka.group_reader import NotCommitted
from marq.kafka.log_reader import MarkersReader
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.records import Records, Row
from marq.leases.message import Message
from marq.settings.limits import Limits, Rate
from marq.settings.queue import QueueSettings
from marq.settings.skipped_records import SkippedRecords
from marq.wire.errors import BrokerUnavailable, ConfigError
from marq.wire.marker_codec import decode
from marq.wire.markers import BLOCKED_WAIT_MS, LAST, MAX_BATCH_MARKERS, Acquire, Cause, Resume, Source
from marq.wire.record_headers import origin
from tests.unit.client.fake_tracker import Tracker, queries, record
from tests.unit.client.fakes import LIMIT_S, P0, P1, FakeRecord, HangingEach, Rig, rig, spin


async def test_only_the_first_message_of_a_key_is_delivered_until_its_ack_is_durable(make_ordered) -> None:
    made, tracker = make_ordered()
    made.reader.add(P0, record(0, "a"), record(1, "a"), record(2, "b"))
    made.receiver.start()

    first, other = await made.take(2)
    assert (first.offset, other.offset) == (0, 2)
    await first.ack(wait=False)
    [second] = await made.take(1)

    assert second.offset == 1
    assert made.acked == [0]
    assert [(each.queue, each.source, list(each.offsets), each.onwards) for each in tracker.asked] == [
        ("q", P0, [0], True)
    ]
    assert all(each.in_order for each in made.acquirer.of(Acquire))
    assert all(payload.left for each in made.acquirer.of(Acquire) for payload in each.payloads)
    await made.receiver.stop_reading(1)
    await made.receiver.stop(1)
    # Offset 0 has ended: the next reader begins behind it.
    assert made.reader.behind[("q", P0)] == 1


async def test_a_message_behind_one_whose_lease_has_ended_may_be_running_elsewhere(make_ordered) -> None:
    made, tracker = make_ordered(queue=lambda _: QueueSettings(limits=Limits(concurrency=1)))
    tracker.open_messages = {0: (State.LEASED_IN_ORDER, 1, 0), 1: (State.LEASED_IN_ORDER, 1, 30_000)}
    made.buffer.handler_demand = 100
    made.reader.add(P0, record(0, "a"), record(1, "a"))
    made.receiver.start()
    for _ in range(4):
        await made.clock.advance(0.25)
        await spin()
    assert made.acquired == []

    tracker.open_messages = {0: (State.LEASED_IN_ORDER, 1, 0)}
    await made.clock.advance(ordering.MAX_ASK_S)

    assert [each.offset for each in await made.take(1)] == [0]


async def test_a_message_that_is_read_after_one_whose_lease_has_ended_may_be_running_elsewhere(make_ordered) -> None:
    made, tracker = make_ordered(queue=lambda _: QueueSettings(limits=Limits(concurrency=1)))
    tracker.open_messages = {0: (State.LEASED_IN_ORDER, 1, 0), 1: (State.LEASED_IN_ORDER, 1, 30_000)}
    made.buffer.handler_demand = 100
    write, answers = tracker.write, asyncio.Event()

    async def write_slowly(records: Collection[MarkerRecord], limit_s: float) -> None:
        if not all(decode(value).onwards for _, value in records):
            await answers.wait()
        await write(records, limit_s)

    tracker.write = write_slowly  # type: ignore[method-assign]
    made.reader.add(P0, record(0, "a"))
    made.receiver.start()
    await spin()
    made.reader.add(P0, record(1, "a"))
    await spin()
    answers.set()
    for _ in range(4):
        await made.clock.advance(0.25)
        await spin()

    assert made.acquired == []


@pytest.mark.parametrize("failure", ["the ACQUIRE's confirmation", "the commit"])
async def test_a_stop_releases_messages_uncounted_whose_cycle_fails_meanwhile(make_ordered, failure: str) -> None:
    """Otherwise, their leases would end and count an attempt that no handler saw, perhaps the last one."""
    made, _ = make_ordered()
    made.buffer.handler_demand = 100
    made.acquirer.gate.clear()
    made.reader.add(P0, record(0, "a"), record(1, "a"), record(2, "b"))
    made.receiver.start()
    await spin()

    stopping = asyncio.create_task(made.receiver.stop_reading(1))
    await spin()
    if failure == "the commit":
        made.reader.refuse_commits = 1
    else:
        made.acquirer.refuse_written = 1
    made.acquirer.gate.set()
    await stopping
    await made.receiver.stop(1)

    assert made.released == dict.fromkeys(range(3), (0, False, ""))


@pytest.mark.parametrize("kept", [0, 4])
async def test_a_source_that_cannot_be_resumed_stops_no_other_and_misses_nothing(
    make_ordered, monkeypatch, kept: int
) -> None:
    monkeypatch.setattr(receiver, "MAX_HELD_RECORDS", kept)
    made, tracker = make_ordered()
    made.buffer.handler_demand = 100
    write, resumable = tracker.write, asyncio.Event()

    async def write_one_later(records: Collection[MarkerRecord], limit_s: float) -> None:
        if any(decode(value).source == P0 for _, value in records):
            await resumable.wait()
        await write(records, limit_s)

    tracker.write = write_one_later  # type: ignore[method-assign]
    made.receiver.start()
    for offset in range(0, 12, 2):
        made.reader.add(P0, record(offset, f"{offset}"), record(offset + 1, f"{offset + 1}"))
        await spin()
    for offset in range(3):
        made.reader.add(P1, record(offset, f"{offset}"))
        await spin()

    assert [(each.partition, each.offset) for each in await made.take(3)] == [(1, offset) for offset in range(3)]
    resumable.set()
    assert [(each.partition, each.offset) for each in await made.take(12)] == [(0, offset) for offset in range(12)]
    made.reader.add(P0, record(12, "12"))
    assert [each.offset for each in await made.take(1)] == [12]
    assert made.reader.committed[P0] == 13


async def test_an_ack_after_a_rebalance_that_left_nothing_to_commit_does_not_end_the_receiver(make_ordered) -> None:
    made, _ = make_ordered()
    made.reader.add(P0, record(0, "a"))
    made.receiver.start()
    [message] = await made.take(1)
    made.receiver.assigned()
    made.reader.reassign()

    await message.ack()
    await made.clock.advance(2 * ordering.COMMIT_S)

    assert made.receiver.error is None
    made.reader.add(P0, record(1, "a"))
    assert [each.offset for each in await made.take(1)] == [1]


@pytest.mark.parametrize("at_stop", [False, True])
async def test_positions_whose_commit_failed_are_committed_again_later_or_at_the_stop(
    make_ordered, at_stop: bool
) -> None:
    made, _ = make_ordered()
    made.reader.add(P0, record(0, "a"))
    made.receiver.start()
    [message] = await made.take(1)
    await message.ack()
    await spin()
    made.reader.refuse_commits = 1
    await made.clock.advance(ordering.COMMIT_S)
    assert made.reader.refuse_commits == 0
    assert made.reader.behind[("q", P0)] == 0

    if not at_stop:
        await made.clock.advance(2 * ordering.COMMIT_S)
        assert made.reader.behind[("q", P0)] == 1
    await made.receiver.stop_reading(1)
    await made.receiver.stop(1)

    assert made.reader.behind[("q", P0)] == 1


async def test_positions_are_committed_although_only_other_partitions_are_read(make_ordered) -> None:
    made, _ = make_ordered()
    made.buffer.handler_demand = 10
    made.reader.add(P0, record(0, "a"))
    made.receiver.start()
    [message] = await made.take(1)
    await message.ack()
    await spin()
    made.reader.add(P1, record(0, "b"))
    await made.take(1)
    assert made.reader.committed[P1] == 1

    await made.clock.advance(2 * ordering.COMMIT_S)

    assert made.reader.behind[("q", P0)] == 1


async def test_other_queues_of_a_group_keep_the_holder_of_the_assignment(make_ordered) -> None:
    settings = {"a": QueueSettings(ordering="key"), "b": QueueSettings()}
    made, _ = make_ordered(["a", "b"], queue=settings.__getitem__)
    made.reader.add(P0, FakeRecord(0, key=b"a"), FakeRecord(1, key=b"b"))
    for buffer in made.receiver.prefetch.buffers.values():
        buffer.handler_demand = 10
    made.receiver.start()
    await made.take(1, "a")
    await made.take(1, "b")

    holders = {each.queue: each.holder for each in made.acquirer.of(Acquire)}
    assert holders["a"] >> 16 == 7
    assert holders["b"] == made.receiver._holder


async def test_a_message_that_keeps_its_place_for_long_costs_no_memory_for_those_that_ended_after_it(
    make_ordered,
) -> None:
    made, _ = make_ordered()
    count = 1_000
    made.buffer.handler_demand = count
    made.reader.add(P0, *[record(offset, f"{offset}") for offset in range(count)])
    made.receiver.start()
    _, *others = await made.take(count)
    await asyncio.gather(*[message.ack() for message in others])

    assert len(made.acked) == count - 1
    [keys] = made.receiver.ordering._keys.values()
    assert {name: len(each) for name, each in vars(keys).items() if isinstance(each, dict | set)} == {
        "_unread": 0, "_values": 1, "_batches": 1, "_delivered": 1, "_retries": 0, "coming": 0, "_done": 0,
    }  # fmt: skip
    kept = {name: len(each) for name, each in vars(keys._order).items() if isinstance(each, dict | set)}
    assert {name: size for name, size in kept.items() if size} == {"_keys": 1, "begun": 1, "_running": 1}
    await made.receiver.stop_reading(1)
    await made.receiver.stop(1)
    assert made.reader.behind[("q", P0)] == 0


@pytest.mark.parametrize("attempt", [1, 2, QueueSettings().max_attempts])
async def test_an_uncounted_release_by_the_former_consumer_counts_no_attempt_and_leaves_no_error(
    make_ordered, attempt: int
) -> None:
    made, tracker = make_ordered()
    tracker.open_messages = {0: (State.LEASED_IN_ORDER, attempt, 30_000)}
    made.reader.add(P0, record(0, "a"))
    made.buffer.handler_demand = 1
    made.receiver.start()
    await spin(100)
    assert made.acquired == []

    # A shutdown, a paused queue or an open circuit breaker has interrupted it.
    tracker.open_messages = {0: (State.WAITING_IN_ORDER, attempt, 0)}
    await made.clock.advance(ordering.MAX_ASK_S)
    [message] = await made.take(1)

    assert (message.attempt, message.last_error, made.released) == (attempt, None, {})


async def test_the_next_attempt_waits_until_the_outcome_of_the_one_before_it_is_durable(make_ordered) -> None:
    made, tracker = make_ordered()
    made.reader.add(P0, record(0, "a"), record(1, "b"))
    made.receiver.start()
    first, other = await made.take(2)
    made.settler.gate.clear()
    await other.ack(wait=False)
    await spin()
    await first.release(0, wait=False)

    await made.clock.advance(31)
    await spin(100)
    # The next attempt would have the same holder, so the release would end it.
    assert made.acquired == [0, 1]

    tracker.open_messages = {0: (State.WAITING_IN_ORDER, 2, 0)}
    made.settler.gate.set()
    [second] = await made.take(1)
    assert (second.offset, second.attempt) == (0, 2)
    assert made.released == {0: (0, True, "")}


@pytest.mark.parametrize("error", [ValueError("no"), Reject("no"), asyncio.CancelledError()])
async def test_a_handler_that_fails_after_its_lease_has_ended_does_not_end_the_next_attempt(
    make_ordered, error: BaseException
) -> None:
    made, tracker = make_ordered(max_lease_ms=30_000)
    made.reader.add(P0, record(0, "a"))
    made.receiver.start()
    [first] = await made.take(1)
    first._batch.note_start(first.offset)
    tracker.open_messages = {0: (State.LEASED_IN_ORDER, 1, 0)}
    await made.clock.advance(31)
    [second] = await made.take(1)
    assert (second.offset, second.attempt) == (0, 2)

    first._fail(error)
    await second.ack()
    assert (made.acked, made.released, made.rejected) == ([0], {}, {})


async def test_the_attempt_of_a_start_that_is_being_written_counts_for_the_next_delivery(make_ordered) -> None:
    """Found by seed 16: the start reached the log after the answer, so the next delivery had the same attempt."""
    made, tracker = make_ordered(max_lease_ms=30_000)
    made.reader.add(P0, record(0, "a"))
    made.receiver.start()
    [first] = await made.take(1)
    made.receiver.starts.returned([first])
    await spin()
    made.settler.gate.clear()
    await made.clock.advance(NOTED_AFTER_S)

    tracker.open_messages = {0: (State.LEASED_IN_ORDER, 0, 0)}
    await made.clock.advance(31)

    [second] = await made.take(1)
    assert (second.offset, second.attempt) == (0, 2)
    made.settler.gate.set()


async def test_what_waits_is_bounded_by_its_bytes(
    make_ordered, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ordering, "MAX_WAITING_BYTES", 100)
    made, _ = make_ordered()
    made.reader.add(P0, *[record(offset, "a", size=60) for offset in range(2)])
    made.buffer.handler_demand = 10
    made.receiver.start()
    [first] = await made.take(1)
    made.reader.add(P0, record(2, "b"))
    made.receiver.demand()
    await spin(100)

    assert made.acquired == [0, 1]
    assert caplog.text.count("queue q: too many messages wait") == 1
    await first.ack(wait=False)
    assert [message.offset for message in await made.take(2)] == [1, 2]


async def test_an_error_that_no_retry_can_repair_ends_the_receiver(make_ordered) -> None:
    async def refuse(partitions: Collection[int]) -> MarkersReader:
        raise ConfigError("topic marq.markers: Read is missing")

    made, tracker = make_ordered()
    made.receiver._queries = queries(tracker, made.clock, refuse)
    made.reader.add(P0, record(0, "a"))
    made.receiver.start()
    # The error ends the wait for messages.
    assert not made.buffer.closed
    made.buffer.call_demand += 1
    made.receiver.demand()
    async with asyncio.timeout(LIMIT_S):
        await made.buffer.wait()

    assert "Read is missing" in str(made.receiver.error)


async def test_after_an_error_a_stop_releases_the_message_behind_one_that_ended(make_ordered) -> None:
    made, _ = make_ordered()
    made.buffer.handler_demand = 2
    made.reader.add(P0, record(0, "a"), record(1, "a"))
    made.receiver.start()
    [first] = await made.take(1)
    assert made.acquired == [0, 1]
    made.receiver.fail(BrokerUnavailable("no broker"))

    await first.ack()
    await made.receiver.stop_reading(1)
    await made.settled()

    assert made.released == {1: (0, False, "")}


async def test_an_outage_of_trackers_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(partitions: Collection[int]) -> MarkersReader:
        raise BrokerUnavailable("no broker")

    clock, tracker = rig().clock, Tracker()
    questions = queries(tracker, clock, fail)

    async def ask(number: int) -> None:
        async for _ in questions.answers([Resume("q", number, P0, [0], onwards=True)]):
            pass

    asking = [asyncio.create_task(ask(number)) for number in (1, 2)]
    for _ in range(10):
        await spin()
        await clock.advance(1)

    assert caplog.text.count("unfinished messages are unknown") == 1
    assert caplog.text.count("no tracker has answered for 5 s") == 1
    questions._open_reader = tracker.open
    await clock.advance(1)
    await asyncio.gather(*asking)


async def test_more_messages_than_fit_into_a_question_are_asked_about(make_ordered, monkeypatch: Any) -> None:
    assert ordering.MAX_ASKED <= MAX_BATCH_MARKERS
    monkeypatch.setattr(ordering, "MAX_ASKED", 4)
    made, tracker = make_ordered()
    tracker.open_messages = dict.fromkeys(range(10), (State.WAITING_IN_ORDER, 2, 0))
    made.reader.add(P0, *[record(offset, f"{offset}") for offset in range(10)])
    made.receiver.start()

    assert sorted([each.offset for each in await made.take(10)]) == list(range(10))
    assert [len(each.offsets) for each in tracker.asked if not each.onwards] == [4, 4, 2]


@pytest.mark.parametrize(("wait_ms", "most"), [(60_000, 2), (BLOCKED_WAIT_MS, 20)])
async def test_a_message_in_its_backoff_is_asked_about_less_often_than_one_that_blocks_its_key(
    make_ordered, wait_ms: int, most: int
) -> None:
    made, tracker = make_ordered(queue=lambda _: QueueSettings(ordering="key", on_dead_letter="block"))
    tracker.open_messages = {0: (State.WAITING_IN_ORDER, 2, wait_ms)}
    made.reader.add(P0, record(0, "a"))
    made.buffer.handler_demand = 1
    made.receiver.start()
    for _ in range(20):
        await spin(100)
        await made.clock.advance(ordering.MAX_ASK_S)

    asked = len([each for each in tracker.asked if not each.onwards])
    assert most - 2 <= asked <= most


async def test_a_message_whose_turn_is_next_waits_behind_none_that_no_handler_has_begun(make_ordered) -> None:
    made, _ = make_ordered(queue=lambda _: QueueSettings(fair=True))
    handler = HangingEach()
    made.reader.add(P0, *[record(offset, "busy") for offset in range(20)])
    made.receiver.start()
    made.work(handler, 2)
    await spin(100)
    made.reader.add(P0, record(20, "quiet"))
    await spin(100)
    assert handler.running == [0, 1]

    # The busy key began to wait for its next turn before the quiet one.
    await handler.end(0)
    await handler.end(1)
    assert handler.running == [2, 20]


async def test_a_batch_handler_of_a_fair_queue_gets_as_many_messages_as_may_be_in_flight(make_ordered) -> None:
    made, _ = make_ordered(queue=lambda _: QueueSettings(fair=True))
    seen: list[int] = []

    async def handler(messages: list[Message]) -> None:
        seen.append(len(messages))

    made.reader.add(P0, *[record(offset, "a") for offset in range(20)])
    made.receiver.start()
    made.work_on_batches(handler, max_messages=10, most=10)
    await spin(200)

    assert seen[:2] == [10, 10]


async def test_messages_that_were_acquired_long_after_their_turns_begin_at_the_rate_of_their_queue(
    make_ordered,
) -> None:
    made, tracker = make_ordered(queue=lambda _: QueueSettings(limits=Limits(rate=Rate(10))))
    tracker.open_messages = dict.fromkeys(range(60), (State.WAITING_IN_ORDER, 2, 0))
    made.reader.add(P0, *[record(offset, "a") for offset in range(60)])
    made.buffer.handler_demand = made.buffer.call_demand = 100

    async def pass_time(seconds: int) -> int:
        for _ in range(10 * seconds):
            await made.clock.advance(0.1)
            made.receiver.demand()
            await spin(50)
        return len(made.buffer.ready)

    # The broker does not confirm the ACQUIREs of messages that have had their turns.
    made.acquirer.gate.clear()
    made.receiver.start()
    assert await pass_time(4) == 0
    made.acquirer.gate.set()
    await spin(100)

    begun = len(made.buffer.ready)
    assert begun <= 11
    assert await pass_time(3) == pytest.approx(begun + 30, abs=2)
    await pass_time(3)
    assert sorted(each.offset for each in await made.take(60)) == list(range(60))


async def test_messages_whose_commit_outlasts_the_rebalance_are_released(
    make_ordered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "REVOKE_LIMIT_S", 0.0)
    made, _ = make_ordered()
    made.reader.add(P0, record(0, "a"), record(1, "a"), record(2, "b"))
    made.buffer.handler_demand = 10
    began, end = asyncio.Event(), asyncio.Event()
    commit = made.reader.commit

    async def slow_commit(*args: Any) -> None:
        began.set()
        await end.wait()
        await commit(*args)

    monkeypatch.setattr(made.reader, "commit", slow_commit)
    made.receiver.start()
    async with asyncio.timeout(LIMIT_S):
        await began.wait()
    await made.receiver.revoked()
    end.set()

    await made.settler.until(lambda: len(made.released) == 3)
    assert made.released == dict.fromkeys([0, 1, 2], (0, False, ""))
    assert not made.buffer.ready


async def test_a_commit_that_outlasts_the_rebalance_does_not_stop_those_of_the_next_assignment(
    make_ordered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "REVOKE_LIMIT_S", 0.0)
    made, _ = make_ordered()
    made.reader.add(P0, record(0, "a"))
    made.buffer.handler_demand = 10
    began, end, lost = asyncio.Event(), asyncio.Event(), set[Source]()
    commit = made.reader.commit

    async def slow_commit(offsets: Mapping[Source, int], *behind: Any) -> None:
        if lost & offsets.keys():
            raise NotCommitted("no longer assigned")
        began.set()
        await end.wait()
        await commit(offsets, *behind)

    monkeypatch.setattr(made.reader, "commit", slow_commit)
    made.receiver.start()
    async with asyncio.timeout(LIMIT_S):
        await began.wait()
    await made.receiver.revoked()
    # Another member has the partition from now on; the commit was on its way before that.
    lost.add(P0)
    made.reader.log.clear()
    made.reader.reassign()
    made.receiver.assigned()
    end.set()
    made.reader.add(P1, record(0, "b"))
    [message] = await made.take(1)
    await message.ack()

    await made.clock.advance(2 * ordering.COMMIT_S)
    await spin(60)

    assert made.reader.behind[("q", P1)] == 1


async def test_messages_that_were_prefetched_before_their_queue_got_limits_are_put_back(make_ordered) -> None:
    """Prefetched messages were delivered together with as many others as the limits allow."""
    settings = [QueueSettings()]
    made, _ = make_ordered(queue=lambda _: settings[0])
    made.add(4)
    made.buffer.handler_demand = 4
    made.receiver.start()
    await made.acquirer.until(lambda: len(made.acquired) == 4)
    await spin()
    assert len(made.buffer.ready) == 4

    settings[0] = QueueSettings(limits=Limits(concurrency=1))
    made.receiver.apply_settings()

    await made.settler.until(lambda: len(made.released) == 4)
    assert made.released == dict.fromkeys(range(4), (0, False, ""))
    assert not made.buffer.ready


async def test_a_source_is_resumed_when_the_commits_that_are_on_their_way_have_ended(
    make_ordered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit that verifies the membership was of an older offset, so a crash duplicated the messages after it."""
    settings = [QueueSettings()]
    made, tracker = make_ordered(queue=lambda _: settings[0])
    made.buffer.handler_demand = 10
    began, end, verified = asyncio.Event(), asyncio.Event(), list[int]()
    commit = made.reader.commit

    async def slow_commit(*args: Any) -> None:
        began.set()
        await end.wait()
        await commit(*args)

    async def verify(sources: Collection[Source]) -> None:
        verified.append(made.reader.committed[P0])

    monkeypatch.setattr(made.reader, "commit", slow_commit)
    monkeypatch.setattr(made.reader, "verify", verify)
    made.add(1)
    made.receiver.start()
    async with asyncio.timeout(LIMIT_S):
        await began.wait()
    settings[0] = QueueSettings(limits=Limits(concurrency=10))
    made.receiver.apply_settings()
    made.add([1])
    await spin()
    assert [list(each.offsets) for each in tracker.asked] == [[1]]
    end.set()

    await made.acquirer.until(lambda: made.acquired == [0, 1])
    assert verified == [1]


@pytest.mark.parametrize("before", ["", "ValueError: x"])
async def test_a_message_whose_last_lease_has_ended_becomes_a_dead_letter_whose_error_says_so(
    make_ordered, before: str
) -> None:
    made, tracker = make_ordered()
    tracker.open_messages = {0: (State.LEASED_IN_ORDER, QueueSettings().max_attempts, 0)}
    tracker.error = before
    made.reader.add(P0, record(0, "a"))
    made.buffer.handler_demand = 1
    made.receiver.start()

    await made.settler.until(lambda: bool(made.released))
    error = "its lease ran out: the process of its handler died, or the handler did not return"
    assert made.released == {0: (LAST, True, error + (before and f"; before that: {before}"))}


async def test_a_message_that_no_longer_blocks_its_key_becomes_a_dead_letter_of_its_last_attempt(make_ordered) -> None:
    made, tracker = make_ordered()
    # The answer names the next attempt.
    tracker.open_messages = {0: (State.WAITING_IN_ORDER, 3, BLOCKED_WAIT_MS)}
    made.reader.add(P0, record(0, "a"))
    made.buffer.handler_demand = 1
    made.receiver.start()
    await spin(100)
    await made.clock.advance(ordering.MAX_ASK_S)

    await made.settler.until(lambda: bool(made.released))
    assert made.released == {0: (LAST, True, "")}
    assert [each.attempt for batch in made.acquirer.of(Acquire) for each in batch.payloads] == [2]


MakeOrdered = Callable[..., tuple[Rig, Tracker]]


class PurgedQueue:
    """A queue with ordering that is purged, perhaps while it is paused."""

    def __init__(self, make_ordered: MakeOrdered, count: int = 2) -> None:
        self._settings = QueueSettings(ordering="key")
        self._purge: SkippedRecords | None = None
        self.count = count
        self.made, self.tracker = make_ordered(queue=lambda _: self._settings, skipped=lambda _: self._purge)
        self.made.reader.add(P0, *[record(offset, "a") for offset in range(count)])
        self.made.buffer.handler_demand = 10
        self.made.receiver.start()

    async def first(self) -> Message:
        """Return message 0 when message 1 waits behind it."""
        [message] = await self.made.take(1)
        await self.made.acquirer.until(lambda: self.made.acquired == list(range(self.count)))
        await spin()
        return message

    def pause(self, paused: bool) -> None:
        self._settings = QueueSettings(ordering="key", paused=paused)
        self.made.receiver.apply_settings()

    async def purge(self, *, in_flight: bool) -> None:
        """Learn that a purge has ended the messages that waited, or also those in flight."""
        ends = {P0: self.count}
        self._purge = SkippedRecords(2_000, ends, in_flight=ends if in_flight else {})
        if in_flight:
            self.tracker.open_messages = {}
        self.pause(False)
        await self.made.clock.advance(0.01)

    @property
    def asked(self) -> list[list[int]]:
        return [list(each.offsets) for each in self.tracker.asked if not each.onwards]


async def test_purged_messages_behind_another_one_end_at_once(make_ordered) -> None:
    queue = PurgedQueue(make_ordered, 50)
    first = await queue.first()
    await queue.purge(in_flight=True)

    await first.ack(wait=False)
    queue.made.reader.add(P0, record(50, "a"))

    assert [each.offset for each in await queue.made.take(1)] == [50]
    # Nothing is written about them: the tracker has ended them.
    assert (queue.made.acked, queue.made.released, queue.asked) == ([0], {}, [])


async def test_a_message_behind_another_one_that_a_purge_left_is_delivered(make_ordered) -> None:
    queue = PurgedQueue(make_ordered)
    first = await queue.first()
    await queue.purge(in_flight=False)
    queue.tracker.open_messages = {1: (State.WAITING_IN_ORDER, 1, 0)}

    await first.ack(wait=False)

    [second] = await queue.made.take(1)
    assert (second.offset, second.attempt) == (1, 1)
    # Its ACQUIRE could have come after the PURGE.
    assert queue.asked == [[1]]


async def test_a_message_whose_acquire_came_after_the_purge_is_not_delivered(make_ordered) -> None:
    queue = PurgedQueue(make_ordered)
    first = await queue.first()
    await queue.purge(in_flight=False)
    queue.tracker.open_messages = {}

    await first.ack(wait=False)
    queue.made.reader.add(P0, record(2, "a"))

    assert [each.offset for each in await queue.made.take(1)] == [2]
    assert queue.made.released == {1: (0, False, "")}


async def test_a_message_whose_ack_is_being_written_is_not_delivered_again_after_a_purge(make_ordered) -> None:
    queue = PurgedQueue(make_ordered)
    first = await queue.first()
    queue.made.settler.gate.clear()
    await first.ack(wait=False)
    await spin(100)

    await queue.purge(in_flight=True)
    await spin(100)
    queue.made.settler.gate.set()
    queue.made.reader.add(P0, record(2, "a"))

    assert [each.offset for each in await queue.made.take(1)] == [2]
    assert queue.made.acked == [0]


async def test_a_purged_message_that_became_the_first_of_its_key_during_a_pause_is_not_delivered(make_ordered) -> None:
    queue = PurgedQueue(make_ordered)
    first = await queue.first()
    queue.pause(True)
    queue.tracker.open_messages = {1: (State.WAITING_IN_ORDER, 1, 0)}
    await first.ack()
    await queue.made.settled()
    await spin(100)
    assert queue.asked == []

    await queue.purge(in_flight=True)
    queue.made.reader.add(P0, record(2, "a"))

    assert [each.offset for each in await queue.made.take(1)] == [2]


async def test_a_released_message_that_a_purge_ended_does_not_hold_up_its_key_until_the_next_regular_question(
    make_ordered,
) -> None:
    queue = PurgedQueue(make_ordered)
    first = await queue.first()
    queue.tracker.open_messages = {0: (State.WAITING_IN_ORDER, 2, 60_000)}
    await first.release(delay=60)
    await queue.made.settled()
    await queue.purge(in_flight=True)

    queue.made.reader.add(P0, record(2, "a"))

    assert [each.offset for each in await queue.made.take(1)] == [2]


def test_a_record_with_a_large_key_can_be_acquired_again() -> None:
    row = Row(0, 1_000, b"k" * 80_000, b"v" * 960_000, ())
    again = delivered_again(P0, "q", row, 2, "boom", counted=True, cause=Cause.RELEASED)

    settings = rig().receiver._settings
    [one] = acquisitions(("q", P0), 1, Records.of([again]), 0, settings, own_topic=True)

    assert (one.taken[0].key, origin(P0, 0, 1_000, one.taken[0].headers).attempt) == (row.key, 2)
