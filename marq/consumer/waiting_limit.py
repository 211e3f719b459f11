"""The limit of messages that wait for earlier ones with the same key: a consumer keeps them in memory."""

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
