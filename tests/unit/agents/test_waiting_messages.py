"""Waiting messages of a partition, compared with a model that keeps every record."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from marq.core.storage.acquired_ranges import AcquiredRanges
from marq.kafka.records import Records
from marq_worker.backlog import waiting_messages
from marq_worker.backlog.waiting_messages import Offsets, WaitingRecords

QUEUES = ("a", "b", "c")


def records(start: int, keys: list[bytes | None], *, gap: int = 0, sent_ms: int = 0) -> Records:
    """Records one after the other, or with ``gap`` offsets of Kafka's own after each."""
    offsets = range(start, start + len(keys) * (1 + gap), 1 + gap)
    return Records(offsets if gap == 0 else list(offsets), [sent_ms] * len(keys), keys, [None] * len(keys))


keys = st.lists(st.sampled_from([b"a", b"b", b"c", b"\xff", b"", None]), min_size=1, max_size=90)
long_runs = st.builds(lambda key, count: [key] * count, st.sampled_from([b"a", b"b"]), st.integers(60, 200))
steps = st.one_of(
    st.tuples(st.just("add"), st.one_of(keys, long_runs), st.integers(0, 1)),
    st.tuples(st.just("acquire"), st.sampled_from(QUEUES), st.tuples(st.integers(0, 400), st.integers(1, 90))),
    st.tuples(st.just("retain"), st.integers(0, 400), st.none()),
    st.tuples(st.just("count"), st.none(), st.none()),
)


@given(st.lists(steps, max_size=12))
def test_what_waits_is_what_no_mark_has(steps: list[tuple[str, object, object]]) -> None:
    # The first interval says where a group began: earlier records are not counted.
    marks = {queue: AcquiredRanges([(0, 0)]) for queue in QUEUES}
    counted = WaitingRecords(lambda queue: marks.get(queue))
    log: dict[str, list[int]] = {queue: [] for queue in QUEUES}
    position = 0

    def expected(queue: str) -> list[int]:
        return [offset for offset in log[queue] if offset not in marks[queue]]

    for what, one, two in steps:
        if what == "add":
            read = records(position, one, gap=two)  # type: ignore[arg-type]
            counted.add(read)
            for offset, key in zip(read.offsets, read.keys, strict=True):
                if key and key != b"\xff":
                    log[key.decode()].append(offset)
            position = read.offsets[-1] + 1
        elif what == "acquire":
            start, count = two  # type: ignore[misc]
            marks[one].add(start, start + count)  # type: ignore[index]
        elif what == "retain":
            counted.drop_before(one)  # type: ignore[arg-type]
            log = {queue: [offset for offset in kept if offset >= one] for queue, kept in log.items()}  # type: ignore[operator]
        else:
            assert {queue: counted.count(queue) for queue in QUEUES} == {
                queue: len(expected(queue)) for queue in QUEUES
            }
    assert {queue: counted.count(queue) for queue in QUEUES} == {queue: len(expected(queue)) for queue in QUEUES}
    # The next owner begins there and must miss nothing.
    first = counted.first(position)
    assert all(offset >= first for queue in QUEUES for offset in expected(queue))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 200)), max_size=20), st.integers(0, 900))
def test_offsets_are_those_that_were_added(runs: list[tuple[int, int]], dropped: int) -> None:
    offsets, every, position = Offsets(), [], 0
    for step, count in runs:
        added = [position + step * number for number in range(count)]
        offsets.extend(added)
        every += added
        position = added[-1] + 1
    offsets.drop_before(dropped)
    kept = [offset for offset in every if offset >= dropped]

    assert (list(offsets), len(offsets)) == (kept, len(kept))
    assert offsets.between(dropped // 2, dropped + 100) == len([offset for offset in kept if offset < dropped + 100])


def test_a_run_takes_no_room_and_single_offsets_become_one() -> None:
    offsets = Offsets()
    for first in range(0, 1_000_000, 1_000):
        offsets.extend(range(first, first + 1_000))
    assert len(offsets._pieces) == 1

    single = Offsets()
    for offset in range(3 * waiting_messages._FULL):
        single.extend([offset])
    assert [type(piece).__name__ for piece in single._pieces] == ["range"]


def test_records_before_the_start_of_a_group_are_not_counted() -> None:
    marks = AcquiredRanges()
    counted = WaitingRecords(lambda _: marks)
    counted.add(records(0, [b"a"] * 10))

    marks.add(4, 6)

    assert counted.count("a") == 4


def test_what_was_acquired_behind_a_gap_without_messages_is_forgotten() -> None:
    """A consumer that begins leaves a gap: from what the one before it acquired to the first record that it read."""
    marks = AcquiredRanges([(0, 0)])
    counted = WaitingRecords(lambda queue: marks if queue == "a" else AcquiredRanges([(0, 100)]))
    counted.add(records(0, [b"a"] * 10, sent_ms=5_000))
    counted.add(records(10, [b"other"] * 10, sent_ms=5_000))
    counted.add(records(20, [b"a"] * 10, sent_ms=9_000))

    marks.add(0, 10)
    marks.add(15, 25)

    assert (counted.count("a"), counted.oldest_ms("a"), counted.first(30)) == (5, 9_000, 25)
    marks.add(27, 30)
    assert (counted.count("a"), counted.first(30)) == (2, 25)


def test_clocks_of_senders_that_differ_cost_little() -> None:
    counted = WaitingRecords(lambda _: None)
    for first in range(0, 4 * waiting_messages._MAX_TIMES, 1_000):
        times = [(first + number) % 2 * 60_000 + 1 for number in range(1_000)]
        counted.add(Records(range(first, first + 1_000), times, [b"a"] * 1_000, [None] * 1_000))

    assert len(counted._times._offsets) <= waiting_messages._MAX_TIMES
    assert counted.oldest_ms("a") == 1


def test_the_oldest_is_known_to_a_second() -> None:
    marks = AcquiredRanges()
    counted = WaitingRecords(lambda _: marks)
    counted.add(records(0, [b"a"] * 10, sent_ms=5_000))
    counted.add(records(10, [b"a"] * 10, sent_ms=5_400))
    counted.add(records(20, [b"a"] * 10, sent_ms=9_000))

    assert (counted.count("a"), counted.oldest_ms("a")) == (30, 5_000)
    marks.add(0, 25)
    assert (counted.count("a"), counted.oldest_ms("a")) == (5, 9_000)
    marks.add(25, 30)
    assert (counted.count("a"), counted.oldest_ms("a"), counted.queues()) == (0, None, [])


def test_all_records_of_a_topic_belong_to_each_queue_that_names_it() -> None:
    counted = WaitingRecords(lambda _: None, ["orders", "audit"])

    assert counted.add(records(0, [None, b"x", b"\xff"])) == {"orders": 3, "audit": 3}
    assert (counted.count("orders"), counted.count("audit")) == (3, 3)


def test_keys_that_name_no_queue_and_too_many_of_them_are_counted_apart(monkeypatch) -> None:
    monkeypatch.setattr(waiting_messages, "MAX_QUEUES", 2)
    counted = WaitingRecords(lambda _: None)

    assert counted.add(records(0, [b"a", b"\xff", None, b"b", b"c", b"a"])) == {"a": 2, "b": 1}
    assert counted.unknown == 3


def test_a_queue_that_is_defined_or_read_is_counted_however_many_names_there_are(monkeypatch) -> None:
    monkeypatch.setattr(waiting_messages, "MAX_QUEUES", 1)
    marks = {"read": AcquiredRanges([(0, 1)])}
    counted = WaitingRecords(marks.get, defined=lambda queue: queue == "defined")

    assert counted.add(records(5, [b"mistake", b"defined", b"read", b"\xff"])) == {
        "mistake": 1,
        "defined": 1,
        "read": 1,
    }
    assert not counted.crowded
    assert counted.add(records(9, [b"other", b"mistake"])) == {"mistake": 1}
    assert counted.crowded


def test_what_is_purged_waits_no_more_without_markers_too() -> None:
    counted = WaitingRecords(lambda _: None, (), lambda queue, sent_ms: 6 if queue == "a" and sent_ms <= 5_000 else 0)
    counted.add(records(0, [b"a", b"b"] * 5, sent_ms=5_000))
    assert (counted.count("a"), counted.count("b")) == (2, 5)

    # A topic that was recreated is not purged.
    counted.forget()
    counted.add(records(0, [b"a"] * 5, sent_ms=9_000))
    assert (counted.count("a"), counted.oldest_ms("a")) == (5, 9_000)
