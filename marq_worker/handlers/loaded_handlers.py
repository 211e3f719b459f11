"""The handlers of a group, imported and checked."""

from __future__ import annotations

import logging
import pkgutil
import sys
from collections.abc import Iterable
from types import ModuleType

from marq.client.send_targets import Handler, definitions_of
from marq.handlers.decorator import QueueHandlers, by_queue, check_handler, codec_of, handlers_in
from marq.handlers.lifespan import lifespans_in
from marq.handlers.middleware import middleware_in
from marq.handlers.typed import HandlersByType
from marq.wire.errors import ConfigError
from marq_worker.handlers.handler_groups import HandledQueue, HandlerGroup
from marq_worker.handlers.handler_modules import load_function, load_module

log = logging.getLogger("marq.handlers")


def load_handlers(group: HandlerGroup) -> dict[str, HandlersByType]:
    """Import the handlers of a group; skip a queue whose handler can't be imported, so that the others run.

    Raises ConfigError if no handler can be imported.
    """
    handlers: dict[str, HandlersByType] = {}
    errors: list[ConfigError] = []
    for queue, handled in group.queues.items():
        try:
            handlers[queue] = load_handlers_of(queue, handled)
        except ConfigError as error:
            errors.append(error)
    if errors and not handlers:
        raise errors[0]
    for failure in errors:
        log.critical("messages wait until this is fixed: %s", failure, exc_info=failure.__cause__)
    return handlers


def load_handlers_of(queue: str, handled: HandledQueue) -> HandlersByType:
    """Import the handlers of a queue."""
    functions: dict[str | None, Handler] = {
        kind: load_handler(queue, name, kind) for kind, name in handled.types.items()
    }
    if handled.handler is not None:
        functions[None] = load_handler(queue, handled.handler)
    return HandlersByType(queue, functions)


def load_handler(queue: str, name: str, kind: str | None = None) -> Handler:
    """Import a handler of a queue, ``module:function``, for a type of its messages."""
    handler: Handler = load_function(queue, name)  # type: ignore[assignment]
    try:
        check_handler(handler)
        codec_of(handler, queue, kind)
    except ConfigError as error:
        raise ConfigError(f"queue {queue!r}: its handler {name!r} can't be used: {error}") from error
    return handler


def decorated_settings(queue: str, name: str) -> list[str]:
    """Return the names of the settings of a queue in the decorator of a handler, ``module:function``."""
    definitions = definitions_of(load_handler(queue, name))
    return [key for definition in definitions if definition.queue == queue for key in definition.settings]


def load_modules(modules: tuple[str, ...]) -> dict[str, QueueHandlers]:
    """Import modules and return the decorated handlers in them, by queue."""
    return by_queue(handlers_in(*map(load_module, modules)))


def surrounding(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the modules that have lifespans or middleware."""
    loaded = {name: load_module(name) for name in modules}
    return tuple(name for name, module in loaded.items() if lifespans_in(module) or middleware_in(module))


def without_handlers(modules: tuple[str, ...]) -> list[str]:
    """Return the modules that have nothing for a worker to run, perhaps because a decorator was forgotten."""
    around = surrounding(modules)
    return [name for name in modules if name not in around and not handlers_in(load_module(name))]


def modules_in(package: str) -> list[str]:
    """Return the modules directly in a package, none for a module."""
    path = getattr(load_module(package), "__path__", ())
    return [f"{package}.{module.name}" for module in pkgutil.iter_modules(path)]


def modules_around(group: HandlerGroup, handlers: Iterable[str]) -> list[ModuleType]:
    """Return the modules whose lifespans and middleware apply to the handlers of some queues."""
    own = [sys.modules[name.partition(":")[0]] for queue in handlers for name in group.queues[queue].handlers]
    return [*map(load_module, group.modules), *own]
