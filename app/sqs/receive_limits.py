"""Messages that clients don't receive: too old ones, and those received more than ``maxReceiveCount`` times."""

from __future__ import annotations

import time
from collections.abc import Sequence

from marq_worker.app.sqs.attributes import QueueAttributes
from marq_worker.app.sqs.dead_letters import DeadLetterSender
from marq_worker.app.sqs.receiving import Delivery
from marq_worker.app.sqs.settling import Settlers
from marq_worker.app.sqs.sqs_queues import Directory


class ReceiveLimits:
    """Deletes messages that are too old; moves those received too often to the dead-letter queue."""

    def __init__(self, directory: Directory, settlers: Settlers, dead_letters: DeadLetterSender) -> None:
        self._directory = directory
        self._settlers = settlers
        self._dead_letters = dead_letters

    async def deliverable(
        self, queue: str, deliveries: Sequence[Delivery], attributes: QueueAttributes
    ) -> list[Delivery]:
        """Return the messages that clients may receive, after ending the others."""
        oldest_ms = (time.time() - attributes.retention_s) * 1000
        most, target = attributes.max_receive_count, attributes.dead_letter_queue or ""
        if not self._directory.exists(target):
            most = None
        ended: list[Delivery] = []
        kept: list[Delivery] = []
        for delivery in deliveries:
            if delivery.sent_ms < oldest_ms:
                ended.append(delivery)
            elif most is not None and delivery.attempt > most:
                # First the copy: a crash in between leaves two dead letters instead of none.
                await self._dead_letters.move(delivery, queue, target)
                ended.append(delivery)
            else:
                kept.append(delivery)
        if ended:
            await self._settlers.of(queue).ack(ended)
        return kept
