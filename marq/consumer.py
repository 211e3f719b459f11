"""The consumer: leases messages of one queue and finishes them one by one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from marq import token
from marq.core.errors import ConfigError, LeaseLost, MarqError
from marq.core.names import check_queue_name
from marq.durations import Duration, duration_ms
from marq.flow import Flow, FlowSettings
from marq.message import Message
from marq.reader import GroupReader
from marq.settings import ClientOptions, ClientSettings, whole_number
from marq.shelf import Shelf
from marq.topics import ensure_topics
from marq.watch import watch_for_tracker
from marq.words import missing
from marq.workers import STOP_CLIENT_S, Handler, Workers, check_handler, wind_down
from marq.writer import KafkaMarkerWriter

log = logging.getLogger("marq")

DEFAULT_LEASE_S = 30.0
DEFAULT_MAX_LEASE_S = 3600.0
DEFAULT_MAX_IN_FLIGHT = 10_000
DEFAULT_GRACE_S = 3.0
MAX_CONCURRENCY = 10_000
MAX_MAX_IN_FLIGHT = 1_000_000
#: An iteration lets others have their turn at least this often.
_TURN_S = 0.005


class Consumer:
    """Receives the messages of a queue: by iteration, :meth:`receive`, or :meth:`run`.

    Args:
        queue: the queue's name.
        bootstrap_servers: ``host:port``, several separated by commas; else MARQ_BOOTSTRAP_SERVERS.
        lease: how long a message is held before it is delivered to somebody else, unless it is renewed, which happens
            by itself; seconds or timedelta.
        max_lease: until when it renews itself: a handler that hangs loses its message then.
        max_in_flight: how many messages are held at the most; fewer while they are finished slowly.
        instance_id: a name for static membership: a restart within the session timeout moves no partitions.
        grace: how long :meth:`stop` waits for handlers that run.
        options: see :class:`marq.settings.ClientOptions`.
    """

    def __init__(
        self,
        queue: str,
        bootstrap_servers: str | Sequence[str] | None = None,
        *,
        lease: Duration = DEFAULT_LEASE_S,
        max_lease: Duration = DEFAULT_MAX_LEASE_S,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        instance_id: str | None = None,
        grace: Duration = DEFAULT_GRACE_S,
        **options: Unpack[ClientOptions],
    ) -> None:
        self.queue = check_queue_name(queue)
        self._settings = ClientSettings.read(bootstrap_servers, options, owner="Consumer")
        self._lease_ms = duration_ms("lease", lease, least_ms=100)
        self._max_lease_ms = duration_ms("max_lease", max_lease, least_ms=self._lease_ms)
        self._max_in_flight = whole_number("max_in_flight", max_in_flight, most=MAX_MAX_IN_FLIGHT)
        self._grace_s = duration_ms("grace", grace, most_ms=3_600_000) / 1000
        if instance_id is not None and (not isinstance(instance_id, str) or not instance_id):
            raise ConfigError(f"instance_id={instance_id!r}: expected text (str)")
        self._instance_id = instance_id
        self._running: _Running | None = None
        self._yielded_s = 0.0
        self._changing: asyncio.Lock | None = None

    async def start(self) -> None:
        """Join the queue's group; does nothing when started.

        Raises:
            BrokerUnavailable: no broker answered within the connect timeout, or it refused.
            ConfigError: a topic's setting is wrong.
        """
        async with self._lock():
            if self._running is None:
                running = _Running(self.queue, self._settings, self._instance_id)
                await running.start(self._flow_settings)
                self._running = running

    def _flow_settings(self, markers_partitions: int, limit_bytes: int) -> FlowSettings:
        return FlowSettings(
            lease_ms=self._lease_ms,
            max_in_flight=self._max_in_flight,
            max_lease_ms=self._max_lease_ms,
            markers_partitions=markers_partitions,
            limit_bytes=limit_bytes,
        )

    async def stop(self, release: bool = True) -> None:
        """Stop receiving, let handlers end within the grace, write what was decided, and leave the group.

        With ``release`` messages that were prefetched and not taken are given back at once, else when their leases end.
        What was taken by iteration or :meth:`receive` and has no outcome stays leased until its lease ends. Does
        nothing when stopped; ends within 10 s (with the default grace) also when the broker is gone.
        """
        async with self._lock():
            running, self._running = self._running, None
            if running is not None:
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
        now_s = time.monotonic()
        if now_s - self._yielded_s > _TURN_S:
            # A loop whose body never waits would starve acks, renewals and heartbeats.
            await asyncio.sleep(0)
            self._yielded_s = now_s
        while not shelf.closed:
            message = shelf.take(now_s)
            if message is not None:
                return message
            flow.outbox.flush_soon()
            await _wait(running, 1)
            self._yielded_s = now_s = time.monotonic()
        if flow.error is not None:
            raise flow.error
        raise StopAsyncIteration

    async def receive(self, max_messages: int = 100, wait: Duration = 20.0) -> list[Message]:
        """Return up to ``max_messages``, as soon as there are any; [] when nothing came within ``wait``.

        Raises:
            MarqError: receiving has stopped for good, for the reason that it says.
        """
        running = self._started()
        count = whole_number("max_messages", max_messages, most=MAX_MAX_IN_FLIGHT)
        wait_s = duration_ms("wait", wait) / 1000
        shelf = running.shelf
        messages = _take(shelf, count)
        try:
            async with asyncio.timeout(wait_s):
                while not messages and not shelf.closed:
                    running.flow.outbox.flush_soon()
                    await _wait(running, count)
                    messages = _take(shelf, count)
        except TimeoutError:
            # Something may have come in the very moment.
            messages = _take(shelf, count)
        if not messages and running.flow.error is not None:
            raise running.flow.error
        return messages

    async def run(self, handler: Handler, concurrency: int = 64) -> None:
        """Call a handler for each message until the consumer is stopped; so many at a time.

        A coroutine function runs in this event loop, a plain function in a pool of ``concurrency`` threads. When it
        returns, the message is acked. ``raise Retry(delay=…)`` releases it, ``raise Reject("why")`` makes it a dead
        letter, any other exception releases it with the queue's backoff. When this call is cancelled, handlers that
        run are cancelled and their messages released without counting the attempt.

        Raises:
            MarqError: receiving has stopped for good, for the reason that it says.
        """
        check_handler(handler)
        count = whole_number("concurrency", concurrency, most=MAX_CONCURRENCY)
        running = self._started()
        workers = Workers(running.shelf, running.flow.outbox, handler, count)
        workers.start()
        running.workers.append(workers)
        running.flow.demand()
        try:
            await workers.done()
        finally:
            # Cancelled, or a worker failed, or receiving did: no handler runs on after this call.
            await workers.stop(0)
            if workers in running.workers:
                running.workers.remove(workers)
        if running.flow.error is not None:
            raise running.flow.error

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
        now_s = time.monotonic()
        lost = [message.id for message, expiry_s in zip(held, expiries, strict=True) if expiry_s <= now_s]
        if lost:
            raise LeaseLost(
                f"queue {self.queue!r}: {len(lost)} of {len(held)} messages were acked after their leases had run out,"
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
            raise MarqError(f"the consumer of queue {self.queue!r} is not started: use `async with` or await start()")
        return self._running

    def _lock(self) -> asyncio.Lock:
        if self._changing is None:
            self._changing = asyncio.Lock()
        return self._changing


class _Running:
    """What exists between start and stop."""

    def __init__(self, queue: str, settings: ClientSettings, instance_id: str | None) -> None:
        self.queue = queue
        self.workers: list[Workers] = []
        self._settings = settings
        self._reader = GroupReader(settings, settings.names.group(queue), instance_id=instance_id)
        self._writers: list[KafkaMarkerWriter] = []
        self._watch: asyncio.Task[None] | None = None
        self.flow: Flow
        self.shelf: Shelf

    async def start(self, flow_settings: Callable[[int, int], FlowSettings]) -> None:
        try:
            topics = await ensure_topics(self._settings)
            for _ in range(2):
                writer = KafkaMarkerWriter(self._settings, topics.markers_limit_bytes)
                self._writers.append(writer)
                await writer.start()
            settings = flow_settings(topics.markers_partitions, topics.markers_limit_bytes)
            acquirer, settler = self._writers
            self.flow = Flow([self.queue], self._reader, acquirer, settler, settings)
            self.shelf = self.flow.shelves[self.queue]
            await self._reader.start(self.flow)
        except BaseException:
            await self._close()
            raise
        self.flow.start()
        self._watch = asyncio.create_task(watch_for_tracker(self._settings), name="marq-watch")

    async def stop(self, grace_s: float, release: bool) -> None:
        await wind_down(self.flow, self.workers, grace_s, release=release)
        await self._close()

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await asyncio.gather(
            self._reader.stop(STOP_CLIENT_S), *[writer.stop(STOP_CLIENT_S) for writer in self._writers]
        )


async def _wait(running: _Running, count: int) -> None:
    """Wait on the shelf for messages, and let the flow know how many are wanted."""
    shelf = running.shelf
    shelf.asked += count
    running.flow.demand()
    try:
        await shelf.wait()
    finally:
        shelf.asked -= count


def _take(shelf: Shelf, count: int) -> list[Message]:
    now_s = time.monotonic()
    messages: list[Message] = []
    while len(messages) < count and (message := shelf.take(now_s)) is not None:
        messages.append(message)
    return messages
