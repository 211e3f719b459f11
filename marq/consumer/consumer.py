"""The consumer: receives messages of one queue or of a group of queues, and settles them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from functools import cache, partial
from typing import Generic, Self, Unpack

from marq.backend.cluster import cluster_of
from marq.client import message_token
from marq.client.codecs import Codec, check_codec
from marq.client.hooks import point
from marq.client.lifecycle import Lifecycle
from marq.client.send_targets import Handler, definitions_of
from marq.consumer.handler_pool import (
    DEFAULT_BATCH_CONCURRENCY,
    DEFAULT_BATCH_MESSAGES,
    BatchHandler,
    BatchHandlerTasks,
    HandlerTasks,
)
from marq.consumer.membership import Membership
from marq.consumer.session import MemberSession
from marq.consumer.starts import still_leased
from marq.handlers.decorator import DEFAULT_CONCURRENCY, check_handler, codec_of, definitions_for, warn_of_unpublished
from marq.handlers.middleware import Middleware, check_middleware
from marq.handlers.parameters import bound, name_of
from marq.kafka.topics import Topics
from marq.leases.message import Message, T_co, put_back
from marq.leases.receiver_settings import ReceiverSettings
from marq.settings.client import ClientOptions, ClientSettings, whole_number
from marq.settings.definitions import Definitions
from marq.settings.durations import Duration, duration_ms
from marq.wire.errors import ConfigError, LeaseLost, MarqError

DEFAULT_MAX_IN_FLIGHT = 20_000
DEFAULT_SHUTDOWN_TIMEOUT_S = 3.0
MAX_CONCURRENCY = 10_000
MAX_MAX_IN_FLIGHT = 1_000_000
#: An iteration yields to other tasks at least this often.
_YIELD_S = 0.005
#: Time limit of a DISPATCH marker, even if less of the caller's ``wait`` is left.
DISPATCH_S = 2.0


class Consumer(Lifecycle[MemberSession], Generic[T_co]):
    """Receives the messages of a queue, or of all queues of a group: by iteration, :meth:`receive`, or :meth:`run`.

    Args:
        queue: the queue's name. Pass either ``queue`` or ``group``.
        group: a group's name, to receive from all queues whose setting ``group`` is this name.
        bootstrap_servers: one ``host:port``, or several separated by commas (default MARQ_BOOTSTRAP_SERVERS).
        lease: how long the consumer holds a message before it is redelivered, in seconds or as a timedelta (default:
            the queue's setting). The consumer renews its leases.
        max_lease: maximum time for which the consumer renews a lease; a handler that runs longer loses its lease
            (default: the queue's setting, which is 1 h unless changed).
        max_in_flight: maximum number of messages in flight, including prefetched ones (default 20,000). The consumer
            normally has about as many as it finishes in a second, but at least twice the ``concurrency`` of
            :meth:`run`.
        codec: decodes :attr:`Message.value`, unless the handler has a codec (default: values are bytes). It also gives
            the consumer its type: with ``codec=marq.Model(Order)`` it is a ``Consumer[Order]``.
        instance_id: a name for static membership: a restart within the session timeout does not move partitions. Each
            consumer of a group needs its own; if another one joins with the same id, this one stops with a ConfigError.
        shutdown_timeout: how long :meth:`stop` waits for running handlers (default 3 s).
        transactional: whether the consumer writes the marker and commits the offset in one Kafka transaction, and
            receives nothing from transactions that are open or aborted (default False). The setting ``transactional``
            of any of its queues has the same effect. Transactions avoid some duplicates when a consumer or a worker is
            killed, but cost throughput; see docs/guarantees.md.
        options: see :class:`marq.settings.client.ClientOptions`.
    """

    def __init__(
        self,
        queue: str | None = None,
        bootstrap_servers: str | Sequence[str] | None = None,
        *,
        group: str | None = None,
        lease: Duration | None = None,
        max_lease: Duration | None = None,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        codec: Codec[T_co] | None = None,
        instance_id: str | None = None,
        shutdown_timeout: Duration = DEFAULT_SHUTDOWN_TIMEOUT_S,
        transactional: bool = False,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._settings = ClientSettings.read(bootstrap_servers, options, owner="Consumer")
        self._membership = Membership(queue, group)
        super().__init__(f"the consumer of {self._membership}")
        self._lease_ms = None if lease is None else duration_ms("lease", lease, least_ms=100)
        self._max_lease_ms = None if max_lease is None else duration_ms("max_lease", max_lease, least_ms=100)
        if self._lease_ms is not None and self._max_lease_ms is not None and self._max_lease_ms < self._lease_ms:
            raise ConfigError(
                f"max_lease={max_lease!r} is shorter than lease={lease!r}, but a consumer holds each message for at"
                " least its lease: raise max_lease, or shorten lease"
            )
        self._max_in_flight = whole_number("max_in_flight", max_in_flight, most=MAX_MAX_IN_FLIGHT)
        self._codec = check_codec(codec)
        self._shutdown_timeout_s = duration_ms("shutdown_timeout", shutdown_timeout, most_ms=3_600_000) / 1000
        if instance_id is not None and (not isinstance(instance_id, str) or not instance_id):
            raise ConfigError(f"instance_id={instance_id!r}: expected text (str)")
        self._instance_id = instance_id
        if not isinstance(transactional, bool):
            raise ConfigError(f"transactional={transactional!r}: expected True or False")
        self._transactional = transactional
        #: True if the next stop releases prefetched messages.
        self._release = True
        self._yielded_s = 0.0
        #: The address that the consumer tells its group.
        self._url = ""

    @property
    def queue(self) -> str | None:
        """The queue's name; None for a consumer of a group."""
        return self._membership.queue

    @property
    def name(self) -> str:
        """The name of the queue or the group."""
        return self._membership.name

    @property
    def in_flight(self) -> int | None:
        """The number of messages in flight, including prefetched ones; None if stopped."""
        running = self._running  # read once: another thread may stop the consumer
        return None if running is None else running.prefetch.in_flight

    @property
    def processing(self) -> int | None:
        """The number of messages that your code is processing; None if stopped."""
        running = self._running
        return None if running is None else running.prefetch.processing

    @property
    def breakers(self) -> dict[str, str]:
        """The state of each queue's circuit breaker, for queues with one: "closed", "open", or "half-open"."""
        running = self._running
        breakers = {} if running is None else running.receiver.gate.breakers
        return {queue: breaker.state for queue, breaker in list(breakers.items())}

    async def _open(self, opened: AsyncExitStack) -> MemberSession:
        membership, cluster = self._membership, cluster_of(self._settings)
        queues = cluster.queues()
        opened.push_async_callback(queues.stop)
        topics = await cluster.topics()
        await queues.start()
        definitions = queues.definitions
        membership.refuse_empty(definitions)
        serving, refused = await membership.plan(cluster, self._settings.names, topics, definitions, {})
        if refused and len(refused) == len(membership.queues(definitions)):
            raise ConfigError(next(iter(refused.values())))
        settings = self._receiver_settings(topics, definitions)
        session = MemberSession(
            membership, self._settings, cluster, topics, queues, serving, settings, self._transactional,
            self._instance_id, self._url,
        )  # fmt: skip
        opened.push_async_callback(lambda: session.end(self._shutdown_timeout_s, release=self._release))
        await session.connect()
        session.start()
        return session

    def _hurry(self, running: MemberSession) -> None:
        running.hurry()

    def _receiver_settings(self, topics: Topics, definitions: Definitions) -> ReceiverSettings:
        settings = ReceiverSettings(
            lease_ms=self._lease_ms,
            max_in_flight=self._max_in_flight,
            max_lease_ms=self._max_lease_ms,
            markers_partitions=topics.markers_partitions,
            limit_bytes=topics.markers_limit_bytes,
            codec=self._codec,
            queue=definitions.settings,
            skipped=definitions.skipped,
            partitions=lambda queue: definitions.placement(queue).reads,
        )
        if self._lease_ms is not None or self._max_lease_ms is not None:
            for queue in self._membership.queues(definitions):
                settings.check_lease(queue, settings.lease_of(queue))
        return settings

    async def stop(self, release: bool = True) -> None:
        """Stop receiving, wait up to ``shutdown_timeout`` for handlers, write all outcomes, and leave the group.

        Prefetched messages are released, or with ``release=False`` redelivered when their leases end. Messages that you
        received by iteration or :meth:`receive` and have not settled stay leased until their leases end. Does nothing
        if the consumer is stopped. With the default timeout it returns within 10 s, even if the broker is gone.

        Raises:
            MarqError: a handler of this consumer made this call, which would wait for that handler.
        """
        running = self._running
        if running is not None and any(asyncio.current_task() in pool.tasks for pool in running.prefetch.pools):
            raise MarqError(
                f"the consumer of {self._membership}: stop() waits for handlers to end, so a handler can't await it;"
                " call asyncio.create_task(consumer.stop()) there, and keep the task"
            )
        async with self._changing:
            self._release = release
            await self._end()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message[T_co]:
        running = self._started()
        buffer = running.buffer
        now_s = running.cluster.now_s()
        if now_s - self._yielded_s > _YIELD_S:
            # A loop whose body never waits would starve acks, renewals and heartbeats.
            await asyncio.sleep(0)
            # Read the clock again: another task may have blocked the loop until a lease ended.
            self._yielded_s = now_s = running.cluster.now_s()
        while not buffer.closed:
            message = buffer.take(now_s)
            if message is not None:
                if await running.receiver.starts.started([message]):
                    running.receiver.starts.returned([message])
                    return message
                now_s = running.cluster.now_s()
                continue
            await running.cluster.within(None, running.wait(1))
            self._yielded_s = now_s = running.cluster.now_s()
        running.raise_error()
        raise StopAsyncIteration

    @point("receive")
    async def receive(
        self, max_messages: int = 100, wait: Duration = 20.0, lease: Duration | None = None
    ) -> list[Message[T_co]]:
        """Return up to ``max_messages`` as soon as any are available, or [] if none arrive within ``wait``.

        ``lease`` replaces the consumer's lease for these messages. Messages of an at-most-once queue are returned when
        their DISPATCH marker is durable. If the broker does not confirm it within ``wait``, or within 2 s if that is
        longer, the messages are released and the call returns [].

        Raises:
            ConfigError: the lease is longer than ``max_lease``.
            MarqError: the consumer can no longer receive; the error says why.
        """
        running = self._started()
        count = whole_number("max_messages", max_messages, most=MAX_MAX_IN_FLIGHT)
        wait_s = duration_ms("wait", wait) / 1000
        clock = asyncio.get_running_loop().time
        until_s = clock() + wait_s
        lease_ms = None if lease is None else duration_ms("lease", lease, least_ms=100)
        if lease_ms is not None:
            for queue in running.queues:
                running.receiver_settings.check_lease(queue, lease_ms)
        messages = running.take(count)
        if not messages:
            try:
                messages = await running.cluster.within(wait_s, running.take_some(count))
            except TimeoutError:
                # Some may have arrived at the same moment.
                messages = running.take(count)
        if not messages:
            running.raise_error()
        try:
            async with asyncio.timeout_at(max(until_s, clock() + DISPATCH_S)):
                messages = await running.receiver.starts.started(messages)
        except TimeoutError:
            return []
        if messages and lease_ms is not None:
            try:
                await running.hold(messages, lease_ms)
            except BaseException:
                # The caller never sees them. Without a release they would be held until max_lease.
                put_back(messages)
                raise
            messages = still_leased(messages, running.cluster.now_s())
        running.receiver.starts.returned(messages)
        return messages

    async def run(
        self, handler: Handler, concurrency: int | None = None, *, middleware: Sequence[Middleware] = ()
    ) -> None:
        """Call a handler for each message until the consumer is stopped.

        A coroutine function runs in this event loop, a plain function in a pool of ``concurrency`` threads. When it
        returns, the message is acked. ``raise Retry(delay=…)`` releases the message, ``raise Reject("why")``
        dead-letters it, and any other exception releases it with the queue's backoff.

        A coroutine function is cancelled when the lease of its message expires, because another consumer may then
        receive the message; a thread keeps running. If this call is cancelled, running handlers are cancelled and their
        messages released; the attempt does not count.

        Args:
            handler: takes the message, the value, or both, as for :func:`marq.handler`. If it is decorated, the
                decorator's concurrency and codec apply.
            concurrency: number of simultaneous calls (default: the decorator's, else 64).
            middleware: runs around each call, the first one outermost; see :func:`marq.middleware`.

        Raises:
            ConfigError: the handler takes other arguments, a middleware is not callable, or the handler is decorated,
                but not for a queue that the consumer serves now or later.
            MarqError: the consumer can no longer receive; the error says why.
        """
        check_handler(handler)
        for function in middleware:
            check_middleware(function)
        running = self._started()
        check = partial(definitions_for, handler)
        definitions = check(running.queues)
        for definition in definitions.values():
            warn_of_unpublished(definition, running.definitions.settings(definition.queue))
        if concurrency is None:
            decorated = [
                definition.settings["concurrency"]
                for definition in definitions.values()
                if "concurrency" in definition.settings
            ]
            concurrency = max(decorated, default=DEFAULT_CONCURRENCY)
        count = whole_number("concurrency", concurrency, most=MAX_CONCURRENCY)
        # Not only for these queues, because more queues may join the group.
        codecs = cache(partial(codec_of, handler))
        queues = {
            *running.queues,
            *(definition.queue for definition in definitions_of(handler) if definition.type is None),
        }
        has_codec = any(codecs(queue) is not None for queue in queues)
        chosen = codecs if has_codec else None
        pool = HandlerTasks(running.buffer, running.receiver, bound(handler), count, chosen, middleware)
        running.checks.append(check)
        try:
            await running.work(pool, self._shutdown_timeout_s)
        finally:
            running.checks.remove(check)

    async def run_batch(
        self,
        handler: BatchHandler,
        max_messages: int = DEFAULT_BATCH_MESSAGES,
        concurrency: int = DEFAULT_BATCH_CONCURRENCY,
    ) -> None:
        """Call a handler with lists of messages until the consumer is stopped.

        Each list contains the messages that are available, from 1 to ``max_messages`` (and at most ``max_in_flight``).
        When the handler returns, all messages that it has not settled are acked. If it raises an exception, it
        applies to all of these messages, as with :meth:`run`. Settle a single message with
        ``await message.reject("why", wait=False)``. A coroutine function is cancelled when the lease of one of its
        messages expires; the others that it has not settled are released with the queue's backoff.

        Args:
            handler: a coroutine function, or a plain function, which runs in a thread; not decorated.
            max_messages: maximum length of a list (default 1,000).
            concurrency: number of simultaneous calls (default 1).

        Raises:
            ConfigError: the handler can't be called with a list of messages.
            MarqError: the consumer can no longer receive; the error says why.
        """
        check_handler(handler, "a list of messages")
        if definitions_of(handler):
            raise ConfigError(f"run_batch({name_of(handler)}): a decorated handler takes one message; use run(handler)")
        size = whole_number("max_messages", max_messages, most=MAX_MAX_IN_FLIGHT)
        count = whole_number("concurrency", concurrency, most=MAX_CONCURRENCY)
        running = self._started()
        pool = BatchHandlerTasks(running.buffer, running.receiver, handler, count, size, self._max_in_flight)
        await running.work(pool, self._shutdown_timeout_s)

    @point("ack_many")
    async def ack(self, messages: Message | str | Iterable[Message | str]) -> None:
        """Ack one or several messages, given as messages or tokens; durable on return.

        Raises:
            LeaseLost: some leases ended before the acks were durable; these acks were written anyway.
            BrokerUnavailable: the consumer that received a message was stopped before its ack was durable.
            ValueError: a token is invalid.
        """
        running = self._started()
        items = [messages] if isinstance(messages, Message | str) else list(messages)
        tokens = [message_token.decode(item) for item in items if isinstance(item, str)]
        held = [item for item in items if not isinstance(item, str)]
        expiries = [message._expiry_s for message in held]
        for message in held:
            message._ack()
        receiver = running.receiver
        for token in tokens:
            receiver.writer.ack_by_token(token)
        # Each message is acked by the session that received it: another consumer's, or one before a restart.
        for keeper in dict.fromkeys([receiver.writer, *(message._batch.keeper for message in held)]):
            await keeper.settled()
        now_s = running.cluster.now_s()
        lost = [message.id for message, expiry_s in zip(held, expiries, strict=True) if expiry_s <= now_s]
        if lost:
            raise LeaseLost(
                f"{self._membership}: {len(lost)} of {len(held)} messages were acked after their leases expired,"
                f" so they may be delivered again; the first is {lost[0]}"
            )

    async def flush(self) -> None:
        """Wait until all outcomes so far are durable.

        Raises:
            BrokerUnavailable: the consumer was stopped first.
        """
        if self._running is not None:
            await self._running.receiver.writer.settled()
