"""The messages that are due, and those that are firing.

A message that was sent stays open until its fact is read back. Until then it is *firing*, so that it is not sent twice.
The owner forgets which messages are firing when it loses the partition.

A paused queue gets no messages. They wait, without TICKs, and are due again at the next TICK after their queue is
resumed.
Dead-lettering and cancellations continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from marq.core.due_index import DueIndex
from marq.core.redeliver_or_dead_letter import DueAction, is_delivery, resolve_due
from marq.core.storage.open_messages import NO_MESSAGES, OpenMessages
from marq.core.storage.rows import LeaseRow
from marq.core.storage.table_image import Place, TableImage
from marq.settings.queue import QueueSettings
from marq.wire.markers import Source

#: Offsets of closed messages that the due index may keep before it is rebuilt.
MAX_STALE_HINTS = 200_000

#: Maximum number of messages per partition that are firing at a time.
MAX_FIRING = 10_000


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
