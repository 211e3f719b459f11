"""Messages that wait for earlier ones with the same key: how many to read at once, and how many to keep in memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marq.consumer.one_per_key import Lines

log = logging.getLogger("marq")

#: Maximum number of messages that wait behind others, and of bytes of their values; at this limit, reading pauses.
MAX_WAITING, MAX_WAITING_BYTES = 100_000, 256 << 20
#: Maximum number of messages in one step.
MAX_STEP = 1_000
_MAX_DOUBLINGS = 10


class WaitingLimit:
    """The limit of one receiver, over all its queues."""

    def __init__(self) -> None:
        #: Whether the limit was logged, and half of it has been in use ever since.
        self._logged = False

    def has_room(self, lines: Collection[Lines]) -> bool:
        """Return whether more messages may wait."""
        used = max(
            sum([each.waiting for each in lines]) / MAX_WAITING, sum([each.size for each in lines]) / MAX_WAITING_BYTES
        )
        if used >= 1 and not self._logged:
            _report(lines)
        self._logged = used >= 1 or (self._logged and used >= 0.5)
        return used < 1


def _report(lines: Collection[Lines]) -> None:
    waiting: Counter[str] = Counter()
    for each in lines:
        waiting[each.queue] += each.waiting
    [(queue, count)] = waiting.most_common(1)
    log.warning(
        "queue %s: too many messages wait for earlier ones with their keys, or for the end of a pause: reading from all"
        " queues of this consumer stops until some are finished: messages=%d",
        queue,
        count,
    )


class BlockedReads:
    """How many messages one receiver reads at once while the keys of all messages read so far are blocked.

    Blocked messages satisfy no call. A receiver that reads only as many messages as calls ask for would need a cycle
    for every few of them, so it reads in larger and larger steps until a message can be delivered.
    """

    def __init__(self) -> None:
        #: How many cycles in a row have read only messages that wait behind others.
        self._cycles = 0

    def note(self, *, blocked: bool) -> None:
        """Note whether all messages of a cycle wait behind others."""
        self._cycles = self._cycles + 1 if blocked else 0

    def step(self, room: int) -> int:
        """Return how many messages to read when ``room`` of them are wanted."""
        return max(room, min(room << min(self._cycles, _MAX_DOUBLINGS), MAX_STEP))
