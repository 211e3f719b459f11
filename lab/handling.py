"""Records in a history that a handler received a message, and how it settled it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import marq
from lab.proof import history
from marq.client import message_token


class Teller:
    """Records deliveries and outcomes of one process; ``add`` takes type, op and fields of each event."""

    def __init__(self, add: Callable[..., None]) -> None:
        self._add = add

    def deliver(self, message: marq.Message) -> None:
        holder = history.holder_name(message_token.decode(message.token).holder)
        content = history.content(message.queue, message.key, message.body, tuple(message.headers.items()))
        self._add(
            "ok", "deliver", group="g", queue=message.queue, attempt=message.attempt, record=record_of(message),
            holder=holder, content=content,
        )  # fmt: skip

    async def settle(self, op: str, message: marq.Message, settle: Callable[[], Awaitable[None]]) -> bool:
        """Record an ``ack``, ``release`` or ``reject`` and its outcome; return whether it is durable and in time."""
        named = message_token.decode(message.token)
        names = {
            "holder": history.holder_name(named.holder),
            "queue": message.queue,
            "source": history.log_name(named.source),
            "offsets": [named.offset],
        }
        self._add("invoke", op, **names)
        began_s = time.monotonic()

        def ended(type_: str, **details: object) -> None:
            # A slow machine may explain that a lease has ended.
            self._add(type_, op, **names, took_ms=round((time.monotonic() - began_s) * 1000), **details)

        try:
            await settle()
        except marq.LeaseLost:
            # An ack was written anyway; another outcome may have been.
            if op == "ack":
                ended("ok", lost=[message.offset])
            else:
                ended("unknown")
        except marq.MarqError as error:
            ended("unknown", error=str(error))
        else:
            ended("ok")
            return True
        return False

    def forget(self, message: marq.Message) -> None:
        """Record that the message will not be settled before its lease ends."""
        self._add("info", "hang", queue=message.queue, record=record_of(message))


async def fail(message: marq.Message, error: Exception, op: str = "release") -> None:
    """Act like a handler that raises, and wait until the outcome ``op`` (release or reject) is durable."""
    with suppress(type(error)):
        async with message:
            raise error
    # The block has queued the outcome.
    await (message.reject() if op == "reject" else message.release())


def record_of(message: marq.Message) -> str:
    """Return the name of the record in a history."""
    named = message_token.decode(message.token)
    return history.name_of(named.source, named.offset)
