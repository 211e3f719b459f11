"""Actions for messages that are due: where each one goes, with which attempt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from marq.core.storage.rows import LeaseRow
from marq.core.transitions import DUE, TO_QUEUE
from marq.settings.queue import QueueSettings
from marq.wire.large_messages import is_gone, left_out, size_bytes
from marq.wire.markers import BACKOFF, BLOCKED_MS, Cause, Kind, Payload, Source
from marq.wire.names import HEADER_ROOM_BYTES


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

    @property
    def fact_kind(self) -> Kind:
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


def fitting(fire: DueAction, payload: Payload, limit_bytes: int) -> DueAction:
    """Return the action, or a dead-letter action if the message is too large or its record is gone."""
    if is_gone(payload) and fire.destination is not Destination.NOWHERE:
        return dead_letter(fire, Cause.GONE)
    if fire.destination is not Destination.QUEUE:
        return fire
    # Without its value, a message is small, but a handler must not get it.
    if size_bytes(payload) <= limit_bytes - HEADER_ROOM_BYTES // 2 and not left_out(payload):
        return fire
    return dead_letter(fire, Cause.TOO_LARGE)


def dead_letter(fire: DueAction, cause: Cause) -> DueAction:
    """Return the action for a message that can't be delivered again for this cause."""
    return DueAction(fire.source, fire.offset, fire.lease, Destination.DEAD_LETTERS, fire.lease.attempt, cause)
