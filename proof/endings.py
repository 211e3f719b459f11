"""What happens to a message that is due."""

from __future__ import annotations

from typing import NamedTuple

from proof.states import (
    ABANDONED,
    CANCELLED,
    DEAD_LETTERED,
    DELAYED,
    DELIVERED,
    DISPATCHED,
    EXHAUSTED,
    LEASED,
    REDELIVERED,
    REJECTED,
    Standing,
)


class Ending(NamedTuple):
    """The end of a due message: kind of the fact, attempt, cause."""

    kind: str
    attempt: int
    cause: str


def ending(standing: Standing, max_attempts: int) -> Ending:
    """Return what happens to a message that is due."""
    if standing.state == REJECTED:
        return Ending(DEAD_LETTERED, standing.attempt, "REJECTED")
    if standing.state == EXHAUSTED:
        return Ending(DEAD_LETTERED, standing.attempt, "RELEASED")
    if standing.state == DELAYED:
        return Ending(DELIVERED, standing.attempt, "DUE")
    if standing.state == CANCELLED:
        return Ending(CANCELLED, standing.attempt, "CANCELLED")
    if standing.state == DISPATCHED:
        return Ending(ABANDONED, standing.attempt, "EXPIRED")
    cause = "EXPIRED" if standing.state == LEASED else "RELEASED"
    if not standing.counted:
        return Ending(REDELIVERED, standing.attempt, cause)
    if standing.attempt < max_attempts:
        return Ending(REDELIVERED, standing.attempt + 1, cause)
    return Ending(DEAD_LETTERED, standing.attempt, cause)
