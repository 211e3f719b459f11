"""Recently deleted messages, whose redeliveries are not delivered."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from marq_worker.sqs.deliveries import SqsDelivery

#: How many deleted messages to remember, and for how long, because their redeliveries may be on their way.
MAX_DELETED, DELETED_S = 100_000, 60.0


class DeletedMessages:
    """The messages that were deleted last, with the deliveries whose handles deleted them.

    A client may delete a message after its lease has ended, when a redelivery is on its way already.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Attempt and time of the deletion, by id.
        self._deleted: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def add(self, message_id: str, attempt: int) -> None:
        """Note that a client has deleted a message by the handle of this attempt."""
        now_s = self._clock()
        self._deleted[message_id] = attempt, now_s
        self._deleted.move_to_end(message_id)
        while len(self._deleted) > MAX_DELETED or now_s - next(iter(self._deleted.values()))[1] >= DELETED_S:
            self._deleted.popitem(last=False)

    def concerns(self, delivery: SqsDelivery) -> bool:
        """Return whether a delivery follows one that was just deleted; a replay begins with the first attempt again."""
        attempt, deleted_s = self._deleted.get(delivery.id, (delivery.attempt, 0.0))
        return delivery.attempt > attempt and self._clock() - deleted_s < DELETED_S
