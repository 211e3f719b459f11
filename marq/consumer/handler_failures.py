"""Outcomes of messages whose handlers failed: retry, dead letter or release, by the exception and the queue's settings.

The queue's circuit breaker counts only failures. ``Retry`` is a failure if another exception caused it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from marq.client.hooks import point
from marq.client.outcomes import Reject, Retry
from marq.consumer.circuit_breaker import HandlerCall
from marq.core.storage.rows import row_key
from marq.wire.errors import error_text
from marq.wire.markers import BACKOFF
from marq.wire.record_headers import uncounted

if TYPE_CHECKING:
    from marq.consumer.message import Message

#: After this many uncounted releases in a row, the next interrupted attempt counts. Otherwise a message whose handlers
#: are always interrupted, as in a deployment that keeps crashing, would be redelivered forever.
MAX_UNCOUNTED = 100

#: What interrupts a handler. Everything else is a failed attempt, even if it is not an Exception: extensions written in
#: Rust panic with a BaseException. Such a message would otherwise end its process again and again, uncounted.
INTERRUPTIONS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


@point("fail")
def fail(message: Message, error: BaseException, call: HandlerCall | None = None) -> None:
    """Apply an exception to a message; ``call`` if its handler was called with other messages, too."""
    held, offset = message._held, message._offset
    if not held.decide(offset):
        return
    if isinstance(error, Reject):
        held.reject(offset, error.reason)
    elif held.at_most_once:
        _reject_failed(message, error, call)
    elif isinstance(error, Retry):
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        delay_ms = BACKOFF if error.delay_ms is None else error.delay_ms
        if cause is None:
            held.release(offset, delay_ms)
        else:
            _release_failed(message, delay_ms, cause, call)
    elif not isinstance(error, INTERRUPTIONS):
        policy = None if held.errors is None else held.errors.said_of(error)
        if isinstance(policy, str):
            held.reject(offset, text_of(error))
        else:
            # The seed that the tracker uses for the queue's own backoff.
            seed = row_key(held.queue, held.source.log, offset)
            delay_ms = BACKOFF if policy is None else policy.delay_ms(message.attempt, seed)
            _release_failed(message, delay_ms, error, call)
    else:
        _release_interrupted(message)


def fail_all(messages: Sequence[Message], error: BaseException, call: HandlerCall, *, only_open: bool) -> None:
    """Apply an exception to all messages of one call; with ``only_open``, the leases of some have ended."""
    for message in messages:
        if only_open and message._offset not in message._held.open:
            # Its lease has ended, so there is nothing to release.
            call.counts(message._held.breaker)
        else:
            fail(message, error, call)


def interrupt(messages: Iterable[Message]) -> None:
    """Release messages of a handler that ignores its cancellation."""
    for message in messages:
        fail(message, asyncio.CancelledError())


def _release_failed(message: Message, delay_ms: int, error: BaseException, call: HandlerCall | None) -> None:
    breaker, counted = message._held.breaker, True
    if breaker is not None:
        counted = (call or HandlerCall([message])).counts(breaker)
        if breaker.pause_left_s:
            delay_ms = max(delay_ms, breaker.delay_ms(message))
    message._held.release(message._offset, delay_ms, counted=counted, error=text_of(error))


def _reject_failed(message: Message, error: BaseException, call: HandlerCall | None) -> None:
    """Dead-letter a message of a queue that delivers at most once, because it must not be redelivered."""
    interrupted = isinstance(error, INTERRUPTIONS)
    if message._held.breaker is not None and not interrupted:
        (call or HandlerCall([message])).counts(message._held.breaker)
    reason = "interrupted: it may have been processed in part" if interrupted else text_of(error)
    message._held.reject(message._offset, reason)


def _release_interrupted(message: Message) -> None:
    """Release a message whose handler was cancelled, as by a shutdown; the attempt does not count."""
    counted = uncounted(message._record.headers) >= MAX_UNCOUNTED
    error = f"interrupted, as {MAX_UNCOUNTED} times before" if counted else ""
    message._held.release(message._offset, 0, counted=counted, error=error)


def text_of(error: BaseException) -> str:
    """Return an exception's class and text."""
    return f"{type(error).__name__}: {error_text(error)}"
