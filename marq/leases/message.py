"""A message as a handler sees it: a view of the fetched record and of the lease that it shares."""

from __future__ import annotations

import builtins
from collections.abc import Iterable
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self

from marq.client import message_token
from marq.client.codecs import Codec, CodecsByType, decode
from marq.client.hooks import point
from marq.client.outcomes import DecodeError, Reject, Retry
from marq.core.deliveries.dead_letter_records import text_of
from marq.kafka.records import Row
from marq.leases import handler_failures
from marq.leases.held import LeasedBatch
from marq.settings.durations import Duration, duration_ms
from marq.settings.hints import Hinted, Unknown, refuse
from marq.wire.error_texts import plain_error
from marq.wire.errors import LeaseLost, MarqError
from marq.wire.markers import BACKOFF
from marq.wire.names import ERROR_HEADER, KEY_HEADER, RESERVED_HEADER
from marq.wire.record_headers import Origin, deduplication_id, message_type, origin

if TYPE_CHECKING:
    # Defaults of type variables need Python 3.13.
    from typing_extensions import TypeVar

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)


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
            self._batch.keeper.failures.write([self], handler_failures.after_rejection(self, "was rejected"), text)
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
        consequence = handler_failures.fail(self, error)
        if consequence is not None and consequence.final:
            # The exception itself propagates, except Reject.
            self._batch.keeper.failures.write([self], consequence, handler_failures.shown(error))
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


def put_back(messages: Iterable[Message], delay_ms: int = 0) -> int:
    """Release messages that user code has not seen, uncounted; return how many were still leased."""
    return sum([message._batch.put_back([message._offset], delay_ms) for message in messages])
