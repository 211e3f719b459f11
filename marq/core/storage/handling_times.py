"""Waiting and handling times of messages: from its record to its ACQUIRE, and from there to its ACK, by the log's clock
at the markers, and by the time of the record.

Only samples are measured, so that they cost next to nothing: a few messages of the first ACK in each millisecond, each
of which represents its neighbours. They are not part of the fold: an owner only has the samples that it folded itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from marq.core.storage.rows import LeaseRow
from marq.wire.marker_codec import ReadPayloads
from marq.wire.markers import Ack, Acquire, MixedAcquire

#: Upper bounds of the buckets, in ms; one more bucket has longer times.
BOUNDS_MS = (5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 300_000, 1_800_000)
#: About how many messages of an ACK are sampled.
SAMPLES = 4
#: Turns for which the last samples of a queue are kept if there are no newer ones.
KEPT_TURNS = 30


class HandlingTimes:
    """Counts of messages by a time, such as that of their handling: recent ones by queue, and a total."""

    def __init__(self) -> None:
        self._now: dict[str, list[int]] = {}
        self._before: Mapping[str, Sequence[int]] = {}
        #: The last counts of each queue from before, and the turn at which they were replaced.
        self._kept: dict[str, tuple[int, Sequence[int]]] = {}
        self._turns = 0
        #: Counts of all queues since this owner started.
        self.counts = _no_counts()
        self.sum_ms = 0

    def note(self, queue: str, took_ms: int, messages: int) -> None:
        """Count messages with this handling time."""
        counts = self._now.get(queue)
        if counts is None:
            counts = self._now[queue] = _no_counts()
        place = bisect_left(BOUNDS_MS, took_ms)
        counts[place] += messages
        self.counts[place] += messages
        self.sum_ms += took_ms * messages

    def turn(self) -> None:
        """Begin the next turn: samples from before the last turn are kept only for queues without newer ones."""
        self._turns += 1
        self._kept.update((queue, (self._turns, counts)) for queue, counts in self._before.items())
        self._kept = {queue: kept for queue, kept in self._kept.items() if self._turns - kept[0] < KEPT_TURNS}
        self._before, self._now = self._now, {}

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Return the counts as :func:`buckets`."""
        return buckets(BOUNDS_MS, self.counts)

    def recent(self) -> dict[str, list[int]]:
        """Return the counts of each queue since the last turn but one, or else its last ones."""
        kept = {queue: list(counts) for queue, (_, counts) in self._kept.items()}
        return kept | add_counts([self._before, self._now])


def samples(batch: Ack, leases: Mapping[int, LeaseRow], most: int = SAMPLES) -> Iterator[tuple[LeaseRow, int]]:
    """Return leases of some messages that an ACK ends, each with the number of messages that it represents."""
    offsets = batch.offsets
    step = max(1, len(offsets) // most)
    for place in range(0, len(offsets), step):
        lease = leases.get(offsets[place])
        if lease is not None:
            yield lease, min(step, len(offsets) - place)


def waits(batch: Acquire | MixedAcquire, now_ms: int) -> Iterator[tuple[str, int, int]]:
    """Return the queue and the wait in ms of some messages, each with the number of messages that it represents.

    Messages that are not due yet do not wait. A clock that is ahead of the log's counts as 0.
    """
    queues: Sequence[str] | None = None
    if isinstance(batch, MixedAcquire):
        queues, times_ms = batch.queues, batch.timestamps_ms
    elif batch.dues_ms is None and isinstance(batch.payloads, ReadPayloads):
        # The column alone: a payload would be cut out of its bytes.
        times_ms = batch.payloads.timestamps
    else:
        return
    step = max(1, len(times_ms) // SAMPLES)
    for place in range(0, len(times_ms), step):
        queue = batch.queue if queues is None else queues[place]
        yield queue, max(0, now_ms - times_ms[place]), min(step, len(times_ms) - place)


def buckets(bounds_ms: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Return each bucket's upper bound in seconds with its cumulative count; the last bound is +Inf.

    ``counts`` has one count for each bound, and one for values above all of them.
    """
    count = 0
    for bound_ms, in_bucket in zip(bounds_ms, counts, strict=False):
        count += in_bucket
        yield str(bound_ms / 1000), count
    yield "+Inf", count + counts[-1]


def add_counts(answers: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Add up counts of queues."""
    total: dict[str, list[int]] = {}
    for answer in answers:
        for queue, counts in answer.items():
            sums = total.get(queue)
            total[queue] = (
                list(counts) if sums is None else [one + more for one, more in zip(sums, counts, strict=True)]
            )
    return total


def quantile_ms(counts: Sequence[int], share: float) -> float | None:
    """Return the handling time of a quantile, None without messages.

    Times are interpolated within a bucket, as by Prometheus' ``histogram_quantile``; the last bucket counts as its
    lower bound.
    """
    wanted, passed, low_ms = share * sum(counts), 0, 0
    if not wanted:
        return None
    for bound_ms, count in zip(BOUNDS_MS, counts, strict=False):
        if count and passed + count >= wanted:
            return low_ms + (bound_ms - low_ms) * (wanted - passed) / count
        passed, low_ms = passed + count, bound_ms
    return float(low_ms)


def _no_counts() -> list[int]:
    return [0] * (len(BOUNDS_MS) + 1)
