"""The operations on messages: send, receive, delete, change the visibility timeout."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from marq.client.receipt import Receipt
from marq.client.send_options import Header, SendOptions
from marq.producer.shared import SharedProducer
from marq.queues.queues import Queues
from marq.wire.record_headers import sequence_text
from marq_worker.message_uuids import MessageIds
from marq_worker.sqs.attributes import QueueAttributes
from marq_worker.sqs.aws_json import TRACE
from marq_worker.sqs.deliveries import SqsDelivery
from marq_worker.sqs.entries import Outcome, each_of, outcome_of
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.fifo import send_options
from marq_worker.sqs.handles import Handle, Handles
from marq_worker.sqs.limits import check_size
from marq_worker.sqs.message_answers import GROUP_HEADER, TRACE_HEADER, MessageForm
from marq_worker.sqs.message_attributes import md5_of_attributes, md5_of_body, to_headers
from marq_worker.sqs.outcomes import Outcomes, change_visibility
from marq_worker.sqs.receive_limits import ReceiveLimits
from marq_worker.sqs.receiving import SHORT_POLL_S, Receivers
from marq_worker.sqs.sqs_queues import Directory
from marq_worker.sqs.tasks import is_being_purged
from marq_worker.sqs.visibility import VisibilityChanges

log = logging.getLogger("marq.sqs")

_LEAST_DELAY_S = 0.001
#: How long a poll of a queue that is being purged waits, at most.
_PURGE_WAIT_S = 2.0

Parameters = Mapping[str, Any]


class Outgoing(NamedTuple):
    """A message to send, and the members of the answer that are known before the send."""

    data: bytes
    headers: Sequence[Header]
    options: SendOptions
    answer: dict[str, str]


class MessageOperations:
    """Each operation takes the queue's name and its parameters, and returns the members of its answer.

    Those on batches take the entries instead, and return an outcome for each.

    Args:
        limits: withhold messages that are too old or were received too often.
        visibility: changes visibility timeouts in standard queues.
    """

    def __init__(
        self,
        *,
        producer: SharedProducer,
        queues: Queues,
        directory: Directory,
        receivers: Receivers,
        outcomes: Outcomes,
        limits: ReceiveLimits,
        visibility: VisibilityChanges,
        handles: Handles,
        ids: MessageIds,
    ) -> None:
        self._producer = producer
        self._queues = queues
        self._directory = directory
        self._receivers = receivers
        self._outcomes = outcomes
        self._limits = limits
        self._visibility = visibility
        self._handles = handles
        self._ids = ids

    async def send(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        message = self._outgoing(queue, parameters)
        receipt = await self._producer.send(queue, message.data, **message.options)
        assert not isinstance(receipt, list)
        answer = {**message.answer, "MessageId": self._ids.of(receipt.id)}
        if receipt.sequence is not None:
            answer["SequenceNumber"] = sequence_text(receipt.sequence)
        return answer

    async def send_batch(self, queue: str, entries: Sequence[Parameters]) -> list[Outcome]:
        messages = [outcome_of(self._outgoing, queue, entry) for entry in entries]
        plain = [
            message for message in messages if isinstance(message, Outgoing) and message.options.keys() <= {"headers"}
        ]
        if len(plain) < len(entries):
            return await each_of(self.send, queue, entries)
        sent = await self._producer.send_each(queue, [(message.data, message.headers) for message in plain])
        return [
            {**message.answer, "MessageId": self._ids.of(receipt.id)} if isinstance(receipt, Receipt) else receipt
            for message, receipt in zip(plain, sent, strict=True)
        ]

    def _outgoing(self, queue: str, parameters: Parameters) -> Outgoing:
        """Return a message to send. Raises SqsError."""
        found = self._directory.get(queue)
        attributes = found.attributes
        check_size(parameters, attributes.maximum_message_bytes)
        body = parameters["MessageBody"]
        message_attributes = parameters.get("MessageAttributes") or {}
        system = parameters.get("MessageSystemAttributes") or {}
        headers = to_headers(message_attributes) if message_attributes else []
        if (group := parameters.get("MessageGroupId")) is not None:
            headers.append((GROUP_HEADER, group.encode()))
        trace = system["AWSTraceHeader"]["StringValue"] if system else parameters.get(TRACE)
        if trace is not None:
            headers.append((TRACE_HEADER, trace.encode()))
        delay: float | None = parameters.get("DelaySeconds")
        if delay == 0:
            # Only a delay above 0 replaces the queue's.
            delay = _LEAST_DELAY_S if attributes.delay_s else None
        options = SendOptions(headers=headers)
        if attributes.fifo:
            options = send_options(attributes, found.generation, parameters, headers)
        elif delay is not None:
            options["delay"] = delay
        if group is not None and self._queues.definitions.settings(queue).by_key:
            options["ordering_key"] = group
        answer = {"MD5OfMessageBody": md5_of_body(body)}
        if (sums := md5_of_attributes(message_attributes)) is not None:
            answer["MD5OfMessageAttributes"] = sums
        if (sums := md5_of_attributes(system)) is not None:
            answer["MD5OfMessageSystemAttributes"] = sums
        return Outgoing(body.encode(), headers, options, answer)

    async def receive(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        attributes = self._directory.get(queue).attributes
        if (why := self._directory.why_not_pollable(queue)) is not None:
            raise SqsError("UnsupportedOperation", f"the queue {queue!r} can't be received from: {why}")
        if self._receivers.stopped:
            return {}
        wait_s = parameters.get("WaitTimeSeconds", attributes.wait_s)
        if is_being_purged(self._queues.definitions.sqs_tasks(queue)):
            # Messages from before the purge must not be delivered after its answer; meanwhile, others wait, too.
            await asyncio.sleep(min(max(wait_s, SHORT_POLL_S), _PURGE_WAIT_S))
            return {}
        receiver = self._receivers.of(queue)
        clock = asyncio.get_running_loop().time
        until_s = clock() + wait_s
        most = parameters.get("MaxNumberOfMessages", 1)
        visibility_s = parameters.get("VisibilityTimeout", attributes.visibility_timeout_s)
        while polled := await receiver.poll(most, max(0.0, until_s - clock())):
            divided = self._limits.divide(polled, attributes)
            deliveries = divided.deliverable
            try:
                await self._limits.end(queue, divided)
                deliveries = await self._hidden(queue, deliveries, visibility_s, attributes)
            except BaseException:
                # The client gave up, or markers could not be written: it never sees these messages.
                receiver.release(divided.deliverable)
                raise
            # Never return a message whose lease has ended, even if it ended while markers were being written.
            receiver.release([delivery for delivery in divided.deliverable if delivery not in deliveries])
            if deliveries:
                form = MessageForm(parameters)
                return {"Messages": [self._formatted(form, delivery, visibility_s) for delivery in deliveries]}
            if clock() > until_s + SHORT_POLL_S:
                # There may be any number of messages to end.
                break
        return {}

    async def _hidden(
        self, queue: str, deliveries: Sequence[SqsDelivery], visibility_s: int, attributes: QueueAttributes
    ) -> list[SqsDelivery]:
        """Set the visibility timeout of messages; return those whose leases lasted until that was durable."""
        until_s = inf
        if deliveries and visibility_s != attributes.visibility_timeout_s:
            until_s = time.monotonic() + visibility_s if visibility_s else inf
            try:
                await change_visibility(self._outcomes, deliveries, visibility_s)
            except SqsError as error:
                log.info("queue %r: a poll releases its messages: %s", queue, error.message)
                return []
        return [delivery for delivery in deliveries if delivery.is_leased and time.monotonic() < until_s]

    def _formatted(self, form: MessageForm, delivery: SqsDelivery, visibility_s: int) -> dict[str, Any]:
        until_ms = delivery.received_ms and delivery.received_ms + visibility_s * 1000
        handle = self._handles.issue(delivery.token, delivery.id, delivery.attempt, until_ms, delivery.url)
        return form.formatted(delivery, self._ids.of(delivery.id), handle)

    async def delete(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        self._directory.get(queue)
        handle = self._handles.read(parameters["ReceiptHandle"], queue)
        await self._outcomes.ack([handle])
        if (receiver := self._receivers.known(queue)) is not None:
            receiver.deleted.add(handle.message_id, handle.attempt)
        return {}

    async def delete_batch(self, queue: str, entries: Sequence[Parameters]) -> list[Outcome]:
        handles = [outcome_of(self._handles.read, entry["ReceiptHandle"], queue) for entry in entries]
        valid = [handle for handle in handles if isinstance(handle, Handle)]
        if any(handle.url for handle in valid):
            # One by one, because some may be too late.
            return await each_of(self.delete, queue, entries)
        await self._outcomes.ack(valid)
        if (receiver := self._receivers.known(queue)) is not None:
            for handle in valid:
                receiver.deleted.add(handle.message_id, handle.attempt)
        return [{} if isinstance(handle, Handle) else handle for handle in handles]

    async def change_visibility(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        self._directory.get(queue)
        handle = self._handles.read(parameters["ReceiptHandle"], queue)
        visibility_s = parameters.get("VisibilityTimeout", 0)
        if handle.url:
            await change_visibility(self._outcomes, [handle], visibility_s)
        else:
            await self._visibility.change(handle, visibility_s)
        return {}

    async def change_visibility_batch(self, queue: str, entries: Sequence[Parameters]) -> list[Outcome]:
        return await each_of(self.change_visibility, queue, entries)
