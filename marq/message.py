"""A message as a handler sees it: a view of the fetched record and of the lease that it shares with its neighbours."""

from __future__ import annotations

from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from marq import token
from marq.breaker import Call
from marq.codecs import Codec, decode
from marq.core.copies import Origin, origin, uncounted
from marq.core.errors import LeaseLost, MarqError
from marq.core.markers import BACKOFF
from marq.core.names import ERROR_HEADER, KEY_HEADER, RESERVED_HEADER
from marq.core.rows import row_key
from marq.durations import Duration, duration_ms
from marq.lease import Lease
from marq.outcomes import Reject, Retry, Undecodable
from marq.records import Row
from marq.words import Unknown, missing, refuse

#: After so many uncounted releases in a row the next interrupted attempt counts: else a message whose handlers are
#: always interrupted, as in a deployment that never comes up, would go round for ever.
MAX_UNCOUNTED = 100


class Message:
    """A leased message. It ends by :meth:`ack`, :meth:`release` or :meth:`reject`; the first of them counts.

    ``async with message:`` acks at a clean exit and releases with the queue's backoff when an exception leaves the
    block, which goes on its way; ``Retry`` and ``Reject`` end there. A block goes on when its lease ends;
    what is cancelled then are handlers that :meth:`Consumer.run` or a worker calls.
    """

    __slots__ = ("_lease", "_offset", "_raw", "_value")
    _value: Any

    def __init__(self, lease: Lease, offset: int, raw: bytes | None) -> None:
        self._lease = lease
        self._offset = offset
        self._raw = raw

    @property
    def id(self) -> str:
        """``topic/partition/offset`` of the first record: the same at every delivery."""
        return self._origin.id

    @property
    def queue(self) -> str:
        return self._lease.queue

    @property
    def value(self) -> Any:
        """What the sender sent: decoded by the codec, at first use; without a codec the bytes of :attr:`body`.

        Raises:
            Undecodable: the codec can't decode it; where it leaves a handler the message becomes a dead letter.
        """
        codec = self._lease.codec
        return (self._raw or b"") if codec is None else self._decoded(codec)

    @property
    def body(self) -> bytes:
        """The sender's bytes; empty for a record without a value."""
        return self._raw or b""

    @property
    def key(self) -> bytes | None:
        """The record's key as its sender gave it; None where it only names the queue."""
        record = self._record
        for name, value in record.headers:
            if name == KEY_HEADER:
                return value
        return record.key if self._lease.own_topic else None

    @property
    def headers(self) -> dict[str, bytes | None]:
        """The sender's headers; where a name occurs twice, the last one counts."""
        return {name: value for name, value in self._record.headers if not name.startswith(RESERVED_HEADER)}

    @property
    def attempt(self) -> int:
        """The number of this delivery, from 1."""
        return 1 if self._lease.records.headers is None else self._origin.attempt

    @property
    def last_error(self) -> str | None:
        """Type and text of the exception by which an earlier delivery ended, as ``ValueError: no such user``.

        Of several the last one; cut at 1,024 bytes; None where there was none.
        """
        found = [value for name, value in self._record.headers if name == ERROR_HEADER]
        return found[-1].decode("utf-8", "replace") if found and found[-1] else None

    @property
    def sent_at(self) -> datetime:
        """When the message was first sent, by its sender's clock (UTC)."""
        return datetime.fromtimestamp(self._origin.first_sent_ms / 1000, UTC)

    @property
    def lease_expires_at(self) -> datetime:
        """When the lease ends unless it is renewed, by this machine's clock (UTC); leases renew themselves."""
        outbox = self._lease.outbox
        return datetime.fromtimestamp(outbox.wall() + self._expiry_s - outbox.clock(), UTC)

    @property
    def partition(self) -> int:
        return self._lease.source.partition

    @property
    def offset(self) -> int:
        return self._offset

    @property
    def token(self) -> str:
        """A short text by which another process can finish the message: ``await consumer.ack(token)``."""
        lease = self._lease
        return token.encode(token.Token(lease.queue, lease.holder, lease.source, self._offset))

    async def ack(self, *, wait: bool = True) -> None:
        """Finish the message; durable on return, or only queued with ``wait=False``.

        Raises:
            LeaseLost: the lease ran out before the ack was durable. It was written all the same.
        """
        lease, offset = self._lease, self._offset
        expiry_s = self._expiry_s
        if self._decide():
            lease.ack(offset)
            if lease.breaker is not None:
                lease.breaker.succeeded([self])
            await lease.outbox.settled(wait=wait)
        elif wait:
            await lease.outbox.settled(wait=True)
            return
        self._check_lease("ack", expiry_s)

    async def release(self, delay: Duration | None = None, *, wait: bool = True, **unknown: Unknown) -> None:
        """Give the message back after ``delay`` (seconds or timedelta; 0: at once), or after the queue's backoff.

        Raises:
            LeaseLost: the lease ran out before.
            MarqError: the queue delivers at most once.
        """
        refuse("release", unknown)
        if self._lease.spending is not None:
            raise MarqError(
                f"queue {self.queue!r}, message {self.id}: the queue delivers at most once, so what was handed"
                " out can't be given back; reject() makes it a dead letter"
            )
        delay_ms = BACKOFF if delay is None else duration_ms("delay", delay)
        self._check_lease("release", self._expiry_s)
        if self._decide():
            self._lease.release(self._offset, delay_ms)
        await self._settled("release", wait)

    async def reject(self, reason: str = "rejected", *, wait: bool = True, **unknown: Unknown) -> None:
        """Make the message a dead letter, for ``reason``.

        Raises:
            LeaseLost: the lease ran out before.
        """
        refuse("reject", unknown)
        self._check_lease("reject", self._expiry_s)
        if self._decide():
            self._lease.reject(self._offset, str(reason))
        await self._settled("reject", wait)

    async def renew(self, seconds: Duration | None = None, *, wait: bool = True, **unknown: Unknown) -> None:
        """Keep the message for at least ``seconds`` (or timedelta) from now on, or for the consumer's lease.

        A lease never gets shorter: where the message is already kept for longer, nothing is written.

        Raises:
            LeaseLost: the lease ran out before.
        """
        refuse("renew", unknown)
        lease, offset = self._lease, self._offset
        lease_ms = int(lease.lease_s * 1000) if seconds is None else duration_ms("seconds", seconds, least_ms=1)
        self._check_lease("renew", self._expiry_s)
        longer = lease.outbox.clock() + lease_ms / 1000 > self._expiry_s
        if longer and offset in lease.open and offset not in lease.decided:
            lease.renew(offset, lease_ms)
        await self._settled("renew", wait)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            self._ack_later()
            return False
        self._fail(error)
        return isinstance(error, Retry | Reject)

    def __getattr__(self, name: str) -> Any:
        raise missing("Message", name)

    def __repr__(self) -> str:
        return f"<Message {self.id} queue={self.queue!r} attempt={self.attempt}>"

    def _decoded(self, codec: Codec) -> Any:
        """Decode once, so that all who look see the same object."""
        try:
            return self._value
        except AttributeError:
            pass  # nobody has looked yet: the slot is not set
        try:
            self._value = value = decode(codec, self.body)
        except Undecodable as error:
            error.add_note(f"queue {self.queue!r}, message {self.id}, attempt {self.attempt}")
            raise
        return value

    @property
    def _record(self) -> Row:
        return self._lease.record(self._offset)

    @property
    def _origin(self) -> Origin:
        record = self._record
        return origin(self._lease.source, record.offset, record.timestamp, record.headers)

    @property
    def _expiry_s(self) -> float:
        return self._lease.expiry_s(self._offset)

    def _decide(self) -> bool:
        """Whether this call decides: the message has no outcome yet."""
        lease, offset = self._lease, self._offset
        if offset in lease.decided:
            return False
        lease.decide(offset)
        return True

    def _ack_later(self) -> None:
        if self._decide():
            self._lease.ack(self._offset)
            if self._lease.breaker is not None:
                self._lease.breaker.succeeded([self])

    def _fail(self, error: BaseException, call: Call | None = None) -> None:
        """Queue what an exception means for the message; ``call`` where the handler was called with others, too."""
        lease, offset = self._lease, self._offset
        if not self._decide():
            return
        if isinstance(error, Reject):
            lease.reject(offset, error.reason)
        elif lease.spending is not None:
            self._reject_failed(error, call)
        elif isinstance(error, Retry):
            cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
            delay_ms = BACKOFF if error.delay_ms is None else error.delay_ms
            if cause is None:
                lease.release(offset, delay_ms)
            else:
                self._release_failed(delay_ms, cause, call)
        elif isinstance(error, Exception):
            said = None if lease.errors is None else lease.errors.said_of(error)
            if isinstance(said, str):
                lease.reject(offset, _text(error))
            else:
                # Computed as the tracker computes the queue's own.
                seed = row_key(lease.source, offset)
                self._release_failed(BACKOFF if said is None else said.delay_ms(self.attempt, seed), error, call)
        else:
            self._interrupt()

    def _release_failed(self, delay_ms: int, error: BaseException, call: Call | None) -> None:
        breaker, counted = self._lease.breaker, True
        if breaker is not None:
            counted = (call or Call([self])).counts(breaker)
            if breaker.pause_left_s:
                delay_ms = max(delay_ms, breaker.delay_ms(self))
        self._lease.release(self._offset, delay_ms, counted=counted, error=_text(error))

    def _reject_failed(self, error: BaseException, call: Call | None) -> None:
        """Of a queue that delivers at most once: nobody sees it again but as a dead letter."""
        if self._lease.breaker is not None and isinstance(error, Exception):
            (call or Call([self])).counts(self._lease.breaker)
        interrupted = "interrupted: it may have been processed in part"
        self._lease.reject(self._offset, _text(error) if isinstance(error, Exception) else interrupted)

    def _interrupt(self) -> None:
        """Cancelled, or the program ends: the attempt was none."""
        counted = uncounted(self._record.headers) >= MAX_UNCOUNTED
        error = f"interrupted, as {MAX_UNCOUNTED} times before" if counted else ""
        self._lease.release(self._offset, 0, counted=counted, error=error)

    async def _settled(self, call: str, wait: bool) -> None:
        # A renew moves the expiry: what counts is the one before.
        expiry_s = self._expiry_s
        await self._lease.outbox.settled(wait=wait)
        if wait:
            self._check_lease(call, max(expiry_s, self._expiry_s))

    def _check_lease(self, call: str, expiry_s: float) -> None:
        late_s = self._lease.outbox.clock() - expiry_s
        if late_s >= 0:
            raise LeaseLost(
                f"queue {self.queue!r}, message {self.id}, attempt {self.attempt}: its lease ran out {late_s:.1f} s"
                f" before {call}() was done, so it may be delivered again; use a longer lease, or renew() in time"
            )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
