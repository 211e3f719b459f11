"""The open messages of one source, and when which of them may be due."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from marq.core.markers import Acquire, Delay, Source, payload_of
from marq.core.queue import QueueSettings
from marq.core.rows import Lease, encode_lease, encode_row, row_keys

#: Messages that are due in the same span of time wait together, and are put in order when its time has come.
SPAN_MS = 1_000
#: At most so many messages with one lease wait so; more are better kept together.
FEW = 16
#: Messages that are hinted at without giving way to others: some 10 ms.
HINTS_AT_ONCE = 10_000


@dataclass(slots=True, eq=False)
class OpenMessages:
    """The open messages of one source: the index, and which rows differ from the table's."""

    source: Source
    leases: dict[int, Lease] = field(default_factory=dict)
    #: Opened since the last take_changes, with the marker that still holds the payload.
    fresh: dict[int, Acquire | Delay] = field(default_factory=dict)
    #: In the table, with a lease that has changed since.
    changed: set[int] = field(default_factory=set)
    #: In the table, ended since.
    ended: list[int] = field(default_factory=list)
    #: In the table with an `s` row beside the `r` row.
    restated: set[int] = field(default_factory=set)
    firing: set[int] = field(default_factory=set)

    @property
    def pending_rows(self) -> int:
        return len(self.fresh) + len(self.changed) + len(self.ended)

    def hold_back(self) -> bool:
        """Take all as on their way, until facts tell of them; False: some are, and nothing has changed."""
        if self.firing:
            return False
        self.firing.update(self.leases)
        return True

    def take_rows(self, changes: dict[bytes, bytes | None]) -> None:
        """Add the rows to write (None: delete); they are then taken for written."""
        source = self.source
        changes.update(dict.fromkeys(row_keys(source, self.ended, b"r")))
        gone = [offset for offset in self.ended if offset in self.restated]
        changes.update(dict.fromkeys(row_keys(source, gone, b"s")))
        self.restated.difference_update(gone)
        restated = [o for o in self.changed if o in self.leases and o not in self.fresh]
        for key, offset in zip(row_keys(source, restated, b"s"), restated, strict=True):
            changes[key] = encode_lease(self.leases[offset])
        self.restated.update(restated)
        encoded: dict[Lease, bytes] = {}
        fresh = list(self.fresh.items())
        for key, (offset, batch) in zip(row_keys(source, list(self.fresh), b"r"), fresh, strict=True):
            lease = self.leases[offset]
            if lease not in encoded:
                encoded[lease] = encode_lease(lease)
            changes[key] = encode_row(encoded[lease], payload_of(batch, offset))
        self.fresh.clear()
        self.changed.clear()
        self.ended.clear()

    def waiting(self, offsets: Sequence[int], lease: Lease) -> list[int]:
        """Return those of the offsets that this very lease still holds and that are not on their way."""
        leases, firing = self.leases, self.firing
        return [offset for offset in offsets if leases.get(offset) is lease and offset not in firing]


class Hint(NamedTuple):
    """These messages may be due then: whoever is not held by that very lease any more is to be skipped.

    Compared from left to right: what is due in one millisecond comes in the order in which it was acquired or delayed,
    also when it has been moved, or when the index has been built anew.
    """

    due_ms: int
    since_ms: int
    source: Source
    first: int
    sequence: int
    opened: OpenMessages
    offsets: Sequence[int]
    lease: Lease


class _Span:
    """Messages that are due in one span of time, in 16 bytes each: a million may wait for days."""

    __slots__ = ("offsets", "opened")

    def __init__(self) -> None:
        self.opened: list[OpenMessages] = []
        self.offsets = array("Q")


class DueIndex:
    """Hints at when messages may be due, the earliest first; early or in vain at worst, never late.

    Messages that were acquired together are due together: one hint for all of them, in a heap. Those that have a time
    of their own, as delayed ones do, wait in spans of a second and get into the heap one span at a time.
    """

    def __init__(self) -> None:
        self._heap: list[Hint] = []
        self._sequence = 0
        self._spans: dict[int, _Span] = {}
        #: The numbers of these spans, as a heap; the former ones are in the heap of hints already.
        self._numbers: list[int] = []
        self._begun = -1
        #: Messages that are hinted at.
        self.size = 0
        #: Of queues that are paused: what was due, and has to wait.
        self._held: dict[str, list[Hint]] = {}
        #: By queue: when it was resumed.
        self._resumed_ms: dict[str, int] = {}

    def push(self, opened: OpenMessages, offsets: Sequence[int], lease: Lease) -> None:
        """Hint at messages that share a lease."""
        count = len(offsets)
        number = lease.due_ms // SPAN_MS
        if number <= self._begun or count > FEW:
            self._push(opened, offsets, lease)
        else:
            span = self._spans.get(number)
            if span is None:
                span = self._spans[number] = _Span()
                heapq.heappush(self._numbers, number)
            for offset in offsets:
                span.opened.append(opened)
                span.offsets.append(offset)
        self.size += count

    def push_again(self, hint: Hint, offsets: Sequence[int]) -> None:
        """Hint once more at some of the messages of a hint that was taken."""
        heapq.heappush(self._heap, hint._replace(first=offsets[0], offsets=offsets))
        self.size += len(offsets)

    def hold(self, hint: Hint, offsets: Sequence[int]) -> None:
        """Hint no more at some of the messages of a hint that was taken, until their queue is resumed."""
        if offsets:
            self._held.setdefault(hint.lease.queue, []).append(hint._replace(first=offsets[0], offsets=offsets))
            self.size += len(offsets)

    def resume(self, settings: Callable[[str], QueueSettings], now_ms: int) -> None:
        """Hint again at what is held of queues that are not paused any more."""
        for queue in [queue for queue in self._held if not settings(queue).paused]:
            for hint in self._held.pop(queue):
                heapq.heappush(self._heap, hint)
            self._resumed_ms[queue] = now_ms

    def wanted_ms(self, lease: Lease) -> int:
        """Return when a message was due, or when its queue was resumed if that was later."""
        return max(lease.due_ms, self._resumed_ms.get(lease.queue, lease.due_ms))

    def _push(self, opened: OpenMessages, offsets: Sequence[int], lease: Lease) -> None:
        self._sequence += 1
        hint = Hint(lease.due_ms, lease.since_ms, opened.source, offsets[0], self._sequence, opened, offsets, lease)
        heapq.heappush(self._heap, hint)

    def next_due_ms(self) -> int | None:
        """When the next message may be due, or None."""
        while True:
            self._begin_spans(self._heap[0].due_ms if self._heap else None)
            if not self._heap:
                return None
            hint = self._heap[0]
            if hint.opened.waiting(hint.offsets, hint.lease):
                return hint.due_ms
            self._take()

    def take(self, now_ms: int) -> Hint | None:
        """Return the first hint that is due, and forget it."""
        self._begin_spans(now_ms)
        return self._take() if self._heap and self._heap[0].due_ms <= now_ms else None

    def _take(self) -> Hint:
        hint = heapq.heappop(self._heap)
        self.size -= len(hint.offsets)
        return hint

    def _begin_spans(self, until_ms: int | None) -> None:
        """Put the messages of all spans that begin by then into the heap; None: of the first span."""
        while self._numbers and (until_ms is None or self._numbers[0] * SPAN_MS <= until_ms):
            number = heapq.heappop(self._numbers)
            self._begun = max(self._begun, number)
            self._begin(number, self._spans.pop(number))
            if until_ms is None and self._heap:
                return

    def _begin(self, number: int, span: _Span) -> None:
        for opened, offset in zip(span.opened, span.offsets, strict=True):
            lease = opened.leases.get(offset)
            # One that moved to another time has another hint.
            if lease is not None and lease.due_ms // SPAN_MS == number:
                self._push(opened, (offset,), lease)
            else:
                self.size -= 1

    def rebuild(self, sources: Callable[[], Iterator[OpenMessages]]) -> Iterator[None]:
        """Forget all hints, and hint at what is open; stop after some thousand messages, so that others can work."""
        self._heap, self._numbers, self._spans, self._held = [], [], {}, {}
        self._begun, self.size = -1, 0
        pushed = 0
        for opened in sources():
            last: Lease | None = None
            run: list[int] = []
            for offset, lease in opened.leases.items():
                if lease is not last:
                    if last is not None:
                        self.push(opened, run, last)
                    last, run = lease, []
                    pushed += 1
                    if pushed % HINTS_AT_ONCE == 0:
                        yield
                run.append(offset)
            if last is not None:
                self.push(opened, run, last)
