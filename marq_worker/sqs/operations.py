"""The operations of the SQS endpoint, from checked calls to answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from marq.wire.errors import BrokerUnavailable, ConfigError, MarqError, MessageTooLarge
from marq_worker.sqs.access_keys import DESCRIBE, Key, action_of
from marq_worker.sqs.attributes import target_of
from marq_worker.sqs.aws_json import Call
from marq_worker.sqs.errors import SqsError, invalid
from marq_worker.sqs.limits import check
from marq_worker.sqs.message_operations import MessageOperations
from marq_worker.sqs.move_operations import MoveOperations, queue_of_task
from marq_worker.sqs.queue_operations import QueueOperations
from marq_worker.sqs.sqs_queues import Directory

log = logging.getLogger("marq.sqs")

Parameters = Mapping[str, Any]


def check_permissions(key: Key, call: Call, queue: str) -> None:
    """Raise SqsError if a key may not make a call."""
    check_permission(key, action_of(call.operation), queue)
    policy = (call.parameters.get("Attributes") or {}).get("RedrivePolicy")
    if policy and (target := target_of(policy)) is not None:
        check_permission(key, "send", target)


def check_permission(key: Key, action: str, queue: str) -> None:
    """Raise SqsError if a key may not perform an action on a queue."""
    if not key.allows(action, queue):
        missing = "any action" if action == DESCRIBE else repr(action)
        raise SqsError(
            "AccessDenied", f"the access key {key.id} has no permission for {missing} on the queue {queue[:80]!r}"
        )


class Operations:
    """Answers calls.

    Args:
        maximum_bytes: the size of the largest message that Kafka accepts.
    """

    def __init__(
        self,
        queues: QueueOperations,
        messages: MessageOperations,
        moves: MoveOperations,
        directory: Directory,
        maximum_bytes: int,
    ) -> None:
        self._moves = moves
        self._directory = directory
        self._maximum_bytes = maximum_bytes
        self._operations: Mapping[str, Any] = {
            **{name: partial(operation, queues) for name, operation in _ON_QUEUES.items()},
            **{name: partial(operation, messages) for name, operation in _ON_MESSAGES.items()},
            **{name: partial(operation, moves) for name, operation in _ON_MOVES.items()},
        }

    async def answer(self, call: Call, key: Key | None, base_url: str) -> dict[str, Any]:
        """Answer a call of a client; ``key`` is None if the endpoint has no keys.

        Raises SqsError.
        """
        operation = self._operations.get(call.operation)
        if operation is None:
            raise SqsError("UnsupportedOperation", f"{call.operation} is not supported")
        parameters = call.parameters
        queue = _queue_of(parameters)
        if queue is not None and key is not None:
            check_permissions(key, call, queue)
        errors = check(call, self._maximum_bytes)
        if queue is not None:
            await self._directory.look_for(queue)
            if key is not None:
                for action, other in self._moves.permissions(call.operation, queue, parameters):
                    check_permission(key, action, other)
        try:
            if "Entries" in parameters:
                return await self._batch(operation, queue or "", parameters["Entries"], errors)
            return dict(await operation(queue, {**parameters, "base_url": base_url, "key": key}))
        except MarqError as error:
            raise translated(error) from error

    async def _batch(
        self, operation: Any, queue: str, entries: Sequence[Parameters], errors: Mapping[str, SqsError]
    ) -> dict[str, Any]:
        """Answer the entries of a batch, each of which succeeds or fails separately."""
        self._directory.get(queue)
        accepted = [entry for entry in entries if entry["Id"] not in errors] if errors else entries
        outcomes = await operation(queue, accepted) if accepted else []
        by_id = {**errors, **{entry["Id"]: outcome for entry, outcome in zip(accepted, outcomes, strict=True)}}
        answer: dict[str, Any] = {"Successful": [], "Failed": []}
        for entry in entries:
            outcome = by_id[entry["Id"]]
            if isinstance(outcome, MarqError):
                outcome = translated(outcome)
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
        # SQS leaves out empty lists, as some clients expect. Successful stays, because others expect it.
        return {name: results for name, results in answer.items() if results or name == "Successful"}


def translated(error: MarqError) -> SqsError:
    if isinstance(error, MessageTooLarge | ConfigError):
        return invalid(str(error))
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
    return queue_of_task(parameters) if url is None else str(url).rpartition("/")[2]


_ON_QUEUES: Mapping[str, Any] = {
    "ListQueues": QueueOperations.list_queues,
    "CreateQueue": QueueOperations.create_queue,
    "DeleteQueue": QueueOperations.delete_queue,
    "GetQueueUrl": QueueOperations.get_queue_url,
    "GetQueueAttributes": QueueOperations.get_queue_attributes,
    "SetQueueAttributes": QueueOperations.set_queue_attributes,
    "PurgeQueue": QueueOperations.purge_queue,
    "ListDeadLetterSourceQueues": QueueOperations.list_dead_letter_sources,
    "ListQueueTags": QueueOperations.list_tags,
    "TagQueue": QueueOperations.tag,
    "UntagQueue": QueueOperations.untag,
}
_ON_MESSAGES: Mapping[str, Any] = {
    "SendMessage": MessageOperations.send,
    "SendMessageBatch": MessageOperations.send_batch,
    "ReceiveMessage": MessageOperations.receive,
    "DeleteMessage": MessageOperations.delete,
    "DeleteMessageBatch": MessageOperations.delete_batch,
    "ChangeMessageVisibility": MessageOperations.change_visibility,
    "ChangeMessageVisibilityBatch": MessageOperations.change_visibility_batch,
}
_ON_MOVES: Mapping[str, Any] = {
    "StartMessageMoveTask": MoveOperations.start,
    "CancelMessageMoveTask": MoveOperations.cancel,
    "ListMessageMoveTasks": MoveOperations.list_tasks,
}
#: The operations that are supported.
SUPPORTED = frozenset({*_ON_QUEUES, *_ON_MESSAGES, *_ON_MOVES})
