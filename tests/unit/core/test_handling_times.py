"""How long messages took is known from the log's clock at both ends, of a few of each ACK."""

from __future__ import annotations

from marq.core.storage.handling_times import BOUNDS_MS, KEPT_TURNS, HandlingTimes, add_counts, quantile_ms
from marq.core.tracker import MANY_QUEUES, Tracker
from marq.settings.queue import QueueSettings
from marq.wire.marker_codec import encode
from marq.wire.markers import ANY_QUEUE, NOW, Ack, Batch
from tests.unit.core.batches import QUEUE, SOURCE, ack, acquire, payload

T0 = 1_000_000


def tracker_of(*batches: tuple[int, Batch], start_ms: int = T0) -> Tracker:
    """Return a tracker that has read markers that came at these times."""
    tracker = Tracker(lambda queue: QueueSettings(), 42)
    for offset, (at_ms, batch) in enumerate(batches):
        tracker.read(encode(batch), start_ms + at_ms, offset)
    return tracker


def folded(*batches: tuple[int, Batch]) -> HandlingTimes:
    return tracker_of(*batches).handling


def waited(*batches: tuple[int, Batch]) -> HandlingTimes:
    """Return the waiting times; the senders' clocks are those of :func:`payload`."""
    return tracker_of(*batches, start_ms=payload().timestamp_ms).waiting


def test_a_message_s_time_is_from_its_acquire_to_its_ack() -> None:
    times = folded((0, acquire([1])), (70, ack([1])))

    assert quantile_ms(times.recent()[QUEUE], 1.0) == 100
    assert (sum(times.counts), times.sum_ms) == (1, 70)


def test_a_few_messages_of_a_great_ack_stand_for_all() -> None:
    many = list(range(1_003))
    times = folded((0, acquire(many)), (400, ack(many)))

    assert times.recent() == {QUEUE: [1_003 if bound == 500 else 0 for bound in (*BOUNDS_MS, None)]}


def test_a_message_has_waited_from_its_record_to_its_acquire() -> None:
    many = list(range(10, 1_013))
    times = waited((70, acquire([1])), (70, acquire([2])), (400, acquire(many)), (500, ack([1])))

    # One ACQUIRE of a millisecond, and a few messages of a large one, which stand for all.
    assert times.recent() == {QUEUE: [{100: 1, 500: 1_003}.get(bound, 0) for bound in (*BOUNDS_MS, None)]}  # type: ignore[call-overload]


def test_messages_that_are_not_due_do_not_wait_and_a_fast_clock_counts_as_no_time() -> None:
    times = waited((-20, acquire([3])), (10, acquire([4, 5], dues_ms=[NOW, 5])))

    assert times.recent() == {QUEUE: [1, *[0] * len(BOUNDS_MS)]}


def test_acks_of_what_is_not_open_count_nothing_and_those_of_several_queues_count_for_theirs() -> None:
    times = folded((0, acquire([1])), (10, Ack(ANY_QUEUE, 7, SOURCE, [1, 2])), (20, ack([1])))

    assert {queue: sum(counts) for queue, counts in times.recent().items()} == {QUEUE: 1}


def test_an_ack_without_a_queue_is_looked_up_once_if_there_are_very_many() -> None:
    """Each look-up visits all queues of the source."""
    places = range(MANY_QUEUES + 1)
    opened = [(0, acquire([place], queue=f"q{place}")) for place in places]

    times = folded(*opened, (10, Ack(ANY_QUEUE, 7, SOURCE, places)))

    assert {queue: sum(counts) for queue, counts in times.recent().items()} == {"q0": MANY_QUEUES + 1}


def test_samples_older_than_two_turns_are_kept_only_while_their_queue_has_no_newer_ones() -> None:
    times = HandlingTimes()
    times.note(QUEUE, 3, 10)
    times.note("rare", 3, 1)
    times.turn()
    times.note(QUEUE, 3, 5)
    assert sum(times.recent()[QUEUE]) == 15

    times.turn()

    assert {queue: sum(counts) for queue, counts in times.recent().items()} == {QUEUE: 5, "rare": 1}
    for _ in range(KEPT_TURNS):
        times.turn()
    assert list(times.recent()) == [QUEUE]
    times.turn()
    assert times.recent() == {}
    assert next(iter(times.buckets())) == ("0.005", 16)
    assert list(times.buckets())[-1] == ("+Inf", 16)


def test_a_quantile_is_within_its_bucket_and_what_is_longer_than_all_is_as_the_last() -> None:
    half = [0, 0, 50, 50, *[0] * (len(BOUNDS_MS) - 3)]
    endless = [*[0] * len(BOUNDS_MS), 1]

    assert quantile_ms(half, 0.5) == 25
    assert quantile_ms(half, 0.75) == 37.5
    assert quantile_ms(endless, 0.95) == BOUNDS_MS[-1]
    assert quantile_ms([0] * len(half), 0.95) is None
    assert add_counts([{"a": [1, 2]}, {"a": [3, 4], "b": [5, 6]}]) == {"a": [4, 6], "b": [5, 6]}
