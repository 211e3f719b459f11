"""Outcomes of messages whose handlers failed: retry, dead letter or release, by the exception and the queue's settings.

The queue's circuit breaker counts only failures. ``Retry`` is a failure if another exception caused it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from marq.client.exception_rules import policy_for
from marq.client.hooks import point
from marq.client.outcomes import DecodeError, NoHandler, Reject, Retry
from marq.core.redeliver_or_dead_letter import is_exhausted, release_delay_ms
from marq.core.storage.rows import row_key
from marq.leases.circuit_breaker import HandlerCall
from marq.leases.failure_log import Consequence
from marq.settings.queue import BLOCK, UNLIMITED_ATTEMPTS
from marq.wire.error_texts import plain_error, with_traceback
from marq.wire.errors import error_text
from marq.wire.markers import BACKOFF
from marq.wire.record_headers import uncounted

if TYPE_CHECKING:
    from marq.leases.message import Message

#: After this many uncounted releases in a row, the next interrupted attempt counts. Otherwise a message whose handlers
#: are always interrupted, as in a deployment that keeps crashing, would be redelivered forever.
MAX_UNCOUNTED = 100

#: The longest delay of a message that no handler here is for.
MAX_NO_HANDLER_MS = 60_000

#: What interrupts a handler. Everything else is a failed attempt, even if it is not an Exception: extensions written in
#: Rust panic with a BaseException. Such a message would otherwise end its process again and again, uncounted.
INTERRUPTIONS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


#: The error of a message whose handler an operator has cancelled.
CANCELLED_BY_OPERATOR = "cancelled by an operator"


@point("fail")
def fail(message: Message, error: BaseException, call: HandlerCall | None = None) -> Consequence | None:
    """Apply an exception to a message, and return what follows, None if the message has an outcome.

    ``call`` if its handler was called with other messages, too.
    """
    batch, offset = message._batch, message._offset
    if not batch.decide(offset):
        return None
    call = call or HandlerCall([message])
    if isinstance(error, Reject):
        # A codec's error may quote the value.
        cause = None if isinstance(error, DecodeError) else cause_of(error)
        batch.reject(offset, _text_and_traceback(message, error.reason, cause, call))
        return after_rejection(message, "could not be decoded" if isinstance(error, DecodeError) else "was rejected")
    if isinstance(error, NoHandler):
        return _release_without_handler(message, error)
    if batch.at_most_once:
        return _reject_failed(message, error, call)
    if isinstance(error, Retry):
        cause = cause_of(error)
        delay_ms = BACKOFF if error.delay_ms is None else error.delay_ms
        if cause is None:
            batch.release(offset, delay_ms)
            return after_release(message, delay_ms, "ended with Retry")
        return _release_failed(message, delay_ms, cause, call)
    if isinstance(error, INTERRUPTIONS):
        return _release_interrupted(message)
    policy = policy_for(error, batch.settings.errors)
    if isinstance(policy, str):
        batch.reject(offset, _text_and_traceback(message, text_of(error), error, call))
        return after_rejection(message, "failed")
    delay_ms = BACKOFF if policy is None else policy.delay_ms(message.attempt, _seed(message))
    return _release_failed(message, delay_ms, error, call)


def fail_all(
    messages: Sequence[Message], error: BaseException, call: HandlerCall, *, only_open: bool
) -> dict[Message, Consequence]:
    """Apply an exception to all messages of one call, and return what follows, except for those with an outcome.

    With ``only_open``, the leases of some have ended, and nothing follows for these.
    """
    followed: dict[Message, Consequence] = {}
    for message in messages:
        if only_open and message._offset not in message._batch.open:
            # Its lease has ended, so there is nothing to release.
            call.failed(message._batch.breaker)
        elif (consequence := fail(message, error, call)) is not None:
            followed[message] = consequence
    return followed


def interrupt(messages: Iterable[Message]) -> None:
    """Release messages of a handler that ignores its cancellation."""
    for message in messages:
        fail(message, asyncio.CancelledError())


def cancel(messages: Iterable[Message], *, counted: bool) -> None:
    """Settle messages whose handler an operator has cancelled: as failed attempts, or as interrupted ones.

    The circuit breaker does not learn of it, because it says nothing about the service that handlers need.
    """
    for message in messages:
        batch, offset = message._batch, message._offset
        if not counted or batch.at_most_once:
            interrupt([message] if offset in batch.open else ())
        elif offset in batch.open and batch.decide(offset):
            batch.release(offset, BACKOFF, counted=True, error=CANCELLED_BY_OPERATOR)


def after_rejection(message: Message, what: str) -> Consequence:
    """Return what follows a rejection."""
    return Consequence(f"{_attempt(message)} {what}, {_end(message)}", final=True)


def after_release(
    message: Message, delay_ms: int, what: str = "failed", *, counted: bool = True, reason: str = ""
) -> Consequence:
    """Return what follows a release, as the tracker will decide if the queue's settings do not change meanwhile.

    ``reason`` says what the queue's circuit breaker did, if the attempt does not count for that reason.
    """
    attempt, settings = message.attempt, message._batch.settings
    if is_exhausted(attempt, counted, settings):
        return Consequence(f"{_attempt(message)} {what}, {_end(message)}", final=True)
    wait_ms = release_delay_ms(attempt, counted, delay_ms, settings, _seed(message))
    uncounted = "" if counted else " and does not count"
    if reason:
        uncounted += f", because the queue's circuit breaker {reason}"
    return Consequence(f"{_attempt(message)} {what}{uncounted}, retry in {wait_ms / 1000:.3g} s")


def _attempt(message: Message) -> str:
    most = message._batch.settings.max_attempts
    return f"attempt {message.attempt}" + ("" if most == UNLIMITED_ATTEMPTS else f" of {most}")


def _end(message: Message) -> str:
    settings = message._batch.settings
    if settings.ordered and settings.on_dead_letter == BLOCK:
        return "blocks its ordering key until an operator acts"
    return "now a dead letter" if settings.dead_letter else "dropped, because dead_letter is false"


def _seed(message: Message) -> bytes:
    """Return the seed that the tracker uses for the queue's own backoff."""
    return row_key(message._batch.queue, message._batch.source.log, message._offset)


def cause_of(error: Reject | Retry) -> BaseException | None:
    """Return the exception that made a handler raise this outcome."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _text_and_traceback(message: Message, text: str, error: BaseException | None, call: HandlerCall) -> str:
    """Return the text of a last attempt: only a dead letter shows the traceback, and retries would carry it along."""
    if error is None or not message._batch.settings.tracebacks:
        return plain_error(text)
    return with_traceback(text, call.traceback(error))


def _release_failed(message: Message, delay_ms: int, error: BaseException, call: HandlerCall) -> Consequence:
    breaker, text = message._batch.breaker, text_of(error)
    reason = call.failed(breaker)
    counted = not reason
    if breaker is not None and breaker.pause_left_s:
        delay_ms = max(delay_ms, breaker.delay_ms(message))
    if is_exhausted(message.attempt, counted, message._batch.settings):
        text = _text_and_traceback(message, text, error, call)
    message._batch.release(message._offset, delay_ms, counted=counted, error=text)
    return after_release(message, delay_ms, counted=counted, reason=reason)


def _reject_failed(message: Message, error: BaseException, call: HandlerCall) -> Consequence:
    """Dead-letter a message of a queue that delivers at most once, because it must not be redelivered."""
    if isinstance(error, INTERRUPTIONS):
        message._batch.reject(message._offset, "interrupted: it may have been processed in part")
        return after_rejection(message, "was interrupted")
    call.failed(message._batch.breaker)
    message._batch.reject(message._offset, _text_and_traceback(message, text_of(error), error, call))
    return after_rejection(message, "failed")


def _release_interrupted(message: Message) -> Consequence:
    """Release a message whose handler was cancelled, as by a shutdown; the attempt does not count."""
    counted = uncounted(message._record.headers) >= MAX_UNCOUNTED
    error = f"interrupted, as {MAX_UNCOUNTED} times before" if counted else ""
    message._batch.release(message._offset, 0, counted=counted, error=error)
    return after_release(message, 0, "was interrupted", counted=counted)


def waits_for_handler(message: Message) -> bool:
    """Return whether a message that no handler here is for is released, for other workers, or else dead-lettered."""
    return uncounted(message._record.headers) < MAX_UNCOUNTED and not message._batch.at_most_once


def _release_without_handler(message: Message, error: NoHandler) -> Consequence:
    """Release a message that no handler here is for, or dead-letter it if that has been so for long."""
    batch, offset = message._batch, message._offset
    if not waits_for_handler(message):
        batch.reject(offset, error.text)
        return after_rejection(message, "has no handler")
    delay_ms = min(1_000 << min(uncounted(message._record.headers), 10), MAX_NO_HANDLER_MS)
    batch.release(offset, delay_ms, counted=False, error=error.text)
    return after_release(message, delay_ms, "has no handler", counted=False)


def shown(error: BaseException) -> BaseException | str:
    """Return what a log line shows of an exception."""
    if isinstance(error, Reject):
        return error.reason
    return (cause_of(error) or error) if isinstance(error, Retry) else error


def text_of(error: BaseException) -> str:
    """Return an exception's class and text."""
    return plain_error(f"{type(error).__name__}: {error_text(error)}")
