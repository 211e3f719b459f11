"""The handlers of a group, imported and checked."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from types import ModuleType

from marq.consumer.handler_parameters import Handler
from marq.consumer.handlers import HandlerDefinition, check_handler, codec_of, handlers_in
from marq.consumer.lifespan import lifespans_in
from marq.consumer.middleware import middleware_in
from marq.wire.errors import ConfigError
from marq_worker.handlers.handler_groups import HandlerGroup
from marq_worker.handlers.handler_modules import load_function, load_module

log = logging.getLogger("marq.handlers")


def load_handlers(group: HandlerGroup) -> dict[str, Handler]:
    """Import the handlers of a group; skip a queue whose handler can't be imported, so that the others run.

    Raises ConfigError if no handler can be imported.
    """
    handlers: dict[str, Handler] = {}
    errors: list[ConfigError] = []
    for queue, handled in group.queues.items():
        try:
            handlers[queue] = load_handler(queue, handled.handler)
        except ConfigError as error:
            errors.append(error)
    if errors and not handlers:
        raise errors[0]
    for error in errors:
        log.critical("messages wait until this is fixed: %s", error, exc_info=error.__cause__)
    return handlers


def load_handler(queue: str, name: str) -> Handler:
    """Import the handler of a queue, ``module:function``."""
    handler: Handler = load_function(queue, name)  # type: ignore[assignment]
    try:
        check_handler(handler)
        codec_of(handler, queue)
    except ConfigError as error:
        raise ConfigError(f"queue {queue!r}: its handler {name!r} can't be used: {error}") from error
    return handler


def load_modules(modules: tuple[str, ...]) -> list[HandlerDefinition]:
    """Import modules and return the decorated handlers in them."""
    return handlers_in(*map(load_module, modules))


def surrounding(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the modules that have lifespans or middleware."""
    loaded = {name: load_module(name) for name in modules}
    return tuple(name for name, module in loaded.items() if lifespans_in(module) or middleware_in(module))


def without_handlers(modules: tuple[str, ...]) -> list[str]:
    """Return the modules that have nothing for a worker to run, perhaps because a decorator was forgotten."""
    around = surrounding(modules)
    return [name for name in modules if name not in around and not handlers_in(load_module(name))]


def modules_around(group: HandlerGroup, handlers: Iterable[str]) -> list[ModuleType]:
    """Return the modules whose lifespans and middleware apply to the handlers of some queues."""
    own = [sys.modules[group.queues[queue].handler.partition(":")[0]] for queue in handlers]
    return [*map(load_module, group.modules), *own]
