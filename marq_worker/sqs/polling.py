"""Leases on demand, for programs that settle messages through any process: the SQS endpoint.

:class:`PolledConsumer` differs from :class:`marq.Consumer` in two ways: messages are acquired only when a call asks for
them, and their leases are not renewed after the call has returned them. :class:`TokenSettler` settles them by the
tokens of their leases, and :class:`LeaseLookup` asks trackers whether an outcome would count.

:class:`PolledInOrder` is for queues with ordering. A message stays with its consumer until it is settled, so that the
next one of its key follows when its end is durable. So a program's outcome has to reach the consumer that delivered the
message. If that consumer is gone, or the source has moved to another one, the outcome is written by token: the next
consumer asks the trackers about such messages (:mod:`marq.consumer.ordering`). A redelivery in place has the same token
as the former delivery, so each outcome names the attempt that it is for.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from typing import NamedTuple

from marq.backend.cluster import Cluster, cluster_of, marker_writer
from marq.client.lifecycle import Lifecycle
from marq.client.message_token import Token
from marq.consumer.consumer import Consumer
from marq.consumer.session import STOP_ACKS_S, STOP_CLIENT_S
from marq.consumer.starts import still_leased
from marq.consumer.tracker_queries import TrackerQueries
from marq.consumer.writer import Listener, OutcomeWriter
from marq.core.storage.rows import HELD
from marq.kafka.topics import Topics
from marq.leases.message import Message, put_back
from marq.leases.receiver_settings import ReceiverSettings
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.settings.queue import QueueSettings
from marq.wire.errors import BrokerUnavailable, MarqError
from marq.wire.markers import Ack, Release, Renew, Resume, Source

#: The lease of messages that are not delivered yet; the consumer renews it. After a crash they wait for its end, so it
#: is short, even if the queue's own lease lasts hours.
WAITING_LEASE_MS = 10_000
#: A polled message's lease may be shorter than its queue's setting by the smaller of these: seconds, and a fraction.
MAX_SHORTFALL_S, MAX_SHORTFALL = 1.0, 0.05
#: How long to wait for a tracker.
LIMIT_S = 4.0


class LeaseStatus(NamedTuple):
    """What a tracker knows about a message: its state (0 if it is not open), its attempt, and its remaining lease."""

    state: int
    attempt: int
    left_ms: int

    @property
    def is_in_flight(self) -> bool:
        return self.state in HELD


_NOT_OPEN = LeaseStatus(0, 0, 0)
_Asked = tuple[Token, asyncio.Future[LeaseStatus]]


class LeaseLookup(Lifecycle[TrackerQueries]):
    """Looks up messages for one process; concurrent lookups share a question."""

    def __init__(self, settings: ClientSettings, limit_s: float = LIMIT_S) -> None:
        super().__init__("the client of lease questions")
        self._settings = settings
        self._limit_s = limit_s
        self._waiting: list[_Asked] = []
        self._asking: asyncio.Task[None] | None = None

    async def _open(self, opened: AsyncExitStack) -> TrackerQueries:
        cluster = cluster_of(self._settings)
        topics = await cluster.topics()
        writer = await opened.enter_async_context(marker_writer(cluster, topics, STOP_CLIENT_S))
        opened.push_async_callback(self._end_asking)
        return TrackerQueries(cluster, writer, topics.markers_partitions)

    async def is_in_flight(self, token: Token) -> bool:
        """Return whether a consumer holds a message; same errors as :meth:`ask`."""
        return (await self.ask(token)).is_in_flight

    async def ask(self, token: Token) -> LeaseStatus:
        """Return what a tracker knows about a message.

        Raises:
            BrokerUnavailable: no tracker answered in time.
            MarqError: the client is stopped.
        """
        questions = self._started()
        answer: asyncio.Future[LeaseStatus] = asyncio.get_running_loop().create_future()
        self._waiting.append((token, answer))
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_all(questions), name="marq-lease-questions")
        return await answer

    async def _end_asking(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    async def _ask_all(self, questions: TrackerQueries) -> None:
        try:
            while self._waiting:
                asked, self._waiting = self._waiting, []
                await self._ask(questions, asked)
        finally:
            self._asking = None
            _fail(self._waiting, MarqError("the client of lease questions was stopped"))
            self._waiting = []

    async def _ask(self, questions: TrackerQueries, asked: Sequence[_Asked]) -> None:
        error: MarqError = MarqError("the client of lease questions was stopped")
        by_source: dict[tuple[str, Source], list[_Asked]] = {}
        for request in asked:
            by_source.setdefault((request[0].queue, request[0].source), []).append(request)
        # The holder identifies the question.
        holders = {secrets.randbits(62) * 2 + 1: some for some in by_source.values()}
        resumes = [
            Resume(some[0][0].queue, holder, some[0][0].source, sorted({token.offset for token, _ in some}), False)
            for holder, some in holders.items()
        ]
        try:
            async with asyncio.timeout(self._limit_s), aclosing(questions.answers(resumes)) as answers:
                async for resume, parts in answers:
                    found = {
                        offset: LeaseStatus(*row)
                        for part in parts
                        for offset, *row in zip(part.offsets, part.states, part.attempts, part.waits_ms, strict=True)
                    }
                    for token, answer in holders[resume.holder]:
                        if not answer.done():
                            answer.set_result(found.get(token.offset, _NOT_OPEN))
        except TimeoutError:
            error = BrokerUnavailable(f"no tracker answered within {self._limit_s:g} s: is a worker running?")
        except MarqError as failure:
            error = failure
        finally:
            _fail(asked, error)


def _fail(asked: Sequence[_Asked], error: MarqError) -> None:
    for _, answer in asked:
        if not answer.done():
            answer.set_exception(error)


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
            messages = await running.receiver.starts.started(messages)
            messages = await self._in_full(messages)
        except BaseException:
            put_back(messages)
            raise
        running.receiver.detach(messages)
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
            await running.receiver.writer.settled()

        with suppress(TimeoutError):
            await running.cluster.within(limit_s, released())

    def left_s(self, message: Message) -> float:
        """Return the seconds until the lease of a polled message ends."""
        # Not the cluster's clock: the consumer may have been stopped while the poll renewed leases.
        return message._expiry_s - message._batch.keeper.now_s()

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


class TokenSettler(Lifecycle[OutcomeWriter]):
    """Settles messages by the tokens of their leases, whichever process received them.

    Calls return when the marker is durable. A marker for a lease that has ended has no effect.
    """

    def __init__(self, settings: ClientSettings) -> None:
        super().__init__("the settler")
        self._settings = settings
        self._cluster: Cluster

    async def _open(self, opened: AsyncExitStack) -> OutcomeWriter:
        self._cluster = cluster_of(self._settings)
        topics = await self._cluster.topics()
        writer = await opened.enter_async_context(marker_writer(self._cluster, topics, STOP_CLIENT_S))
        settings = ReceiverSettings(0, topics.markers_partitions, topics.markers_limit_bytes)
        outcomes = OutcomeWriter(writer, settings, self._cluster, Listener(), shared=True)
        outcomes.start()

        async def stop() -> None:
            await outcomes.stop(STOP_ACKS_S)

        opened.push_async_callback(stop)
        return outcomes

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
            [Release(token.queue, token.holder, token.source, [token.offset], [0], counted, [""]) for token in tokens]
        )

    async def _settle(self, batches: Sequence[Ack | Renew | Release]) -> None:
        """Write markers. Raises MarqError; BrokerUnavailable if the settler is stopped first."""
        writer = self._started()
        if writer.error is not None:
            raise MarqError(f"the settler stopped after an unexpected error: {writer.error!r}")
        for batch in batches:
            writer.settle_foreign(batch)
        await writer.settled()


class PolledInOrder(PolledConsumer):
    """Receives messages of one queue with ordering on request, and settles those that it has delivered."""

    def _receiver_settings(self, topics: Topics, definitions: Definitions) -> ReceiverSettings:
        settings = super()._receiver_settings(topics, definitions)
        max_lease_ms = min(map(settings.max_lease_of, self._membership.queues(definitions)), default=WAITING_LEASE_MS)
        #: By source and offset.
        self._delivered: dict[tuple[Source, int], Message] = {}
        #: The last purge that is known.
        self._purge = settings.skipped(self.name)
        return replace(settings, lease_ms=min(WAITING_LEASE_MS, max_lease_ms))

    async def poll(self, max_messages: int, *, max_bytes: int | None = None) -> list[Message]:
        """Return up to ``max_messages`` that are available, at most one of each ordering key; otherwise as above."""
        running = self._started()
        self._end_purged()
        messages = self._take(max_messages, max_bytes)
        if not messages:
            running.raise_error()
            return []
        lease_ms = running.receiver_settings.queue(self.name).lease_ms
        try:
            # Durable before the program sees them: if this process dies then, they keep this lease.
            await running.hold(messages, lease_ms, ends=True, started=True)
        except BaseException:
            put_back(messages)
            raise
        held = [message for message in messages if self._is_held(message)]
        # Their source was given up meanwhile. Without a release, its next consumer would wait for their leases.
        put_back([message for message in messages if message not in held])
        self._delivered.update({(message._batch.source, message.offset): message for message in held})
        return held

    def _end_purged(self) -> None:
        """Ack delivered messages that a purge has ended, or they would block their keys."""
        running = self._started()
        gate, purge = running.receiver.gate, running.receiver_settings.skipped(self.name)
        if purge == self._purge:
            return
        self._purge = purge
        for place in [place for place, message in self._delivered.items() if gate.has_ended(message)]:
            self._delivered.pop(place)._ack()

    def find(self, token: Token, attempt: int) -> Message | None:
        """Return a delivered message if this attempt of it is still leased here."""
        message = self._delivered.get((token.source, token.offset))
        # The holder must match, too: after a source is assigned again, its messages belong to the new holder.
        if message is None or message.attempt != attempt or message._batch.holder != token.holder:
            return None
        return message if self._is_held(message) else None

    async def ack_held(self, message: Message) -> None:
        """Ack a message that :meth:`find` returned; durable on return."""
        running = self._started()
        del self._delivered[message._batch.source, message.offset]
        message._ack()
        await running.receiver.writer.settled()

    async def release_held(self, message: Message, *, counted: bool) -> None:
        """Release a message that :meth:`find` returned; ``counted=False`` if no program has seen it."""
        running = self._started()
        del self._delivered[message._batch.source, message.offset]
        if not counted:
            put_back([message])
        elif message._batch.decide(message.offset):
            message._batch.release(message.offset, 0)
        await running.receiver.writer.settled()

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
            # They count as in flight until then. The ordering still has to learn that the others were lost.
            receiver = self._running.receiver
            receiver.detach([message for message in messages if not receiver.ordering.has(message._batch)])

    def _is_held(self, message: Message) -> bool:
        batch, offset = message._batch, message._offset
        if self._running is None or not self._running.receiver.ordering.has(batch):
            return False
        return offset in batch.open and batch.keeper.now_s() < batch.expiry_s(offset)
