"""What becomes of a message whose time has come."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from marq.core.markers import BACKOFF, Cause, Kind, Source
from marq.core.queue import QueueSettings
from marq.core.rows import Lease, State


class Destination(IntEnum):
    """Where a due message goes."""

    QUEUE = 1
    DEAD_LETTERS = 2
    NOWHERE = 3


@dataclass(frozen=True, slots=True)
class Fire:
    """A due message: send a copy with this attempt to its destination, with the fact, in one transaction."""

    source: Source
    offset: int
    lease: Lease
    destination: Destination
    attempt: int
    cause: Cause

    @property
    def fact_kind(self) -> Kind:
        if self.lease.state is State.CANCELLED:
            return Kind.CANCELLED
        if self.lease.state is State.SPENT:
            return Kind.ABANDONED
        if self.destination is not Destination.QUEUE:
            return Kind.DEAD_LETTERED
        return Kind.DELIVERED if self.lease.state is State.DELAYED else Kind.REDELIVERED


def is_exhausted(attempt: int, counted: bool, settings: QueueSettings) -> bool:
    """Whether a delivery with this attempt was the last one, so that no copy goes to the queue."""
    return counted and attempt >= settings.max_attempts


def release_delay_ms(attempt: int, counted: bool, delay_ms: int, settings: QueueSettings, seed: bytes) -> int:
    """Return how long a released message waits; ``seed`` identifies it.

    After the last attempt it becomes a dead letter, and waits for neither the delay of its RELEASE nor the backoff.
    """
    if is_exhausted(attempt, counted, settings):
        return 0
    return settings.backoff.delay_ms(attempt, seed) if delay_ms == BACKOFF else delay_ms


def is_delivery(lease: Lease, settings: QueueSettings) -> bool:
    """Whether an open message whose time has come would go to its queue now."""
    if lease.state is State.DELAYED:
        return True
    expires = lease.state in (State.LEASED, State.RELEASED)
    return expires and not is_exhausted(lease.attempt, lease.counted, settings)


def what_is_due(source: Source, offset: int, lease: Lease, settings: QueueSettings) -> Fire:
    """Return what is to be done now about an open message whose time has come."""
    dead = Destination.DEAD_LETTERS if settings.dead_letter else Destination.NOWHERE
    if lease.state is State.REJECTED:
        return Fire(source, offset, lease, dead, lease.attempt, Cause.REJECTED)
    if lease.state is State.DELAYED:
        return Fire(source, offset, lease, Destination.QUEUE, lease.attempt, Cause.DUE)
    if lease.state is State.CANCELLED:
        return Fire(source, offset, lease, Destination.NOWHERE, lease.attempt, Cause.CANCELLED)
    if lease.state is State.SPENT:
        return Fire(source, offset, lease, Destination.NOWHERE, lease.attempt, Cause.EXPIRED)
    cause = Cause.EXPIRED if lease.state is State.LEASED else Cause.RELEASED
    if not is_delivery(lease, settings):
        return Fire(source, offset, lease, dead, lease.attempt, cause)
    attempt = lease.attempt + 1 if lease.counted else lease.attempt
    return Fire(source, offset, lease, Destination.QUEUE, attempt, cause)
