"""The queue consumer agent: runs the handlers of config/queues.toml and emits markers.

It is the same engine as :class:`marq.Consumer` (:mod:`marq.flow`), fed by the agent's stream. All queues with handlers
are read together, in the worker's consumer group.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import faust
from faust.types import TP, StreamT

from agents.stream_reader import Partitions, StreamReader
from config.queues import QueueDefinition
from marq.core.errors import ConfigError, MarqError
from marq.flow import Flow, FlowSettings
from marq.settings import ClientSettings
from marq.topics import Topics
from marq.workers import STOP_CLIENT_S, Handler, Workers, wind_down
from marq.writer import KafkaMarkerWriter

log = logging.getLogger("marq.handlers")

#: Messages that a worker holds at the most, over all of its queues.
MAX_IN_FLIGHT = 10_000
#: A handler that hangs loses its message after this.
MAX_LEASE_MS = 3_600_000
#: How long a stop waits for handlers that run.
GRACE_SECONDS = 3.0


@dataclass
class Handlers:
    """The queues with handlers of one worker."""

    topic: str
    definitions: Mapping[str, QueueDefinition]
    flow: Flow | None = None
    reader: StreamReader | None = None
    _writers: list[KafkaMarkerWriter] = field(default_factory=list)
    _workers: list[Workers] = field(default_factory=list)

    async def start(self, client: ClientSettings, topics: Topics, partitions: Partitions) -> None:
        """Load the handlers and start their workers; messages come when partitions are assigned.

        Raises:
            ConfigError: a handler can't be imported.
            BrokerUnavailable: no broker answered in time.
        """
        if not self.definitions:
            return
        handlers = {queue: load_handler(queue, definition) for queue, definition in self.definitions.items()}
        self.reader = StreamReader(self.topic, self.definitions, partitions)
        for _ in range(2):
            writer = KafkaMarkerWriter(client, topics.markers_limit_bytes)
            self._writers.append(writer)
            await writer.start()
        self.flow = Flow(list(self.definitions), self.reader, *self._writers, self._settings(topics))
        self.flow.start()
        for queue, handler in handlers.items():
            concurrency = self.definitions[queue].concurrency
            workers = Workers(self.flow.shelves[queue], self.flow.outbox, handler, concurrency)
            workers.start()
            self._workers.append(workers)

    def _settings(self, topics: Topics) -> FlowSettings:
        leases = {queue: definition.settings.lease_ms for queue, definition in self.definitions.items()}
        return FlowSettings(
            lease_ms=max(leases.values()),
            leases_ms=leases,
            max_in_flight=MAX_IN_FLIGHT,
            max_lease_ms=max(MAX_LEASE_MS, *leases.values()),
            markers_partitions=topics.markers_partitions,
            limit_bytes=topics.markers_limit_bytes,
        )

    async def done(self) -> None:
        """Return when receiving has stopped; raise what stopped it."""
        await asyncio.gather(*(workers.done() for workers in self._workers))
        if self.flow is not None and self.flow.error is not None:
            raise self.flow.error

    async def assigned(self, partitions: set[TP]) -> None:
        if self.reader is not None and self.flow is not None:
            self.flow.assigned()
            await self.reader.assigned([tp.partition for tp in partitions if tp.topic == self.topic])

    async def revoked(self) -> None:
        if self.reader is not None and self.flow is not None:
            await self.flow.revoked()
            self.reader.revoked()

    async def stop(self) -> None:
        """Let handlers end, write what was decided, and give back at once what was prefetched."""
        flow, self.flow = self.flow, None
        if flow is None:
            return
        await wind_down(flow, self._workers, GRACE_SECONDS, release=True)
        await asyncio.gather(*[writer.stop(STOP_CLIENT_S) for writer in self._writers])


def load_handler(queue: str, definition: QueueDefinition) -> Handler:
    """Import the handler of a queue.

    Raises:
        ConfigError: there is no such module or function.
    """
    assert definition.handler is not None
    module, _, name = definition.handler.partition(":")
    try:
        handler: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module does while it is imported
        raise ConfigError(
            f"queue {queue!r}: its handler {definition.handler!r} can't be imported ({error!r}); expected "
            "MODULE:FUNCTION, importable from the directory that the worker is started in"
        ) from error
    if not callable(handler):
        raise ConfigError(f"queue {queue!r}: its handler {definition.handler!r} is not a function")
    checked: Handler = handler
    return checked


def attach(
    app: faust.App, topic: faust.TopicT | None, name: str, definitions: Mapping[str, QueueDefinition]
) -> Handlers:
    """Attach the queue consumer to an application; without queues that have handlers there is nothing to read."""
    handlers = Handlers(name, definitions)
    if topic is None:
        return handlers

    @app.agent(topic, name="queue consumer")
    async def consume(messages: StreamT[object]) -> None:
        # Never acknowledged to Faust: the flow commits, after the marker and with the positions of each queue.
        async for event in messages.noack().events():
            if handlers.reader is not None:
                await handlers.reader.deliver(event.message.partition, event.value)

    @app.task
    async def watch() -> None:
        try:
            await handlers.done()
        except MarqError as error:
            # The trackers of this worker go on: redelivery must not end with the handlers.
            log.critical("handlers stopped, and run again only after a restart of the worker: %s", error)

    return handlers
