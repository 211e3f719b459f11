"""Several handlers of one queue, by the type of its messages, which their sender put in the header ``marq-type``.

A message whose type has no handler goes to the handler without a type. If there is none, it is not an error of the
message: in a rolling deployment, workers with the old code receive messages of a new type. So it is released, for
workers that have the handler, and the attempt does not count. After ``MAX_UNCOUNTED`` releases in a row, about an hour
and a half, it becomes a dead letter: by then, no worker will get the handler. A queue that delivers at most once
redelivers nothing, so there it becomes one at once.

Only queues with typed handlers look at the header. All others call their handler directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn

from marq.client.codecs import Codec, CodecsByType
from marq.client.outcomes import NoHandler
from marq.client.send_targets import Handler
from marq.handlers.parameters import bound
from marq.kafka.repeated_warnings import RepeatedWarning
from marq.leases.handler_failures import waits_for_handler
from marq.leases.message import Message
from marq.wire.errors import ConfigError
from marq.wire.names import TYPE_HEADER
from marq.wire.record_headers import last_value

Call = Callable[[Message], Awaitable[Any]]

#: Senders choose the types, so their number has no limit.
MAX_WARNED_TYPES = 100
_WARNING = (
    "no handler: queue=%s type=%s id=%s; the message is released without counting the attempt, for workers that have a"
    " handler of this type, and becomes a dead letter after about 90 minutes"
)


class TypedHandlers:
    """The handlers of a queue by type, and the one for all other messages, if there is one.

    ``codecs`` has the codec of each type's values, None for bytes, and that of the other messages under None.
    """

    def __init__(
        self,
        queue: str,
        handlers: Mapping[str, Handler],
        untyped: Handler | None,
        codecs: Mapping[str | None, Codec | None],
    ) -> None:
        self._queue = queue
        self._types = ", ".join(map(repr, sorted(handlers)))
        self._untyped = None if untyped is None else bound(untyped)
        self._handlers = {name.encode(): bound(handler) for name, handler in handlers.items()}
        self._codecs = CodecsByType(codecs)
        #: The warnings about types without a handler.
        self._missing: dict[str | None, RepeatedWarning] = {}

    @property
    def codecs(self) -> CodecsByType | None:
        """The codecs; None if all values are bytes."""
        has_codec = any(codec is not None for codec in self._codecs.by_type.values())
        return self._codecs if has_codec else None

    def codec_of(self, kind: str | None) -> Codec | None:
        """Return the codec of a type's values. Raises ConfigError if no handler is for it."""
        if self._untyped is None and kind not in self._codecs.by_type:
            raise ConfigError(f"queue {self._queue!r}: {_no_handler(kind, self._types)}")
        return self._codecs.of(kind)

    def handler_of(self, message: Message) -> Callable[[Message], Any]:
        """Return the handler that is called with a message."""
        other = self._refuse if self._untyped is None else self._untyped
        return self._handlers.get(type_of(message), other)

    def calls(self, call_of: Callable[[Callable[[Message], Any]], Call]) -> Call:
        """Return what calls the handler of a message; ``call_of`` makes a coroutine function of each handler."""
        get = {kind: call_of(handler) for kind, handler in self._handlers.items()}.get
        other = self._refuse if self._untyped is None else call_of(self._untyped)

        def call(message: Message) -> Awaitable[Any]:
            return get(type_of(message), other)(message)

        return call

    async def _refuse(self, message: Message) -> NoReturn:
        kind = message.type
        # Otherwise it becomes a dead letter now, whose line says so.
        if waits_for_handler(message):
            self._warn(kind, message)
        raise NoHandler(_no_handler(kind, self._types))

    def _warn(self, kind: str | None, message: Message) -> None:
        if kind not in self._missing and len(self._missing) < MAX_WARNED_TYPES:
            self._missing[kind] = RepeatedWarning(_WARNING)
        if kind in self._missing:
            self._missing[kind].write(asyncio.get_running_loop().time(), self._queue, kind, message.id)


def _no_handler(kind: str | None, types: str) -> str:
    what = "a message without a type" if kind is None else f"messages of type {kind!r}"
    return f"no handler for {what}; there are handlers for {types}"


def type_of(message: Message) -> bytes:
    """Return the type of a message as bytes, empty if it has none."""
    return last_value(message._record.headers, TYPE_HEADER) or b""
