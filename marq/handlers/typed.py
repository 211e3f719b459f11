"""The handlers of one queue, by the type of its messages, which their sender put in the header ``marq-type``.

A message whose type has no handler goes to the handler without a type. If there is none, it is not an error of the
message: in a rolling deployment, workers with the old code receive messages of a new type. So it is released, for
workers that have the handler, and the attempt does not count. After ``MAX_UNCOUNTED`` releases in a row, about an hour
and a half, it becomes a dead letter: by then, no worker will get the handler. A queue that delivers at most once
redelivers nothing, so there it becomes one at once.

Only queues with typed handlers look at the header. The handler of any other queue is called directly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn

from marq.client.codecs import Codec, CodecsByType
from marq.client.outcomes import DecodeError, NoHandler
from marq.client.send_targets import Handler, definitions_of
from marq.handlers.decorator import codec_of
from marq.handlers.parameters import bound, name_of
from marq.kafka.repeated_warnings import RepeatedWarning
from marq.leases.message import Message
from marq.wire.errors import ConfigError
from marq.wire.names import TYPE_HEADER
from marq.wire.record_headers import last_value

log = logging.getLogger("marq")

Call = Callable[[Message], Awaitable[Any]]

#: Senders choose the types, so their number has no limit.
MAX_WARNED_TYPES = 100
_WARNING = (
    "no handler: queue=%s type=%s id=%s; the message is released without counting the attempt, for workers that have a"
    " handler of this type, and becomes a dead letter after about 90 minutes"
)


class HandlersByType:
    """The handlers of a queue; ``functions`` has them by type, and the one without a type as None.

    Raises:
        ConfigError: values can't be decoded, or the handler without a type is decorated for types only.
    """

    def __init__(self, queue: str, functions: Mapping[str | None, Handler]) -> None:
        untyped = functions.get(None)
        types = [definition.type for definition in definitions_of(untyped) if definition.queue == queue]
        if types and None not in types:
            raise ConfigError(
                f"queue {queue!r}: its handler {name_of(untyped)} is decorated for messages of type {types[0]!r} only:"
                " do not name it as `handler` of the queue, but its module in MARQ_HANDLERS"
            )
        self._queue = queue
        self._codecs = CodecsByType({kind: codec_of(function, queue, kind) for kind, function in functions.items()})
        self._untyped = None if untyped is None else bound(untyped)
        self._typed = {kind.encode(): bound(function) for kind, function in functions.items() if kind is not None}
        self._types = ", ".join(sorted(repr(kind) for kind in functions if kind is not None))
        #: The warnings about types without a handler.
        self._missing: dict[str | None, RepeatedWarning] = {}

    @property
    def codec(self) -> Codec | CodecsByType | None:
        """Decodes the values; None if all are bytes."""
        if not self._typed:
            return self._codecs.of(None)
        return self._codecs if any(codec is not None for codec in self._codecs.by_type.values()) else None

    def check_value(self, kind: str | None, data: bytes) -> None:
        """Check that a value of a type can be decoded. Raises ConfigError if not, or if no handler is for the type."""
        if self._untyped is None and kind not in self._codecs.by_type:
            raise ConfigError(f"queue {self._queue!r}: {_no_handler(kind, self._types)}")
        codec = self._codecs.of(kind)
        if codec is None:
            return
        try:
            codec.decode(data)
        except DecodeError as error:
            raise ConfigError(f"its value can't be decoded by the handler of queue {self._queue!r}: {error}") from error
        except Exception as error:  # a user's codec may need what only a running handler has
            log.debug("a value could not be checked: queue=%s error=%r", self._queue, error)

    def handler_of(self, message: Message) -> Callable[[Message], Any]:
        """Return the handler that is called with a message."""
        other = self._refuse if self._untyped is None else self._untyped
        return self._typed.get(type_of(message), other)

    def calls(self, call_of: Callable[[Callable[[Message], Any]], Call]) -> Call:
        """Return what calls the handler of a message; ``call_of`` makes a coroutine function of each handler."""
        other = self._refuse if self._untyped is None else call_of(self._untyped)
        if not self._typed:
            return other
        get = {kind: call_of(handler) for kind, handler in self._typed.items()}.get

        def call(message: Message) -> Awaitable[Any]:
            return get(type_of(message), other)(message)

        return call

    async def _refuse(self, message: Message) -> NoReturn:
        kind = message.type
        # Otherwise it becomes a dead letter now, whose line says so.
        if message._waits_for_handler:
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
