"""FIFO queues: queues of Marq with ordering by key, whose names end in ``.fifo``; the group of a message is its key.

The endpoint that delivers a message of such a queue, or of one with limits, fairness or a priority, keeps it until a
client settles it, because the next message of its group may follow only then. Its receipt handle contains the address
of that endpoint. Others pass the outcome on.

If that endpoint is gone, or its partition has moved, the outcome is written by token after a tracker has confirmed that
this delivery is still in flight. An endpoint that reads the partition later learns of it from the tracker. Without this
check, a late deletion could end the next delivery of the message, while another client works on it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

from marq.client import message_token
from marq.client.message_checks import Header
from marq.client.message_token import Token
from marq.client.send_options import SendOptions
from marq.leases.message import Message
from marq.settings.client import ClientSettings
from marq.wire.errors import MarqError
from marq.wire.names import DEDUPLICATION_ID_HEADER, ORDERING_KEY_HEADER
from marq.wire.names import SEQUENCE_HEADER as MARQ_SEQUENCE_HEADER
from marq.wire.record_headers import sequence_text
from marq_worker.sqs.attributes import QueueAttributes
from marq_worker.sqs.deliveries import SqsDelivery
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.message_answers import DEDUPLICATION_HEADER, GROUP_HEADER, SEQUENCE_HEADER
from marq_worker.sqs.peers import Peers
from marq_worker.sqs.polling import LeaseLookup, PolledConsumer, PolledInOrder, TokenSettler, own_headers
from marq_worker.sqs.receiving import QueueReceiver
from marq_worker.sqs.settling import DeliveryHandle

log = logging.getLogger("marq.sqs")

ACK, RENEW, RELEASE = "ack", "renew", "release"
#: Interval between checks for deliveries that are over.
FORGET_S = 10.0


def send_options(
    attributes: QueueAttributes, generation: int, parameters: Mapping[str, Any], headers: Sequence[Header]
) -> SendOptions:
    """Return the options of SendMessage, or of an entry of its batch, for a FIFO queue. Raises SqsError."""
    deduplication_id = parameters.get("MessageDeduplicationId")
    if deduplication_id is None:
        if not attributes.content_based_deduplication:
            raise SqsError(
                "InvalidParameterValue",
                "MessageDeduplicationId is missing; set it, or set the queue's attribute ContentBasedDeduplication",
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


@dataclass(frozen=True, slots=True)
class SettleRequest:
    """The outcome that a client wants for one delivery of a message.

    ``lease_ms`` is for RENEW; a RELEASE is not ``counted`` if no client has seen the message.
    """

    token: Token
    attempt: int
    action: str
    lease_ms: int = 0
    counted: bool = True

    def document(self) -> dict[str, Any]:
        """Return the outcome for another endpoint, as JSON."""
        return {
            "token": message_token.encode(self.token),
            "attempt": self.attempt,
            "action": self.action,
            "lease": self.lease_ms,
            "counted": self.counted,
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> SettleRequest:
        """Read what :meth:`document` returned. Raises ValueError, KeyError or TypeError."""
        return cls(
            message_token.decode(document["token"]),
            int(document["attempt"]),
            str(document["action"]),
            int(document["lease"]),
            bool(document["counted"]),
        )


#: An outcome for another endpoint, and the future of whether that endpoint holds the message.
Pending = tuple[SettleRequest, asyncio.Future[bool]]


class KeptReceiver(QueueReceiver):
    """Receives the messages of one queue, and keeps them until they are settled."""

    keeps = True

    def __init__(
        self, queue: str, client: ClientSettings, url: str, settler: TokenSettler, peers: Peers, outcomes: Outcomes
    ) -> None:
        super().__init__(queue, client, url, settler, peers)
        self._outcomes = outcomes
        self._checked_s = time.monotonic()

    def _new_consumer(self) -> PolledConsumer:
        return PolledInOrder(self._queue, self._client, self._url)

    async def _receive(self, consumer: PolledConsumer, most: int, max_bytes: int | None) -> list[SqsDelivery]:
        return [self._delivery(message, consumer) for message in await consumer.poll(most, max_bytes=max_bytes)]

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

    async def _release(self, deliveries: Sequence[SqsDelivery]) -> None:
        try:
            await self._outcomes.release(deliveries, counted=False)
        except (MarqError, SqsError) as error:
            log.warning("queue %r: messages were not released, their leases will expire: %s", self._queue, error)

    async def _end(self, deliveries: Sequence[SqsDelivery]) -> None:
        await self._outcomes.ack(deliveries)

    async def settle(self, outcome: SettleRequest) -> bool:
        """Settle a message that is held here; return False if this delivery is not."""
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
        # Messages without a deduplication id have no sequence.
        by_time = sequence_text(delivery.sent_ms * 1_000_000 + message.offset % 1_000_000).encode()
        headers: dict[str, bytes | None] = {SEQUENCE_HEADER: by_time}
        if DEDUPLICATION_ID_HEADER in own:
            headers[DEDUPLICATION_HEADER] = own[DEDUPLICATION_ID_HEADER]
        headers |= delivery.headers
        if MARQ_SEQUENCE_HEADER in own:
            # An endpoint of an earlier version sent another number.
            headers[SEQUENCE_HEADER] = own[MARQ_SEQUENCE_HEADER]
        return delivery._replace(headers=headers)


class Outcomes:
    """Settles deliveries, wherever they are kept; for those that no endpoint keeps, a marker is enough.

    Args:
        url: the address of this endpoint.
        receiver: returns the receiver of a queue that is polled here, or None.
    """

    def __init__(
        self,
        url: str,
        settler: TokenSettler,
        questions: LeaseLookup,
        peers: Peers,
        receiver: Callable[[str], QueueReceiver | None],
    ) -> None:
        self._url = url
        self._settler = settler
        self._questions = questions
        self._peers = peers
        self._receiver = receiver
        #: Outcomes for other endpoints; those that arrive during a request share the next one.
        self._pending: dict[str, list[Pending]] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}

    async def ack(self, deliveries: Sequence[DeliveryHandle]) -> None:
        """Delete messages. Raises SqsError if the delivery of a kept message is over, MarqError if that is unknown."""
        if tokens := _not_kept(deliveries):
            await self._settler.ack(tokens)
        await self._settle(deliveries, ACK)

    async def renew(self, deliveries: Sequence[DeliveryHandle], lease_ms: int) -> None:
        """Hide messages for this long from now on; same errors as :meth:`ack`."""
        if tokens := _not_kept(deliveries):
            await self._settler.renew([(token, lease_ms) for token in tokens])
        await self._settle(deliveries, RENEW, lease_ms=lease_ms)

    async def release(self, deliveries: Sequence[DeliveryHandle], *, counted: bool = True) -> None:
        """Make messages available; same errors as :meth:`ack`."""
        if tokens := _not_kept(deliveries):
            await self._settler.release(tokens, counted=counted)
        await self._settle(deliveries, RELEASE, counted=counted)

    async def stop(self) -> None:
        for task in self._sending.values():
            task.cancel()
        await asyncio.gather(*self._sending.values(), return_exceptions=True)
        for pending in self._pending.values():
            _answer(pending, [])
        self._pending.clear()

    async def _settle(self, deliveries: Sequence[DeliveryHandle], action: str, **how: Any) -> None:
        results = await asyncio.gather(
            *[
                self._settle_one(delivery.url, SettleRequest(delivery.token, delivery.attempt, action, **how))
                for delivery in deliveries
                if delivery.url
            ],
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _settle_one(self, url: str, outcome: SettleRequest) -> None:
        if url == self._url:
            held = await self.settle_here(outcome)
        else:
            held = await self._settle_there(url, outcome)
        if not held:
            await self._settle_by_token(outcome)

    async def settle_here(self, outcome: SettleRequest) -> bool:
        """Settle a message that this endpoint holds; return False if it does not hold this delivery."""
        receiver = self._receiver(outcome.token.queue)
        return isinstance(receiver, KeptReceiver) and await receiver.settle(outcome)

    async def _settle_there(self, url: str, outcome: SettleRequest) -> bool:
        held: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pending.setdefault(url, []).append((outcome, held))
        if url not in self._sending:
            self._sending[url] = asyncio.create_task(self._send(url), name="marq-sqs-outcomes")
        return await held

    async def _send(self, url: str) -> None:
        """Send the outcomes for another endpoint, one request at a time."""
        try:
            while pending := self._pending.pop(url, None):
                results: Sequence[bool] = []
                try:
                    results = await self._peers.settle(url, [outcome.document() for outcome, _ in pending])
                finally:
                    _answer(pending, results)
        finally:
            del self._sending[url]

    async def _settle_by_token(self, outcome: SettleRequest) -> None:
        """Settle a message whose endpoint no longer holds it, if this delivery is still in flight."""
        lease = await self._questions.ask(outcome.token)
        if not lease.state and (outcome.action == ACK or not outcome.counted):
            # The message has ended already; deleting it twice is not an error.
            return
        if not lease.is_in_flight or lease.attempt != outcome.attempt or not lease.left_ms:
            raise SqsError(
                "InvalidParameterValue" if outcome.action == ACK else "MessageNotInflight",
                "the receipt handle has expired: the visibility timeout of this delivery is over",
            )
        match outcome.action:
            case "ack":
                await self._settler.ack([outcome.token])
            case "renew":
                await self._settler.renew([(outcome.token, outcome.lease_ms)])
            case _:
                await self._settler.release([outcome.token], counted=outcome.counted)


def _not_kept(deliveries: Sequence[DeliveryHandle]) -> list[Token]:
    """Return the tokens of messages that no endpoint keeps: a marker settles them."""
    return [delivery.token for delivery in deliveries if not delivery.url]


def _answer(pending: Sequence[Pending], results: Sequence[bool]) -> None:
    """Resolve the futures; an outcome without a result counts as not held."""
    for number, (_, held) in enumerate(pending):
        if not held.done():
            held.set_result(number < len(results) and results[number])
