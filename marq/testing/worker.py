"""Runs handlers as ``marq worker`` does, but without Faust: one session for each group of queues."""

from __future__ import annotations

import asyncio
import functools
import importlib
import pkgutil
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Self

from marq.client.current_producer import HandlersProducer
from marq.client.outcomes import NoHandler, Outcome
from marq.client.send_targets import Handler, HandlerDefinition, definitions_of
from marq.consumer.session import HandlersSession
from marq.handlers.decorator import by_queue, check_handler, handlers_in
from marq.handlers.lifespan import Lifespan, Resources, lifespans_in
from marq.handlers.middleware import CallNext, Middleware, middleware_in
from marq.handlers.typed import HandlersByType
from marq.kafka.queue_records import serving
from marq.leases.message import Message
from marq.producer.producer import Producer
from marq.queues.following import encoded
from marq.settings.client import ClientSettings
from marq.settings.combinations import check_queue, check_topic
from marq.settings.default_group import HANDLERS_GROUP
from marq.settings.definitions import Definitions, layer_key
from marq.settings.removed_handlers import handler_of
from marq.testing.cluster import MemoryCluster, MemoryMember
from marq.testing.namespace import Namespace
from marq.wire.errors import ConfigError

#: A decorated function, or a module that contains some.
Handled = Callable[..., Any] | ModuleType


class MemoryWorker:
    """The handlers of some queues; :attr:`errors` are their exceptions, except ``Retry`` and ``Reject``."""

    def __init__(
        self,
        settings: ClientSettings,
        namespace: Namespace,
        handlers: Sequence[Handled],
        overrides: Mapping[Lifespan, Any],
        modules: Sequence[str] = (),
    ) -> None:
        self.errors: list[Exception] = []
        #: Whether to handle nothing after the first error, which :meth:`check` then raises.
        self.raises = False
        #: The modules whose handlers the project's workers run.
        self._project = modules
        #: What some lifespans yield instead of running.
        self._overrides = overrides
        self._settings = settings
        self._namespace = namespace
        self._sources = handlers
        self._groups: list[_Group] = []

    @property
    def queues(self) -> list[str]:
        """The queues whose handlers run."""
        return sorted(queue for group in self._groups for queue in group.handlers)

    def check(self) -> None:
        """Raise the error because of which handlers no longer receive messages, if there is one."""
        if self.raises and self.errors:
            raise self.errors[0]
        for group in self._groups:
            group.check()

    async def __aenter__(self) -> Self:
        if not self._sources:
            self._sources = [_project_module(name) for name in self._project]
        handlers = self._handlers()
        definitions = self._namespace.definitions
        by_group: dict[str, dict[str, HandlersByType]] = {}
        for queue, handler in handlers.items():
            by_group.setdefault(definitions.group(queue) or HANDLERS_GROUP, {})[queue] = handler
        for name, members in sorted(by_group.items()):
            self._refuse_part(name, definitions.queues_of(name), members)
        try:
            for name, members in sorted(by_group.items()):
                modules = self._modules(members)
                chain = [self._note, *middleware_in(*modules)]
                resources = Resources([self._overridden(lifespan) for lifespan in lifespans_in(*modules)])
                group = _Group(name, members, chain, resources)
                self._groups.append(group)
                await group.start(self._settings, definitions)
                self._namespace.followers.add(group.apply_settings)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _stop(self) -> None:
        self._namespace.followers.difference_update([group.apply_settings for group in self._groups])
        await asyncio.gather(*[group.stop() for group in self._groups])

    async def _note(self, message: Message, call_next: CallNext) -> None:
        """Record the exceptions of handlers and middleware."""
        if self.raises and self.errors:
            raise NoHandler("not handled, because an earlier message has failed")
        try:
            await call_next(message)
        except Exception as error:
            if not isinstance(error, Outcome):
                self.errors.append(error)
            raise

    def _refuse_part(self, group: str, queues: Iterable[str], handlers: Mapping[str, HandlersByType]) -> None:
        missing = [queue for queue in queues if queue not in handlers]
        if missing and self._project:
            # A test may run some of the handlers that the project's workers run.
            elsewhere = by_queue(_decorated(map(_project_module, self._project)))
            missing = [queue for queue in missing if queue not in elsewhere]
        if missing:
            raise ConfigError(
                f"group {group!r}: {', '.join(map(repr, missing))} has no handler here, but a worker runs the handlers"
                " of all queues of a group: pass those, too, or move these queues to another group"
            )

    def _overridden(self, function: Lifespan) -> Lifespan:
        if function not in self._overrides:
            return function

        @functools.wraps(function)
        async def replacement() -> AsyncIterator[Any]:
            yield self._overrides[function]

        return replacement

    def _modules(self, queues: Iterable[str]) -> list[ModuleType]:
        """Return the modules whose lifespans and middleware a worker applies to the handlers of some queues."""
        names = [self._namespace.definitions.settings(queue).handler or "" for queue in queues]
        own = [sys.modules.get(name.partition(":")[0]) for name in names]
        return [source for source in [*self._sources, *own] if isinstance(source, ModuleType)]

    def _handlers(self) -> dict[str, HandlersByType]:
        """Return the handler of each queue, and publish the decorated ones."""
        definitions = self._namespace.definitions
        handlers: dict[str, HandlersByType] = {}
        decorated = by_queue(_decorated(self._sources))
        for queue, queue_handlers in decorated.items():
            document = {**queue_handlers.document, "handler": _importable(queue_handlers.document["handler"])}
            key = layer_key("handler", queue)
            after = definitions.after({key: document})
            check_queue(after, queue)
            check_topic(after, queue, self._namespace.names)
            self._namespace.define(key, encoded(document))
            handlers[queue] = HandlersByType(
                queue, {kind: one.function for kind, one in queue_handlers.by_type.items()}
            )
        for queue in definitions.names():
            name = handler_of(definitions, queue, own={})
            if name is not None:
                typed = decorated[queue].by_type if queue in decorated else {}
                functions = {kind: one.function for kind, one in typed.items()}
                handlers[queue] = HandlersByType(queue, {**functions, None: _load(queue, name)})
        if not handlers:
            raise ConfigError(
                "no handlers to run: pass functions with @marq.handler or modules with such functions, or name modules"
                ' in marq.toml, [settings] handlers = ["tasks"], or a handler in the settings of a queue,'
                " Broker.define('emails', handler='module:function')"
            )
        return handlers


class _Group:
    """The handlers of one group, run as a worker's process runs them."""

    def __init__(
        self, name: str, handlers: Mapping[str, HandlersByType], chain: Sequence[Middleware], resources: Resources
    ) -> None:
        self.handlers = handlers
        self._name = name
        self._chain = chain
        self._resources = resources
        self._member: MemoryMember | None = None
        self._session: HandlersSession | None = None

    async def start(self, settings: ClientSettings, definitions: Definitions) -> None:
        cluster, names = MemoryCluster(settings), settings.names
        topics = await cluster.topics()
        own_topics = {queue: definitions(queue).topic for queue in self.handlers}
        served = serving(names.messages, self.handlers, own_topics, changed_at=definitions.changed_at(self.handlers))
        await cluster.own_topics(served.own_topics.values(), topics)
        self._member = member = cluster.member(names.named_group(self._name), served, None)
        producer = HandlersProducer(functools.partial(Producer.of, settings))
        self._session = session = HandlersSession(
            cluster, topics, served, member, definitions, self.handlers, producer, self._chain, self._resources
        )
        await session.connect()
        await member.start(session.receiver)
        session.start()

    def check(self) -> None:
        if self._session is not None and self._session.receiver.error is not None:
            raise self._session.receiver.error

    def apply_settings(self) -> None:
        if self._session is not None:
            self._session.receiver.apply_settings()

    async def stop(self) -> None:
        try:
            if self._session is not None:
                await self._session.close()
        finally:
            if self._member is not None:
                await self._member.stop(0)


def _decorated(handlers: Iterable[Handled]) -> Iterator[HandlerDefinition]:
    for handled in handlers:
        if isinstance(handled, ModuleType):
            definitions: Sequence[HandlerDefinition] = handlers_in(handled)
            surrounds = bool(lifespans_in(handled) or middleware_in(handled))
        else:
            definitions, surrounds = definitions_of(handled), False
        if not (definitions or surrounds):
            raise ConfigError(
                f"{handled!r}: expected a function with @marq.handler, or a module that has one; a function without it"
                " is run by Consumer.run"
            )
        yield from definitions


def _importable(name: str) -> str:
    """Return the name as if the function were at module level: handlers are often defined within a test."""
    return re.sub(r"[^\w.:]", "_", name.replace("<locals>.", ""))


def _load(queue: str, name: str) -> Handler:
    try:
        handler: Handler = pkgutil.resolve_name(name)
    except Exception as error:  # importing a module may raise anything
        raise ConfigError(f"queue {queue!r}: its handler {name!r} can't be imported ({error!r})") from error
    check_handler(handler)
    return handler


def _project_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # importing a module may raise anything
        raise ConfigError(
            f"marq.toml: [settings] handlers: module {name!r} can't be imported ({error!r}); Python looks for it in the"
            " directory of marq.toml, too"
        ) from error
