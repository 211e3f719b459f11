"""The messages that are due, and those that are firing.

A message that was sent stays open until its fact is read back. Until then it is *firing*, so that it is not sent twice.
The owner forgets which messages are firing when it loses the partition.

A paused queue gets no messages. They wait, without TICKs, and are due again at the next TICK after their queue is
resumed. Dead-lettering and cancellations continue.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from marq.core.redeliver_or_dead_letter import DueAction, is_delivery, resolve_due
from marq.core.storage.rows import IN_ORDER, LeaseRow, State
from marq.core.storage.table_image import NO_MESSAGES, OpenMessages, Place, TableImage
from marq.settings.queue import QueueSettings
from marq.wire.markers import Source

# Looked up for every hint.
_DELAYED = State.DELAYED

#: Messages that are due in the same span of time wait together, and are sorted when it begins.
SPAN_MS = 1_000
#: At most this many messages with one lease wait in a span; more of them share a hint.
FEW = 16
#: Messages to process before yielding to other tasks: about 10 ms.
HINTS_AT_ONCE = 10_000
#: Offsets of closed messages that the due index may keep before it is rebuilt.
MAX_STALE_HINTS = 200_000

#: Maximum number of messages per partition that are firing at a time.
MAX_FIRING = 10_000


class Hint(NamedTuple):
    """Messages that may be due at this time: those that no longer have exactly this lease are skipped.

    Hints are compared from left to right: messages that are due in the same millisecond are in the order in which they
    were acquired or delayed, even if they were rescheduled or the index was rebuilt. ``place`` is the offset of a
    delayed message in the log, so that messages of several senders keep that order. It is 0 for others.
    """

    due_ms: int
    since_ms: int
    place: int
    source: Source
    first: int
    sequence: int
    opened: OpenMessages
    offsets: Sequence[int]
    lease: LeaseRow


class _Span:
    """Messages that are due in one span of time, 16 bytes each: a million may wait for days."""

    __slots__ = ("offsets", "opened")

    def __init__(self) -> None:
        self.opened: list[OpenMessages] = []
        self.offsets = array("Q")


class DueIndex:
    """Hints at when messages may be due, the earliest first. A hint may be early or stale, but never late.

    Messages that were acquired together are due together: they share one hint, in a heap. Messages with individual
    times, such as delayed ones, wait in spans of a second and enter the heap one span at a time.
    """

    def __init__(self) -> None:
        self._heap: list[Hint] = []
        self._sequence = 0
        self._spans: dict[int, _Span] = {}
        #: The numbers of these spans, as a heap; earlier spans are in the heap of hints already.
        self._numbers: list[int] = []
        self._begun = -1
        #: The number of messages in all hints; a message counts once for each of its hints.
        self.size = 0
        #: The due messages of each paused queue.
        self._held: dict[str, list[Hint]] = {}
        #: When each queue was resumed.
        self._resumed_ms: dict[str, int] = {}

    def push(self, opened: OpenMessages, offsets: Sequence[int], lease: LeaseRow) -> None:
        """Add hints for messages that share a lease; those that keep their place are never due."""
        if lease.state in IN_ORDER:
            return
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
        """Add a hint again for some messages of a taken hint."""
        heapq.heappush(self._heap, hint._replace(first=offsets[0], offsets=offsets))
        self.size += len(offsets)

    def hold(self, hint: Hint, offsets: Sequence[int]) -> None:
        """Until their queue is resumed, keep some messages of a taken hint."""
        if offsets:
            self._held.setdefault(hint.lease.queue, []).append(hint._replace(first=offsets[0], offsets=offsets))
            self.size += len(offsets)

    def resume(self, settings: Callable[[str], QueueSettings], now_ms: int) -> bool:
        """Add hints again for the kept messages of queues that are no longer paused; return whether there are any."""
        resumed = [queue for queue in self._held if not settings(queue).paused]
        for queue in resumed:
            for hint in self._held.pop(queue):
                heapq.heappush(self._heap, hint)
            self._resumed_ms[queue] = now_ms
        return bool(resumed)

    def wanted_ms(self, lease: LeaseRow) -> int:
        """Return when a message was due, or when its queue was resumed if that was later."""
        return max(lease.due_ms, self._resumed_ms.get(lease.queue, lease.due_ms))

    def _push(self, opened: OpenMessages, offsets: Sequence[int], lease: LeaseRow) -> None:
        self._sequence += 1
        place = lease.holder if lease.state is _DELAYED else 0
        hint = Hint(
            lease.due_ms, lease.since_ms, place, opened.source, offsets[0], self._sequence, opened, offsets, lease
        )  # fmt: skip
        heapq.heappush(self._heap, hint)

    def next_due_ms(self) -> int | None:
        """Return when the next message may be due, or None."""
        while True:
            self._begin_spans(self._heap[0].due_ms if self._heap else None)
            if not self._heap:
                return None
            hint = self._heap[0]
            if hint.opened.waiting(hint.offsets, hint.lease):
                return hint.due_ms
            self._take()

    def take(self, now_ms: int) -> Hint | None:
        """Remove and return the first hint that is due."""
        self._begin_spans(now_ms)
        return self._take() if self._heap and self._heap[0].due_ms <= now_ms else None

    def _take(self) -> Hint:
        hint = heapq.heappop(self._heap)
        self.size -= len(hint.offsets)
        return hint

    def _begin_spans(self, until_ms: int | None) -> None:
        """Move the messages of all spans that begin by ``until_ms`` to the heap; None: those of the first span."""
        while self._numbers and (until_ms is None or self._numbers[0] * SPAN_MS <= until_ms):
            number = heapq.heappop(self._numbers)
            self._begun = max(self._begun, number)
            self._begin(number, self._spans.pop(number))
            if until_ms is None and self._heap:
                return

    def _begin(self, number: int, span: _Span) -> None:
        for opened, offset in zip(span.opened, span.offsets, strict=True):
            lease = opened.leases.get(offset)
            # A rescheduled message has another hint, and one that keeps its place by now needs none.
            if lease is not None and lease.due_ms // SPAN_MS == number and lease.state not in IN_ORDER:
                self._push(opened, (offset,), lease)
            else:
                self.size -= 1

    def rebuild(self, sources: Iterable[OpenMessages]) -> Iterator[None]:
        """Rebuild all hints from the open messages; yield every few thousand hints, so that other tasks can run."""
        self._heap, self._numbers, self._spans, self._held = [], [], {}, {}
        self._begun, self.size = -1, 0
        pushed = 0
        for opened in sources:
            for lease, offsets in groupby(opened.leases, opened.leases.__getitem__):
                self.push(opened, list(offsets), lease)
                pushed += 1
                if pushed % HINTS_AT_ONCE == 0:
                    yield


class DueMessages(TableImage):
    """The open messages of one markers partition, by when they are due."""

    def __init__(self, settings: Callable[[str], QueueSettings]) -> None:
        super().__init__()
        self._settings = settings
        self._due = DueIndex()
        self._firing_count = 0
        #: Whether messages are due again because their queue was resumed. The clock may be that of the last marker
        #: from before the resumption, so fire nothing before the next TICK: messages may have expired meanwhile.
        self.resumed = False

    def _drop_stale_hints(self) -> None:
        # Hints of closed messages would otherwise stay until their leases expire.
        if self._due.size > 2 * self._open_count + MAX_STALE_HINTS:
            for _ in self._due.rebuild(self._each()):
                pass

    def restoring(self, table: Iterable[tuple[bytes, bytes]]) -> Iterator[None]:
        yield from super().restoring(table)
        yield from self._due.rebuild(self._each())

    @property
    def next_due_ms(self) -> int | None:
        """When the next message may be due by the clock, or None; early at worst, never late."""
        self.look_for_resumed()
        return self._due.next_due_ms()

    def look_for_resumed(self) -> None:
        """Make messages of resumed queues due again."""
        if self._due.resume(self._settings, self.clock.now_ms):
            self.resumed = True

    def due(self, now_ms: int) -> list[DueAction]:
        """Return the actions for due messages, at most :data:`MAX_FIRING`; they are firing from now on.

        ``now_ms`` is the clock at a TICK of the owner's own. Messages are in order of due time; those that were
        acquired together are in the order of the log.
        """
        self.look_for_resumed()
        fires: list[DueAction] = []
        while self._firing_count < MAX_FIRING and (hint := self._due.take(now_ms)) is not None:
            opened, lease = hint.opened, hint.lease
            waiting = opened.waiting(hint.offsets, lease)
            settings = self._settings(lease.queue)
            if settings.paused and is_delivery(lease, settings):
                self._due.hold(hint, waiting)
                continue
            room = MAX_FIRING - self._firing_count
            if len(waiting) > room:
                self._due.push_again(hint, waiting[room:])
                del waiting[room:]
            opened.firing.update(waiting)
            self._firing_count += len(waiting)
            fires += [resolve_due(opened.source, offset, lease, settings) for offset in waiting]
        return fires

    def put_back(self, fire: DueAction) -> None:
        """Note that a due message is not sent yet; it is due again after :meth:`remind`."""
        self._known_of(fire.lease.queue, fire.source).firing.discard(fire.offset)
        self._firing_count -= 1

    def remind(self, place: Place) -> None:
        """Make a message that was put back due again, if it is still open."""
        self._hint_at(self._known_of(place.queue, place.source), place.offset)

    def wanted_ms(self, lease: LeaseRow) -> int:
        """Return when a message was due, or when its queue was resumed if that was later."""
        return self._due.wanted_ms(lease)

    def forget_firing(self) -> None:
        """Note that nothing is firing: every committed fact has been folded, so open messages were not sent."""
        for opened in self._each():
            if opened.firing:
                fired = sorted(opened.firing)
                opened.firing.clear()
                for offset in fired:
                    self._hint_at(opened, offset)
        self._firing_count = 0

    def _hint_at(self, opened: OpenMessages, offset: int) -> None:
        lease = opened.leases.get(offset)
        if lease is not None:
            self._due.push(opened, [offset], lease)
            self._drop_stale_hints()

    def is_firing(self, queue: str, source: Source, offset: int) -> bool:
        """Return whether a message was sent and its fact is not read back yet."""
        return offset in self._sources.get(source, {}).get(queue, NO_MESSAGES).firing

    def hold_back(self, queue: str, source: Source) -> bool:
        """Treat all messages of a queue in a source as firing until a fact ends them; return False if some are."""
        opened = self._sources.get(source, {}).get(queue, NO_MESSAGES)
        if opened.firing:
            return False
        opened.firing.update(opened.leases)
        self._firing_count += len(opened.firing)
        return True
