"""Actions for messages that are due: where each one goes, with which attempt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from marq.core.storage.rows import LeaseRow, State
from marq.core.transitions import DUE, TO_QUEUE
from marq.settings.queue import DEAD_LETTER, QueueSettings
from marq.wire.large_messages import is_gone, left_out, size_bytes
from marq.wire.markers import BACKOFF, BLOCKED_MS, Cause, Kind, Payload, Source
from marq.wire.names import HEADER_ROOM_BYTES, is_synthetic
from marq.wire.record_headers import expires_at_ms


class Destination(IntEnum):
    """Where a due message goes."""

    QUEUE = 1
    DEAD_LETTERS = 2
    NOWHERE = 3


@dataclass(frozen=True, slots=True)
class DueAction:
    """A due message: send it with this attempt to its destination, with the fact, in one transaction."""

    source: Source
    offset: int
    lease: LeaseRow
    destination: Destination
    attempt: int
    cause: Cause
    #: When an expired message expired.
    expired_ms: int | None = None

    @property
    def fact_kind(self) -> Kind:
        if self.cause is Cause.MESSAGE_EXPIRED and self.destination is Destination.NOWHERE:
            return Kind.CANCELLED
        fact = DUE[self.lease.state].fact
        return Kind.DEAD_LETTERED if fact in TO_QUEUE and self.destination is not Destination.QUEUE else fact


def is_exhausted(attempt: int, counted: bool, settings: QueueSettings) -> bool:
    """Return whether a delivery with this attempt was the last one, so that none follows."""
    return counted and attempt >= settings.max_attempts


def release_delay_ms(attempt: int, counted: bool, delay_ms: int, settings: QueueSettings, seed: bytes) -> int:
    """Return how long a released message waits; ``seed`` identifies it.

    After the last attempt it becomes a dead letter, and waits for neither the delay of its RELEASE nor the backoff.
    """
    if is_exhausted(attempt, counted, settings) and delay_ms < BLOCKED_MS:
        return 0
    return settings.backoff.delay_ms(attempt, seed) if delay_ms == BACKOFF else max(delay_ms, 0)


def is_delivery(lease: LeaseRow, settings: QueueSettings) -> bool:
    """Return whether an open message would go to its queue if it were due now."""
    return _fact(lease, settings) in TO_QUEUE


def resolve_due(source: Source, offset: int, lease: LeaseRow, settings: QueueSettings) -> DueAction:
    """Return the action for an open message that is due."""
    fact = _fact(lease, settings)
    destination, attempt = Destination.NOWHERE, lease.attempt
    if fact in TO_QUEUE:
        destination = Destination.QUEUE
        if fact is Kind.REDELIVERED and lease.counted:
            attempt += 1
    elif fact is Kind.DEAD_LETTERED and settings.dead_letter:
        destination = Destination.DEAD_LETTERS
    return DueAction(source, offset, lease, destination, attempt, DUE[lease.state].cause)


def _fact(lease: LeaseRow, settings: QueueSettings) -> Kind:
    due = DUE[lease.state]
    return due.exhausted if is_exhausted(lease.attempt, lease.counted, settings) else due.fact


def due_time_ms(lease: LeaseRow, source: Source) -> int | None:
    """Return when a delayed message is due for its first delivery; None if it was not delayed.

    A message that is left with the tracker because its queue is paused, or because it seems to have expired, is due
    when it is acquired.
    """
    if lease.state is not State.DELAYED or not (is_synthetic(source.topic) or lease.due_ms > lease.since_ms):
        return None
    # A time in the past means now.
    return max(lease.due_ms, lease.since_ms)


def unexpired(fire: DueAction, payload: Payload, now_ms: int, settings: QueueSettings) -> DueAction:
    """Return the action, or one that ends the message if it has expired by the log's clock ``now_ms``.

    Messages of a queue with ordering do not expire, because their consumers deliver them again.
    """
    if fire.destination is not Destination.QUEUE or settings.by_key:
        return fire
    expires_ms = expires_at_ms(
        payload.timestamp_ms,
        payload.headers,
        delay_ms=settings.delay_ms,
        expires_after_ms=settings.expires_after_ms,
        due_ms=due_time_ms(fire.lease, fire.source),
    )
    if expires_ms is None or now_ms < expires_ms:
        return fire
    destination, attempt = Destination.NOWHERE, fire.lease.attempt
    if settings.dead_letter and settings.expired == DEAD_LETTER:
        destination, attempt = Destination.DEAD_LETTERS, attempts_used(fire)
    return DueAction(fire.source, fire.offset, fire.lease, destination, attempt, Cause.MESSAGE_EXPIRED, expires_ms)


def fitting(fire: DueAction, payload: Payload, limit_bytes: int) -> DueAction:
    """Return the action, or a dead-letter action if the message is too large or its record is gone."""
    if is_gone(payload) and fire.cause is not Cause.MESSAGE_EXPIRED and fire.destination is not Destination.NOWHERE:
        return dead_letter(fire, Cause.GONE)
    if fire.destination is not Destination.QUEUE:
        return fire
    # Without its value, a message is small, but a handler must not get it.
    if size_bytes(payload) <= limit_bytes - HEADER_ROOM_BYTES // 2 and not left_out(payload):
        return fire
    return dead_letter(fire, Cause.TOO_LARGE)


def dead_letter(fire: DueAction, cause: Cause) -> DueAction:
    """Return the action for a message that can't be delivered again for this cause."""
    return DueAction(fire.source, fire.offset, fire.lease, Destination.DEAD_LETTERS, attempts_used(fire), cause)


def attempts_used(fire: DueAction) -> int:
    """Return the number of attempts of a message that does not get the next one; 0 if none counted."""
    return fire.attempt - 1 if fire.destination is Destination.QUEUE else fire.attempt
