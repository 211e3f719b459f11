"""Acks, releases, rejects and renewals of messages.

Messages, handler pools, the receiver and calls with a token all come here. The first call that decides the outcome of a
message counts (:meth:`marq.consumer.held_batch.HeldBatch.decide`). When a handler returns, the message is acked without
recording a decision: only code that keeps the message could decide later, and the batcher drops a second ACK.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from marq.client.hooks import point
from marq.client.outcomes import Reject, Retry
from marq.consumer.breaker import Call
from marq.consumer.interruptions import release_interrupted
from marq.core.storage.rows import row_key
from marq.wire.markers import BACKOFF, Ack

if TYPE_CHECKING:
    from marq.client.message_token import Token
    from marq.consumer.ack_batcher import AckBatcher
    from marq.consumer.held_batch import HeldBatch
    from marq.consumer.message import Message
    from marq.consumer.renewal import Renewal

_held = attrgetter("_held")


def ack(message: Message) -> bool:
    """Ack a message; return False if it already has an outcome."""
    held, offset = message._held, message._offset
    if not held.decide(offset):
        return False
    held.ack(offset)
    if held.breaker is not None:
        held.breaker.succeeded([message])
    return True


def finish(message: Message) -> None:
    """Ack a message whose handler returned, unless it has an outcome. This is a hot path."""
    held, offset = message._held, message._offset
    if not held.decided or offset not in held.decided:
        held.acked.append(offset)
        if not held.dirty:
            held.acks.touch(held)
        if held.breaker is not None:
            held.breaker.succeeded([message])


def finish_all(messages: Sequence[Message]) -> None:
    """Ack the messages of a batch handler that returned, except those with an outcome."""
    for breaker in {message._held.breaker for message in messages}:
        if breaker is not None:
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
        message._held.reject(message._offset, reason)


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


# --- exceptions -------------------------------------------------------------------------------------------------------


@point("fail")
def fail(message: Message, error: BaseException, call: Call | None = None) -> None:
    """Apply an exception to a message; ``call`` if its handler was called with other messages, too."""
    held, offset = message._held, message._offset
    if not held.decide(offset):
        return
    if isinstance(error, Reject):
        held.reject(offset, error.reason)
    elif held.at_most_once is not None:
        _reject_failed(message, error, call)
    elif isinstance(error, Retry):
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        delay_ms = BACKOFF if error.delay_ms is None else error.delay_ms
        if cause is None:
            held.release(offset, delay_ms)
        else:
            _release_failed(message, delay_ms, cause, call)
    elif isinstance(error, Exception):
        policy = None if held.errors is None else held.errors.said_of(error)
        if isinstance(policy, str):
            held.reject(offset, _text(error))
        else:
            # The seed that the tracker uses for the queue's own backoff.
            seed = row_key(held.queue, held.source, offset)
            delay_ms = BACKOFF if policy is None else policy.delay_ms(message.attempt, seed)
            _release_failed(message, delay_ms, error, call)
    else:
        release_interrupted(message)


def fail_all(messages: Sequence[Message], error: BaseException, *, only_open: bool) -> None:
    """Apply an exception to all messages of one call; with ``only_open``, the leases of some have ended."""
    call = Call(messages)
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


def _release_failed(message: Message, delay_ms: int, error: BaseException, call: Call | None) -> None:
    breaker, counted = message._held.breaker, True
    if breaker is not None:
        counted = (call or Call([message])).counts(breaker)
        if breaker.pause_left_s:
            delay_ms = max(delay_ms, breaker.delay_ms(message))
    message._held.release(message._offset, delay_ms, counted=counted, error=_text(error))


def _reject_failed(message: Message, error: BaseException, call: Call | None) -> None:
    """Dead-letter a message of a queue that delivers at most once, because it must not be redelivered."""
    if message._held.breaker is not None and isinstance(error, Exception):
        (call or Call([message])).counts(message._held.breaker)
    interrupted = "interrupted: it may have been processed in part"
    message._held.reject(message._offset, _text(error) if isinstance(error, Exception) else interrupted)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
