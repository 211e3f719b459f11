"""The session of a consumer between start and stop: a receiver, its connections, and handler pools.

:class:`marq.Consumer`, the handlers of a worker and those of the in-memory broker run the same session. They differ in
their cluster (:mod:`marq.backend.cluster`), which creates writers and tells the time, and in their reader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from math import inf

from marq.backend.cluster import Cluster, DefinitionsView, WriterConnection
from marq.client.background import failure_of, until_set
from marq.client.current_producer import HandlersProducer
from marq.consumer.handler_pool import HandlerPool, HandlerTasks
from marq.consumer.membership import Check, Membership
from marq.consumer.prefetch import PrefetchBuffer
from marq.consumer.receiver import Receiver
from marq.handlers.lifespan import Resources
from marq.handlers.middleware import Middleware
from marq.handlers.typed import HandlersByType
from marq.kafka.group_reader import GroupMember
from marq.kafka.queue_records import Serving
from marq.kafka.topics import Topics
from marq.leases.message import Message
from marq.leases.receiver_settings import ReceiverSettings
from marq.queues.tracker_watch import watch_for_tracker
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.settings.queue import QueueSettings
from marq.wire.errors import BrokerUnavailable, ConfigError

log = logging.getLogger("marq")

#: How long a stop waits for a broker that does not answer: in all, at least after the handlers have ended, and for each
#: connection. It ends within 10 s even if the broker is gone.
STOP_S, STOP_ACKS_S, STOP_CLIENT_S = 5.0, 2.0, 1.0
#: Pause between two attempts to serve the queues of the current definitions.
RETRY_S = 1.0
#: The same while a queue's own topic can't be read. That may last for days.
TOPIC_RETRY_S = 5.0
#: Maximum number of queues in a log line.
SHOWN_QUEUES = 20
#: For a worker's handlers: maximum messages in flight per process, and how long a stop waits for handlers in tests.
WORKER_MAX_IN_FLIGHT, TESTS_SHUTDOWN_S = 10_000, 3.0

#: Returns what to serve now, and after how many seconds to plan again if nothing changes.
Plan = Callable[[], Awaitable[tuple[Serving, float]]]


class ConsumerSession:
    """A receiver and its handler pools; call :meth:`connect`, :meth:`start` and :meth:`stop` in this order.

    After the start, :meth:`follow` may follow the definitions of queues.

    ``group`` is the Kafka group of a reader that is a member itself and so can commit in transactions: those of queues
    that deliver at most once, or all if the session is ``transactional``.
    """

    def __init__(
        self,
        cluster: Cluster,
        topics: Topics,
        serving: Serving,
        reader: GroupMember,
        settings: ReceiverSettings,
        *,
        group: str | None = None,
        transactional: bool = False,
        instance_id: str | None = None,
        buffer: PrefetchBuffer | None = None,
    ) -> None:
        writer = cluster.writer(topics)
        transactions = None if group is None else cluster.transactions(topics, group, instance_id)
        acquirer = None if transactional and transactions is not None else cluster.acquirer(topics)
        connections: tuple[WriterConnection | None, ...] = (acquirer, transactions, writer)
        self._connections = [connection for connection in connections if connection is not None]
        #: Other connections are opened on first use.
        self._connected_first = [self._connections[0], writer]
        self.cluster = cluster
        self.pools: list[HandlerPool] = []
        self._serving, self._reader = serving, reader
        #: Set when the definitions have changed.
        self.changed = asyncio.Event()
        self._background: list[asyncio.Task[None]] = []
        self._ending = False
        self.receiver_settings = settings
        self.receiver = Receiver(
            serving,
            reader,
            acquirer,
            writer,
            settings,
            cluster,
            transactions=transactions,
            buffer=buffer,
        )
        self.prefetch = self.receiver.prefetch

    async def connect(self) -> None:
        """Connect to the brokers.

        Raises:
            BrokerUnavailable: no broker answered in time, or it refused.
        """
        for connection in self._connected_first:
            await connection.start()

    def start(self) -> None:
        """Start receiving; messages arrive once partitions are assigned."""
        self.receiver.start()

    def follow(self, plan: Plan) -> None:
        """Serve what ``plan`` returns, now and from each change on; receiving stops for good if it raises."""
        following = asyncio.create_task(self._follow(plan), name="marq-definitions")
        following.add_done_callback(self._following_ended)
        self._background.append(following)

    async def _follow(self, plan: Plan) -> None:
        while True:
            # Before the definitions are read, so that no later change is missed.
            self.changed.clear()
            wanted, again_s = await plan()
            if wanted != self._serving:
                await self.receiver.serve(wanted, self._reader.serve)
                self._serving = wanted
            await until_set(self.changed, again_s, self.cluster.sleep)

    def _following_ended(self, task: asyncio.Task[None]) -> None:
        if (error := failure_of(task, stopping=self._ending)) is not None:
            self.receiver.fail(error)

    async def unfollow(self) -> None:
        """Follow no more changes."""
        self._ending = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def add(self, pool: HandlerPool) -> None:
        """Start a handler pool."""
        pool.start()
        self.pools.append(pool)
        self.receiver.demand()

    async def work(self, pool: HandlerPool, shutdown_s: float) -> None:
        """Run a handler pool to its end; running handlers may finish for ``shutdown_s`` after an error.

        Raises:
            MarqError: receiving has stopped for good.
        """
        self.add(pool)
        try:
            await self._done_or_failed([pool])
            if self.receiver.error is not None:
                await asyncio.wait(pool.tasks, timeout=shutdown_s)
        finally:
            # No handler keeps running after this call, however it ends.
            await pool.stop(0)
            self.pools.remove(pool)
        self.raise_error()

    async def done(self) -> None:
        """Return when all handler pools have ended.

        Raises:
            MarqError: receiving has stopped for good; handlers may still be running.
        """
        await self._done_or_failed(self.pools)
        self.raise_error()

    async def _done_or_failed(self, pools: Sequence[HandlerPool]) -> None:
        """Return when all pools have ended, or when receiving has stopped for good: a handler may never return."""
        done = asyncio.create_task(_done(pools))
        failed = asyncio.create_task(self.receiver.failed.wait())
        try:
            await asyncio.wait([done, failed], return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                done.result()
        finally:
            done.cancel()
            failed.cancel()

    def raise_error(self) -> None:
        """Raise the error that stopped receiving, if there is one."""
        if self.receiver.error is not None:
            raise self.receiver.error

    async def stop(self, shutdown_s: float, *, release: bool = True) -> None:
        """Stop receiving, release prefetched messages, wait for handlers, and write their outcomes."""
        self.prefetch.close()
        clock = asyncio.get_running_loop().time
        until_s = clock() + STOP_S
        handlers = asyncio.create_task(self._stop_handlers(shutdown_s))
        released, ended_s = await asyncio.gather(self._stop_reading(handlers, release=release), handlers)
        queues = ",".join(self.prefetch.buffers)
        if not await self.receiver.stop(max(until_s, ended_s + STOP_ACKS_S) - clock()):
            log.warning("stopped before all outcomes were written: queue=%s; their leases will expire", queues)
        elif released:
            log.info("released prefetched messages: queue=%s messages=%d", queues, released)

    async def _stop_handlers(self, shutdown_s: float) -> float:
        """Stop the handler pools, and return when they had ended, in the event loop's time."""
        await asyncio.gather(*[pool.stop(self.shutdown_s_of(pool, shutdown_s)) for pool in self.pools])
        return asyncio.get_running_loop().time()

    def shutdown_s_of(self, pool: HandlerPool, shutdown_s: float) -> float:
        """Return how long a stop waits for the handlers of a pool."""
        return shutdown_s

    async def _stop_reading(self, handlers: asyncio.Task[float], *, release: bool) -> int:
        """Stop receiving, and release prefetched messages if asked to; return how many were released."""
        # Do not wait for the handlers first. No other consumer could have the messages until then, and a lease that
        # reaches `max_lease` meanwhile would count an attempt that no handler saw.
        released = self.prefetch.release() if release else 0
        await self.receiver.stop_reading(STOP_S, handlers)
        # Release again: cycles in progress have delivered messages, which would wait until their leases end.
        return released + (self.prefetch.release() if release else 0)

    def hurry(self) -> None:
        """Stop waiting for handlers during a stop."""
        for pool in self.pools:
            pool.hurry()

    async def disconnect(self) -> None:
        await asyncio.gather(*[connection.stop(STOP_CLIENT_S) for connection in self._connections])


async def _done(pools: Sequence[HandlerPool]) -> None:
    # A task of its own: a gathering that is cancelled and not awaited would log a traceback.
    await asyncio.gather(*[pool.done() for pool in pools])


# --- a member of a group ----------------------------------------------------------------------------------------------


class MemberSession(ConsumerSession):
    """The session of a :class:`marq.Consumer`: it joins a group and follows the definitions of queues."""

    def __init__(
        self,
        membership: Membership,
        settings: ClientSettings,
        cluster: Cluster,
        topics: Topics,
        queues: DefinitionsView,
        serving: Serving,
        receiver_settings: ReceiverSettings,
        transactional: bool,
        instance_id: str | None,
        url: str,
    ) -> None:
        self._membership = membership
        self._settings = settings
        self._topics = topics
        self._queues = queues
        #: The current definitions.
        self.definitions = definitions = queues.definitions
        #: Why some queues are not served yet.
        self._refused: dict[str, str] = {}
        #: Called with queues before they are served.
        self.checks: list[Check] = [self._check_group]
        self._group = membership.kafka_group(settings.names, definitions)
        transactional = transactional or any(definitions.settings(queue).transactional for queue in serving.queues)
        # A redelivery from an aborted transaction could end on its own, as a second dead letter with the same id.
        reader = cluster.member(self._group, serving, instance_id, committed=transactional, url=url)
        self.buffer = PrefetchBuffer(membership.name, ahead=receiver_settings.prefetch)
        super().__init__(
            cluster,
            topics,
            serving,
            reader,
            receiver_settings,
            group=self._group,
            transactional=transactional,
            instance_id=instance_id,
            buffer=self.buffer,
        )

    async def connect(self) -> None:
        await super().connect()
        await self._reader.start(self.receiver)

    def start(self) -> None:
        super().start()
        self._queues.listen(self.changed.set)
        # Queues may have been defined while the consumer joined its group.
        self.follow(self._plan)
        watching = asyncio.create_task(watch_for_tracker(self.cluster.tracker_runs, self._settings), name="marq-watch")
        self._background.append(watching)

    @property
    def queues(self) -> list[str]:
        """The queues to serve now."""
        return self._membership.queues(self.definitions)

    async def _plan(self) -> tuple[Serving, float]:
        """Return what to serve now; queues of a group that can't be served are left out, and tried again."""
        self.receiver.apply_settings()
        names, served = self._settings.names, self._serving.own_topics
        try:
            wanted, refused = await self._membership.plan(
                self.cluster, names, self._topics, self.definitions, served, self.checks
            )
        except BrokerUnavailable as error:
            log.warning("%s: the definitions have changed, retrying: %s", self._membership, error)
            return self._serving, RETRY_S
        for queue, reason in refused.items():
            if reason != self._refused.get(queue):
                log.error("%s: queue not served, retrying: queue=%s error=%s", self._membership, queue, reason)
        self._refused = refused
        if wanted != self._serving:
            log.info("%s: queues served from now on: %s", self._membership, _shortened(wanted.queues))
        return wanted, TOPIC_RETRY_S if refused else inf

    def _check_group(self, queues: Collection[str]) -> None:
        if self._membership.kafka_group(self._settings.names, self.definitions) != self._group:
            group = self.definitions.group(self._membership.name)
            raise ConfigError(
                f"{self._membership} now belongs to another group, whose consumers continue where this one stopped:"
                f" start {f'Consumer(group={group!r})' if group else 'the consumer'} instead"
            )

    # --- calls that wait for messages ---------------------------------------------------------------------------------

    def take(self, count: int) -> list[Message]:
        """Return at most ``count`` messages that are available."""
        return self.buffer.take_many(count, self.cluster.now_s())

    async def wait(self, count: int) -> None:
        """Ask for ``count`` messages, and return when some may be available."""
        buffer = self.buffer
        self.receiver.writer.flush_soon()
        buffer.call_demand += count
        self.receiver.demand()
        try:
            await buffer.wait()
        finally:
            buffer.call_demand -= count

    async def take_some(self, count: int) -> list[Message]:
        """Wait for at most ``count`` messages; return [] when no further messages will arrive."""
        while not (messages := self.take(count)) and not self.buffer.closed:
            await self.wait(count)
        return messages

    async def hold(
        self, messages: Sequence[Message], lease_ms: int, *, ends: bool = False, started: bool = False
    ) -> None:
        """Lease messages for ``lease_ms`` from now on, and renew them for as long again unless the lease ``ends``.

        The lease is durable on return.
        """
        self.receiver.hold(messages, lease_ms, ends=ends, started=started)
        await self.receiver.writer.settled()

    async def end(self, shutdown_s: float, *, release: bool) -> None:
        """Stop and leave the group; after :meth:`hurry` it does not wait for handlers any longer."""
        try:
            await self.stop(shutdown_s, release=release)
        finally:
            await self.unfollow()
            await asyncio.gather(self.disconnect(), self._reader.stop(STOP_CLIENT_S), self._queues.stop())


def _shortened(queues: Sequence[str]) -> str:
    more = f" and {len(queues) - SHOWN_QUEUES} more" if len(queues) > SHOWN_QUEUES else ""
    return ", ".join(queues[:SHOWN_QUEUES]) + more or "none"


# --- a worker's handlers ----------------------------------------------------------------------------------------------


class HandlersSession(ConsumerSession):
    """The session of a worker's handlers: a pool for each queue, a producer for ``handler.send``, and resources.

    ``group`` is the Kafka group of a transactional session, whose reader can commit in transactions. A stop waits for
    handlers for ``shutdown_s``, or for the ``shutdown_timeout`` of their queue, but at most for ``shutdown_limit_s``.
    While it is ``quiet``, it takes no more messages, as if all queues were paused.
    """

    def __init__(
        self,
        cluster: Cluster,
        topics: Topics,
        serving: Serving,
        reader: GroupMember,
        definitions: Definitions,
        handlers: Mapping[str, HandlersByType],
        producer: HandlersProducer,
        chain: Sequence[Middleware],
        resources: Resources,
        *,
        group: str | None = None,
        instance_id: str | None = None,
        shutdown_s: float = TESTS_SHUTDOWN_S,
        shutdown_limit_s: float = inf,
        quiet: bool = False,
    ) -> None:
        self._definitions = definitions
        self._quiet = quiet
        codecs = {queue: by_type.codec for queue, by_type in handlers.items() if by_type.codec is not None}
        settings = ReceiverSettings(
            max_in_flight=WORKER_MAX_IN_FLIGHT,
            markers_partitions=topics.markers_partitions,
            limit_bytes=topics.markers_limit_bytes,
            codecs=codecs,
            queue=self._settings,
            skipped=definitions.skipped,
            partitions=lambda queue: definitions.placement(queue).reads,
        )
        super().__init__(
            cluster,
            topics,
            serving,
            reader,
            settings,
            group=group,
            transactional=group is not None,
            instance_id=instance_id,
        )
        self._producer = producer
        self._handlers = handlers
        self._chain = chain
        self._resources = resources
        self._shutdown_s, self._shutdown_limit_s = shutdown_s, shutdown_limit_s

    def _settings(self, queue: str) -> QueueSettings:
        settings = self._definitions.settings(queue)
        return replace(settings, paused=True) if self._quiet else settings

    def set_quiet(self, quiet: bool) -> None:
        """Take no more messages, or take messages again."""
        self._quiet = quiet
        self.receiver.apply_settings()

    async def connect(self) -> None:
        """Connect, and open the resources."""
        await super().connect()
        with self._producer.current():
            self.receiver.writer.state = await self._resources.open(self.receiver.fail)

    def start(self) -> None:
        super().start()
        for queue, handlers in self._handlers.items():
            concurrency = self._definitions.settings(queue).concurrency
            buffer = self.prefetch.buffers[queue]
            with self._producer.current():
                self.add(HandlerTasks(buffer, self.receiver, handlers, concurrency, chain=self._chain))

    def shutdown_s_of(self, pool: HandlerPool, shutdown_s: float) -> float:
        # As the settings are now: a change applies to processes that run already.
        own_ms = self._definitions.settings(pool.queue).shutdown_timeout_ms
        return min(shutdown_s if own_ms is None else own_ms / 1000, self._shutdown_limit_s)

    async def close(self) -> None:
        """Stop, close the resources when no handler needs them, and disconnect.

        Raises:
            MarqError: a lifespan raised.
        """
        async with AsyncExitStack() as ends:
            ends.push_async_callback(self.disconnect)
            ends.push_async_callback(self._producer.stop)
            ends.push_async_callback(self._resources.close)
            await self.unfollow()
            await self.stop(self._shutdown_s)
