"""Cuts the messages of an ACQUIRE or DELAY into groups with the same attempt and time, which share a lease."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

from marq.wire.markers import DUE_AT_ONCE, MAX_TIME_MS, NOW, Acquire, Delay


def due_at(base_ms: int, after_ms: int) -> int:
    """Return a due time that fits into the row of a lease: markers may have any time or delay of 63 bits."""
    return min(base_ms + after_ms, MAX_TIME_MS)


def early_due_at(now_ms: int, due_ms: int) -> int:
    """Return the due time of a message whose ACQUIRE has one, at the log's clock ``now_ms``."""
    return due_at(0, now_ms if due_ms == DUE_AT_ONCE else due_ms)


def group_by_due(batch: Acquire, offsets: Sequence[int]) -> Iterable[tuple[int, int, Sequence[int]]]:
    """Group offsets of a batch by their attempts and times, which are nearly always 1 and :data:`NOW`."""
    attempts, times = batch.attempts, batch.dues_ms
    if not offsets:
        return ()
    if attempts is None and times is None:
        return ((1, NOW, offsets),)
    groups: dict[tuple[int, int], list[int]] = {}
    for offset in offsets:
        index = bisect_left(batch.offsets, offset)
        shared = (1 if attempts is None else attempts[index], NOW if times is None else times[index])
        groups.setdefault(shared, []).append(offset)
    return [(attempt, time_ms, group) for (attempt, time_ms), group in groups.items()]


def runs_by_due(batch: Delay, offsets: Sequence[int]) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Cut offsets of a batch into runs with the same attempt and time; each message may have its own time."""
    attempts = repeat(1) if batch.attempts is None else batch.attempts
    members: Iterable[tuple[int, int, int]] = zip(batch.offsets, attempts, batch.times_ms, strict=False)
    if len(offsets) < len(batch.offsets):
        wanted = set(offsets)
        members = [member for member in members if member[0] in wanted]
    last_attempt, last_ms, run = 0, 0, list[int]()
    for offset, attempt, time_ms in members:
        if time_ms == last_ms and attempt == last_attempt:
            run.append(offset)
            continue
        if run:
            yield last_attempt, last_ms, run
        last_attempt, last_ms, run = attempt, time_ms, [offset]
    if run:
        yield last_attempt, last_ms, run
