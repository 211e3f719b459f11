"""The consumer: leases messages of one queue, or of a group of queues, and finishes them one by one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from marq import token
from marq.batches import DEFAULT_CONCURRENCY as DEFAULT_BATCH_CONCURRENCY
from marq.batches import DEFAULT_MAX_MESSAGES, BatchHandler, BatchWorkers
from marq.cluster import Connection, cluster_of
from marq.codecs import Codec, check_codec
from marq.connection import to_its_end
from marq.core.definitions import Definitions
from marq.core.errors import BrokerUnavailable, ConfigError, LeaseLost, MarqError
from marq.core.queue import AT_MOST_ONCE, QueueSettings
from marq.crew import Crew
from marq.durations import Duration, duration_ms, plain_seconds
from marq.flow import Flow
from marq.flow_settings import FlowSettings
from marq.handlers import DEFAULT_CONCURRENCY, Handler, check_handler, definitions_for, definitions_of
from marq.membership import Membership
from marq.message import Message
from marq.reader import GroupMember
from marq.serving import Serving
from marq.settings import ClientOptions, ClientSettings, whole_number
from marq.shelf import Shelf
from marq.spending import release_unseen, seen_once
from marq.starts import MARKED, TRANSACTIONAL, check_start
from marq.topics import Topics
from marq.watch import watch_for_tracker
from marq.words import missing
from marq.workers import STOP_CLIENT_S, Workers, wind_down

log = logging.getLogger("marq")

DEFAULT_MAX_LEASE_S = 3600.0
DEFAULT_MAX_IN_FLIGHT = 20_000
DEFAULT_GRACE_S = 3.0
MAX_CONCURRENCY = 10_000
MAX_MAX_IN_FLIGHT = 1_000_000
#: Between two attempts to serve what the definitions say.
RETRY_S = 1.0
#: Of a group's queues in a log line.
SHOWN_QUEUES = 20
#: An iteration lets others have their turn at least this often.
_TURN_S = 0.005
#: A SPEND marker may take this long, even if less of the time to wait is left.
SPEND_S = 2.0


class Consumer:
    """Receives the messages of a queue, or of all queues of a group: by iteration, :meth:`receive`, or :meth:`run`.

    Args:
        queue: the queue's name; or
        group: a group's name: all queues whose settings name it are served, with one read of the topic.
        bootstrap_servers: ``host:port``, several separated by commas; else MARQ_BOOTSTRAP_SERVERS.
        lease: how long a message is held before it is delivered to somebody else, unless it is renewed, which happens
            by itself; seconds or timedelta; without it what the queue's settings say.
        max_lease: until when it renews itself: a handler that hangs loses its message then.
        max_in_flight: maximum number of messages in flight, prefetched ones included (default 20,000). The consumer
            holds about as many as it finishes in a second, and never fewer than twice the ``concurrency`` of
            :meth:`run`: with ``concurrency=5`` and slow handlers it holds 10, however large ``max_in_flight`` is.
        codec: what decodes :attr:`Message.value`; bytes without it.
        instance_id: a name for static membership: a restart within the session timeout moves no partitions. Each
            consumer of a group needs its own: if another one joins with the same id, this one stops with a ConfigError.
        grace: how long :meth:`stop` waits for handlers that run.
        start: ``"transactional"`` writes the marker and commits the offset in one Kafka transaction, and receives
            nothing from transactions that are open or aborted. That avoids some duplicates when a consumer or a worker
            is killed, but costs throughput (docs/guarantees.md). The default, ``"marked"``, writes the marker first.
        options: see :class:`marq.settings.ClientOptions`.
    """

    def __init__(
        self,
        queue: str | None = None,
        bootstrap_servers: str | Sequence[str] | None = None,
        *,
        group: str | None = None,
        lease: Duration | None = None,
        max_lease: Duration = DEFAULT_MAX_LEASE_S,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        codec: Codec | None = None,
        instance_id: str | None = None,
        grace: Duration = DEFAULT_GRACE_S,
        start: str = MARKED,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._settings = ClientSettings.read(bootstrap_servers, options, owner="Consumer")
        self._membership = Membership(queue, group)
        self._lease_ms = None if lease is None else duration_ms("lease", lease, least_ms=100)
        self._max_lease_ms = duration_ms("max_lease", max_lease, least_ms=100)
        if self._lease_ms is not None and self._max_lease_ms < self._lease_ms:
            raise ConfigError(
                f"max_lease={max_lease!r} is shorter than lease={lease!r}, but a consumer holds each message for at"
                " least its lease: raise max_lease, or shorten lease"
            )
        self._max_in_flight = whole_number("max_in_flight", max_in_flight, most=MAX_MAX_IN_FLIGHT)
        self._codec = check_codec(codec)
        self._grace_s = duration_ms("grace", grace, most_ms=3_600_000) / 1000
        if instance_id is not None and (not isinstance(instance_id, str) or not instance_id):
            raise ConfigError(f"instance_id={instance_id!r}: expected text (str)")
        self._instance_id = instance_id
        self._start = check_start(start)
        self._running: _Running | None = None
        self._stopped = False
        self._yielded_s = 0.0
        self._changing: asyncio.Lock | None = None

    @property
    def queue(self) -> str | None:
        """The queue's name; None for a consumer of a group."""
        return self._membership.queue

    @property
    def name(self) -> str:
        """The name of the queue or the group."""
        return self._membership.name

    @property
    def holding(self) -> tuple[int, int] | None:
        """How many messages are leased and not finished, and how many of these somebody works on; None: stopped."""
        running = self._running
        return None if running is None else (running.flow.held, running.flow.taken)

    @property
    def breakers(self) -> dict[str, str]:
        """The state of the circuit breaker of each queue that has one: "closed", "open", or "half-open"."""
        running = self._running
        return {} if running is None else {name: each.state for name, each in running.flow.rules.breakers.items()}

    async def start(self) -> None:
        """Join the queue's group; does nothing when started.

        Raises:
            BrokerUnavailable: no broker answered within the connect timeout, or it refused.
            ConfigError: a topic's setting is wrong, or the queue belongs to another group.
        """
        async with self._lock():
            if self._running is None:
                running = _Running(self._membership, self._settings)
                await running.start(self._flow_settings, self._start, self._instance_id)
                self._running, self._stopped = running, False

    def _flow_settings(self, topics: Topics, definitions: Definitions) -> FlowSettings:
        own = self._lease_ms
        return FlowSettings(
            lease_ms=QueueSettings().lease_ms if own is None else own,
            leases_ms={} if own is not None else _Leases(self._membership, definitions),
            max_in_flight=self._max_in_flight,
            max_lease_ms=self._max_lease_ms,
            markers_partitions=topics.markers_partitions,
            limit_bytes=topics.markers_limit_bytes,
            codec=self._codec,
            queue=definitions.settings,
            purge=definitions.purge,
        )

    async def stop(self, release: bool = True) -> None:
        """Stop receiving, let handlers end within the grace, write what was decided, and leave the group.

        With ``release`` messages that were prefetched and not taken are given back at once, else when their leases end.
        What was taken by iteration or :meth:`receive` and has no outcome stays leased until its lease ends. Does
        nothing when stopped; ends within 10 s (with the default grace) also when the broker is gone.

        Raises:
            MarqError: called by a handler of this consumer, for whose end it would wait.
        """
        if self._running is not None and asyncio.current_task() in self._running.workers:
            raise MarqError(
                f"the consumer of {self._membership}: stop() waits for handlers to end, so a handler can't await it;"
                " call asyncio.create_task(consumer.stop()) there, and keep the task"
            )
        async with self._lock():
            running, self._running = self._running, None
            if running is not None:
                self._stopped = True
                await running.stop(self._grace_s, release)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        running = self._started()
        shelf, flow = running.shelf, running.flow
        now_s = running.cluster.now_s()
        if now_s - self._yielded_s > _TURN_S:
            # A loop whose body never waits would starve acks, renewals and heartbeats.
            await asyncio.sleep(0)
            self._yielded_s = now_s
        while not shelf.closed:
            message = shelf.take(now_s)
            if message is not None:
                if await seen_once([message]):
                    return message
                now_s = running.cluster.now_s()
                continue
            flow.outbox.flush_soon()
            await running.cluster.within(None, _wait(running, 1))
            self._yielded_s = now_s = running.cluster.now_s()
        if flow.error is not None:
            raise flow.error
        raise StopAsyncIteration

    async def receive(
        self, max_messages: int = 100, wait: Duration = 20.0, lease: Duration | None = None
    ) -> list[Message]:
        """Return up to ``max_messages``, as soon as there are any; [] when nothing came within ``wait``.

        Messages of a queue that delivers at most once are returned when their SPEND marker is durable. If the broker
        does not confirm it within ``wait``, or within 2 s if that is longer, they are released and the answer is [].

        ``lease``: how long these are held, and by how much they renew themselves, instead of the consumer's lease.

        Raises:
            ConfigError: the lease is longer than ``max_lease``.
            MarqError: receiving has stopped for good, for the reason that it says.
        """
        running = self._started()
        count = whole_number("max_messages", max_messages, most=MAX_MAX_IN_FLIGHT)
        wait_s = duration_ms("wait", wait) / 1000
        clock = asyncio.get_running_loop().time
        until_s = clock() + wait_s
        lease_ms = None if lease is None else duration_ms("lease", lease, least_ms=100)
        if lease_ms is not None and lease_ms > self._max_lease_ms:
            raise ConfigError(
                f"lease={lease!r} is longer than max_lease ({plain_seconds(self._max_lease_ms)} s): pass a"
                " shorter lease, or make the consumer with a longer max_lease"
            )
        messages = _take(running, count)
        if not messages:
            try:
                messages = await running.cluster.within(wait_s, _await_some(running, count))
            except TimeoutError:
                # Something may have come in the very moment.
                messages = _take(running, count)
        if not messages and running.flow.error is not None:
            raise running.flow.error
        try:
            async with asyncio.timeout_at(max(until_s, clock() + SPEND_S)):
                messages = await seen_once(messages)
        except TimeoutError:
            return []
        if messages and lease_ms is not None:
            try:
                await running.flow.hold(messages, lease_ms)
            except BaseException:
                # The caller never sees them. Without a release they would be held until max_lease.
                release_unseen(messages)
                raise
        return messages

    async def run(self, handler: Handler, concurrency: int | None = None) -> None:
        """Call a handler for each message until the consumer is stopped; so many at a time.

        A coroutine function runs in this event loop, a plain function in a pool of ``concurrency`` threads. When it
        returns, the message is acked. ``raise Retry(delay=…)`` releases it, ``raise Reject("why")`` makes it a dead
        letter, any other exception releases it with the queue's backoff.

        A coroutine function is cancelled when the lease of its message is over, because somebody else may have the
        message then; a thread goes on. When this call is cancelled, handlers that run are cancelled, too, and their
        messages released without counting the attempt.

        Args:
            handler: may be decorated with :func:`marq.handler`, whose concurrency and codec then hold.
            concurrency: calls at a time; 64 unless this or the decorator says otherwise.

        Raises:
            ConfigError: the handler can't be called with a message, or is decorated for another queue.
            MarqError: receiving has stopped for good, for the reason that it says.
        """
        check_handler(handler)
        running = self._started()
        said = definitions_for(handler, running.queues)
        if concurrency is None:
            given = [each.concurrency for each in said.values() if each.concurrency is not None]
            concurrency = max(given, default=DEFAULT_CONCURRENCY)
        count = whole_number("concurrency", concurrency, most=MAX_CONCURRENCY)
        codecs = {queue: each.codec for queue, each in said.items() if each.codec is not None}
        await running.work(Workers(running.shelf, running.flow.outbox, handler, count, codecs))

    async def run_batch(
        self,
        handler: BatchHandler,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        concurrency: int = DEFAULT_BATCH_CONCURRENCY,
    ) -> None:
        """Call a handler with lists of messages until the consumer is stopped.

        A list has from 1 to ``max_messages`` messages (and no more than the consumer's ``max_in_flight``): what is
        there, without waiting for more. When the handler returns, all messages of the list that have no outcome of
        their own are acked. What it raises holds for all of these: ``Retry``, ``Reject``, or with any other exception
        the queue's backoff. A message that ends differently is told so: ``await message.reject("why", wait=False)``.

        A coroutine function is cancelled when the lease of a message of its list is over; what it still holds of the
        list is released with the queue's backoff. All else is as with :meth:`run`.

        Args:
            handler: a coroutine function, or a plain function, which runs in a thread; not decorated.
            max_messages: the longest list.
            concurrency: lists at a time.

        Raises:
            ConfigError: the handler can't be called with a list of messages.
            MarqError: receiving has stopped for good, for the reason that it says.
        """
        check_handler(handler, "a list of messages")
        if definitions_of(handler):
            raise ConfigError(f"run_batch({handler!r}): a decorated handler takes one message; use run(handler)")
        size = whole_number("max_messages", max_messages, most=MAX_MAX_IN_FLIGHT)
        count = whole_number("concurrency", concurrency, most=MAX_CONCURRENCY)
        running = self._started()
        await running.work(BatchWorkers(running.shelf, running.flow.outbox, handler, count, size, self._max_in_flight))

    async def ack(self, messages: Message | str | Iterable[Message | str]) -> None:
        """Finish a message, several of them, or one named by its token; durable on return.

        Raises:
            LeaseLost: some leases ran out before; their acks were written all the same.
            ValueError: a token can't be read.
        """
        running = self._started()
        given = [messages] if isinstance(messages, Message | str) else list(messages)
        tokens = [token.decode(each) for each in given if isinstance(each, str)]
        held = [each for each in given if not isinstance(each, str)]
        expiries = [message._expiry_s for message in held]
        for message in held:
            message._ack_later()
        for each in tokens:
            running.flow.ack_by_token(each)
        await running.flow.outbox.settled(wait=True)
        now_s = running.cluster.now_s()
        lost = [message.id for message, expiry_s in zip(held, expiries, strict=True) if expiry_s <= now_s]
        if lost:
            raise LeaseLost(
                f"{self._membership}: {len(lost)} of {len(held)} messages were acked after their leases had run out,"
                f" so they may be delivered again; the first is {lost[0]}"
            )

    async def flush(self) -> None:
        """Return when all outcomes that were decided so far are durable.

        Raises:
            BrokerUnavailable: the consumer was stopped before that.
        """
        if self._running is not None:
            await self._running.flow.outbox.settled(wait=True)

    def __getattr__(self, name: str) -> Any:
        raise missing("Consumer", name)

    def _started(self) -> _Running:
        if self._running is None:
            state, advice = (
                ("was stopped", "await start() to receive again")
                if self._stopped
                else ("is not started", "use `async with` or await start()")
            )
            raise MarqError(f"the consumer of {self._membership} {state}: {advice}")
        return self._running

    def _lock(self) -> asyncio.Lock:
        if self._changing is None:
            self._changing = asyncio.Lock()
        return self._changing


class _Running:
    """What exists between start and stop."""

    def __init__(self, membership: Membership, settings: ClientSettings) -> None:
        self.cluster = cluster_of(settings)
        self.crews: list[Crew[Any]] = []
        self.shelf = Shelf(membership.name)
        self.flow: Flow
        self._membership = membership
        self._settings = settings
        self._queues = self.cluster.queues()
        self._connections: list[Connection] = []
        self._reader: GroupMember | None = None
        self._group = ""
        self._background: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def start(
        self, flow_settings: Callable[[Topics, Definitions], FlowSettings], how: str, instance_id: str | None
    ) -> None:
        membership, cluster, names = self._membership, self.cluster, self._settings.names
        try:
            topics = await cluster.topics()
            await self._queues.start()
            # From here on, for joining the group takes its time: a queue that joins meanwhile is served, too.
            self._queues.listen(self._changed.set)
            definitions = self._queues.definitions
            serving = membership.serving(names, definitions)
            membership.refuse_empty(definitions)
            await cluster.own_topics(serving.own_topics.values(), topics)
            self._group = membership.kafka_group(names, definitions)
            # A redelivery of an aborted transaction has its own end, perhaps as a second dead letter with the same id.
            committed = how == TRANSACTIONAL or any(
                definitions.settings(each).delivery == AT_MOST_ONCE for each in serving.queues
            )
            reader = cluster.member(self._group, serving, instance_id, committed=committed)
            start, starting = cluster.start(how, topics, reader, self._group, instance_id)
            once = start
            if how != TRANSACTIONAL:
                # Connected when there is something to start at most once, if ever.
                once, transactions = cluster.start(TRANSACTIONAL, topics, reader, self._group, instance_id)
                self._connections.append(transactions)
            settler = cluster.writer(topics)
            for connection in (starting, settler):
                self._connections.append(connection)
                await connection.start()
            self._reader = reader
            self.flow = Flow(
                serving,
                reader,
                start,
                settler,
                flow_settings(topics, definitions),
                once=once,
                shelf=self.shelf,
                clock=cluster.now_s,
                wall=cluster.wall_s,
                sleep=cluster.sleep,
            )
            await reader.start(self.flow)
        except BaseException:
            await to_its_end(self._close())
            raise
        self.flow.start()
        self._background = [
            asyncio.create_task(self._follow(serving, topics), name="marq-definitions"),
            asyncio.create_task(watch_for_tracker(cluster.tracker_runs, self._settings), name="marq-watch"),
        ]

    async def _follow(self, serving: Serving, topics: Topics) -> None:
        """Serve what the definitions say, as they change."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                wanted = self._membership.serving(self._settings.names, self._queues.definitions)
                self._check_group()
                self.flow.look_at_pauses()
                if wanted != serving:
                    await self.cluster.own_topics(wanted.own_topics.values(), topics)
                    assert self._reader is not None
                    log.info("%s: queues served from now on: %s", self._membership, _some(wanted.queues))
                    await self.flow.serve(wanted, self._reader.serve)
                    serving = wanted
            except BrokerUnavailable as error:
                log.warning("%s: the definitions have changed, trying again: %s", self._membership, error)
                await self.cluster.sleep(RETRY_S)
                self._changed.set()
            except MarqError as error:
                self.flow.fail(error)
                return

    def _check_group(self) -> None:
        definitions = self._queues.definitions
        if self._membership.kafka_group(self._settings.names, definitions) != self._group:
            group = definitions.group(self._membership.name)
            raise ConfigError(
                f"{self._membership} belongs to another group now, whose consumers go on where this one ends: start"
                f" {f'Consumer(group={group!r})' if group else 'the consumer'} instead"
            )

    @property
    def queues(self) -> list[str]:
        """The queues that are served now."""
        return self._membership.queues(self._queues.definitions)

    async def work(self, crew: Crew[Any]) -> None:
        """Let workers work until the end.

        Raises:
            MarqError: receiving has stopped for good.
        """
        crew.start()
        self.crews.append(crew)
        self.flow.demand()
        try:
            await crew.done()
        finally:
            # Cancelled, or a worker failed, or receiving did: no handler runs on after this call.
            await crew.stop(0)
            if crew in self.crews:
                self.crews.remove(crew)
        if self.flow.error is not None:
            raise self.flow.error

    @property
    def workers(self) -> set[asyncio.Task[None]]:
        """The tasks that call handlers."""
        return {task for crew in self.crews for task in crew.tasks}

    async def stop(self, grace_s: float, release: bool) -> None:
        """End, also when that is cancelled: then without grace, but a member that stayed would hold its partitions."""
        await to_its_end(self._wind_down(grace_s, release), self._hurry)

    async def _wind_down(self, grace_s: float, release: bool) -> None:
        await wind_down(self.flow, self.crews, grace_s, release=release)
        await self._close()

    def _hurry(self) -> None:
        for crew in self.crews:
            crew.hurry()

    async def _close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        closing = [connection.stop(STOP_CLIENT_S) for connection in self._connections]
        if self._reader is not None:
            closing.append(self._reader.stop(STOP_CLIENT_S))
        await asyncio.gather(*closing, self._queues.stop())


def _some(queues: Sequence[str]) -> str:
    more = f" and {len(queues) - SHOWN_QUEUES} more" if len(queues) > SHOWN_QUEUES else ""
    return ", ".join(queues[:SHOWN_QUEUES]) + more or "none"


class _Leases(Mapping[str, int]):
    """What the settings of the queues that are served say now, in ms."""

    def __init__(self, membership: Membership, definitions: Definitions) -> None:
        self._membership = membership
        self._definitions = definitions

    def __getitem__(self, queue: str) -> int:
        return self._definitions.settings(queue).lease_ms

    def __iter__(self) -> Iterator[str]:
        return iter(self._membership.queues(self._definitions))

    def __len__(self) -> int:
        return len(self._membership.queues(self._definitions))


async def _wait(running: _Running, count: int) -> None:
    """Wait on the shelf for messages, and let the flow know how many are wanted."""
    shelf = running.shelf
    shelf.asked += count
    running.flow.demand()
    try:
        await shelf.wait()
    finally:
        shelf.asked -= count


async def _await_some(running: _Running, count: int) -> list[Message]:
    while True:
        messages = _take(running, count)
        if messages or running.shelf.closed:
            return messages
        running.flow.outbox.flush_soon()
        await _wait(running, count)


def _take(running: _Running, count: int) -> list[Message]:
    now_s = running.cluster.now_s()
    messages: list[Message] = []
    while len(messages) < count and (message := running.shelf.take(now_s)) is not None:
        messages.append(message)
    return messages
