"""Acks, releases, rejects and renewals of messages.

Messages, handler pools, the receiver and calls with a token all come here. The first call that decides the outcome of a
message counts (:meth:`marq.leases.held.LeasedBatch.decide`). When a handler returns, the message is acked without
recording a decision: only code that keeps the message could decide later, and the writer drops a second ACK.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from marq.leases import handler_failures
from marq.wire.error_texts import plain_error

if TYPE_CHECKING:
    from marq.leases.circuit_breaker import HandlerCall
    from marq.leases.message import Message

_batch = attrgetter("_batch")


def ack(message: Message) -> bool:
    """Ack a message; return False if it already has an outcome."""
    batch, offset = message._batch, message._offset
    if not batch.decide(offset):
        return False
    batch.ack(offset)
    # A lost lease has already counted as a failure.
    if batch.breaker is not None and offset in batch.open:
        batch.breaker.succeeded([message])
    return True


def finish(message: Message) -> None:
    """Ack a message whose handler returned, unless it has an outcome. This is a hot path."""
    batch, offset = message._batch, message._offset
    if not batch.decided or offset not in batch.decided:
        batch.acked.append(offset)
        if not batch.dirty:
            batch.touch()
        if batch.breaker is not None and offset in batch.open:
            batch.breaker.succeeded([message])


def finish_all(messages: Sequence[Message], call: HandlerCall | None) -> None:
    """Ack the messages of a batch handler that returned, except those with an outcome; ``call``: if it lost a lease."""
    for breaker in {message._batch.breaker for message in messages}:
        if breaker is not None and not (call is not None and call.has_failed(breaker)):
            breaker.succeeded(messages)
    for batch, members in groupby(messages, _batch):
        offsets = [message._offset for message in members]
        if batch.decided:
            offsets = [offset for offset in offsets if offset not in batch.decided]
        if offsets:
            batch.acked += offsets
            batch.touch()


def release(message: Message, delay_ms: int) -> None:
    """Release a message, unless it has an outcome."""
    if message._batch.decide(message._offset):
        message._batch.release(message._offset, delay_ms)


def reject(message: Message, reason: str) -> None:
    """Dead-letter a message, unless it has an outcome."""
    if message._batch.decide(message._offset):
        message._batch.reject(message._offset, plain_error(reason))
        consequence = handler_failures.after_rejection(message, "was rejected")
        message._batch.keeper.failures.write([message], consequence, reason)


def renew(message: Message, lease_ms: int) -> None:
    """Renew the lease of a message that has no outcome; a lease never gets shorter."""
    batch, offset = message._batch, message._offset
    longer = batch.keeper.now_s() + lease_ms / 1000 > batch.expiry_s(offset)
    if longer and offset in batch.open and offset not in batch.decided:
        batch.renew(offset, lease_ms)


def put_back(messages: Iterable[Message], delay_ms: int = 0) -> int:
    """Release messages that user code has not seen, uncounted; return how many were still leased."""
    return sum([message._batch.put_back([message._offset], delay_ms) for message in messages])
