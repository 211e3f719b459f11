"""Sends messages to a dead-letter queue and back, as new messages with the same content."""

from __future__ import annotations

from marq.client.send_options import SendOptions
from marq.producer.producer import Producer
from marq.queues.queues import Queues
from marq_worker.sqs.arns import arn_of
from marq_worker.sqs.characters import is_fifo
from marq_worker.sqs.deliveries import SqsDelivery
from marq_worker.sqs.fifo import move_options
from marq_worker.sqs.message_answers import GROUP_HEADER, SOURCE_HEADER


class DeadLetterSender:
    """Sends messages whose deliveries the caller deletes afterwards. Same errors as :meth:`marq.Producer.send`."""

    def __init__(self, producer: Producer, queues: Queues) -> None:
        self._producer = producer
        self._queues = queues

    async def move(self, delivery: SqsDelivery, queue: str, target: str) -> None:
        """Send a message of a queue to its dead-letter queue."""
        await self._send(delivery, target, (SOURCE_HEADER, arn_of(queue).encode()))

    async def move_back(self, target: str, delivery: SqsDelivery) -> None:
        """Send a dead letter to a queue."""
        await self._send(delivery, target)

    async def _send(self, delivery: SqsDelivery, target: str, *more: tuple[str, bytes]) -> None:
        headers = [(name, value) for name, value in delivery.headers.items() if name != SOURCE_HEADER]
        headers.extend(more)
        if is_fifo(target):
            options = move_options(delivery, headers)
        else:
            options = SendOptions(headers=headers)
            if (group := delivery.headers.get(GROUP_HEADER)) and self._queues.definitions.settings(target).by_key:
                # Without it, the message would escape the limits of its group.
                options["ordering_key"] = group
        await self._producer.send(target, delivery.body, **options)
