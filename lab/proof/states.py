"""The states of messages in the fold of a markers partition, and the facts that end them."""

from __future__ import annotations

from typing import NamedTuple

from marq.wire.markers import BLOCKED_MS

LEASED, RELEASED, REJECTED = "LEASED", "RELEASED", "REJECTED"
#: State of an in-flight message that is never redelivered, and the fact that ends it.
DISPATCHED, ABANDONED = "DISPATCHED", "ABANDONED"
#: States of messages that keep their place: no tracker ever redelivers them.
LEASED_IN_ORDER, WAITING_IN_ORDER = "LEASED_IN_ORDER", "WAITING_IN_ORDER"
#: State of a message whose last delivery in its place failed.
EXHAUSTED = "EXHAUSTED"
#: The text of a leased message that has lost its place.
OUT_OF_LINE = "its record is gone"
IN_ORDER = (LEASED_IN_ORDER, WAITING_IN_ORDER)
HELD = (LEASED, DISPATCHED, LEASED_IN_ORDER)
#: CANCELLED is both a state and the fact that ends it.
DELAYED, CANCELLED = "DELAYED", "CANCELLED"
#: States in which a message may be rescheduled and cancelled.
WAITING = (DELAYED, RELEASED, WAITING_IN_ORDER)
REDELIVERED, DEAD_LETTERED, DELIVERED = "REDELIVERED", "DEAD_LETTERED", "DELIVERED"
#: Facts, with the name of the counter of each.
FACTS = {name: name.lower() for name in (REDELIVERED, DEAD_LETTERED, DELIVERED, CANCELLED, ABANDONED)}
#: Facts that come with a record on the queue.
COPIED = (REDELIVERED, DELIVERED)
#: Low bits of an ordered message's holder; the bits above them are the offset of its RESUME.
HOLDER_BITS = 16


class Standing(NamedTuple):
    """The state of an open message; ``dues_ms``: when it may be due, the earliest first."""

    queue: str
    holder: str
    attempt: int
    dues_ms: tuple[int, ...]
    since_ms: int
    state: str = LEASED
    counted: bool = True
    text: str = ""

    @property
    def due_ms(self) -> int:
        return self.dues_ms[0]

    def blocks(self, now_ms: int) -> bool:
        """Whether a message that waits in its line blocks it until an operator acts."""
        return self.due_ms - now_ms >= BLOCKED_MS // 2


def comes_after(holder: str, other: str) -> bool:
    """Whether one holder of ordered messages resumed after another, or is the same one."""
    return int(holder, 16) >> HOLDER_BITS >= int(other, 16) >> HOLDER_BITS
