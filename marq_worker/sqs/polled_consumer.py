"""Receives messages for programs that settle them by token, through any process: the SQS endpoint.

It differs from :class:`marq.Consumer` in two ways: messages are acquired only when a call asks for them, and their
leases are not renewed after :meth:`PolledConsumer.poll` has returned them. :class:`TokenSettler` settles them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import NamedTuple

from marq.backend.cluster import Cluster, cluster_of, marker_writer
from marq.client.lifecycle import Lifecycle
from marq.client.message_token import Token
from marq.consumer.ack_batcher import AckBatcher
from marq.consumer.consumer import Consumer
from marq.consumer.session import STOP_ACKS_S, STOP_CLIENT_S
from marq.consumer.starts import started, still_leased
from marq.kafka.topics import Topics
from marq.leases.message import Message
from marq.leases.receiver_settings import ReceiverSettings
from marq.leases.settlement import put_back
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.settings.queue import QueueSettings
from marq.wire.errors import MarqError
from marq.wire.markers import Ack, Release, Renew, Source
from marq.wire.record_headers import first_received_ms, origin, record_id

#: A polled message's lease may be shorter than its queue's setting by the smaller of these: seconds, and a fraction.
MAX_SHORTFALL_S, MAX_SHORTFALL = 1.0, 0.05


class Described(NamedTuple):
    """A message as another process can receive it; times are in milliseconds since 1970.

    ``first_received_ms`` is 0 if it is unknown or this is the first delivery. ``available_ms`` is when the message
    could first be received: later than ``sent_ms`` if it was delayed or redriven, or its sender chose its timestamp.
    """

    token: Token
    id: str
    attempt: int
    sent_ms: int
    body: bytes
    headers: dict[str, bytes | None]
    first_received_ms: int = 0
    available_ms: int = 0


def described(message: Message) -> Described:
    """Return the parts of a message; looking up each of them costs several times as much."""
    held, offset = message._held, message._offset
    record = held.record(offset)
    token = Token(held.queue, held.holder, held.source, offset)
    if not record.headers:
        sent_ms = record.timestamp
        return Described(token, record_id(held.source.log, offset), 1, sent_ms, message.body, {}, 0, sent_ms)
    facts = origin(held.source, offset, record.timestamp, record.headers)
    received_ms = first_received_ms(record.headers)
    # The record of a delayed or redriven message has the time of its first delivery. If a redelivery lacks the header,
    # its record is that first delivery, or its age is unknown. The message must not count as older than it is.
    known = facts.attempt > 1 and received_ms
    available_ms = max(facts.first_sent_ms, received_ms) if known else record.timestamp
    return Described(
        token, facts.id, facts.attempt, facts.first_sent_ms, message.body, message.headers, received_ms, available_ms
    )


class PolledConsumer(Consumer):
    """Receives messages of one queue on request.

    Args:
        queue: the queue's name.
        settings: the client's settings.
        url: an address at which other members of the queue's group can ask this process for messages.
    """

    def __init__(self, queue: str, settings: ClientSettings, url: str = "") -> None:
        super().__init__(queue, settings.bootstrap_servers, shutdown_timeout=0)
        self._settings = settings
        self._url = url

    def _receiver_settings(self, topics: Topics, definitions: Definitions) -> ReceiverSettings:
        settings = super()._receiver_settings(topics, definitions)
        return replace(settings, prefetch=False, queue=_without_breaker(settings.queue))

    async def poll(self, max_messages: int, *, max_bytes: int | None = None) -> list[Message]:
        """Return up to ``max_messages`` that are available.

        Their leases last as long as the queue's setting says, and end unless :class:`TokenSettler` renews them. With
        ``max_bytes``, the message that reaches this size is the last one; the next poll returns the others.

        Raises:
            MarqError: the consumer can no longer receive; the error says why.
        """
        running = self._started()
        messages = self._take(max_messages, max_bytes)
        if not messages:
            running.raise_error()
            return []
        try:
            messages = await started(messages)
            messages = await self._in_full(messages)
        except BaseException:
            put_back(messages)
            raise
        running.detach(messages)
        return messages

    def _take(self, max_messages: int, max_bytes: int | None) -> list[Message]:
        running = self._started()
        if max_bytes is None:
            return running.take(max_messages)
        taken: list[Message] = []
        size = 0
        while len(taken) < max_messages and size < max_bytes and (messages := running.take(1)):
            taken += messages
            size += sum(map(_size, messages))
        return taken

    async def _in_full(self, messages: list[Message]) -> list[Message]:
        """Renew the leases of messages that waited for a poll; leave out messages whose leases end meanwhile."""
        running = self._started()
        now_s, lease_ms = running.cluster.now_s(), running.receiver_settings.queue(self.name).lease_ms
        least_s = lease_ms / 1000 - min(MAX_SHORTFALL_S, lease_ms / 1000 * MAX_SHORTFALL)
        short = [message for message in messages if message._expiry_s - now_s < least_s]
        if not short:
            return messages
        await running.hold(short, lease_ms, ends=True)
        return still_leased(messages, running.cluster.now_s())

    async def put_back(self, limit_s: float) -> None:
        """Release the messages that no poll has returned; return when that is durable, or after the limit.

        Call this before a stop, when no poll waits any longer. A message whose ACQUIRE is still being written when the
        consumer stops, or whose release is not written, would count as received when its lease ends.
        """
        running = self._started()

        async def released() -> None:
            # No cycle follows, because no call asks for messages.
            await running.receiver.revoked()
            running.receiver.prefetch.release()
            await running.receiver.acks.settled()

        with suppress(TimeoutError):
            await running.cluster.within(limit_s, released())

    def left_s(self, message: Message) -> float:
        """Return the seconds until the lease of a polled message ends."""
        # Not the cluster's clock: the consumer may have been stopped while the poll renewed leases.
        return message._expiry_s - message._held.acks.clock()

    def broker_ms(self) -> int | None:
        """Return the milliseconds since 1970 by the brokers' clock; None before the first message."""
        return None if self._running is None else self._running.cluster.broker_ms()

    @property
    def error(self) -> MarqError | None:
        """Why the consumer can no longer receive, or None if it can."""
        return None if self._running is None else self._running.receiver.error

    async def wait(self, max_messages: int, wait_s: float) -> None:
        """Ask for messages; return when a poll may find some, or after ``wait_s``."""
        running = self._started()
        with suppress(TimeoutError):
            await running.cluster.within(wait_s, running.wait(max_messages))


def _size(message: Message) -> int:
    """Return about how many bytes a message has."""
    return len(message.body) + sum([len(name) + len(value or b"") for name, value in message._record.headers])


def _without_breaker(settings: Callable[[str], QueueSettings]) -> Callable[[str], QueueSettings]:
    """Return settings without circuit breakers, which count outcomes that a polling process never learns."""

    def without(queue: str) -> QueueSettings:
        found = settings(queue)
        return found if found.breaker is None else replace(found, breaker=None)

    return without


class TokenSettler(Lifecycle[AckBatcher]):
    """Settles messages by the tokens of their leases, whichever process received them.

    Calls return when the marker is durable. A marker for a lease that has ended has no effect.
    """

    def __init__(self, settings: ClientSettings) -> None:
        super().__init__("the settler")
        self._settings = settings
        self._cluster: Cluster
        self.error: BaseException | None = None

    async def _open(self, opened: AsyncExitStack) -> AckBatcher:
        self._cluster = cluster_of(self._settings)
        topics = await self._cluster.topics()
        writer = await opened.enter_async_context(marker_writer(self._cluster, topics, STOP_CLIENT_S))
        batcher = AckBatcher(
            writer,
            markers_partitions=topics.markers_partitions,
            limit_bytes=topics.markers_limit_bytes,
            finished=lambda queue, count: None,
            failed=self._failed,
            shared=True,
        )
        batcher.start()

        async def stop() -> None:
            await batcher.stop(STOP_ACKS_S)

        opened.push_async_callback(stop)
        return batcher

    def _failed(self, error: BaseException) -> None:
        self.error = error

    def broker_ms(self) -> int | None:
        """Return the milliseconds since 1970 by the brokers' clock; None before the first outcome."""
        return None if self._running is None else self._cluster.broker_ms()

    async def ack(self, tokens: Sequence[Token]) -> None:
        """Ack messages."""
        offsets: dict[tuple[str, int, Source], set[int]] = {}
        for token in tokens:
            offsets.setdefault((token.queue, token.holder, token.source), set()).add(token.offset)
        await self._settle([Ack(*place, sorted(some)) for place, some in offsets.items()])

    async def renew(self, leases: Sequence[tuple[Token, int]]) -> None:
        """Make leases end in the given number of milliseconds, earlier or later than before."""
        await self._settle(
            [
                Renew(token.queue, token.holder, token.source, [token.offset], lease_ms, exactly=True)
                for token, lease_ms in leases
            ]
        )

    async def release(self, tokens: Sequence[Token], *, counted: bool = True) -> None:
        """Release messages at once; ``counted=False``, if no program has seen them, does not count the attempt."""
        await self._settle(
            [Release(each.queue, each.holder, each.source, [each.offset], [0], counted, [""]) for each in tokens]
        )

    async def _settle(self, batches: Sequence[Ack | Renew | Release]) -> None:
        """Write markers. Raises MarqError; BrokerUnavailable if the settler is stopped first."""
        batcher = self._started()
        if self.error is not None:
            raise MarqError(f"the settler stopped after an unexpected error: {self.error!r}")
        for batch in batches:
            batcher.settle_foreign(batch)
        await batcher.settled()
