"""How long messages are worked on: from the ACQUIRE to the ACK of one, by the log's clock at both.

The times are samples, so that they cost next to nothing: of the ACKs of one millisecond the first one, and of that a
few messages, each of which stands for its neighbours. They are no part of the fold: whoever owns a partition has those
that it folded itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from marq.core.histogram import buckets
from marq.core.markers import Ack
from marq.core.rows import Lease

#: Upper ends of the buckets that times are counted in, ms; what is longer is in one more.
BOUNDS_MS = (5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 300_000, 1_800_000)
#: About so many messages of an ACK are looked at.
SAMPLES = 4


class HandlingTimes:
    """Counts of messages by how long they took: lately, by queue, and altogether."""

    def __init__(self) -> None:
        self._now: dict[str, list[int]] = {}
        self._before: Mapping[str, Sequence[int]] = {}
        #: Of all queues, since this owner began.
        self.counts = _no_counts()
        self.sum_ms = 0

    def note(self, queue: str, took_ms: int, messages: int) -> None:
        """Count some messages that took as long as one of them."""
        counts = self._now.get(queue)
        if counts is None:
            counts = self._now[queue] = _no_counts()
        place = bisect_left(BOUNDS_MS, took_ms)
        counts[place] += messages
        self.counts[place] += messages
        self.sum_ms += took_ms * messages

    def turn(self) -> None:
        """Forget what is older than the last call of this."""
        self._before, self._now = self._now, {}

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Return each bucket's upper end in seconds, as Prometheus writes it, and how many took at most so long."""
        return buckets(BOUNDS_MS, self.counts)

    def recent(self) -> dict[str, list[int]]:
        """Return the counts of each queue since the last turn but one."""
        return add_counts([self._before, self._now])


def samples(batch: Ack, leases: Mapping[int, Lease]) -> Iterator[tuple[Lease, int]]:
    """Return leases of messages that an ACK ends, each with how many of its messages it stands for."""
    offsets = batch.offsets
    step = max(1, len(offsets) // SAMPLES)
    for place in range(0, len(offsets), step):
        lease = leases.get(offsets[place])
        if lease is not None:
            yield lease, min(step, len(offsets) - place)


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
    """Return within what time a share of the messages was done, None without any.

    Within a bucket they are taken for spread evenly, as by Prometheus' ``histogram_quantile``; the last has no end, and
    stands for its beginning.
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
