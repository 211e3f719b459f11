"""Counts in buckets, as Prometheus writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def buckets(bounds_ms: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Return each bucket's upper end in seconds, and how many were at most so long; the last one has no end.

    ``counts``: one for each bound, and one for what is above all of them.
    """
    count = 0
    for bound_ms, each in zip(bounds_ms, counts, strict=False):
        count += each
        yield str(bound_ms / 1000), count
    yield "+Inf", count + counts[-1]
