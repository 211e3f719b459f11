"""The queue consumer agent: runs the handlers of one group of queues and emits markers.

It is the same engine as :class:`marq.Consumer` (:mod:`marq.flow`), fed by the agent's stream. Each group has a process
of its own, a Faust application whose only agent this is (app/handlers_process.py).
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import faust
from faust.types import TP, StreamT

from agents.handler_groups import HandlerGroup, check_delivery
from agents.stream_reader import Partitions, StreamReader
from marq.core.definitions import Definitions
from marq.core.errors import ConfigError, MarqError
from marq.core.markers import Source
from marq.flow import Flow
from marq.flow_settings import FlowSettings
from marq.handlers import Handler, HandlerDefinition, check_handler, definitions_of, handlers_in
from marq.rosters import check_room
from marq.settings import ClientSettings
from marq.starts import MarkedStart
from marq.topics import Topics
from marq.workers import STOP_CLIENT_S, Workers, wind_down
from marq.writer import KafkaMarkerWriter

#: Files whose frames come before the user's code in the traceback of an import.
_IMPORTING = (__file__, importlib.__file__, "<frozen importlib")

log = logging.getLogger("marq.handlers")

#: Messages that a process holds at the most, over all of its queues.
MAX_IN_FLIGHT = 10_000
#: A handler that hangs loses its message after this.
MAX_LEASE_MS = 3_600_000
#: How long a stop waits for handlers that run.
GRACE_SECONDS = 3.0


class Leases(Mapping[str, int]):
    """The leases of a group's queues in ms, as the definitions say now: a change counts at the next ACQUIRE."""

    def __init__(self, group: HandlerGroup, definitions: Definitions) -> None:
        self._queues = group.queues
        self._definitions = definitions

    def __getitem__(self, queue: str) -> int:
        return self._definitions.settings(queue).lease_ms

    def __iter__(self) -> Iterator[str]:
        return iter(self._queues)

    def __len__(self) -> int:
        return len(self._queues)


@dataclass
class Handlers:
    """The handlers of one group, while they run."""

    group: HandlerGroup
    flow: Flow | None = None
    reader: StreamReader | None = None
    _writers: list[KafkaMarkerWriter] = field(default_factory=list)
    _workers: list[Workers] = field(default_factory=list)

    async def start(
        self, client: ClientSettings, topics: Topics, definitions: Definitions, partitions: Partitions
    ) -> None:
        """Load the handlers and start their workers; messages come when partitions are assigned.

        Raises:
            ConfigError: no handler can be imported, the group has too many queues, or one delivers at most once.
            BrokerUnavailable: no broker answered in time.
        """
        check_room(self.group.name, self.group.queues)
        check_delivery(self.group, definitions)
        handlers = load_handlers(self.group)
        served = self.group.serving(client.names.messages, handlers)
        self.reader = StreamReader(served, partitions)
        for _ in range(2):
            writer = KafkaMarkerWriter(client, topics.markers_limit_bytes)
            self._writers.append(writer)
            await writer.start()
        acquirer, settler = self._writers
        start = MarkedStart(acquirer, self.reader)
        self.flow = Flow(served, self.reader, start, settler, self._settings(topics, definitions, handlers))
        self.flow.start()
        for queue, handler in handlers.items():
            concurrency = self.group.queues[queue].concurrency
            workers = Workers(self.flow.shelves[queue], self.flow.outbox, handler, concurrency)
            workers.start()
            self._workers.append(workers)

    def _settings(self, topics: Topics, definitions: Definitions, handlers: Mapping[str, Handler]) -> FlowSettings:
        leases = Leases(self.group, definitions)
        codecs = {
            each.queue: each.codec
            for queue, handler in handlers.items()
            for each in definitions_of(handler)
            if each.queue == queue and each.codec is not None
        }
        return FlowSettings(
            lease_ms=max(leases.values()),
            leases_ms=leases,
            max_in_flight=MAX_IN_FLIGHT,
            max_lease_ms=max(MAX_LEASE_MS, *leases.values()),
            markers_partitions=topics.markers_partitions,
            limit_bytes=topics.markers_limit_bytes,
            codecs=codecs,
            queue=definitions.settings,
            purge=definitions.purge,
        )

    def look_at_pauses(self) -> None:
        """Definitions have changed: queues may be paused, or not any more."""
        if self.flow is not None:
            self.flow.look_at_pauses()

    @property
    def breakers(self) -> dict[str, dict[str, Any]]:
        """State and openings of the circuit breaker of each queue that has one."""
        found = {} if self.flow is None else self.flow.rules.breakers
        return {queue: {"state": each.state, "openings": each.openings} for queue, each in found.items()}

    @property
    def holding(self) -> dict[str, int]:
        """How many messages are held, and how many of these are in handlers."""
        flow = self.flow
        return {"held": 0, "taken": 0} if flow is None else {"held": flow.held, "taken": flow.taken}

    async def done(self) -> None:
        """Return when receiving has stopped; raise what stopped it."""
        await asyncio.gather(*(workers.done() for workers in self._workers))
        if self.flow is not None and self.flow.error is not None:
            raise self.flow.error

    def assigned(self, partitions: set[TP]) -> None:
        if self.reader is not None and self.flow is not None:
            self.flow.assigned()
            self.reader.assigned([Source(*tp) for tp in partitions])

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


def load_handlers(group: HandlerGroup) -> dict[str, Handler]:
    """Import the handlers of a group; a queue whose handler can't be had is left out, so that the others go on.

    Raises:
        ConfigError: that is so for all of them.
    """
    handlers: dict[str, Handler] = {}
    errors: list[ConfigError] = []
    for queue, each in group.queues.items():
        try:
            handlers[queue] = load_handler(queue, each.handler)
        except ConfigError as error:
            errors.append(error)
    if errors and not handlers:
        raise errors[0]
    for error in errors:
        log.critical("messages wait until this is fixed: %s", error, exc_info=error.__cause__)
    return handlers


def load_handler(queue: str, name: str) -> Handler:
    """Import the handler of a queue, ``module:function``.

    Raises:
        ConfigError: there is no such module or function.
    """
    module, _, path = name.partition(":")
    try:
        handler: Handler = functools.reduce(getattr, path.split("."), _import(module))  # type: ignore[arg-type]
    except Exception as error:  # whatever the module does while it is imported
        raise _not_imported(
            f"queue {queue!r}: its handler {name!r} can't be imported ({error!r}); expected "
            "MODULE:FUNCTION, importable from the directory that the worker is started in",
            error,
        ) from error
    try:
        check_handler(handler)
    except ConfigError as error:
        raise ConfigError(f"queue {queue!r}: its handler {name!r} can't be used: {error}") from error
    return handler


def load_modules(modules: tuple[str, ...]) -> list[HandlerDefinition]:
    """Import modules and return the decorated handlers in them.

    Raises:
        ConfigError: a module can't be imported, or two functions are for one queue.
    """
    return handlers_in(*map(_load_module, modules))


def _load_module(name: str) -> ModuleType:
    try:
        return _import(name)
    except Exception as error:  # whatever the module does while it is imported
        raise _not_imported(
            f"MARQ_HANDLERS: module {name!r} can't be imported ({error!r}); expected a module that is importable from "
            "the directory that the worker is started in",
            error,
        ) from error


def _not_imported(text: str, error: Exception) -> ConfigError:
    """Return the error for a failed import, with the traceback from the user's first line as its note."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_IMPORTING):
        trace = trace.tb_next
    failed = ConfigError(text)
    # If no line of the user's code ran, there is no such module or function, and the text is enough.
    if trace is not None or isinstance(error, SyntaxError):
        failed.add_note("".join(traceback.format_exception(type(error), error, trace)).rstrip())
    return failed


def _import(name: str) -> ModuleType:
    # The script `faust` has its own directory in the path instead, and Faust adds ours only while it looks for the app.
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    return importlib.import_module(name)


def attach(
    app: faust.App, topic: faust.TopicT, group: HandlerGroup, failed: Callable[[MarqError], Awaitable[None]]
) -> Handlers:
    """Attach the queue consumer to an application; ``failed`` is called when nothing more can be received."""
    handlers = Handlers(group)

    @app.agent(topic, name="queue consumer")
    async def consume(messages: StreamT[object]) -> None:
        # Never acknowledged to Faust: the flow commits, after the marker and with the positions of each queue.
        async for event in messages.noack().events():
            if handlers.reader is not None:
                source = Source(event.message.topic, event.message.partition)
                await handlers.reader.deliver(source, event.value)

    @app.task
    async def watch() -> None:
        try:
            await handlers.done()
        except MarqError as error:
            await failed(error)

    return handlers
