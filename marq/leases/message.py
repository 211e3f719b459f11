"""A message as a handler sees it: a view of the fetched record and of the lease that it shares.

If its handler fails, the exception and the queue's settings decide on its outcome: retry, dead letter or release. The
queue's circuit breaker counts only failures. ``Retry`` is a failure if another exception caused it.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Iterable
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self

from marq.client import message_token
from marq.client.codecs import Codec, CodecsByType, decode
from marq.client.exception_rules import policy_for
from marq.client.hooks import point
from marq.client.outcomes import DecodeError, NoHandler, Reject, Retry
from marq.core.deliveries.dead_letter_records import text_of
from marq.core.redeliver_or_dead_letter import is_exhausted, release_delay_ms
from marq.core.storage.rows import row_key
from marq.kafka.records import Row
from marq.leases.circuit_breaker import HandlerCall
from marq.leases.failure_log import Consequence
from marq.leases.held import LeasedBatch
from marq.settings.durations import Duration, duration_ms
from marq.settings.hints import Hinted, Unknown, refuse
from marq.settings.queue import BLOCK, UNLIMITED_ATTEMPTS
from marq.wire.error_texts import plain_error, with_traceback
from marq.wire.errors import LeaseLost, MarqError, error_text
from marq.wire.markers import BACKOFF
from marq.wire.names import ERROR_HEADER, KEY_HEADER, RESERVED_HEADER
from marq.wire.record_headers import Origin, deduplication_id, message_type, origin, uncounted

if TYPE_CHECKING:
    # Defaults of type variables need Python 3.13.
    from typing_extensions import TypeVar

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)

#: After this many uncounted releases in a row, the next interrupted attempt counts. Otherwise a message whose handlers
#: are always interrupted, as in a deployment that keeps crashing, would be redelivered forever.
MAX_UNCOUNTED = 100

#: The longest delay of a message that no handler here is for.
MAX_NO_HANDLER_MS = 60_000

#: What interrupts a handler. Everything else is a failed attempt, even if it is not an Exception: extensions written in
#: Rust panic with a BaseException. Such a message would otherwise end its process again and again, uncounted.
INTERRUPTIONS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


class Message(Hinted, Generic[T_co]):
    """A leased message. Settle it with :meth:`ack`, :meth:`release` or :meth:`reject`; only the first call counts.

    ``async with message:`` acks the message when the block ends without an exception. If an exception leaves the block,
    the message is released with the queue's backoff, and the exception propagates. ``Retry`` and ``Reject`` work as in
    :meth:`Consumer.run` and do not propagate. If the lease ends, the block keeps running; Marq cancels only handlers
    that :meth:`Consumer.run` or a worker called.
    """

    __slots__ = ("_batch", "_offset", "_raw", "_value")
    _value: Any

    def __init__(self, batch: LeasedBatch, offset: int, raw: bytes | None) -> None:
        self._batch = batch
        self._offset = offset
        self._raw = raw

    @property
    def id(self) -> str:
        """``topic/partition/offset`` of the message's first record; the same at every delivery."""
        return self._origin.id

    @property
    def queue(self) -> str:
        return self._batch.queue

    @property
    def value(self) -> T_co:
        """The value, decoded by the codec on first access; without a codec, the same as :attr:`body`.

        Raises:
            DecodeError: the codec can't decode it. If a handler lets it propagate, the message is dead-lettered.
        """
        codec = self._batch.codec
        # The codec comes from the handler's annotation, so the value has that type.
        return (self._raw or b"") if codec is None else self._decoded(codec)  # type: ignore[return-value]

    @property
    def body(self) -> bytes:
        """The sender's bytes; empty for a record without a value."""
        return self._raw or b""

    @property
    def key(self) -> bytes | None:
        """The sender's record key; None if the key only names the queue."""
        record = self._record
        return dict(record.headers).get(KEY_HEADER, record.key if self._batch.own_topic else None)

    @property
    def headers(self) -> dict[str, bytes | None]:
        """The sender's headers; if a name occurs twice, the last value counts."""
        return {name: value for name, value in self._record.headers if not name.startswith(RESERVED_HEADER)}

    @property
    def attempt(self) -> int:
        """The number of this delivery, starting at 1."""
        return 1 if self._batch.records.headers is None else self._origin.attempt

    @property
    def last_error(self) -> str | None:
        """The last exception of an earlier delivery, such as ``ValueError: no such user``, or None.

        Truncated to 1,024 bytes.
        """
        return text_of(self._record.headers, ERROR_HEADER) or None

    @property
    def type(self) -> str | None:
        """The type that the message was sent with, or None."""
        return message_type(self._record.headers)

    @property
    def deduplication_id(self) -> str | None:
        """The id that the message was sent with, or None."""
        own_id = deduplication_id(self._record.headers)
        return None if own_id is None else own_id.decode("utf-8", "replace")

    @property
    def sent_at(self) -> datetime:
        """When the message was first sent, by its sender's clock (UTC); at most the last moment of the year 9999."""
        try:
            return datetime.fromtimestamp(self._origin.first_sent_ms / 1000, UTC)
        except (ValueError, OverflowError, OSError):
            # Some programs write microseconds. Middleware that measures ages must not fail their messages.
            return datetime.max.replace(tzinfo=UTC)

    @property
    def lease_expires_at(self) -> datetime:
        """When the lease ends unless the consumer renews it, by this machine's clock (UTC)."""
        keeper = self._batch.keeper
        return datetime.fromtimestamp(keeper.wall_s() + self._expiry_s - keeper.now_s(), UTC)

    @property
    def state(self) -> Any:
        """The state that the lifespans of a worker's handlers yielded (:func:`marq.lifespan`), or None.

        It is None for messages of a :class:`Consumer`.
        """
        return self._batch.keeper.state

    @property
    def partition(self) -> int:
        return self._batch.source.partition

    @property
    def offset(self) -> int:
        return self._offset

    @property
    def token(self) -> str:
        """A short string that lets another process ack the message: ``await consumer.ack(token)``."""
        batch = self._batch
        return message_token.encode(message_token.Token(batch.queue, batch.holder, batch.source, self._offset))

    @point("ack")
    async def ack(self, *, wait: bool = True) -> None:
        """Ack the message; durable on return. With ``wait=False``, only queue the ack.

        Raises:
            LeaseLost: the lease ended before the ack was durable. The ack was written anyway.
        """
        expiry_s = self._expiry_s
        first = self._ack()
        if wait:
            await self._batch.keeper.settled()
        if first or not wait:
            self._check_lease("ack", expiry_s)

    @point("release")
    async def release(self, delay: Duration | None = None, *, wait: bool = True, **unknown: Unknown) -> None:
        """Release the message after ``delay`` (seconds or timedelta; 0: at once), or after the queue's backoff.

        Raises:
            LeaseLost: the lease ended before the release was durable.
            MarqError: the queue is an at-most-once queue.
        """
        refuse("release", unknown)
        if self._batch.at_most_once:
            raise MarqError(
                f"queue {self.queue!r}, message {self.id}: the queue delivers at most once, so a"
                " delivered message can't be released; reject() makes it a dead letter"
            )
        delay_ms = BACKOFF if delay is None else duration_ms("delay", delay)
        self._check_lease("release", self._expiry_s)
        if self._batch.decide(self._offset):
            self._batch.release(self._offset, delay_ms)
        if wait:
            await self._settled("release")

    @point("reject")
    async def reject(self, reason: str = "rejected", *, wait: bool = True, **unknown: Unknown) -> None:
        """Dead-letter the message with ``reason``.

        Raises:
            LeaseLost: the lease ended before the rejection was durable.
        """
        refuse("reject", unknown)
        self._check_lease("reject", self._expiry_s)
        if self._batch.decide(self._offset):
            text = str(reason)
            self._batch.reject(self._offset, plain_error(text))
            self._batch.keeper.failures.write([self], self._after_rejection("was rejected"), text)
        if wait:
            await self._settled("reject")

    @point("renew")
    async def renew(self, seconds: Duration | None = None, *, wait: bool = True, **unknown: Unknown) -> None:
        """Renew the lease for at least ``seconds`` (or a timedelta) from now (default: the consumer's lease).

        This never shortens a lease: if it already lasts longer, nothing is written.

        Raises:
            LeaseLost: the lease ended before the renewal was durable.
        """
        refuse("renew", unknown)
        lease_ms = int(self._batch.lease_s * 1000) if seconds is None else duration_ms("seconds", seconds, least_ms=1)
        self._check_lease("renew", self._expiry_s)
        batch, offset = self._batch, self._offset
        longer = batch.keeper.now_s() + lease_ms / 1000 > self._expiry_s
        if longer and offset in batch.open and offset not in batch.decided:
            batch.renew(offset, lease_ms)
        if wait:
            await self._settled("renew")

    @point("enter")
    async def __aenter__(self) -> Self:
        return self

    @point("exit")
    async def __aexit__(
        self, kind: builtins.type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            self._ack()
            return False
        consequence = self._fail(error)
        if consequence is not None and consequence.final:
            # The exception itself propagates, except Reject.
            self._batch.keeper.failures.write([self], consequence, shown_error(error))
        return isinstance(error, Retry | Reject)

    def __repr__(self) -> str:
        return f"<Message {self.id} queue={self.queue!r} attempt={self.attempt}>"

    def _ack(self) -> bool:
        """Ack the message; return False if it already has an outcome."""
        batch, offset = self._batch, self._offset
        if not batch.decide(offset):
            return False
        batch.ack(offset)
        # A lost lease has already counted as a failure.
        if batch.breaker is not None and offset in batch.open:
            batch.breaker.succeeded([self])
        return True

    def _decoded(self, codec: Codec | CodecsByType) -> Any:
        """Decode once, so that every access returns the same object."""
        try:
            return self._value
        except AttributeError:
            pass  # the slot is not set before the first access
        if isinstance(codec, CodecsByType):
            if (own := codec.of(self.type)) is None:
                return self.body
            codec = own
        try:
            self._value = value = decode(codec, self.body)
        except DecodeError as error:
            error.add_note(f"queue {self.queue!r}, message {self.id}, attempt {self.attempt}")
            raise
        return value

    @property
    def _record(self) -> Row:
        return self._batch.record(self._offset)

    @property
    def _origin(self) -> Origin:
        record = self._record
        return origin(self._batch.source, record.offset, record.timestamp, record.headers)

    @property
    def _expiry_s(self) -> float:
        return self._batch.expiry_s(self._offset)

    async def _settled(self, call: str) -> None:
        # A renew moves the expiry; the earlier one counts.
        expiry_s = self._expiry_s
        await self._batch.keeper.settled()
        self._check_lease(call, max(expiry_s, self._expiry_s))

    def _check_lease(self, call: str, expiry_s: float) -> None:
        late_s = self._batch.keeper.now_s() - expiry_s
        if late_s >= 0:
            raise LeaseLost(
                f"queue {self.queue!r}, message {self.id}, attempt {self.attempt}: its lease expired {late_s:.1f} s"
                f" before {call}() completed, so it may be delivered again; use a longer lease, or renew() in time"
            )

    # --- failed handlers ----------------------------------------------------------------------------------------------

    @point("fail")
    def _fail(self, error: BaseException, call: HandlerCall | None = None) -> Consequence | None:
        """Apply an exception, and return what follows, None if the message has an outcome.

        ``call`` if its handler was called with other messages, too.
        """
        batch, offset = self._batch, self._offset
        if not batch.decide(offset):
            return None
        call = call or HandlerCall([self])
        if isinstance(error, Reject):
            # A codec's error may quote the value.
            cause = None if isinstance(error, DecodeError) else _cause_of(error)
            batch.reject(offset, self._last_error_text(error.reason, cause, call))
            return self._after_rejection("could not be decoded" if isinstance(error, DecodeError) else "was rejected")
        if isinstance(error, NoHandler):
            return self._release_without_handler(error)
        if batch.at_most_once:
            return self._reject_failed(error, call)
        if isinstance(error, Retry):
            delay_ms = BACKOFF if error.delay_ms is None else error.delay_ms
            if (cause := _cause_of(error)) is None:
                batch.release(offset, delay_ms)
                return self._after_release(delay_ms, "ended with Retry")
            return self._release_failed(delay_ms, cause, call)
        if isinstance(error, INTERRUPTIONS):
            return self._release_interrupted()
        policy = policy_for(error, batch.settings.errors)
        if isinstance(policy, str):
            batch.reject(offset, self._last_error_text(_class_and_text(error), error, call))
            return self._after_rejection("failed")
        delay_ms = BACKOFF if policy is None else policy.delay_ms(self.attempt, self._seed)
        return self._release_failed(delay_ms, error, call)

    def _release_failed(self, delay_ms: int, error: BaseException, call: HandlerCall) -> Consequence:
        breaker, text = self._batch.breaker, _class_and_text(error)
        reason = call.failed(breaker)
        counted = not reason
        if breaker is not None and breaker.pause_left_s:
            delay_ms = max(delay_ms, breaker.delay_ms(self))
        if is_exhausted(self.attempt, counted, self._batch.settings):
            text = self._last_error_text(text, error, call)
        self._batch.release(self._offset, delay_ms, counted=counted, error=text)
        return self._after_release(delay_ms, counted=counted, reason=reason)

    def _reject_failed(self, error: BaseException, call: HandlerCall) -> Consequence:
        """Dead-letter a message of a queue that delivers at most once, because it must not be redelivered."""
        if isinstance(error, INTERRUPTIONS):
            self._batch.reject(self._offset, "interrupted: it may have been processed in part")
            return self._after_rejection("was interrupted")
        call.failed(self._batch.breaker)
        self._batch.reject(self._offset, self._last_error_text(_class_and_text(error), error, call))
        return self._after_rejection("failed")

    def _release_interrupted(self) -> Consequence:
        """Release a message whose handler was cancelled, as by a shutdown; the attempt does not count."""
        counted = uncounted(self._record.headers) >= MAX_UNCOUNTED
        error = f"interrupted, as {MAX_UNCOUNTED} times before" if counted else ""
        self._batch.release(self._offset, 0, counted=counted, error=error)
        return self._after_release(0, "was interrupted", counted=counted)

    def _release_without_handler(self, error: NoHandler) -> Consequence:
        """Release a message that no handler here is for, or dead-letter it if that has been so for long."""
        if not self._waits_for_handler:
            self._batch.reject(self._offset, error.text)
            return self._after_rejection("has no handler")
        delay_ms = min(1_000 << min(uncounted(self._record.headers), 10), MAX_NO_HANDLER_MS)
        self._batch.release(self._offset, delay_ms, counted=False, error=error.text)
        return self._after_release(delay_ms, "has no handler", counted=False)

    @property
    def _waits_for_handler(self) -> bool:
        """Whether the message, which no handler here is for, is released for other workers, or else dead-lettered."""
        return uncounted(self._record.headers) < MAX_UNCOUNTED and not self._batch.at_most_once

    def _last_error_text(self, text: str, error: BaseException | None, call: HandlerCall) -> str:
        """Return the text of a last attempt: only a dead letter shows the traceback; retries would carry it along."""
        if error is None or not self._batch.settings.tracebacks:
            return plain_error(text)
        return with_traceback(text, call.traceback(error))

    def _after_rejection(self, what: str) -> Consequence:
        """Return what follows a rejection."""
        return Consequence(f"{self._attempt_of_max} {what}, {self._end}", final=True)

    def _after_release(
        self, delay_ms: int, what: str = "failed", *, counted: bool = True, reason: str = ""
    ) -> Consequence:
        """Return what follows a release, as the tracker will decide if the queue's settings do not change meanwhile.

        ``reason`` says what the queue's circuit breaker did, if the attempt does not count for that reason.
        """
        attempt, settings = self.attempt, self._batch.settings
        if is_exhausted(attempt, counted, settings):
            return Consequence(f"{self._attempt_of_max} {what}, {self._end}", final=True)
        wait_ms = release_delay_ms(attempt, counted, delay_ms, settings, self._seed)
        uncounted_text = "" if counted else " and does not count"
        if reason:
            uncounted_text += f", because the queue's circuit breaker {reason}"
        return Consequence(f"{self._attempt_of_max} {what}{uncounted_text}, retry in {wait_ms / 1000:.3g} s")

    @property
    def _attempt_of_max(self) -> str:
        most = self._batch.settings.max_attempts
        return f"attempt {self.attempt}" + ("" if most == UNLIMITED_ATTEMPTS else f" of {most}")

    @property
    def _end(self) -> str:
        """What happens after the last attempt."""
        settings = self._batch.settings
        if settings.ordered and settings.on_dead_letter == BLOCK:
            return "blocks its ordering key until an operator acts"
        return "now a dead letter" if settings.dead_letter else "dropped, because dead_letter is false"

    @property
    def _seed(self) -> bytes:
        """The seed that the tracker uses for the queue's own backoff."""
        return row_key(self._batch.queue, self._batch.source.log, self._offset)


def _cause_of(error: Reject | Retry) -> BaseException | None:
    """Return the exception that made a handler raise this outcome."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def shown_error(error: BaseException) -> BaseException | str:
    """Return what a log line shows of an exception."""
    if isinstance(error, Reject):
        return error.reason
    return (_cause_of(error) or error) if isinstance(error, Retry) else error


def _class_and_text(error: BaseException) -> str:
    return plain_error(f"{type(error).__name__}: {error_text(error)}")


def put_back(messages: Iterable[Message], delay_ms: int = 0) -> int:
    """Release messages that user code has not seen, uncounted; return how many were still leased."""
    return sum([message._batch.put_back([message._offset], delay_ms) for message in messages])
