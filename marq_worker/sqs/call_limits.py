"""Limits of calls: batches, ranges, names. The model of SQS has types and required members only.

A mistake in one entry of a batch fails that entry; the others are carried out. A mistake in the batch itself, such as
two entries with one id, fails the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from marq_worker.sqs.attributes import NAMES as QUEUE_ATTRIBUTES
from marq_worker.sqs.aws_json import Call
from marq_worker.sqs.characters import FIFO_SUFFIX, is_entry_id, is_queue_name
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.message_attributes import asks_for_all
from marq_worker.sqs.message_limits import (
    MAX_MESSAGE_BYTES,
    check_message,
    check_range,
    check_token,
    message_bytes,
)

MAX_BATCH = 10
MAX_VISIBILITY_S = 43_200
MAX_WAIT_S = 20
MAX_NAMES = 1_000
MAX_TASKS = 10
MAX_MOVES_PER_S = 500
MAX_TAGS = 50
MAX_TAG_KEY, MAX_TAG_VALUE = 128, 256

#: Names that a receiver can ask for, apart from ``All``.
SYSTEM_ATTRIBUTES = frozenset(
    {
        "SenderId",
        "SentTimestamp",
        "ApproximateReceiveCount",
        "ApproximateFirstReceiveTimestamp",
        "SequenceNumber",
        "MessageDeduplicationId",
        "MessageGroupId",
        "AWSTraceHeader",
        "DeadLetterQueueSourceArn",
        # SQS's model lists this name, although no message has this attribute.
        "SqsManagedSseEnabled",
    }
)

Parameters = Mapping[str, Any]


def check(call: Call, maximum_bytes: int = MAX_MESSAGE_BYTES) -> dict[str, SqsError]:
    """Check a call against the limits that do not depend on the queue's settings.

    Args:
        maximum_bytes: the size of the largest message that is accepted (default 1 MiB).

    Returns:
        The errors of a batch's entries by their ids; empty for any other call.

    Raises:
        SqsError: the whole call is refused.
    """
    parameters = call.parameters
    if call.operation in _ENTRIES:
        return _check_batch(call.operation, parameters, maximum_bytes)
    if call.operation == "SendMessage":
        check_message(parameters, parameters["QueueUrl"], maximum_bytes)
    elif (rule := _RULES.get(call.operation)) is not None:
        rule(parameters)
    return {}


# --- batches ----------------------------------------------------------------------------------------------------------


def _check_batch(operation: str, parameters: Parameters, maximum_bytes: int) -> dict[str, SqsError]:
    entries = parameters["Entries"]
    if not entries:
        raise SqsError("EmptyBatchRequest", "the batch has no entries")
    if len(entries) > MAX_BATCH:
        raise SqsError(
            "TooManyEntriesInBatchRequest", f"the batch has {len(entries)} entries; at most {MAX_BATCH} are allowed"
        )
    ids = [entry["Id"] for entry in entries]
    for entry_id in ids:
        if not is_entry_id(entry_id):
            raise SqsError("InvalidBatchEntryId", "expected an Id of 1 to 80 of A-Z a-z 0-9 _ - for each entry")
        if ids.count(entry_id) > 1:
            raise SqsError("BatchEntryIdsNotDistinct", f"Id {entry_id!r} occurs twice in the batch")
    if operation == "SendMessageBatch":
        # Kafka's limit does not apply to the batch, because each entry becomes a record.
        size = sum(map(message_bytes, entries))
        if size > MAX_MESSAGE_BYTES:
            raise SqsError(
                "BatchRequestTooLong", f"the batch has {size} bytes; at most {MAX_MESSAGE_BYTES} are allowed"
            )
    check_entry = _ENTRIES[operation]
    errors = {}
    for entry in entries:
        try:
            check_entry(entry, parameters["QueueUrl"], maximum_bytes)
        except SqsError as error:
            errors[entry["Id"]] = error
    return errors


def _check_visibility(parameters: Parameters, *_: object) -> None:
    if "VisibilityTimeout" not in parameters:
        raise SqsError("MissingParameter", "VisibilityTimeout is missing; add it")
    check_range(parameters, "VisibilityTimeout", 0, MAX_VISIBILITY_S)


def _check_delete(*_: object) -> None:
    """Accept every entry: a handle has no limits of its own."""


_ENTRIES: Mapping[str, Callable[[Parameters, str, int], None]] = {
    "SendMessageBatch": check_message,
    "ChangeMessageVisibilityBatch": _check_visibility,
    "DeleteMessageBatch": _check_delete,
}


# --- other calls ------------------------------------------------------------------------------------------------------


def _check_receive(parameters: Parameters) -> None:
    check_range(parameters, "MaxNumberOfMessages", 1, MAX_BATCH)
    check_range(parameters, "VisibilityTimeout", 0, MAX_VISIBILITY_S)
    check_range(parameters, "WaitTimeSeconds", 0, MAX_WAIT_S)
    check_token(parameters, "ReceiveRequestAttemptId")
    for member in ("AttributeNames", "MessageSystemAttributeNames"):
        _check_names(parameters, member, SYSTEM_ATTRIBUTES)


def _check_names(parameters: Parameters, member: str, known: frozenset[str]) -> None:
    for name in parameters.get(member, ()):
        if name not in known and not asks_for_all([name]):
            raise SqsError("InvalidAttributeName", f"{member}: {name[:80]!r} is unknown")


def _check_create(parameters: Parameters) -> None:
    name = parameters["QueueName"]
    if not is_queue_name(name):
        raise _invalid(
            f"QueueName: expected 1 to 80 of A-Z a-z 0-9 _ -, and .fifo at the end for a FIFO queue; got {name[:100]!r}"
        )
    fifo = parameters.get("Attributes", {}).get("FifoQueue", "").lower() == "true"
    if fifo and not name.endswith(FIFO_SUFFIX):
        raise _invalid(f"QueueName: the name of a FIFO queue ends in {FIFO_SUFFIX}")
    if name.endswith(FIFO_SUFFIX) and not fifo:
        raise _invalid(f"QueueName: only a queue with the attribute FifoQueue=true ends in {FIFO_SUFFIX}")
    _check_tags(parameters.get("tags", {}))


def check_tag_count(tags: Mapping[str, str]) -> None:
    """Check the number of a queue's tags. Raises SqsError."""
    if len(tags) > MAX_TAGS:
        raise _invalid(f"the queue would have {len(tags)} tags; at most {MAX_TAGS} are allowed")


def _check_tags(tags: Mapping[str, str]) -> None:
    check_tag_count(tags)
    for key, value in tags.items():
        if not 0 < len(key) <= MAX_TAG_KEY or len(value) > MAX_TAG_VALUE or key.lower().startswith("aws:"):
            raise _invalid(
                f"tag {key[:80]!r}: expected a key of 1 to {MAX_TAG_KEY} characters that does not begin with aws:,"
                f" and a value of at most {MAX_TAG_VALUE}"
            )


def _check_tag(parameters: Parameters) -> None:
    if not parameters["Tags"]:
        raise SqsError("MissingParameter", "Tags is empty; name at least one tag")
    _check_tags(parameters["Tags"])


def _check_untag(parameters: Parameters) -> None:
    if not parameters["TagKeys"]:
        raise _invalid("TagKeys is empty; name at least one tag")


def _check_page(parameters: Parameters) -> None:
    check_range(parameters, "MaxResults", 1, MAX_NAMES)


_RULES: Mapping[str, Callable[[Parameters], None]] = {
    "ReceiveMessage": _check_receive,
    "ChangeMessageVisibility": _check_visibility,
    "CreateQueue": _check_create,
    "GetQueueAttributes": lambda parameters: _check_names(parameters, "AttributeNames", QUEUE_ATTRIBUTES),
    "TagQueue": _check_tag,
    "UntagQueue": _check_untag,
    "ListQueues": _check_page,
    "ListDeadLetterSourceQueues": _check_page,
    "ListMessageMoveTasks": lambda parameters: check_range(parameters, "MaxResults", 1, MAX_TASKS),
    "StartMessageMoveTask": lambda parameters: check_range(
        parameters, "MaxNumberOfMessagesPerSecond", 1, MAX_MOVES_PER_S
    ),
}


def _invalid(message: str) -> SqsError:
    return SqsError("InvalidParameterValue", message)
