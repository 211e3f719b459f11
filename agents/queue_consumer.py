"""The queue consumer agent: runs the handlers of one group of queues and emits markers.

It runs the same session as :class:`marq.Consumer` (:mod:`marq.consumer.session`), fed by the agent's stream. Each group
has its own process, a Faust application with this single agent (app/handlers_app.py). A worker only lists it.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import faust
from faust.types import TP, StreamT

from marq.backend.cluster import cluster_of
from marq.client.current_producer import HandlersProducer
from marq.consumer.handlers_session import HandlersSession
from marq.consumer.lifespan import Resources, lifespans_in
from marq.consumer.message import Message
from marq.consumer.middleware import middleware_in
from marq.kafka.offset_snapshots import check_room
from marq.kafka.topics import Topics
from marq.producer.producer import Producer
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.errors import MarqError
from marq.wire.markers import Source
from marq_worker.handlers.handler_groups import HandlerGroup, check_transactional
from marq_worker.handlers.loaded_handlers import load_handlers, modules_around
from marq_worker.transport.stream_reader import FaustConsumerPort, StreamReader

log = logging.getLogger("marq.handlers")

#: Running handlers to tell of one process.
MAX_CALLS = 100


class Handlers:
    """The running handlers of one group."""

    def __init__(self, group: HandlerGroup) -> None:
        self.group = group
        self.session: HandlersSession | None = None
        self.reader: StreamReader | None = None
        self.quiet = False

    async def start(
        self,
        client: ClientSettings,
        topics: Topics,
        definitions: Definitions,
        partitions: FaustConsumerPort,
        instance_id: str | None,
        shutdown_s: float,
        shutdown_limit_s: float,
    ) -> None:
        """Load the handlers and start their tasks; messages arrive once partitions are assigned.

        The time limits of a stop are those of :class:`marq.consumer.handlers_session.HandlersSession`.
        """
        check_room(self.group.name, self.group.queues)
        check_transactional(self.group, definitions)
        handlers = load_handlers(self.group)
        served = self.group.serving(client.names.messages, handlers, definitions.skipped)
        self.reader = StreamReader(served, partitions)
        modules = modules_around(self.group, handlers)
        chain, resources = middleware_in(*modules), Resources(lifespans_in(*modules))
        producer = HandlersProducer(functools.partial(Producer.of, client))
        session = HandlersSession(
            cluster_of(client),
            topics,
            served,
            self.reader,
            definitions,
            handlers,
            producer,
            chain,
            resources,
            group=partitions.group if self.group.transactional else None,
            instance_id=instance_id,
            shutdown_s=shutdown_s,
            shutdown_limit_s=shutdown_limit_s,
        )
        self.session = session
        if self.quiet:
            session.set_quiet(True)
        await session.connect()
        if self.session is not session:
            # Stopped meanwhile.
            await session.disconnect()
            return
        session.start()

    def set_quiet(self, quiet: bool) -> None:
        """Take no more messages, or take messages again; running handlers continue, and the group stays as it is."""
        if quiet != self.quiet:
            self.quiet = quiet
            group = self.group.name
            if quiet:
                log.warning("group %s: quiet, taking no more messages until SIGCONT; running handlers continue", group)
            else:
                log.info("group %s: taking messages again", group)
            if self.session is not None:
                self.session.set_quiet(quiet)

    def apply_pauses(self) -> None:
        """Pause and resume queues as their settings say now."""
        if self.session is not None:
            self.session.receiver.apply_pauses()

    @property
    def breakers(self) -> dict[str, dict[str, Any]]:
        """State and openings of each queue's circuit breaker."""
        breakers = {} if self.session is None else self.session.receiver.gate.breakers
        return {queue: {"state": breaker.state, "openings": breaker.openings} for queue, breaker in breakers.items()}

    @property
    def holding(self) -> dict[str, int]:
        """Messages in flight, and how many of them are in handlers."""
        session = self.session
        if session is None:
            return {"in_flight": 0, "processing": 0}
        return {"in_flight": session.prefetch.in_flight, "processing": session.prefetch.processing}

    def running(self, task: asyncio.Task[Any] | None = None) -> str:
        """Describe the handlers that are running now, or only the one that runs in a task; "" without any."""
        pools = [] if self.session is None else self.session.pools
        running = [pool for pool in pools if task is None or task in pool.busy_tasks]
        names = {(message.queue, self._name_of(message)) for pool in running for message in pool.running}
        return ", ".join(f"handler {name} of queue {queue}" for queue, name in sorted(names))

    def _name_of(self, message: Message) -> str:
        handled = self.group.queues[message.queue]
        kind = message.type if handled.types else None
        return handled.handler or handled.handlers[0] if kind not in handled.types else handled.types[kind]

    def calls(self, wanted: tuple[str, str] | None = None) -> list[dict[str, Any]]:
        """Return what handlers do now, those first that have run for longest; may be called in any thread.

        ``wanted``: only that with the message of this queue and id, even if many others have run for longer.
        ``cancellable``: not if it is a plain function, which runs in a thread.
        """
        session = self.session
        calls = [
            {
                "queue": message.queue,
                "handler": self._name_of(message),
                "id": message.id,
                "attempt": message.attempt,
                "seconds": round(seconds, 3),
                "cancellable": pool.cancellable(message),
            }
            for pool in (() if session is None else list(session.pools))
            for message, seconds in pool.calls()
            if wanted is None or (message.queue, message.id) == wanted
        ]
        return heapq.nlargest(MAX_CALLS, calls, key=lambda call: call["seconds"])

    def cancel(self, queue: str, message_id: str, *, counted: bool) -> None:
        """Cancel the handler of a message, as :meth:`marq.consumer.handler_pool.HandlerPool.cancel`."""
        for pool in () if self.session is None else self.session.pools:
            if pool.queue == queue:
                pool.cancel(message_id, counted=counted)

    def holders(self) -> Sequence[int]:
        """Return the holders (numbers) as which this process acquires messages for its group."""
        return () if self.session is None else self.session.receiver.holders()

    async def done(self) -> None:
        """Wait until receiving has stopped; raise its error."""
        if self.session is not None:
            await self.session.done()

    def assigned(self, partitions: set[TP]) -> None:
        if self.reader is not None and self.session is not None:
            self.session.receiver.assigned()
            self.reader.assigned([Source(*tp) for tp in partitions])

    async def revoked(self) -> None:
        if self.reader is not None and self.session is not None:
            await self.session.receiver.revoked()
            self.reader.revoked()

    async def stop(self) -> None:
        """Let handlers finish, write their outcomes, release prefetched messages, and exit the lifespans."""
        session, self.session = self.session, None
        if session is not None:
            try:
                await session.close()
            except MarqError as error:
                log.error("%s", error, exc_info=error.__cause__)


def attach(
    app: faust.App, topic: faust.TopicT, group: HandlerGroup, failed: Callable[[MarqError], Awaitable[None]]
) -> Handlers:
    """Attach the queue consumer to an application; ``failed`` is called when receiving has stopped for good."""
    handlers = Handlers(group)
    declare(app, topic, handlers)

    @app.task
    async def watch() -> None:
        try:
            await handlers.done()
        except MarqError as error:
            await failed(error)

    return handlers


def declare(app: faust.App, topic: faust.TopicT, handlers: Handlers | None) -> None:
    """Declare the agent; without ``handlers`` it is only listed, because it runs in other processes."""

    @app.agent(topic, name="queue consumer")
    async def consume(messages: StreamT[object]) -> None:
        """Run handlers and write ACQUIRE, ACK, RELEASE and REJECT markers; each group has its own process."""
        # Not acknowledged to Faust: the receiver commits after the marker, with the positions of each queue.
        async for event in messages.noack().events():
            if handlers is not None and handlers.reader is not None:
                source = Source(event.message.topic, event.message.partition)
                await handlers.reader.deliver(source, event.value)

    if handlers is None:
        # Without an actor, the application neither subscribes to the topic nor reads it.
        consume.concurrency = 0
