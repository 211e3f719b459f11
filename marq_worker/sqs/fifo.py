"""FIFO queues: queues of Marq with ordering by key, whose names end in ``.fifo``; the group of a message is its key.

The endpoint that delivers a message of such a queue, or of one with limits, fairness or a priority, keeps it until a
client settles it, because the next message of its group may follow only then. Its receipt handle contains the address
of that endpoint. Others pass the outcome on (:mod:`marq_worker.sqs.outcomes`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, cast

from marq.client.send_options import Header, SendOptions
from marq.leases.message import Message
from marq.settings.client import ClientSettings
from marq.wire.errors import MarqError
from marq.wire.names import DEDUPLICATION_ID_HEADER, ORDERING_KEY_HEADER, RESERVED_HEADER
from marq.wire.names import SEQUENCE_HEADER as MARQ_SEQUENCE_HEADER
from marq.wire.record_headers import sequence_text
from marq_worker.sqs.attributes import QueueAttributes
from marq_worker.sqs.deliveries import SqsDelivery
from marq_worker.sqs.errors import invalid
from marq_worker.sqs.message_answers import DEDUPLICATION_HEADER, GROUP_HEADER, SEQUENCE_HEADER
from marq_worker.sqs.outcomes import ACK, RELEASE, Outcomes, SettleRequest
from marq_worker.sqs.peers import Peers
from marq_worker.sqs.polling import PolledConsumer, PolledInOrder
from marq_worker.sqs.receiving import QueueReceiver

log = logging.getLogger("marq.sqs")

#: Interval between checks for deliveries that are over.
FORGET_S = 10.0


def send_options(
    attributes: QueueAttributes, generation: int, parameters: Mapping[str, Any], headers: Sequence[Header]
) -> SendOptions:
    """Return the options of SendMessage, or of an entry of its batch, for a FIFO queue. Raises SqsError."""
    deduplication_id = parameters.get("MessageDeduplicationId")
    if deduplication_id is None:
        if not attributes.content_based_deduplication:
            raise invalid(
                "MessageDeduplicationId is missing; set it, or set the queue's attribute ContentBasedDeduplication"
            )
        deduplication_id = sha256(parameters["MessageBody"].encode()).hexdigest()
    if generation:
        # Trackers remember the ids of the deleted queue with this name.
        headers = [*headers, (DEDUPLICATION_HEADER, deduplication_id.encode())]
        deduplication_id = f"{deduplication_id} {generation}"
    return SendOptions(
        headers=headers,
        ordering_key=parameters["MessageGroupId"],
        deduplication_id=deduplication_id,
        delay=attributes.delay_s or None,
    )


def move_options(delivery: SqsDelivery, headers: Sequence[Header]) -> SendOptions:
    """Return the options with which a dead letter keeps its group."""
    return SendOptions(
        # It gets a sequence number of its own.
        headers=[(name, value) for name, value in headers if name != SEQUENCE_HEADER],
        # Other producers may send messages without a group.
        ordering_key=delivery.headers.get(GROUP_HEADER) or delivery.id,
        # Not the sender's id: messages that had the same one at different times are not duplicates.
        deduplication_id=f"{delivery.token.queue} {delivery.id}",
    )


class KeptReceiver(QueueReceiver):
    """Receives the messages of one queue, and keeps them until they are settled."""

    keeps = True

    def __init__(self, queue: str, client: ClientSettings, url: str, outcomes: Outcomes, peers: Peers) -> None:
        super().__init__(queue, client, url, outcomes, peers)
        self._checked_s = time.monotonic()

    def _new_consumer(self) -> PolledConsumer:
        return PolledInOrder(self._queue, self._client, self._url)

    def _delivery(self, message: Message, consumer: PolledConsumer) -> SqsDelivery:
        delivery, own = SqsDelivery.of(message, consumer), own_headers(message)
        # A producer of Marq may have sent it.
        group = {GROUP_HEADER: own[ORDERING_KEY_HEADER]} if ORDERING_KEY_HEADER in own else {}
        return delivery._replace(headers={**group, **delivery.headers}, url=self._url)

    def _check(self) -> None:
        now_s = time.monotonic()
        if self._consumer is not None and now_s - self._checked_s > FORGET_S:
            self._checked_s = now_s
            cast("PolledInOrder", self._consumer).forget_lost()

    async def settle(self, outcome: SettleRequest) -> bool:
        consumer = cast("PolledInOrder | None", self._consumer)
        if consumer is None or not self._started.is_set():
            return False
        message = consumer.find(outcome.token, outcome.attempt)
        if message is None:
            return False
        try:
            if outcome.action == ACK:
                await consumer.ack_held(message)
            elif outcome.action == RELEASE:
                await consumer.release_held(message, counted=outcome.counted)
            else:
                return await consumer.renew_held(message, outcome.lease_ms)
        except MarqError as error:
            # The tracker knows whether it was written.
            log.info("queue %r: an outcome was not confirmed: %s", self._queue, error)
            return False
        return True


class FifoReceiver(KeptReceiver):
    """Receives the messages of one FIFO queue."""

    def _delivery(self, message: Message, consumer: PolledConsumer) -> SqsDelivery:
        delivery, own = super()._delivery(message, consumer), own_headers(message)
        headers = dict(delivery.headers)
        # Messages without a deduplication id have no sequence.
        by_time = sequence_text(delivery.sent_ms * 1_000_000 + message.offset % 1_000_000).encode()
        headers[SEQUENCE_HEADER] = own.get(MARQ_SEQUENCE_HEADER, by_time)
        if DEDUPLICATION_ID_HEADER in own:
            headers.setdefault(DEDUPLICATION_HEADER, own[DEDUPLICATION_ID_HEADER])
        return delivery._replace(headers=headers)


def own_headers(message: Message) -> dict[str, bytes | None]:
    """Return the headers of a message that Marq wrote, which :attr:`Message.headers` leaves out."""
    return {name: value for name, value in message._record.headers if name.startswith(RESERVED_HEADER)}
