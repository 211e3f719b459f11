"""Acks, releases, rejects and renewals of messages.

Messages, handler pools, the receiver and calls with a token all come here. The first call that decides the outcome of a
message counts (:meth:`marq.leases.held.HeldBatch.decide`). When a handler returns, the message is acked without
recording a decision: only code that keeps the message could decide later, and the batcher drops a second ACK.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from marq.leases import handler_failures
from marq.wire.error_texts import plain_error
from marq.wire.markers import Ack

if TYPE_CHECKING:
    from marq.client.message_token import Token
    from marq.consumer.ack_batcher import AckBatcher
    from marq.consumer.renewal import Renewal
    from marq.leases.circuit_breaker import HandlerCall
    from marq.leases.held import HeldBatch
    from marq.leases.message import Message

_held = attrgetter("_held")


def ack(message: Message) -> bool:
    """Ack a message; return False if it already has an outcome."""
    held, offset = message._held, message._offset
    if not held.decide(offset):
        return False
    held.ack(offset)
    # A lost lease has already counted as a failure.
    if held.breaker is not None and offset in held.open:
        held.breaker.succeeded([message])
    return True


def finish(message: Message) -> None:
    """Ack a message whose handler returned, unless it has an outcome. This is a hot path."""
    held, offset = message._held, message._offset
    if not held.decided or offset not in held.decided:
        held.acked.append(offset)
        if not held.dirty:
            held.acks.touch(held)
        if held.breaker is not None and offset in held.open:
            held.breaker.succeeded([message])


def finish_all(messages: Sequence[Message], call: HandlerCall | None) -> None:
    """Ack the messages of a batch handler that returned, except those with an outcome; ``call``: if it lost a lease."""
    for breaker in {message._held.breaker for message in messages}:
        if breaker is not None and not (call is not None and call.has_failed(breaker)):
            breaker.succeeded(messages)
    for held, members in groupby(messages, _held):
        offsets = [message._offset for message in members]
        if held.decided:
            offsets = [offset for offset in offsets if offset not in held.decided]
        if offsets:
            held.acked += offsets
            held.acks.touch(held)


def release(message: Message, delay_ms: int) -> None:
    """Release a message, unless it has an outcome."""
    if message._held.decide(message._offset):
        message._held.release(message._offset, delay_ms)


def reject(message: Message, reason: str) -> None:
    """Dead-letter a message, unless it has an outcome."""
    if message._held.decide(message._offset):
        message._held.reject(message._offset, plain_error(reason))
        consequence = handler_failures.after_rejection(message, "was rejected")
        message._held.acks.failures.write([message], consequence, reason)


def renew(message: Message, lease_ms: int) -> None:
    """Renew the lease of a message that has no outcome; a lease never gets shorter."""
    held, offset = message._held, message._offset
    longer = held.acks.clock() + lease_ms / 1000 > held.expiry_s(offset)
    if longer and offset in held.open and offset not in held.decided:
        held.renew(offset, lease_ms)


def put_back(messages: Iterable[Message], delay_ms: int = 0) -> int:
    """Release messages that user code has not seen, uncounted; return how many were still leased."""
    count = 0
    for message in messages:
        held, offset = message._held, message._offset
        if offset in held.open:
            held.release(offset, delay_ms, counted=False)
            count += 1
    return count


def hold(messages: Iterable[Message], lease_ms: int, renewal: Renewal, *, ends: bool = False) -> None:
    """Lease messages for ``lease_ms`` from now on, and renew them for as long again unless the lease ``ends``."""
    parts: dict[HeldBatch, list[Message]] = {}
    for message in messages:
        if message._offset in message._held.open:
            parts.setdefault(message._held, []).append(message)
    for held, members in parts.items():
        part = held.part([message._offset for message in members], held.acks.clock(), lease_ms)
        part.ends = ends
        for message in members:
            message._held = part
        renewal.add(part)


def detach(messages: Iterable[Message]) -> dict[str, int]:
    """Leave messages to the holders of their tokens: their leases are not renewed; return how many of each queue."""
    counts: dict[str, int] = {}
    for message in messages:
        held, offset = message._held, message._offset
        if offset in held.open:
            held.open.discard(offset)
            counts[held.queue] = counts.get(held.queue, 0) + 1
    return counts


def ack_by_token(token: Token, renewal: Renewal, acks: AckBatcher) -> None:
    """Ack a message held by this or another consumer."""
    held = renewal.find(token.holder, token.source, token.offset)
    if held is None:
        acks.settle_foreign(Ack(token.queue, token.holder, token.source, [token.offset]))
    elif held.decide(token.offset):
        held.ack(token.offset)
