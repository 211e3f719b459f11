"""Receives messages of a queue with ordering for programs that settle them through any process: the SQS endpoint.

A message stays with its consumer until it is settled, so that the next one of its key follows when its end is durable.
So a program's outcome has to reach the consumer that delivered the message. If that consumer is gone, or the source has
moved to another one, the outcome is written by token: the next consumer asks the trackers about such messages
(:mod:`marq.consumer.ordered_receiving`).

A redelivery in place has the same token as the former delivery, so each outcome names the attempt that it is for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from marq.client.message_token import Token
from marq.consumer import settlement
from marq.consumer.message import Message
from marq.consumer.polled_consumer import PolledConsumer
from marq.consumer.receiver_settings import ReceiverSettings
from marq.kafka.topics import Topics
from marq.settings.definitions import Definitions
from marq.wire.markers import Source
from marq.wire.names import RESERVED_HEADER

#: The lease of messages that are not delivered yet; the consumer renews it. After a crash they wait for its end, so it
#: is short, even if the queue's own lease lasts hours.
WAITING_LEASE_MS = 10_000


class Place(NamedTuple):
    """The place of a message in its queue."""

    source: Source
    offset: int


def own_headers(message: Message) -> dict[str, bytes | None]:
    """Return the headers of a message that Marq wrote, which :attr:`Message.headers` leaves out."""
    return {name: value for name, value in message._record.headers if name.startswith(RESERVED_HEADER)}


class PolledInOrder(PolledConsumer):
    """Receives messages of one queue with ordering on request, and settles those that it has delivered."""

    def _receiver_settings(self, topics: Topics, definitions: Definitions) -> ReceiverSettings:
        settings = super()._receiver_settings(topics, definitions)
        max_lease_ms = min(map(settings.max_lease_of, self._membership.queues(definitions)), default=WAITING_LEASE_MS)
        self._delivered: dict[Place, Message] = {}
        #: The last purge that is known.
        self._purge = settings.skipped(self.name)
        return replace(settings, lease_ms=min(WAITING_LEASE_MS, max_lease_ms))

    async def poll(
        self, max_messages: int, lease_ms: int | None = None, *, max_bytes: int | None = None
    ) -> list[Message]:
        """Return up to ``max_messages`` that are available, at most one of each ordering key.

        Each is leased for ``lease_ms`` (default: the queue's setting), and the consumer does not renew it. With
        ``max_bytes``, the message that reaches this size is the last one.

        Raises:
            MarqError: the consumer can no longer receive; the error says why.
        """
        running = self._started()
        self._end_purged()
        messages = self._take(max_messages, max_bytes)
        if not messages:
            running.raise_error()
            return []
        if lease_ms is None:
            lease_ms = running.receiver_settings.queue(self.name).lease_ms
        try:
            # Durable before the program sees them: if this process dies then, they keep this lease.
            await running.hold(messages, lease_ms, ends=True)
        except BaseException:
            settlement.put_back(messages)
            raise
        held = [message for message in messages if self._is_held(message)]
        # Their source was given up meanwhile. Without a release, its next consumer would wait for their leases.
        settlement.put_back([message for message in messages if message not in held])
        for each in held:
            each._held.unseen = False
        self._delivered.update({Place(each._held.source, each.offset): each for each in held})
        return held

    def _end_purged(self) -> None:
        """Ack delivered messages that a purge has ended, or they would block their keys."""
        running = self._started()
        gate, purge = running.receiver.gate, running.receiver_settings.skipped(self.name)
        if purge == self._purge:
            return
        self._purge = purge
        for place in [place for place, message in self._delivered.items() if gate.has_ended(message)]:
            settlement.ack(self._delivered.pop(place))

    def find(self, token: Token, attempt: int) -> Message | None:
        """Return a delivered message if this attempt of it is still leased here."""
        message = self._delivered.get(Place(token.source, token.offset))
        # The holder must match, too: after a source is assigned again, its messages belong to the new holder.
        if message is None or message.attempt != attempt or message._held.holder != token.holder:
            return None
        return message if self._is_held(message) else None

    async def ack_held(self, message: Message) -> None:
        """Ack a message that :meth:`find` returned; durable on return."""
        running = self._started()
        del self._delivered[Place(message._held.source, message.offset)]
        settlement.ack(message)
        await running.receiver.acks.settled()

    async def release_held(self, message: Message, *, counted: bool) -> None:
        """Release a message that :meth:`find` returned; ``counted=False`` if no program has seen it."""
        running = self._started()
        del self._delivered[Place(message._held.source, message.offset)]
        if counted:
            settlement.release(message, 0)
        else:
            settlement.put_back([message])
        await running.receiver.acks.settled()

    async def renew_held(self, message: Message, lease_ms: int) -> bool:
        """Let the lease of a message that :meth:`find` returned end in ``lease_ms``, earlier or later than before.

        Return False if it ended before that was durable.
        """
        await self._started().hold([message], lease_ms, ends=True)
        return self._is_held(message)

    def forget_lost(self) -> None:
        """Forget messages that are no longer leased here; do not renew those whose source was given up."""
        lost = [place for place, message in self._delivered.items() if not self._is_held(message)]
        messages = [self._delivered.pop(place) for place in lost]
        if self._running is not None:
            # They count as in flight until then. The lines still have to learn that the others were lost.
            self._running.detach([each for each in messages if each._held.lines is None or not each._held.lines.active])

    def _is_held(self, message: Message) -> bool:
        held = message._held
        assert held.lines is not None, "only queues with ordering are polled in order"
        in_time = held.acks.clock() < held.expiry_s(message._offset)
        return held.lines.active and message._offset in held.open and in_time
