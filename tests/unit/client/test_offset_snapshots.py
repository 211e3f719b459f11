"""Positions of more queues than an offset's metadata has room for."""

from __future__ import annotations

from itertools import count

import pytest
from aiokafka import ConsumerRecord
from hypothesis import example, given
from hypothesis import strategies as st

from marq.kafka.committed_offsets import Committed, StartPosition, StartPositionResolver
from marq.kafka.queue_positions import (
    MAX_METADATA_BYTES,
    UNNAMED_MS,
    MemberPositions,
    OffsetSnapshot,
    OffsetSnapshotKey,
    Positions,
    UnknownPositions,
    check_room,
    in_the_metadata,
    left_over,
    new_snapshot,
)
from marq.kafka.queue_records import serving
from marq.kafka.records import Records
from marq.wire.errors import ConfigError
from marq.wire.markers import Source
from marq.wire.names import Names

NAMES = Names()
SOURCE = Source(NAMES.messages, 0)
MANY = [f"queue-{number:05}" for number in range(20_000)]


class Partition:
    """What a group has committed in one partition, with the snapshots that its commits name."""

    def __init__(self, room_bytes: int = MAX_METADATA_BYTES) -> None:
        self.snapshots: dict[str, OffsetSnapshot] = {}
        self.committed: Committed | None = None
        self._room_bytes = room_bytes
        self._numbers = count()

    def place(self, queues: list[str], end: int | None = None) -> StartPosition:
        committed = {} if self.committed is None else {SOURCE: self.committed}
        place = StartPositionResolver(
            NAMES,
            NAMES.named_group("g"),
            serving(NAMES.messages, queues, {}),
            [SOURCE],
            committed,
            self.snapshots,
            plain_bytes=self._room_bytes,
            room_bytes=self._room_bytes,
            new_id=lambda: str(next(self._numbers)),
        ).places({} if end is None else {SOURCE: end})[SOURCE]
        if place.snapshot is not None:
            self.snapshots[place.snapshot.id] = place.snapshot
        return place

    def commit(self, place: StartPosition, queues: list[str], *offsets: int) -> None:
        positions = place.positions
        for offset in offsets:
            positions = positions.advanced_to(tuple(sorted(queues)), offset)
            metadata = positions.encode(offset)
            assert len(metadata.encode()) <= max(self._room_bytes, MAX_METADATA_BYTES)
            self.committed = Committed(offset, metadata)


def test_twenty_thousand_queues_are_where_their_group_is_and_no_second_snapshot_is_written() -> None:
    partition = Partition()

    partition.commit(partition.place(MANY), MANY, 100, 200)
    again = partition.place(MANY)

    assert again.start == 200
    assert again.positions == Positions(dict.fromkeys(MANY, 200))
    assert again.snapshot is None


def test_joining_and_leaving_queues_need_no_snapshot_if_none_is_behind() -> None:
    partition = Partition()
    partition.commit(partition.place(MANY), MANY, 100)
    others = MANY[1:]

    without = partition.place(others)
    partition.commit(without, others, 150)
    both = partition.place(MANY)

    assert without.snapshot is None
    assert both.start == 100
    assert both.positions == Positions({MANY[0]: 100} | dict.fromkeys(others, 150))


def test_while_one_queue_catches_up_the_others_stay_where_they_are() -> None:
    partition = Partition()
    partition.commit(partition.place(MANY), MANY, 1_000)

    place = partition.place([*MANY, "late"])
    partition.commit(place, [*MANY, "late"], 10)
    crashed = partition.place([*MANY, "late"])

    assert place.start == 0
    assert place.snapshot is not None
    assert crashed.start == 10
    assert crashed.positions == Positions(dict.fromkeys(MANY, 1_000) | {"late": 10})
    assert crashed.snapshot is None


def test_a_queue_that_becomes_ordered_while_it_is_served_keeps_the_snapshot() -> None:
    partition = Partition()
    place, queues = partition.place(MANY), tuple(MANY)
    positions = place.positions.advanced_to(queues, 100)

    for offset in (200, 300):
        positions = positions.advanced_to(queues, offset, {MANY[3]: 150})
        partition.committed = Committed(offset, positions.encode(offset))

    again = partition.place(MANY)
    assert again.positions == Positions(dict.fromkeys(MANY, 300) | {MANY[3]: 150})
    assert again.start == 150


def unmet(place: StartPosition, queues: list[str], *offsets: int) -> list[bytes | None]:
    """Return the keys of records at these offsets after reading began at a place; all are of the first queue."""
    progress = MemberPositions()
    progress.begin(SOURCE, place.positions, place.start)
    read = Records.of([ConsumerRecord(*SOURCE, at, 0, 0, queues[0].encode(), b"v", None, 0, 0, ()) for at in offsets])
    [found] = progress.without_received(serving(NAMES.messages, queues, {}), {SOURCE: read}).values()
    return [record.key for record in found]


@pytest.mark.parametrize("queues", [["a"], ["a", "b"], MANY], ids=["one", "two", "many"])
def test_a_log_that_has_lost_its_end_is_read_from_its_new_end(
    queues: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    partition = Partition()
    partition.commit(partition.place(queues), queues, 100)

    place = partition.place(queues, end=90)
    assert (place.start, place.lost) == (90, True)
    assert unmet(place, queues, 89, 90) == [None, queues[0].encode()]
    assert "partition 0: the log ends at 90, but it was read up to 100" in caplog.text

    # From the next commit on, the former positions are forgotten.
    partition.commit(place, queues, 91)
    again = partition.place(queues, end=200)
    assert (again.start, again.lost) == (91, False)
    assert again.positions == Positions(dict.fromkeys(queues, 91))


@pytest.mark.parametrize("queues", [["late", "a", "b"], ["late", *MANY]], ids=["few", "many"])
def test_queues_that_are_further_than_the_place_forget_what_the_log_has_lost(queues: list[str]) -> None:
    partition, others = Partition(), queues[1:]
    partition.commit(partition.place(others), others, 100)
    partition.commit(partition.place(queues), queues, 10)

    place = partition.place(queues, end=90)
    assert (place.start, place.lost) == (10, True)
    assert unmet(place, others, 89, 90) == [None, others[0].encode()]

    partition.commit(place, queues, 20)
    assert partition.place(queues).positions == Positions({**dict.fromkeys(others, 90), "late": 20})


def test_the_place_of_a_queue_with_ordering_is_not_after_the_end_of_the_log() -> None:
    partition, queues = Partition(), ("a", "b")
    positions = Positions().advanced_to(queues, 100, {"a": 95})
    partition.committed = Committed(100, positions.encode(100))

    place = partition.place(["a", "b"], end=90)

    assert (place.start, place.positions) == (90, Positions({"a": 90, "b": 90}))
    assert list(place.positions.behind) == ["a"]


@pytest.mark.parametrize("end", [None, 100, 101])
def test_a_place_in_a_whole_log_or_one_whose_end_is_unknown_stays(end: int | None) -> None:
    partition = Partition()
    partition.commit(partition.place(["a"]), ["a"], 100)

    place = partition.place(["a"], end=end)

    assert (place.start, place.lost) == (100, False)


def test_queues_that_come_one_by_one_from_groups_of_their_own_keep_their_positions() -> None:
    partition = Partition()
    resolver = StartPositionResolver(NAMES, "g", serving(NAMES.messages, MANY, {}), [SOURCE], {}, {})
    for number, queue in enumerate(MANY):
        theirs = {SOURCE: Committed(number, Positions({queue: number}).encode(number))}
        resolver.consider(NAMES.group(queue), theirs, {})
    place = resolver.places()[SOURCE]
    assert place.snapshot is not None
    partition.snapshots[place.snapshot.id] = place.snapshot

    partition.commit(place, MANY, 5_000)

    assert partition.place(MANY).positions == Positions({queue: max(n, 5_000) for n, queue in enumerate(MANY)})


QUEUES = st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True)
STEPS = st.lists(st.tuples(QUEUES, st.lists(st.integers(1, 9), max_size=2)), max_size=8)


# A queue that the snapshot does not name, and whose member begins where the queue is.
@example([(["a", "c", "d", "e"], [1]), (["a"], [1]), (["b"], [1]), (["b"], [1]), (["a"], [])], 60)
@given(STEPS, st.sampled_from([1, 40, 60, 90, MAX_METADATA_BYTES]))
def test_each_queue_continues_at_its_position_in_any_group(
    steps: list[tuple[list[str], list[int]]], room_bytes: int
) -> None:
    partition, truth = Partition(room_bytes), dict[str, int]()
    for queues, advances in steps:
        place = partition.place(queues)
        assert {queue: at for queue, at in place.positions.by_queue.items() if at} == truth
        assert place.start == min(truth.get(queue, 0) for queue in queues)
        offset = place.start
        for advance in advances:
            offset += advance
            truth |= {queue: max(truth.get(queue, 0), offset) for queue in queues}
            partition.commit(place, queues, offset)


def test_a_snapshot_is_read_back() -> None:
    snapshot = OffsetSnapshot("id", {"é": 0, "b": 7}, {"left": 3})

    assert OffsetSnapshot.decode("id", snapshot.encode()) == snapshot
    for other in (b"[]", b"[" * 100_000):
        with pytest.raises(UnknownPositions, match="snapshot id"):
            OffsetSnapshot.decode("id", other)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ('{"version":3}', "newer"),
        ('{"version":2,"snapshot":"gone","served":{},"past":{}}', "gone"),
        ('{"version":2,"snapshot":"here","served":[],"past":{}}', "can't be read"),
    ],
)
def test_unknown_metadata_neither_restarts_nor_skips_records(metadata, message) -> None:
    with pytest.raises(UnknownPositions, match=message):
        Positions.decode(5, metadata, None, {"here": OffsetSnapshot("here", {}, {})})


def test_a_snapshot_of_now_will_not_do_where_too_much_is_different() -> None:
    snapshot = new_snapshot("id", {}, MANY, 0)
    apart = dict.fromkeys(MANY, 10) | dict.fromkeys(MANY[:5_000], 20)

    assert in_the_metadata(dict.fromkeys(MANY, 10), frozenset(MANY), 10, snapshot, MAX_METADATA_BYTES) is not None
    assert in_the_metadata(apart, frozenset(MANY), 10, snapshot, MAX_METADATA_BYTES) is None


def test_names_that_are_longer_than_any_snapshot_are_refused_with_a_way_out() -> None:
    check_room("g", [f"{number:0200}" for number in range(30_000)])

    with pytest.raises(ConfigError, match=r"group 'g' would have 60000 queues.*more groups"):
        check_room("g", [f"{number:0200}" for number in range(60_000)])


def test_what_is_left_over_is_of_our_partitions_not_named_and_old() -> None:
    def key(name: str, partition: int = 0, group: str = "a group") -> OffsetSnapshotKey:
        return OffsetSnapshotKey(name, Source("t", partition), group)

    old, new = 1_000, 1_000 + UNNAMED_MS + 1
    written = {
        key("named"): old,
        key("unnamed"): old,
        key("new"): new,
        key("of-another-partition", 1): old,
        key("of-another-group", group="b"): old,
    }

    assert left_over(written, "a group", {Source("t", 0): "named"}) == [key("unnamed")]
    assert [OffsetSnapshotKey.decode(each.encode()) for each in written] == list(written)
    assert OffsetSnapshotKey.decode(b"x") is OffsetSnapshotKey.decode(None) is None
