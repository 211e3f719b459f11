"""The starts of handlers in the log: what a tracker has to know if this process dies.

:class:`Starts` writes two markers, both for messages that user code is about to see or has:

* DISPATCH, for queues that deliver at most once: written right before user code sees a message, never for prefetched
  ones. A crash before it is durable loses nothing, because the tracker redelivers the message. A crash after that
  abandons the message.
* RENEW with ``started``, for all other queues: the attempt counts if the lease expires. Prefetched messages have no
  start, so a process that dies uses up no attempt of theirs. Handlers that return soon cost nothing: the start is
  written only when user code has had the message for :data:`NOTED_AFTER_S`. That of a suspect, a message whose previous
  lease has expired, is written before user code sees it. So no message can end its process again and again without
  using up its attempts.

This is part of step 4 of :mod:`marq.consumer.receiver`. The markers are written together with outcomes
(:mod:`marq.consumer.writer`), so concurrent callers share a write.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from marq.consumer.prefetch import Prefetch
from marq.consumer.writer import OutcomeWriter
from marq.leases.message import Message, put_back
from marq.leases.receiver_settings import ReceiverSettings
from marq.wire.errors import BrokerUnavailable
from marq.wire.record_headers import expired

#: How long user code has had a message before its start is written.
NOTED_AFTER_S = 0.1


def is_suspect(message: Message) -> bool:
    """Return whether the previous lease of a message has expired: its handler may have ended the process."""
    return not message._batch.at_most_once and expired(message._record.headers) > 0


class Starts:
    """Decides when the starts of one consumer's messages are written; the writer's task passes the time."""

    def __init__(self, writer: OutcomeWriter, settings: ReceiverSettings, prefetch: Prefetch) -> None:
        self._writer = writer
        self._prefetch = prefetch
        #: False if the attempts count from the beginning, and after the end.
        self._notes = settings.prefetch
        #: True if user code got messages since the last look; the time at which those of that look need their starts.
        self._looks = False
        self._due_s = inf
        #: The messages that handlers had at that look, those that calls had returned, and those returned since.
        self._before: set[Message] = set()
        self._noting: list[Message] = []
        self._returned: list[Message] = []
        #: True once user code gets no more messages.
        self.stopped = False

    def taken(self) -> None:
        """Note that user code gets messages. This is a hot path."""
        if not self._looks:
            self._looks = True
            if self._due_s == inf:
                self._writer.wake()

    def returned(self, messages: Sequence[Message]) -> None:
        """Note that a call returns messages to user code."""
        if self._notes:
            self._returned += messages
            self.taken()

    def pass_time(self, now_s: float) -> float:
        """Write the starts of messages that user code has had for a while; return when to call again."""
        if not self._notes:
            return inf
        if now_s >= self._due_s:
            self._queue([*[message for message in self._running() if message in self._before], *self._noting])
            self._before, self._noting = set(), []
            self._looks, self._due_s = True, inf
        if self._looks and self._due_s == inf:
            self._looks, running = False, self._running()
            if self._returned or any(map(_lacks_start, running)):
                self._before, self._noting, self._returned = set(running), self._returned, []
                self._due_s = now_s + NOTED_AFTER_S
        return self._due_s

    async def started(self, messages: list[Message]) -> list[Message]:
        """Write the starts that must come first, and return the messages that user code may see now, in their order.

        Returns all of them without waiting if no start has to be written first. Otherwise, messages whose leases have
        ended are left out, because another consumer may have them. If the call is cancelled, or the consumer stops, the
        messages are released and the attempt does not count: user code never saw them.
        """
        if not any(message._batch.starts_first for message in messages):
            return messages
        stopped = self.stopped
        firsts = [] if stopped else [message for message in messages if _comes_first(message)]
        for message in firsts:
            message._batch.start(message._offset)
        try:
            if firsts:
                await self._writer.settled()
        except BrokerUnavailable:
            stopped = True  # The writer has ended.
        except BaseException:
            put_back(messages)
            raise
        if stopped or self.stopped:
            put_back(messages)
            return []
        now_s = self._writer.now_s()
        # A start is written only while the lease lasts. If it was confirmed later, it may not have counted: another
        # consumer may have the message.
        leased = [message for message in messages if is_leased(message, now_s)]
        for message in leased:
            if _comes_first(message):
                message._batch.note_start(message._offset)
        return leased

    def end(self) -> None:
        """Queue the starts of messages that stay leased after a stop, because calls have returned them."""
        if self._notes:
            self._notes = False
            self._queue([*self._noting, *self._returned])

    def _running(self) -> list[Message]:
        return [message for pool in self._prefetch.pools for message in pool.running]

    def _queue(self, messages: Sequence[Message]) -> None:
        late = [message for message in messages if _lacks_start(message)]
        for message in late:
            message._batch.note_start(message._offset)
            message._batch.start(message._offset)
        if late:
            self._writer.flush_soon()


def _lacks_start(message: Message) -> bool:
    """Return whether a message is open, and its attempt would not count if its lease expired."""
    batch, offset = message._batch, message._offset
    return offset in batch.open and offset not in batch.decided and not (batch.at_most_once or offset in batch.started)


def _comes_first(message: Message) -> bool:
    """Return whether user code may see a message only when its start is durable."""
    batch = message._batch
    return batch.at_most_once or (batch.starts_first and is_suspect(message))


def still_leased(messages: Sequence[Message], now_s: float) -> list[Message]:
    """Return the messages whose leases have not ended before their renewal was confirmed; release the others.

    The tracker may have renewed those, too. They would stay hidden, and then count an attempt that no program saw.
    """
    for message in messages:
        if not is_leased(message, now_s):
            message._batch.release(message._offset, 0, counted=False)
    return [message for message in messages if is_leased(message, now_s)]


def is_leased(message: Message, now_s: float) -> bool:
    return message._expiry_s > now_s and message.offset in message._batch.open
