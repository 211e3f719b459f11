"""The current settings of queues that affect deliveries: pauses, purges, circuit breakers, policies for exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf

from marq.client.background import Time
from marq.consumer.expiry import expired
from marq.consumer.prefetch import Prefetch, PrefetchBuffer
from marq.leases.circuit_breaker import CLOSED, QueueBreaker
from marq.leases.held import LeasedBatch
from marq.leases.message import Message, put_back
from marq.leases.receiver_settings import ReceiverSettings
from marq.settings.skipped_records import SkippedRecords

#: The entry of a queue that was never purged.
_NO_PURGE: tuple[SkippedRecords | None, float] = (None, -inf)


class DeliveryGate:
    """Decides what one receiver may deliver now; it sets ``changed`` when there may be room for more messages.

    A queue that is paused, or whose breaker is open, delivers nothing: its prefetched messages are released.
    """

    def __init__(
        self,
        settings: ReceiverSettings,
        queues: Sequence[str],
        prefetch: Prefetch,
        time: Time,
        changed: asyncio.Event,
    ) -> None:
        self._settings, self._skipped = settings.queue, settings.skipped
        #: The purged records of each queue, and when they became known here.
        self._purges: dict[str, tuple[SkippedRecords | None, float]] = {}
        self._prefetch = prefetch
        self._clock, self._broker_ms = time.now_s, time.broker_ms
        self._changed = changed
        #: The breaker of each queue that has one.
        self.breakers: dict[str, QueueBreaker] = {}
        self._paused: frozenset[str] = frozenset()
        #: The buffers of queues that are not paused, with the breakers of these; None for a queue without one.
        self._buffers: dict[PrefetchBuffer, set[QueueBreaker | None]] = {}
        self.apply_pauses(queues)

    def apply_pauses(self, queues: Sequence[str]) -> None:
        """Pause and resume the served queues, as their settings say.

        If all queues are paused, nothing is read. Otherwise messages of paused queues are acquired and left with the
        tracker (:mod:`marq.consumer.acquire`), because messages of other queues come after them.
        """
        before = self._paused
        self._paused = frozenset(queue for queue in queues if self._settings(queue).paused)
        for queue in self._paused - before:
            put_back(self._prefetch.take_of(queue))
        self._apply_breakers(queues)
        self._buffers = {}
        for queue in queues:
            if queue not in self._paused:
                self._buffers.setdefault(self._prefetch.buffers[queue], set()).add(self.breakers.get(queue))
        self._changed.set()

    def apply_purges(self, queues: Sequence[str]) -> list[str]:
        """Note new purges of the served queues; return the queues whose messages in flight have ended."""
        ended: list[str] = []
        for queue in queues:
            purge = self._skipped(queue)
            before, _ = self._purges.setdefault(queue, (purge, -inf))
            if purge is None or purge == before:
                continue
            self._purges[queue] = purge, self._clock()
            if purge.in_flight != (before.in_flight if before else {}):
                put_back(self._prefetch.take_of(queue))
                ended.append(queue)
        return ended

    def has_ended(self, message: Message) -> bool:
        """Return whether a purge has ended a message, even if it is in flight."""
        batch, (purge, _) = message._batch, self._purges.get(message._batch.queue, _NO_PURGE)
        return purge is not None and purge.has_ended(batch.source, message._offset, message._record.timestamp)

    def _may_be_purged(self, message: Message) -> bool:
        """Return whether the PURGE may have come before the ACQUIRE of a message."""
        batch, (purge, known_s) = message._batch, self._purges.get(message._batch.queue, _NO_PURGE)
        if purge is None or batch.taken_s > known_s:
            return self.has_ended(message)
        return not purge.left(batch.source, message._offset, message._record.timestamp)

    def apply(self, batch: LeasedBatch) -> None:
        """Apply the current settings to a batch."""
        batch.settings, batch.breaker = self._settings(batch.queue), self.breakers.get(batch.queue)

    def admitted(self, batch: LeasedBatch, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages that may be delivered now; release the others."""
        if batch.queue in self._paused:
            # They were acquired before the receiver knew of the pause.
            put_back(messages)
            return []
        offsets = batch.records.offsets
        late = {offsets[index] for index in self._expired(batch)}
        # A RELEASE of a purged message has no effect. An ordered queue then asks the tracker before the next delivery.
        ended = dict.fromkeys(
            [message for message in messages if message._offset in late or self._may_be_purged(message)]
        )
        put_back(ended)
        messages = [message for message in messages if message not in ended]
        # Messages with keys may have waited since their breaker was changed or removed.
        breaker = batch.breaker = self.breakers.get(batch.queue)
        if breaker is None:
            return messages
        count = breaker.admit(messages)
        for message in messages[count:]:
            put_back([message], breaker.delay_ms(message))
        return messages[:count]

    def restricts(self, batch: LeasedBatch) -> bool:
        """Whether some messages of a batch may not be delivered now."""
        if batch.queue in self.breakers or batch.queue in self._paused:
            return True
        if self._expired(batch):
            return True
        purge, _ = self._purges.get(batch.queue, _NO_PURGE)
        return purge is not None and batch.records.offsets[0] < purge.ends.get(batch.source, 0)

    def _expired(self, batch: LeasedBatch) -> Sequence[int]:
        """Return the indexes of messages of a batch that seem to have expired."""
        return expired(batch.records, batch.settings, self._broker_ms()) if batch.may_expire else ()

    def room(self, most: int, pending: int) -> int:
        """Return how many messages to fetch now, at most ``most``, in addition to the ``pending`` ones."""
        now_s, rooms = self._clock(), [0]
        for buffer, breakers in self._buffers.items():
            room = buffer.room(most, now_s, pending, self._prefetch.overtaken(buffer))
            rooms += [room if breaker is None else breaker.room(room) for breaker in breakers]
        return max(rooms)

    def finished(self, queue: str) -> None:
        """Tell the queue's breaker that messages have ended."""
        breaker = self.breakers.get(queue)
        if breaker is not None:
            breaker.finished()

    def end_pauses(self) -> float:
        """Resume reading after the pauses of breakers; return when the next one ends."""
        next_s = inf
        for breaker in self.breakers.values():
            if left_s := breaker.pause_left_s:
                next_s = min(next_s, self._clock() + left_s)
            elif breaker.state != CLOSED:
                self._changed.set()
        return next_s

    def _apply_breakers(self, queues: Sequence[str]) -> None:
        """Make the breakers that the queues' settings want; one whose settings have not changed stays as it is."""
        for queue in queues:
            known, wanted = self.breakers.get(queue), self._settings(queue).breaker
            if (None if known is None else known.settings) != wanted:
                self.breakers.pop(queue, None)
                if wanted is not None:
                    self.breakers[queue] = QueueBreaker(queue, wanted, self._clock, self._opened)

    def _opened(self, breaker: QueueBreaker) -> None:
        """Release prefetched messages."""
        if self.breakers.get(breaker.queue) is not breaker:
            # Messages in flight keep the breaker that a change of the settings has replaced.
            return
        for message in self._prefetch.take_of(breaker.queue):
            put_back([message], breaker.delay_ms(message))
