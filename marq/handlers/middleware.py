"""Middleware: functions around each call of a handler.

A chain of middleware becomes part of the handler when a handler pool starts, so a pool without middleware calls its
handler directly. Middleware runs in the event loop, even around plain functions, which run in threads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

from marq.client.hooks import point
from marq.handlers.decorator import accepts, mark, marked_in
from marq.handlers.parameters import is_coroutine_function, name_of
from marq.leases.message import Message
from marq.wire.errors import ConfigError, MarqError

#: The second argument of a middleware: calls the next one, and finally the handler.
CallNext = Callable[[Message], Awaitable[Any]]
Middleware = Callable[[Message, CallNext], Awaitable[Any]]
Function = TypeVar("Function", bound=Middleware)

_ATTRIBUTE = "__marq_middleware__"


def middleware(function: Function) -> Function:
    """Decorate ``async def function(message, call_next)``, which runs around each call of a handler.

    ``await call_next(message)`` calls the handler and raises its exceptions, including ``Retry`` and ``Reject``. An
    exception from the middleware has the same effect as one from the handler. When the middleware returns, the message
    is acked, so a middleware that does not call ``call_next`` skips the handler.

    A worker finds middleware in the modules of MARQ_HANDLERS and in the modules of its handlers, and applies all of it
    to all handlers. Within a module, the first middleware is outermost. Pass it to :meth:`Consumer.run` in a service.

    Raises:
        ConfigError: the function is not a coroutine function, or can't be called with these arguments.
    """
    check_middleware(function)
    mark(function, _ATTRIBUTE)
    return function


def middleware_in(*modules: ModuleType) -> list[Middleware]:
    """Return the middleware in the namespaces of modules, imported ones included, in their order."""
    return marked_in(modules, _ATTRIBUTE)


def check_middleware(function: object) -> None:
    """Check that a middleware can be called; raise ConfigError if not."""
    if not (callable(function) and is_coroutine_function(function) and accepts(function, 2)):
        raise ConfigError(f"middleware {name_of(function)}: expected `async def` with the arguments message, call_next")


@point("surround")
def surround(handler: Callable[[Any], Awaitable[Any]], chain: Sequence[Middleware]) -> Callable[[Any], Awaitable[Any]]:
    """Return a handler that calls a chain of middleware, the first one outermost, around this one."""
    for function in reversed(chain):
        handler = _around(function, handler)
    return handler


def _around(function: Middleware, handler: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    async def call(message: Message) -> Any:
        is_called = is_begun = False

        async def call_handler(message: Message) -> Any:
            nonlocal is_begun
            is_begun = True
            return await handler(message)

        def call_next(message: Message) -> Awaitable[Any]:
            nonlocal is_called
            if is_called:
                raise MarqError(
                    f"middleware {name_of(function)}: call_next() was called twice for one message, but a delivery is"
                    " one call of the handler; raise marq.Retry to have the message redelivered"
                )
            is_called = True
            return call_handler(message)

        result = await function(message, call_next)
        if is_called and not is_begun:
            # Returning would ack a message that no handler has seen.
            raise MarqError(
                f"middleware {name_of(function)}: call_next() was not awaited, so the handler did not run: write await"
                " call_next(message)"
            )
        return result

    return call
