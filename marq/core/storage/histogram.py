"""Counts in buckets, as Prometheus writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def buckets(bounds_ms: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Return each bucket's upper bound in seconds with its cumulative count; the last bound is +Inf.

    ``counts`` has one count for each bound, and one for values above all of them.
    """
    count = 0
    for bound_ms, each in zip(bounds_ms, counts, strict=False):
        count += each
        yield str(bound_ms / 1000), count
    yield "+Inf", count + counts[-1]
