from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import permutations, product

import pytest

from marq.consumer.acquire import AcquiredOffsets, acquire_records
from marq.consumer.ordering import Ordering
from marq.kafka.group_reader import NotCommitted
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.queue_positions import NOT_BEHIND, LowWatermarks
from marq.kafka.queue_records import serving
from marq.kafka.records import Records
from marq.leases.receiver_settings import ReceiverSettings
from marq.wire.large_messages import left_out
from marq.wire.marker_codec import decode, encode
from marq.wire.markers import ANY_QUEUE, DUE_AT_ONCE, NOW, Ack, Acquire, MixedAcquire, Release, Source, split
from marq.wire.names import markers_partition
from tests.unit.client.fakes import P0, P1, FakeRecord, Rig, spin


def records(*offsets: int, **fields: object) -> list[FakeRecord]:
    return [FakeRecord(offset, **fields) for offset in offsets]  # type: ignore[arg-type]


async def test_a_batch_is_acquired_committed_and_delivered_in_this_order(make_rig) -> None:
    rig = make_rig()
    seen: list[tuple[int, int]] = []
    rig.reader.during_commit = lambda: seen.append((len(rig.acquirer.written), len(rig.buffer.ready)))
    rig.reader.add(P0, *records(5, 6, 7))

    messages = await rig.take(3)

    assert [message.offset for message in messages] == [5, 6, 7]
    assert seen == [(1, 0)]
    assert rig.reader.committed == {P0: 8}
    (partition, batch) = rig.acquirer.written[0]
    assert partition == markers_partition("t", 0, 4)
    assert isinstance(batch, Acquire)
    assert (batch.queue, batch.source, list(batch.offsets), batch.lease_ms) == ("q", P0, [5, 6, 7], 30_000)
    assert [payload.left for payload in batch.payloads] == [True] * 3


async def test_a_slow_commit_drops_only_messages_whose_own_lease_has_expired(make_rig) -> None:
    rig = make_rig(["short", "long"], leases_ms={"short": 2_000, "long": 900_000})

    def commit_slowly() -> None:
        rig.clock.now_s += 3

    rig.reader.during_commit = commit_slowly
    rig.receiver.prefetch.buffers["long"].handler_demand = 2
    rig.reader.add(P0, *records(0, key=b"short"), *records(1, key=b"long"))

    [message] = await rig.take(1, "long")

    assert message.offset == 1
    assert not rig.receiver.prefetch.buffers["short"].ready


async def test_from_offset_is_where_the_assignment_began_and_then_the_end_of_the_acquire_before(make_rig) -> None:
    rig = make_rig()
    rig.buffer.handler_demand = 10
    rig.reader.add(P0, *records(10, key=b"other"), *records(11, 12))
    await rig.take(2)
    rig.reader.add(P0, *records(13, 14, key=b"other"), *records(15))

    await rig.take(1)

    assert [(each.from_offset, list(each.offsets)) for each in rig.acquirer.of(Acquire)] == [(10, [11, 12]), (13, [15])]


async def test_a_new_assignment_has_a_new_holder_and_its_own_from_offset(make_rig) -> None:
    rig = make_rig()
    rig.reader.add(P0, *records(0))
    (first,) = await rig.take(1)
    rig.reader.add(P0, *records(1, key=b"other"))

    await rig.receiver.revoked()
    rig.receiver.assigned()
    rig.reader.add(P0, *records(5))
    await rig.take(1)
    await first.ack()

    one, two = rig.acquirer.of(Acquire)
    assert one.holder != two.holder
    assert two.from_offset > 0
    assert [each.holder for each in rig.settler.of(Ack)] == [one.holder]


async def test_the_group_is_told_the_next_holder_and_those_of_messages_in_flight(make_rig) -> None:
    rig = make_rig()
    first_told = rig.receiver.holders()
    # A request to join may be repeated.
    assert rig.receiver.holders() == first_told
    rig.receiver.assigned()
    rig.reader.add(P0, *records(0))
    [held] = await rig.take(1)

    await rig.receiver.revoked()
    told = rig.receiver.holders()
    rig.receiver.assigned()
    rig.reader.add(P0, *records(1))
    await rig.take(1)

    one, two = rig.acquirer.of(Acquire)
    assert [one.holder] == list(first_told)
    assert list(told) == [two.holder, one.holder]
    await held.ack()
    assert one.holder not in rig.receiver.holders()


async def test_cycles_in_progress_end_before_the_stop(make_rig) -> None:
    rig = await with_cycles(make_rig, 3)

    stopping = asyncio.create_task(rig.receiver.stop_reading(5))
    await spin()
    rig.acquirer.gate.set()
    await stopping

    assert rig.reader.committed == {P0: 2}
    assert rig.receiver.prefetch.release() == 2


async def test_a_stop_gives_up_no_cycle_while_handlers_run(make_rig) -> None:
    """A slow broker could write its ACQUIRE later, and the lease would count an attempt that no handler saw."""
    rig = await with_cycles(make_rig, 1)
    handled = asyncio.Event()
    handler = asyncio.create_task(handled.wait())

    stopping = asyncio.create_task(rig.receiver.stop_reading(0, handler))
    await spin()
    rig.acquirer.gate.set()
    await stopping
    rig.receiver.prefetch.release()
    await rig.settled()

    assert rig.released == {0: (0, False, "")}
    handled.set()
    await handler


async def test_a_stop_gives_up_a_cycle_when_its_time_and_the_handlers_have_ended(make_rig) -> None:
    rig = await with_cycles(make_rig, 1)

    await rig.receiver.stop_reading(0, asyncio.create_task(asyncio.sleep(0)))

    assert rig.reader.committed == {}


async def test_a_cycle_that_has_not_begun_at_the_stop_acquires_nothing(make_rig) -> None:
    rig = make_rig()
    rig.buffer.handler_demand = 10
    begin, stops = rig.receiver._begin_cycle, []

    def begin_and_stop(*arguments):
        begin(*arguments)
        rig.receiver._stopping = True
        stops.append(rig.receiver._cycles[-1])

    rig.receiver._begin_cycle = begin_and_stop
    rig.reader.add(P0, *records(0))
    rig.receiver.demand()
    await spin()
    await rig.receiver.stop_reading(1)

    assert [cycle.task.result() for cycle in stops] == [False]
    assert (rig.acquirer.written, rig.reader.committed) == ([], {})


async def with_cycles(make_rig, fetches: int) -> Rig:
    """A receiver that has read a record by each of some fetches, and writes ACQUIREs for the first two."""
    rig = make_rig()
    rig.acquirer.gate.clear()
    rig.buffer.handler_demand = 10
    for offset in range(fetches):
        rig.reader.add(P0, *records(offset))
        rig.receiver.demand()
        await spin()
    return rig


async def test_acquires_are_written_while_the_cycle_before_commits_and_are_committed_after_it(make_rig) -> None:
    committing, commits = asyncio.Event(), list[dict[Source, int]]()
    rig = make_rig()
    commit = rig.reader.commit

    async def slowly(offsets: Mapping[Source, int], behind: LowWatermarks) -> None:
        await committing.wait()
        commits.append(dict(offsets))
        await commit(offsets)

    rig.reader.commit = slowly
    rig.buffer.handler_demand = 10
    for offset in range(3):
        rig.reader.add(P0, *records(offset))
        rig.receiver.demand()
        await spin()

    assert [list(each.offsets) for each in rig.acquirer.of(Acquire)] == [[0], [1]]
    assert rig.receiver.prefetch.in_flight == 0
    committing.set()

    assert [message.offset for message in await rig.take(3)] == [0, 1, 2]
    assert commits == [{P0: 1}, {P0: 2}, {P0: 3}]
    assert [each.from_offset for each in rig.acquirer.of(Acquire)] == [0, 1, 2]


async def test_a_cycle_of_a_former_assignment_that_ends_late_takes_nothing_of_the_new_one_with_it(
    make_rig, monkeypatch
) -> None:
    monkeypatch.setattr("marq.consumer.receiver.REVOKE_LIMIT_S", 0.01)
    rig = make_rig()
    rig.acquirer.gate.clear()
    rig.buffer.handler_demand = 10
    rig.reader.add(P0, *records(0))
    rig.receiver.demand()
    await spin()
    await rig.receiver.revoked()
    # Another member has the first partition now.
    rig.receiver.assigned()
    rig.reader.add(P1, *records(0, 1))
    await spin()
    # The fetch that was under way was for the former assignment.
    rig.reader.rewind({P1: 0})
    await spin()

    rig.acquirer.gate.set()

    assert [(message.partition, message.offset) for message in await rig.take(2)] == [(1, 0), (1, 1)]
    assert rig.reader.committed == {P1: 2}


async def test_a_rebalance_waits_for_all_cycles_and_lets_no_other_one_start(make_rig) -> None:
    rig = await with_cycles(make_rig, 3)

    revoking = asyncio.create_task(rig.receiver.revoked())
    await spin()
    assert not revoking.done()
    rig.acquirer.gate.set()
    await asyncio.wait_for(revoking, 60)

    # The third was fetched and is in no cycle: the next owner reads it.
    assert rig.reader.committed == {P0: 2}
    assert len(rig.acquirer.of(Acquire)) == 2


# --- overlapping cycles that fail -------------------------------------------------------------------------------------

#: What becomes of one cycle's first ACQUIRE and commit.
FATES = ("done", "refused", "answer lost", "not committed")
OVERLAPPING = 3


class Overlap:
    """Cycles of one record each, whose ACQUIREs the test answers one by one; later ones are written at once.

    No commit may pass a message without a durable ACQUIRE: nothing would ever deliver it. No message may be delivered
    before its commit: a new owner would deliver it, too. No ACQUIRE may claim records that it does not name: a tracker
    would take them for ended.
    """

    def __init__(self, rig: Rig, fates: Sequence[str], sources: Sequence[Source]) -> None:
        self.rig = rig
        self._fates = fates
        self._answers = [asyncio.Event() for _ in fates]
        self._writes = 0
        self._refused = set[int]()
        self._write, self._commit = rig.acquirer.write, rig.reader.commit
        rig.acquirer.write, rig.reader.commit = self.write, self.commit  # type: ignore[method-assign]
        #: Commits beyond messages that are not acquired.
        self.lost: list[Mapping[Source, int]] = []
        #: Messages that were delivered although they were not committed.
        self.early: list[tuple[Source, int]] = []
        self.sent = [(source, sources[:index].count(source)) for index, source in enumerate(sources)]
        self.ends = {source: sources.count(source) for source in sources}
        self.ended = asyncio.Event()

    async def begin(self) -> None:
        self.rig.buffer.handler_demand = 10
        for source, offset in self.sent:
            self.rig.reader.add(source, *records(offset))
            self.rig.receiver.demand()
            await spin()
        assert self._writes == len(self.sent)

    async def answer(self, order: Iterable[int]) -> None:
        for index in order:
            self._answers[index].set()
            await spin()

    async def write(self, batches: Sequence[MarkerRecord], limit_s: float) -> None:
        index, self._writes = self._writes, self._writes + 1
        if index < len(self._fates):
            await self._answers[index].wait()
            self.rig.acquirer.refuse = int(self._fates[index] == "refused")
            self.rig.acquirer.refuse_written = int(self._fates[index] == "answer lost")
        await self._write(batches, limit_s)

    async def commit(self, offsets: Mapping[Source, int], behind: LowWatermarks = NOT_BEHIND) -> None:
        self.early += [place for place in self.ready if place[1] >= self.rig.reader.committed.get(place[0], 0)]
        taken = {(each.source, offset) for each in self.rig.acquirer.of(Acquire) for offset in each.offsets}
        if any(offset < offsets.get(source, 0) for source, offset in set(self.sent) - taken):
            self.lost.append(offsets)
            self.ended.set()
        for index, (source, offset) in enumerate(self.sent):
            refused = self._fates[index] == "not committed" and index not in self._refused
            if refused and offsets.get(source) == offset + 1:
                self._refused.add(index)
                raise NotCommitted("refused by the test")
        await self._commit(offsets)
        if self.rig.reader.committed == self.ends:
            self.ended.set()

    async def delivered(self) -> list[tuple[Source, int]]:
        """Return the messages that were delivered when everything is committed."""
        async with asyncio.timeout(60):
            await self.ended.wait()
        await spin()
        assert (self.lost, self.early) == ([], [])
        for each in self.rig.acquirer.of(Acquire):
            assert list(each.offsets) == list(range(each.from_offset, each.offsets[-1] + 1))
        return self.ready

    @property
    def ready(self) -> list[tuple[Source, int]]:
        return [(Source("t", message.partition), message.offset) for message in self.rig.buffer.ready.all()]


@pytest.fixture
def overlaps(make_rig, monkeypatch) -> Iterator[Overlap]:
    """Each combination of fates, in one partition and in two."""
    monkeypatch.setattr("marq.consumer.receiver.MAX_CYCLES", OVERLAPPING)
    monkeypatch.setattr("marq.consumer.receiver.FIRST_RETRY_S", 0)
    monkeypatch.setattr("marq.consumer.receiver.REVOKE_LIMIT_S", 0)
    return (
        Overlap(make_rig(), fates, sources)
        for sources in ([P0, P0, P0], [P0, P1, P0])
        for fates in product(FATES, repeat=OVERLAPPING)
    )


@pytest.mark.parametrize("order", list(permutations(range(OVERLAPPING))))
async def test_no_message_is_skipped_whichever_of_several_cycles_fail_and_in_whatever_order(overlaps, order) -> None:
    for overlap in overlaps:
        await overlap.begin()
        await overlap.answer(order)

        assert sorted(await overlap.delivered()) == sorted(overlap.sent)


@pytest.mark.parametrize("answered", range(OVERLAPPING))
async def test_no_message_is_skipped_if_partitions_are_reassigned_while_cycles_fail(overlaps, answered) -> None:
    for overlap in overlaps:
        await overlap.begin()
        await overlap.answer(range(answered))
        await overlap.rig.receiver.revoked()
        overlap.rig.reader.reassign()
        overlap.rig.receiver.assigned()
        await spin()
        await overlap.answer(range(answered, OVERLAPPING))

        assert sorted(await overlap.delivered()) == sorted(overlap.sent)


@pytest.mark.parametrize("answered", range(OVERLAPPING + 1))
async def test_a_stop_while_cycles_fail_commits_nothing_beyond_what_is_acquired(overlaps, answered) -> None:
    for overlap in overlaps:
        await overlap.begin()
        await overlap.answer(reversed(range(OVERLAPPING - answered, OVERLAPPING)))
        await overlap.rig.receiver.stop_reading(0)

        assert overlap.lost == []


async def test_a_cycle_that_begins_as_its_partitions_are_reassigned_hides_no_earlier_one(make_rig, monkeypatch) -> None:
    monkeypatch.setattr("marq.consumer.receiver.MAX_CYCLES", 4)
    monkeypatch.setattr("marq.consumer.receiver.FIRST_RETRY_S", 0)
    rig = make_rig()
    committing = asyncio.Event()
    fetch, commit = rig.reader.fetch, rig.reader.commit

    async def slow_commit(offsets: Mapping[Source, int], behind: LowWatermarks) -> None:
        await committing.wait()
        await commit(offsets)

    async def fetch_and_reassign(count: int) -> Mapping[Source, Records]:
        if len(rig.reader.fetched) != 2:
            return await fetch(count)
        # The second cycle is a task that has not begun yet.
        rig.reader.fetched.append(count)
        rig.acquirer.gate.clear()
        rig.reader.reassign()
        rig.receiver.assigned()
        return {}

    rig.reader.commit, rig.reader.fetch = slow_commit, fetch_and_reassign
    rig.buffer.handler_demand = 10
    for offset in range(2):
        rig.reader.add(P0, *records(offset))
        rig.receiver.demand()
        await spin()
    rig.acquirer.refuse = 2
    rig.acquirer.gate.set()
    await spin()
    committing.set()
    await spin(100)

    assert rig.reader.committed == {P0: 2}


async def test_acks_of_several_queues_are_one_batch_and_late_ones_say_whose_they_are(make_rig) -> None:
    rig = make_rig(["a", "b", "c"])
    rig.reader.add(P0, FakeRecord(0, b"a"), FakeRecord(1, b"b"), FakeRecord(2, b"a"), FakeRecord(3, b"c"))
    taken = [*await rig.take(2, "a"), *await rig.take(1, "b"), *await rig.take(1, "c")]
    taken[-1]._batch.expires_s = rig.clock()

    for message in reversed(taken):
        message._batch.ack(message.offset)
    assert rig.settler.of(Ack) == []
    await rig.settled()

    acks = {each.queue: list(each.offsets) for each in rig.settler.of(Ack)}
    assert acks == {ANY_QUEUE: [0, 1, 2], "c": [3]}


async def test_many_records_of_other_queues_cost_one_cycle(make_rig) -> None:
    rig = make_rig()
    commits: list[int] = []
    rig.reader.during_commit = lambda: commits.append(1)
    rig.reader.add(P0, *records(*range(500), key=b"other"), *records(500), *records(*range(501, 900), key=b"other"))

    (message,) = await rig.take(1)

    assert message.offset == 500
    assert rig.acquired == [500]
    assert len(commits) == 1
    assert rig.reader.committed == {P0: 900}


async def test_a_loop_that_takes_one_message_after_another_soon_finds_many_at_hand(make_rig) -> None:
    rig = make_rig()
    rig.reader.add(P0, *records(*range(2_000)))

    for _ in range(2_000):
        (message,) = await rig.take(1)
        rig.clock.now_s += 0.0001
        await message.ack(wait=False)
        if not rig.buffer.ready:
            rig.receiver.writer.flush_soon()

    assert len(rig.acquirer.of(Acquire)) < 40


async def test_a_loop_that_takes_its_time_holds_one_message(make_rig) -> None:
    rig = make_rig()
    rig.reader.add(P0, *records(*range(20)))

    for _ in range(10):
        (message,) = await rig.take(1)
        assert rig.receiver.prefetch.in_flight == 1
        rig.clock.now_s += 10
        await message.ack()


async def test_nothing_is_fetched_before_a_request(make_rig) -> None:
    rig = make_rig()
    rig.reader.add(P0, *records(0))

    await spin()

    assert rig.reader.fetched == []
    assert [message.offset for message in await rig.take(1)] == [0]


async def test_what_was_read_beyond_max_in_flight_is_neither_acquired_nor_committed_and_membership_goes_on(
    make_rig,
) -> None:
    rig = make_rig(max_in_flight=3)
    rig.buffer.handler_demand = 100
    rig.reader.add(P0, *records(*range(10)))
    messages = await rig.take(3)
    rig.reader.kept_alive.clear()

    await asyncio.wait_for(rig.reader.kept_alive.wait(), 60)

    assert (rig.receiver.prefetch.in_flight, rig.acquired, rig.reader.committed) == (3, [0, 1, 2], {P0: 3})
    for message in messages:
        await message.ack()
    assert [message.offset for message in await rig.take(3)] == [3, 4, 5]


async def test_a_full_consumer_that_is_busy_stays_in_its_group(make_rig) -> None:
    """Each finished message wakes the receiver; that must not postpone its next poll."""
    rig = make_rig(max_in_flight=3)
    rig.reader.keep_alive_s = 0.1
    rig.buffer.handler_demand = 100
    rig.reader.add(P0, *records(*range(10)))
    await rig.take(3)
    rig.reader.kept_alive.clear()
    wake_ups = 0

    while not rig.reader.kept_alive.is_set() and wake_ups < 200:
        wake_ups += 1
        rig.receiver.demand()
        with suppress(TimeoutError):
            await asyncio.wait_for(rig.reader.kept_alive.wait(), 0.02)

    assert rig.reader.kept_alive.is_set()
    assert rig.receiver.prefetch.in_flight == 3


async def test_batches_are_cut_so_that_each_fits_into_a_record(make_rig) -> None:
    limit = 8_000
    rig = make_rig(limit_bytes=limit)
    rig.reader.add(P0, *records(*range(12), value=b"x" * 900))

    await rig.take(12)

    batches = rig.acquirer.of(Acquire)
    assert len(batches) > 3
    assert [offset for each in batches for offset in each.offsets] == list(range(12))
    assert [each.from_offset for each in batches] == [each.offsets[0] for each in batches]
    assert max(len(encode(each)) for each in batches) <= limit


async def test_few_messages_of_several_queues_share_an_acquire(make_rig) -> None:
    rig = make_rig(["a", "b", "c"])
    for buffer in rig.receiver.prefetch.buffers.values():
        buffer.handler_demand = 10
    many = records(*range(10, 16), key=b"c")
    rig.reader.add(P0, *records(0, key=b"a"), *records(1, key=b"b"), *records(2, 3, key=b"a"), *many)
    await rig.acquirer.until(lambda: len(rig.acquired) == 10)
    rig.reader.add(P0, *records(20, key=b"b"), *records(21, key=b"a"))
    await rig.acquirer.until(lambda: len(rig.acquired) == 12)

    written = [(type(batch), list(batch.offsets)) for _, batch in rig.acquirer.written]
    assert written == [(MixedAcquire, [0, 1, 2, 3]), (Acquire, [*range(10, 16)]), (MixedAcquire, [20, 21])]
    known = {(each.queue, each.offsets[0]): each.from_offset for each in rig.acquirer.of(Acquire)}
    assert known == {
        ("a", 0): 0, ("b", 1): 0, ("a", 2): 1, ("a", 3): 3, ("c", 10): 0, ("b", 20): 2, ("a", 21): 4,
    }  # fmt: skip


def test_a_mixed_acquire_is_cut_so_that_it_fits_into_a_record() -> None:
    limit, queues = 8_000, [f"queue-{number}" for number in range(400)]
    settings = ReceiverSettings(1_000, 4, limit)
    read = Records.of([FakeRecord(offset, key=queue.encode()) for offset, queue in enumerate(queues)])
    served = serving("t", queues, {})
    taken, _ = AcquiredOffsets().acquisitions(served, {P0: read}, 7, settings, Ordering(settings))

    values = [value for _, value in acquire_records(taken, settings)]

    assert len(values) > 1
    assert max(map(len, values)) <= limit
    acquires = [acquire for value in values for acquire in split(decode(value))]
    assert [(each.queue, *each.offsets) for each in acquires] == list(zip(queues, range(400), strict=True))


@pytest.mark.parametrize("kept", [{"headers": [("marq-attempt", b"2")]}, {"headers": [("marq-deliver-at", b"5")]}])
async def test_a_message_whose_acquire_has_more_columns_has_its_own(make_rig, kept: dict[str, object]) -> None:
    rig = make_rig(["a", "b", "c"])
    for buffer in rig.receiver.prefetch.buffers.values():
        buffer.handler_demand = 10
    rig.reader.add(P0, *records(0, key=b"a"), *records(1, key=b"b", **kept), *records(2, key=b"c"))
    await rig.acquirer.until(lambda: len(rig.acquired) == 3)

    written = [(type(batch), list(batch.offsets)) for _, batch in rig.acquirer.written]
    assert written == [(MixedAcquire, [0, 2]), (Acquire, [1])]


async def test_a_message_that_does_not_fit_is_left_to_the_tracker_without_its_value(make_rig) -> None:
    limit = 8_000
    rig = make_rig(limit_bytes=limit)
    rig.reader.add(P0, *records(0, 1, 2, value=b"x"), *records(3, value=b"x" * 4_000), *records(4, value=b"x"))

    messages = await rig.take(4)

    assert [message.offset for message in messages] == [0, 1, 2, 4]
    batch, rest = rig.acquirer.of(Acquire)
    assert (list(batch.offsets), list(batch.dues_ms)) == ([0, 1, 2, 3], [NOW, NOW, NOW, DUE_AT_ONCE])
    assert (list(rest.offsets), rest.dues_ms) == ([4], None)
    assert batch.payloads[3].value is None
    assert left_out(batch.payloads[3]) == "t/0/3 has 4001 bytes, and a marker has room for 2792"
    assert rig.reader.committed == {P0: 5}


@pytest.mark.parametrize(
    ("taken", "handler_demand", "kept", "delay_ms"),
    [(1, 0, [], 0), (0, 4, [0, 1, 2, 3], 30_000)],
    ids=["no call waits any more", "a slow handler needs fewer"],
)
async def test_excess_prefetch_is_released_uncounted_after_a_lease(
    make_rig, taken: int, handler_demand: int, kept: list[int], delay_ms: int
) -> None:
    rig = make_rig()
    rig.add(10)
    rig.buffer.call_demand = 10
    rig.receiver.demand()
    await asyncio.wait_for(rig.buffer.wait(), 60)
    for _ in range(taken):
        rig.buffer.take(rig.clock())
    rig.buffer.call_demand, rig.buffer.handler_demand = 0, handler_demand

    rig.clock.now_s += 20
    await rig.receiver.writer.renew()
    assert len(rig.buffer.ready) == 10 - taken
    rig.clock.now_s += 20
    await rig.receiver.writer.renew()

    await rig.settler.until(lambda: bool(rig.settler.of(Release)))
    [release] = rig.settler.of(Release)
    assert list(release.offsets) == list(range(taken + len(kept), 10))
    assert (release.counted, set(release.delays_ms)) == (False, {delay_ms})
    assert [message.offset for message in rig.buffer.ready.all()] == kept


async def test_an_acquire_that_took_longer_than_the_lease_hands_nothing_out(make_rig) -> None:
    rig = make_rig()
    rig.acquirer.gate.clear()
    rig.reader.add(P0, *records(0))
    rig.buffer.call_demand = 1
    rig.receiver.demand()
    await spin()

    rig.clock.now_s += 31
    rig.acquirer.gate.set()
    await spin()

    assert rig.buffer.take(rig.clock()) is None
    assert rig.receiver.prefetch.in_flight == 0


async def test_a_lease_that_is_made_longer_while_its_marker_is_written_is_still_the_one_of_the_marker(make_rig) -> None:
    """The simulation's seed 6632: the client believed the new lease, the tracker the one that the ACQUIRE says."""
    leases = {"q": 10_000}
    rig = make_rig(leases_ms=leases)
    rig.reader.during_commit = lambda: leases.update(q=60_000)
    rig.reader.add(P0, *records(0))

    (message,) = await rig.take(1)

    assert [each.lease_ms for each in rig.acquirer.of(Acquire)] == [10_000]
    assert message._batch.expires_s == rig.clock() + 10
