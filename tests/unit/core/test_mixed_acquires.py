"""A MIXED_ACQUIRE has the effect of an ACQUIRE for each of its messages, for trackers and for the checker alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lab.proof import history
from lab.proof.fold import Fold
from marq.core.lease_book import LeaseBook
from marq.core.storage.rows import encode_lease
from marq.settings.queue import QueueSettings
from marq.wire.markers import ANY_QUEUE, Ack, Acquire, Batch, MixedAcquire, Source, split

QUEUES = ("a", "b", "c")
HOLDERS = (7, 8)


@st.composite
def mixed_acquires(draw: st.DrawFn) -> MixedAcquire:
    offsets = sorted(draw(st.sets(st.integers(0, 20), min_size=1, max_size=6)))
    queues = [draw(st.sampled_from(QUEUES)) for _ in offsets]
    known = [draw(st.integers(0, offset)) for offset in offsets]
    source = Source("t", draw(st.integers(0, 1)))
    times_ms = [0] * len(offsets)
    holder, counted = draw(st.sampled_from(HOLDERS)), draw(st.booleans())
    return MixedAcquire(ANY_QUEUE, holder, source, offsets, 1_000, queues, known, times_ms, counted)


acks = st.builds(
    Ack,
    st.sampled_from([ANY_QUEUE, *QUEUES]),
    st.sampled_from(HOLDERS),
    st.builds(Source, st.just("t"), st.integers(0, 1)),
    st.sets(st.integers(0, 20), min_size=1, max_size=6).map(sorted),
)
logs = st.lists(st.one_of(mixed_acquires(), acks), max_size=12)


def alone(batches: Sequence[Batch]) -> list[Batch]:
    return [acquire for batch in batches for acquire in split(batch)]


def state_of(batches: Sequence[Batch]) -> dict[str, Any]:
    book = LeaseBook(lambda queue: QueueSettings())
    for offset, batch in enumerate(batches):
        # Within the lease, however many records there are.
        book.fold(batch, 500, offset)
    return {
        "leases": {(source, offset, lease.queue): encode_lease(lease) for source, offset, lease in book.open_leases()},
        "acquired": {place: ranges.intervals for place, ranges in book.acquired.items() if ranges.intervals},
        "counts": book.counts,
        "rows": {key: row for key, row in book.take_changes().items() if key[:1] == b"r"},
        "due": {(fire.source, fire.offset, fire.fact_kind) for fire in book.due(2_000)},
    }


def judged(batches: Sequence[Batch]) -> dict[str, Any]:
    fold = Fold(lambda queue: [{}])
    for offset, batch in enumerate(batches):
        fold.fold(history.marker("log", offset, 500, batch))
    return {"open": fold.open, "acquired": fold.acquired, "counts": fold.counts}


@given(logs)
def test_a_tracker_folds_it_like_an_acquire_of_each_message(batches: list[Batch]) -> None:
    assert state_of(batches) == state_of(alone(batches))


@given(logs)
def test_the_checker_folds_it_like_an_acquire_of_each_message(batches: list[Batch]) -> None:
    assert judged(batches) == judged(alone(batches))


def test_its_acquires_leave_their_payloads_in_their_records() -> None:
    batch = MixedAcquire(ANY_QUEUE, 7, Source("t", 0), [3, 5], 1_000, ["a", "b"], [1, 5], [10, 20], counted=False)

    first, second = batch.acquires()

    assert isinstance(first, Acquire)
    assert (first.queue, list(first.offsets), first.from_offset, first.counted) == ("a", [3], 1, False)
    assert (second.queue, list(second.offsets), second.from_offset, second.lease_ms) == ("b", [5], 5, 1_000)
    assert [payload.left for payload in second.payloads] == [True]
    assert (first.attempts, second.payloads[0].timestamp_ms) == (None, 20)
