"""The operations of the SQS endpoint, from checked calls to answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from marq.producer.producer import Producer
from marq.queues.queues import Queues
from marq.wire.errors import BrokerUnavailable, ConfigError, MarqError, MessageTooLarge
from marq_worker.app.sqs.attributes import QueueAttributes, target_of
from marq_worker.app.sqs.directory import Directory, can_be_polled
from marq_worker.app.sqs.errors import SqsError
from marq_worker.app.sqs.handles import Handles
from marq_worker.app.sqs.keys import DESCRIBE, Key, action_of
from marq_worker.app.sqs.limits import check
from marq_worker.app.sqs.message_attributes import md5_of_attributes, md5_of_body, to_headers
from marq_worker.app.sqs.message_ids import MessageIds
from marq_worker.app.sqs.received import GROUP_HEADER, SOURCE_HEADER, TRACE_HEADER, formatted
from marq_worker.app.sqs.receiving import Delivery, Receivers
from marq_worker.app.sqs.wire import Call

log = logging.getLogger("marq.sqs")

REGION, ACCOUNT = "us-east-1", "000000000000"
_LEAST_DELAY_S = 0.001
#: How many names ListQueues returns at most.
_MAX_NAMES = 1_000

Parameters = Mapping[str, Any]
#: Returns how many messages of a queue wait, are in flight and are delayed; None if that is not known.
Counts = Callable[[str], Awaitable[tuple[int, int, int] | None]]
#: Ends all waiting messages of a queue.
Purge = Callable[[str], Awaitable[None]]


class Operations:
    """Answers calls. Each operation takes its parameters and returns the members of its answer.

    Args:
        settler: the markers of deletions and visibility changes.
        maximum_bytes: the size of the largest message that Kafka accepts.
    """

    def __init__(
        self,
        *,
        producer: Producer,
        queues: Queues,
        directory: Directory,
        receivers: Receivers,
        settler: Any,
        handles: Handles,
        ids: MessageIds,
        counts: Counts,
        purge: Purge,
        maximum_bytes: int,
    ) -> None:
        self._producer = producer
        self._queues = queues
        self._directory = directory
        self._receivers = receivers
        self._settler = settler
        self._handles = handles
        self._ids = ids
        self._counts = counts
        self._purge = purge
        self._purging: set[str] = set()
        self._maximum_bytes = maximum_bytes

    async def answer(self, call: Call, key: Key | None, base_url: str) -> dict[str, Any]:
        """Answer a call of a client; ``key`` is None if the endpoint has no keys.

        Raises SqsError.
        """
        operation = _OPERATIONS.get(call.operation)
        if operation is None:
            raise SqsError("UnsupportedOperation", f"{call.operation} is not supported")
        parameters = call.parameters
        queue = _queue_of(parameters)
        if queue is not None and key is not None:
            _check_permission(key, action_of(call.operation), queue)
            policy = (parameters.get("Attributes") or {}).get("RedrivePolicy")
            if policy and (target := target_of(policy)) is not None:
                # The endpoint will send there for the client.
                _check_permission(key, "send", target)
        if queue is not None:
            await self._directory.look_for(queue)
        errors = check(call, self._maximum_bytes)
        try:
            if call.operation == "ListQueues":
                return self._list_queues(parameters, key, base_url)
            if "Entries" in parameters:
                return await self._batch(operation, parameters, queue or "", errors)
            return dict(await operation(self, queue, {**parameters, "base_url": base_url}))
        except MarqError as error:
            raise _translated(error) from error

    # --- queues -------------------------------------------------------------------------------------------------------

    def _list_queues(self, parameters: Parameters, key: Key | None, base_url: str) -> dict[str, Any]:
        names = [
            name
            for name in self._directory.names(parameters.get("QueueNamePrefix", ""))
            if key is None or key.allows(DESCRIBE, name)
        ]
        return _page("QueueUrls", names, parameters, base_url)

    async def _create_queue(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        await self._directory.create(queue, parameters.get("Attributes", {}), parameters.get("tags", {}))
        return {"QueueUrl": _url(parameters["base_url"], queue)}

    async def _get_queue_url(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        return {"QueueUrl": _url(parameters["base_url"], self._directory.get(queue).name)}

    async def _delete_queue(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        self._directory.check_deletion(queue)
        await self._receivers.drop(queue)
        await self._end_messages(queue)
        await self._directory.delete(queue)
        return {}

    async def _purge_queue(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        self._directory.get(queue)
        await self._end_messages(queue)
        return {}

    async def _end_messages(self, queue: str) -> None:
        if queue in self._purging:
            raise SqsError("PurgeQueueInProgress", f"the queue {queue!r} is being purged")
        self._purging.add(queue)
        try:
            await self._purge(queue)
        finally:
            self._purging.discard(queue)

    async def _get_queue_attributes(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        found = self._directory.get(queue)
        names = set(parameters.get("AttributeNames", ()))
        attributes = found.attributes.to_attributes(_arn) | {
            "QueueArn": _arn(queue),
            "CreatedTimestamp": str(found.created_s),
            "LastModifiedTimestamp": str(found.modified_s),
        }
        if "All" in names or any(name.startswith("Approximate") for name in names):
            counts = await self._counts(queue)
            if counts is None:
                raise SqsError("ServiceUnavailable", "no worker has counted the messages of queues yet; try again")
            waiting, in_flight, delayed = counts
            attributes["ApproximateNumberOfMessages"] = str(waiting)
            attributes["ApproximateNumberOfMessagesNotVisible"] = str(in_flight)
            attributes["ApproximateNumberOfMessagesDelayed"] = str(delayed)
        chosen = {name: value for name, value in attributes.items() if "All" in names or name in names}
        return {"Attributes": chosen} if chosen else {}

    async def _set_queue_attributes(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        await self._directory.set_attributes(queue, parameters["Attributes"])
        return {}

    async def _list_dead_letter_sources(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        names = self._directory.sources_of(queue)
        return _page("queueUrls", names, parameters, parameters["base_url"])

    async def _list_tags(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        tags = self._directory.get(queue).tags
        return {"Tags": dict(tags)} if tags else {}

    async def _tag(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        await self._directory.tag(queue, parameters["Tags"])
        return {}

    async def _untag(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        await self._directory.untag(queue, parameters["TagKeys"])
        return {}

    # --- messages -----------------------------------------------------------------------------------------------------

    async def _batch(
        self, operation: Any, parameters: Parameters, queue: str, errors: Mapping[str, SqsError]
    ) -> dict[str, Any]:
        """Answer the entries of a batch, which fail one by one."""
        entries = parameters["Entries"]
        self._directory.get(queue)
        outcomes = await asyncio.gather(
            *[_outcome(operation(self, queue, entry), errors.get(entry["Id"])) for entry in entries]
        )
        answer: dict[str, Any] = {"Successful": [], "Failed": []}
        for entry, outcome in zip(entries, outcomes, strict=True):
            if isinstance(outcome, SqsError):
                answer["Failed"].append(
                    {
                        "Id": entry["Id"],
                        "SenderFault": outcome.sender_fault,
                        "Code": outcome.code,
                        "Message": outcome.message,
                    }
                )
            else:
                answer["Successful"].append({"Id": entry["Id"], **outcome})
        # Some clients expect both lists, others none that is empty: SQS leaves out what is empty.
        return {name: results for name, results in answer.items() if results or name == "Successful"}

    async def _send(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        attributes = self._directory.get(queue).attributes
        body = parameters["MessageBody"]
        message_attributes = parameters.get("MessageAttributes") or {}
        system = parameters.get("MessageSystemAttributes") or {}
        headers = to_headers(message_attributes)
        if (group := parameters.get("MessageGroupId")) is not None:
            headers.append((GROUP_HEADER, group.encode()))
        if (trace := system.get("AWSTraceHeader")) is not None:
            headers.append((TRACE_HEADER, trace["StringValue"].encode()))
        data = body.encode()
        if len(data) > attributes.maximum_message_bytes:
            raise SqsError(
                "InvalidParameterValue",
                f"the message has {len(data)} bytes; at most {attributes.maximum_message_bytes} are allowed",
            )
        delay: float | None = parameters.get("DelaySeconds")
        if delay == 0:
            # Only a time replaces the queue's delay.
            delay = _LEAST_DELAY_S if attributes.delay_s else None
        receipt = await self._producer.send(queue, data, headers=headers, delay=delay)
        assert not isinstance(receipt, list)
        answer = {"MD5OfMessageBody": md5_of_body(body), "MessageId": self._ids.of(receipt.id)}
        if (sums := md5_of_attributes(message_attributes)) is not None:
            answer["MD5OfMessageAttributes"] = sums
        if (sums := md5_of_attributes(system)) is not None:
            answer["MD5OfMessageSystemAttributes"] = sums
        return answer

    async def _receive(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        attributes = self._directory.get(queue).attributes
        definitions = self._queues.definitions
        if (why := can_be_polled(definitions.settings(queue), definitions.group(queue))) is not None:
            raise SqsError("UnsupportedOperation", f"the queue {queue!r} can't be received from: {why}")
        if self._receivers.stopped:
            return {}
        wait_s = parameters.get("WaitTimeSeconds", attributes.wait_s)
        receiver = self._receivers.of(queue)
        clock = asyncio.get_running_loop().time
        until_s = clock() + wait_s
        most = parameters.get("MaxNumberOfMessages", 1)
        while polled := await receiver.poll(most, max(0.0, until_s - clock())):
            try:
                deliveries = await self._deliverable(queue, polled, attributes)
                if deliveries:
                    return await self._received(deliveries, attributes, parameters)
            except BaseException:
                # The client gave up, or markers could not be written: it never sees them.
                receiver.release(polled)
                raise
        return {}

    async def _received(
        self, deliveries: Sequence[Delivery], attributes: QueueAttributes, parameters: Parameters
    ) -> dict[str, Any]:
        visibility_s = parameters.get("VisibilityTimeout", attributes.visibility_timeout_s)
        if visibility_s != attributes.visibility_timeout_s:
            await self._change(deliveries, visibility_s)
        return {"Messages": [self._formatted(delivery, parameters) for delivery in deliveries]}

    async def _deliverable(
        self, queue: str, deliveries: Sequence[Delivery], attributes: QueueAttributes
    ) -> list[Delivery]:
        """Return the messages for clients; delete those that are too old, and move those received too often."""
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
                # First the copy: a crash in between makes two dead letters, and loses none.
                await self._move(delivery, target, _arn(queue))
                ended.append(delivery)
            else:
                kept.append(delivery)
        if ended:
            await self._settler.ack([each.token for each in ended])
        return kept

    async def _move(self, delivery: Delivery, target: str, source_arn: str) -> None:
        headers = [(name, value) for name, value in delivery.headers.items() if name != SOURCE_HEADER]
        await self._producer.send(target, delivery.body, headers=[*headers, (SOURCE_HEADER, source_arn.encode())])

    async def _change(self, deliveries: Sequence[Delivery], visibility_s: int) -> None:
        if visibility_s:
            await self._settler.renew([(each.token, visibility_s * 1000) for each in deliveries])
        else:
            await self._settler.release([each.token for each in deliveries])

    def _formatted(self, delivery: Delivery, parameters: Parameters) -> dict[str, Any]:
        handle = self._handles.issue(delivery.token, delivery.id, delivery.attempt)
        return formatted(delivery, self._ids.of(delivery.id), handle, parameters)

    async def _delete(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        self._directory.get(queue)
        handle = self._handles.read(parameters["ReceiptHandle"], queue)
        await self._settler.ack([handle.token])
        if (receiver := self._receivers.known(queue)) is not None:
            receiver.deleted.add(handle.message_id, handle.attempt)
        return {}

    async def _change_visibility(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        self._directory.get(queue)
        handle = self._handles.read(parameters["ReceiptHandle"], queue)
        visibility_s = parameters.get("VisibilityTimeout", 0)
        if visibility_s:
            await self._settler.renew([(handle.token, visibility_s * 1000)])
        else:
            await self._settler.release([handle.token])
        return {}


async def _outcome(calling: Awaitable[dict[str, Any]], refused: SqsError | None) -> dict[str, Any] | SqsError:
    """Return the result of a batch's entry, or why it failed."""
    if refused is not None:
        calling.close()  # type: ignore[attr-defined]
        return refused
    try:
        return await calling
    except SqsError as error:
        return error
    except MarqError as error:
        return _translated(error)


def _check_permission(key: Key, action: str, queue: str) -> None:
    """Raise SqsError if a key may not perform an action on a queue."""
    if not key.allows(action, queue):
        raise SqsError(
            "AccessDenied", f"the access key {key.id} has no permission for {action!r} on the queue {queue!r}"
        )


def _translated(error: MarqError) -> SqsError:
    if isinstance(error, MessageTooLarge | ConfigError):
        return SqsError("InvalidParameterValue", str(error))
    if isinstance(error, BrokerUnavailable):
        log.warning("a call failed: %s", error)
        return SqsError("ServiceUnavailable", str(error))
    log.error("a call failed: %s", error)
    return SqsError("InternalFailure", str(error))


def _queue_of(parameters: Parameters) -> str | None:
    """Return the name of the queue that a call concerns. Raises SqsError."""
    if (name := parameters.get("QueueName")) is not None:
        return str(name)
    url = parameters.get("QueueUrl")
    return None if url is None else str(url).rpartition("/")[2]


def _page(member: str, names: list[str], parameters: Parameters, base_url: str) -> dict[str, Any]:
    """Return the next page of sorted names as URLs."""
    token, most = parameters.get("NextToken"), parameters.get("MaxResults")
    if token is not None:
        names = [name for name in names if name > token]
    page = names[: most or _MAX_NAMES]
    answer: dict[str, Any] = {member: [_url(base_url, name) for name in page]} if page or member == "queueUrls" else {}
    if most is not None and len(names) > most:
        answer["NextToken"] = page[-1]
    return answer


def _url(base_url: str, queue: str) -> str:
    return f"{base_url}/{ACCOUNT}/{queue}"


def _arn(queue: str) -> str:
    return f"arn:aws:sqs:{REGION}:{ACCOUNT}:{queue}"


_OPERATIONS: Mapping[str, Any] = {
    "ListQueues": Operations._list_queues,
    "CreateQueue": Operations._create_queue,
    "DeleteQueue": Operations._delete_queue,
    "GetQueueUrl": Operations._get_queue_url,
    "GetQueueAttributes": Operations._get_queue_attributes,
    "SetQueueAttributes": Operations._set_queue_attributes,
    "PurgeQueue": Operations._purge_queue,
    "ListDeadLetterSourceQueues": Operations._list_dead_letter_sources,
    "ListQueueTags": Operations._list_tags,
    "TagQueue": Operations._tag,
    "UntagQueue": Operations._untag,
    "SendMessage": Operations._send,
    "SendMessageBatch": Operations._send,
    "ReceiveMessage": Operations._receive,
    "DeleteMessage": Operations._delete,
    "DeleteMessageBatch": Operations._delete,
    "ChangeMessageVisibility": Operations._change_visibility,
    "ChangeMessageVisibilityBatch": Operations._change_visibility,
}
