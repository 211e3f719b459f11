"""Runs handlers as ``faust -A app worker`` does, without Faust: one engine for each group of queues."""

from __future__ import annotations

import asyncio
import functools
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, Self

from marq.core.definitions import HANDLERS_GROUP, Definitions, layer_key
from marq.core.errors import ConfigError
from marq.crew import is_coroutine_function
from marq.flow import Flow
from marq.flow_settings import FlowSettings
from marq.handlers import Handler, HandlerDefinition, check_handler, definitions_of, handlers_in
from marq.outcomes import Outcome
from marq.serving import serving
from marq.settings import ClientSettings
from marq.starts import MarkedStart
from marq.testing.cluster import MemoryCluster, MemoryMember
from marq.testing.installation import Installation, encoded
from marq.workers import Workers, wind_down

#: As in the worker: what a process holds, how long a handler may hang, and how long a stop waits for handlers.
MAX_IN_FLIGHT, MAX_LEASE_MS, GRACE_S = 10_000, 3_600_000, 3.0

#: Layers of settings whose handlers every worker runs; that of the decorator is for workers that were given it.
_FOR_ALL = ("file", "change")

#: What can be given to a worker: decorated functions, and modules that have some.
Handled = Callable[..., Any] | ModuleType


class Worker:
    """The handlers of some queues; :attr:`errors` is what they raised without meaning an outcome by it."""

    def __init__(self, settings: ClientSettings, installation: Installation, handlers: Sequence[Handled]) -> None:
        self.errors: list[Exception] = []
        self._settings = settings
        self._installation = installation
        self._given = handlers
        self._groups: list[_Group] = []

    @property
    def queues(self) -> list[str]:
        """The queues whose handlers run."""
        return sorted(queue for group in self._groups for queue in group.handlers)

    async def __aenter__(self) -> Self:
        handlers = self._handlers()
        definitions = self._installation.definitions
        by_group: dict[str, dict[str, Handler]] = {}
        for queue, handler in handlers.items():
            by_group.setdefault(definitions.group(queue) or HANDLERS_GROUP, {})[queue] = handler
        for name, members in sorted(by_group.items()):
            _refuse_part(name, definitions.queues_of(name), members)
        try:
            for name, members in sorted(by_group.items()):
                group = _Group(name, {queue: _noting(each, self.errors) for queue, each in members.items()})
                self._groups.append(group)
                await group.start(self._settings, definitions)
                self._installation.followers.add(group.look_at_pauses)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        self._installation.followers.difference_update([group.look_at_pauses for group in self._groups])
        await asyncio.gather(*[group.stop() for group in self._groups])

    def _handlers(self) -> dict[str, Handler]:
        """Return the handler of each queue, and let the definitions know of the decorated ones."""
        definitions = self._installation.definitions
        found: dict[str, Handler] = {}
        for each in _decorated(self._given):
            document = {**each.document, "handler": _importable(each.name)}
            self._installation.define(layer_key("handler", each.queue), encoded(document))
            found[each.queue] = each.function
        for queue in definitions.names():
            name = definitions.settings(queue).handler
            if name is not None and any("handler" in (definitions.layer(each, queue) or {}) for each in _FOR_ALL):
                found[queue] = _load(queue, name)
        if not found:
            raise ConfigError(
                "no handlers to run: give functions with @marq.handler, modules that have some, or name a"
                " handler in the settings of a queue, Broker.define('emails', handler='module:function')"
            )
        return found


class _Group:
    """One engine, as in :class:`marq.Consumer`, with handlers for each of its queues."""

    def __init__(self, name: str, handlers: Mapping[str, Handler]) -> None:
        self.handlers = handlers
        self._name = name
        self._flow: Flow | None = None
        self._member: MemoryMember | None = None
        self._crews: list[Workers] = []

    async def start(self, settings: ClientSettings, definitions: Definitions) -> None:
        cluster, names = MemoryCluster(settings), settings.names
        topics = await cluster.topics()
        served = serving(names.messages, self.handlers, {each: definitions(each).topic for each in self.handlers})
        await cluster.own_topics(served.own_topics.values(), topics)
        leases = _Leases(list(self.handlers), definitions)
        codecs = {
            each.queue: each.codec
            for queue, handler in self.handlers.items()
            for each in definitions_of(handler)
            if each.queue == queue and each.codec is not None
        }
        self._member = cluster.member(names.named_group(self._name), served, None)
        self._flow = flow = Flow(
            served,
            self._member,
            MarkedStart(cluster.writer(topics), self._member),
            cluster.writer(topics),
            FlowSettings(
                lease_ms=max(leases.values()),
                leases_ms=leases,
                max_in_flight=MAX_IN_FLIGHT,
                max_lease_ms=max(MAX_LEASE_MS, *leases.values()),
                markers_partitions=topics.markers_partitions,
                limit_bytes=topics.markers_limit_bytes,
                codecs=codecs,
                queue=definitions.settings,
                purge=definitions.purge,
            ),
            clock=cluster.now_s,
            wall=cluster.wall_s,
            sleep=cluster.sleep,
        )
        await self._member.start(flow)
        flow.start()
        for queue, handler in self.handlers.items():
            crew = Workers(flow.shelves[queue], flow.outbox, handler, definitions(queue).concurrency)
            crew.start()
            self._crews.append(crew)

    def look_at_pauses(self) -> None:
        if self._flow is not None:
            self._flow.look_at_pauses()

    async def stop(self) -> None:
        if self._flow is not None:
            await wind_down(self._flow, self._crews, GRACE_S, release=True)
        if self._member is not None:
            await self._member.stop(0)


class _Leases(Mapping[str, int]):
    """The leases of queues in ms, as the definitions say now."""

    def __init__(self, queues: Sequence[str], definitions: Definitions) -> None:
        self._queues = queues
        self._definitions = definitions

    def __getitem__(self, queue: str) -> int:
        return self._definitions.settings(queue).lease_ms

    def __iter__(self) -> Iterator[str]:
        return iter(self._queues)

    def __len__(self) -> int:
        return len(self._queues)


def _decorated(handlers: Iterable[Handled]) -> Iterator[HandlerDefinition]:
    for each in handlers:
        found = handlers_in(each) if isinstance(each, ModuleType) else definitions_of(each)
        if not found:
            raise ConfigError(
                f"{each!r}: expected a function with @marq.handler, or a module that has one; a function without it is"
                " run by Consumer.run"
            )
        yield from found


def _importable(name: str) -> str:
    """Return the name as if the function were one of its module: those of tests are often defined within a test."""
    return re.sub(r"[^\w.:]", "_", name.replace("<locals>.", ""))


def _load(queue: str, name: str) -> Handler:
    try:
        handler: Handler = pkgutil.resolve_name(name)
    except Exception as error:  # whatever the module does while it is imported
        raise ConfigError(f"queue {queue!r}: its handler {name!r} can't be imported ({error!r})") from error
    check_handler(handler)
    return handler


def _refuse_part(group: str, queues: Iterable[str], handlers: Mapping[str, Handler]) -> None:
    missing = [queue for queue in queues if queue not in handlers]
    if missing:
        raise ConfigError(
            f"group {group!r}: {', '.join(map(repr, missing))} has no handler here, and a worker runs the handlers of"
            " all queues of a group: give it those, too, or another group to these"
        )


def _noting(handler: Handler, errors: list[Exception]) -> Handler:
    """Return a handler that notes what it raises."""

    def note(error: Exception) -> None:
        if not isinstance(error, Outcome):
            errors.append(error)

    if is_coroutine_function(handler):

        @functools.wraps(handler)
        async def call(message: Any) -> Any:
            try:
                return await handler(message)
            except Exception as error:
                note(error)
                raise

        return call

    @functools.wraps(handler)
    def call_plainly(message: Any) -> Any:
        try:
            return handler(message)
        except Exception as error:
            note(error)
            raise

    return call_plainly
