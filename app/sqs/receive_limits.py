"""Messages that clients don't receive: too old ones, and those received more than ``maxReceiveCount`` times."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from marq.wire.errors import BrokerUnavailable, MarqError
from marq_worker.app.sqs.attributes import QueueAttributes
from marq_worker.app.sqs.dead_letters import DeadLetterSender
from marq_worker.app.sqs.errors import SqsError
from marq_worker.app.sqs.receiving import Delivery
from marq_worker.app.sqs.settling import Settlers
from marq_worker.app.sqs.sqs_queues import Directory

log = logging.getLogger("marq.sqs")

#: Time limit of a stop.
STOP_S = 2.0
#: How many polls may have been answered before their other messages are ended; those beyond wait.
MAX_BEGUN = 100


class Divided(NamedTuple):
    """Messages to deliver, old ones to delete, and those that were received too often, to move to ``target``."""

    deliverable: list[Delivery]
    old: list[Delivery]
    dead: list[Delivery]
    target: str


class ReceiveLimits:
    """Deletes messages that are too old; moves those received too often to the dead-letter queue."""

    def __init__(self, directory: Directory, settlers: Settlers, dead_letters: DeadLetterSender) -> None:
        self._directory = directory
        self._settlers = settlers
        self._dead_letters = dead_letters
        self._ending: set[asyncio.Task[None]] = set()

    def divide(self, deliveries: Sequence[Delivery], attributes: QueueAttributes) -> Divided:
        oldest_ms = attributes.oldest_ms(time.time())
        most, target = attributes.max_receive_count, attributes.dead_letter_queue or ""
        if most is not None and not self._directory.exists(target):
            most = None
        divided = Divided([], [], [], target)
        for delivery in deliveries:
            if 0 < delivery.available_ms < oldest_ms:
                divided.old.append(delivery)
            elif most is not None and delivery.attempt > most:
                divided.dead.append(delivery)
            else:
                divided.deliverable.append(delivery)
        return divided

    async def end(self, queue: str, divided: Divided) -> None:
        """Delete and move messages, even if the client disconnects in the meantime.

        If that fails, the messages stay hidden until their visibility timeouts end. A later poll then tries again. If
        there are messages to deliver, this does not wait: a slow dead-letter queue would use up their leases.
        """
        if not (divided.old or divided.dead):
            return
        ending = asyncio.create_task(self._end(queue, divided), name="marq-sqs-limits")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        if not divided.deliverable or len(self._ending) > MAX_BEGUN:
            await asyncio.shield(ending)

    async def stop(self) -> None:
        """Finish moves whose clients do not wait: a message that was copied but not deleted would be moved again."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=STOP_S)

    async def _end(self, queue: str, divided: Divided) -> None:
        settler = self._settlers.of(queue)
        try:
            if divided.old:
                await settler.ack(divided.old)
                log.info("old messages were deleted: queue=%s messages=%d", queue, len(divided.old))
        except (MarqError, SqsError) as error:
            log.warning("queue %r: %d old messages were not deleted: %s", queue, len(divided.old), error)
        for delivery in divided.dead:
            try:
                # First the copy: a crash in between leaves two dead letters instead of none.
                await self._dead_letters.move(delivery, queue, divided.target)
                await settler.ack([delivery])
            except (MarqError, SqsError) as error:
                log.warning("queue %r: a message was not moved to %r: %s", queue, divided.target, error)
                if isinstance(error, BrokerUnavailable):
                    break
