"""Limits of calls: batches, messages, ranges, names. The model of SQS has types and required members only.

A mistake in one entry of a batch fails that entry; the others are carried out. A mistake in the batch itself, such as
two entries with one id, fails the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from marq_worker.sqs.attributes import MAX_DELAY_S, MAX_MESSAGE_BYTES, MAX_VISIBILITY_S, MAX_WAIT_S
from marq_worker.sqs.attributes import NAMES as QUEUE_ATTRIBUTES
from marq_worker.sqs.aws_json import Call
from marq_worker.sqs.characters import (
    FIFO_SUFFIX,
    MAX_DIGITS,
    is_attribute_name,
    is_entry_id,
    is_number,
    is_queue_name,
    is_text,
    is_token,
)
from marq_worker.sqs.errors import SqsError, invalid
from marq_worker.sqs.message_attributes import Attributes, asks_for_all, base_type

MAX_BATCH = 10
MAX_ATTRIBUTES = 10
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

#: The member with the value of a message attribute, by base type.
_MEMBERS = {"String": "StringValue", "Number": "StringValue", "Binary": "BinaryValue"}
_TRACE = "AWSTraceHeader"

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


# --- messages ---------------------------------------------------------------------------------------------------------


def message_bytes(message: Parameters) -> int:
    """Return the size that counts against the limits: the body, and names, types and values of attributes."""
    size = _bytes(message["MessageBody"])
    for name, attribute in message.get("MessageAttributes", {}).items():
        size += len(name) + len(attribute["DataType"])
        size += len(attribute.get("BinaryValue", b"")) + _bytes(attribute.get("StringValue", ""))
    return size


def check_size(message: Parameters, maximum_bytes: int) -> None:
    """Check the size of a message. Raises SqsError."""
    size = message_bytes(message)
    if size > maximum_bytes:
        raise invalid(f"the message has {size} bytes with its attributes; at most {maximum_bytes} are allowed")


def check_message(message: Parameters, queue_url: str, maximum_bytes: int) -> None:
    """Check the parameters of SendMessage, or an entry of SendMessageBatch. Raises SqsError."""
    body = message["MessageBody"]
    if not body:
        raise SqsError("MissingParameter", "MessageBody is empty; a message has at least one character")
    if not is_text(body):
        raise SqsError(
            "InvalidMessageContents", "MessageBody has a character that XML 1.0 does not allow; encode it, as base64"
        )
    if "MessageAttributes" in message:
        _check_attributes(message["MessageAttributes"])
    if "MessageSystemAttributes" in message:
        _check_system_attributes(message["MessageSystemAttributes"])
    check_size(message, maximum_bytes)
    _check_range(message, "DelaySeconds", 0, MAX_DELAY_S)
    for name in ("MessageGroupId", "MessageDeduplicationId"):
        _check_token(message, name)
    if queue_url.endswith(FIFO_SUFFIX):
        if "MessageGroupId" not in message:
            raise SqsError("MissingParameter", "MessageGroupId is missing; each message of a FIFO queue has one")
        if message.get("DelaySeconds"):
            raise invalid("DelaySeconds can't be set for a message of a FIFO queue; set it for the queue")
    elif "MessageDeduplicationId" in message:
        raise invalid("MessageDeduplicationId is only for FIFO queues")


def _check_attributes(attributes: Attributes) -> None:
    if len(attributes) > MAX_ATTRIBUTES:
        raise invalid(f"the message has {len(attributes)} attributes; at most {MAX_ATTRIBUTES} are allowed")
    for name, attribute in attributes.items():
        if not is_attribute_name(name):
            raise invalid(
                f"message attribute {name[:80]!r}: expected a name of 1 to 256 of A-Z a-z 0-9 _ - . that does not begin"
                " with AWS. or Amazon., without a dot at an end or two in a row"
            )
        _check_value(name, attribute)


def _check_value(name: str, attribute: Mapping[str, Any]) -> None:
    base = base_type(attribute["DataType"])
    if not base:
        raise invalid(
            f"message attribute {name!r}: expected a DataType of String, Number or Binary, with or without .LABEL"
        )
    for member in ("StringListValues", "BinaryListValues"):
        if attribute.get(member):
            raise SqsError("UnsupportedOperation", f"message attribute {name!r}: {member} is not supported")
    member = _MEMBERS[base]
    if not attribute.get(member) or len({"StringValue", "BinaryValue"} & attribute.keys()) > 1:
        raise invalid(
            f"message attribute {name!r}: expected a {member} that is not empty, and no other value, because its"
            f" DataType is {base}"
        )
    if base == "String" and not is_text(attribute[member]):
        raise invalid(f"message attribute {name!r}: the value has a character that XML 1.0 does not allow")
    if base == "Number" and not is_number(attribute[member]):
        raise invalid(f"message attribute {name!r}: expected a number with at most {MAX_DIGITS} digits")


def _check_system_attributes(attributes: Attributes) -> None:
    for name, attribute in attributes.items():
        if name != _TRACE:
            raise invalid(f"message system attribute {name[:80]!r}: only {_TRACE} can be sent")
        if attribute["DataType"] != "String":
            raise invalid(f"message system attribute {name}: expected the DataType String")
        _check_value(name, attribute)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


# --- other calls ------------------------------------------------------------------------------------------------------


def _check_receive(parameters: Parameters) -> None:
    _check_range(parameters, "MaxNumberOfMessages", 1, MAX_BATCH)
    _check_range(parameters, "VisibilityTimeout", 0, MAX_VISIBILITY_S)
    _check_range(parameters, "WaitTimeSeconds", 0, MAX_WAIT_S)
    _check_token(parameters, "ReceiveRequestAttemptId")
    for member in ("AttributeNames", "MessageSystemAttributeNames"):
        _check_names(parameters, member, SYSTEM_ATTRIBUTES)


def _check_visibility(parameters: Parameters, *_: object) -> None:
    if "VisibilityTimeout" not in parameters:
        raise SqsError("MissingParameter", "VisibilityTimeout is missing; add it")
    _check_range(parameters, "VisibilityTimeout", 0, MAX_VISIBILITY_S)


def _check_names(parameters: Parameters, member: str, known: frozenset[str]) -> None:
    for name in parameters.get(member, ()):
        if name not in known and not asks_for_all([name]):
            raise SqsError("InvalidAttributeName", f"{member}: {name[:80]!r} is unknown")


def _check_create(parameters: Parameters) -> None:
    name = parameters["QueueName"]
    if not is_queue_name(name):
        raise invalid(
            f"QueueName: expected 1 to 80 of A-Z a-z 0-9 _ -, and .fifo at the end for a FIFO queue; got {name[:100]!r}"
        )
    fifo = parameters.get("Attributes", {}).get("FifoQueue", "").lower() == "true"
    if fifo and not name.endswith(FIFO_SUFFIX):
        raise invalid(f"QueueName: the name of a FIFO queue ends in {FIFO_SUFFIX}")
    if name.endswith(FIFO_SUFFIX) and not fifo:
        raise invalid(f"QueueName: only a queue with the attribute FifoQueue=true ends in {FIFO_SUFFIX}")
    _check_tags(parameters.get("tags", {}))


def check_tag_count(tags: Mapping[str, str]) -> None:
    """Check the number of a queue's tags. Raises SqsError."""
    if len(tags) > MAX_TAGS:
        raise invalid(f"the queue would have {len(tags)} tags; at most {MAX_TAGS} are allowed")


def _check_tags(tags: Mapping[str, str]) -> None:
    check_tag_count(tags)
    for key, value in tags.items():
        if not 0 < len(key) <= MAX_TAG_KEY or len(value) > MAX_TAG_VALUE or key.lower().startswith("aws:"):
            raise invalid(
                f"tag {key[:80]!r}: expected a key of 1 to {MAX_TAG_KEY} characters that does not begin with aws:,"
                f" and a value of at most {MAX_TAG_VALUE}"
            )


def _check_tag(parameters: Parameters) -> None:
    if not parameters["Tags"]:
        raise SqsError("MissingParameter", "Tags is empty; name at least one tag")
    _check_tags(parameters["Tags"])


def _check_untag(parameters: Parameters) -> None:
    if not parameters["TagKeys"]:
        raise invalid("TagKeys is empty; name at least one tag")


def _check_page(parameters: Parameters) -> None:
    _check_range(parameters, "MaxResults", 1, MAX_NAMES)


def _check_range(parameters: Parameters, name: str, least: int, most: int) -> None:
    value = parameters.get(name)
    if value is not None and not least <= value <= most:
        raise invalid(f"{name}: expected {least} to {most}, got {value}")


def _check_token(parameters: Parameters, name: str) -> None:
    value = parameters.get(name)
    if value is not None and not is_token(value):
        raise invalid(f"{name}: expected 1 to 128 alphanumeric or ASCII punctuation characters")


_ENTRIES: Mapping[str, Callable[[Parameters, str, int], None]] = {
    "SendMessageBatch": check_message,
    "ChangeMessageVisibilityBatch": _check_visibility,
    # A handle has no limits of its own.
    "DeleteMessageBatch": lambda *_: None,
}
_RULES: Mapping[str, Callable[[Parameters], None]] = {
    "ReceiveMessage": _check_receive,
    "ChangeMessageVisibility": _check_visibility,
    "CreateQueue": _check_create,
    "GetQueueAttributes": lambda parameters: _check_names(parameters, "AttributeNames", QUEUE_ATTRIBUTES),
    "TagQueue": _check_tag,
    "UntagQueue": _check_untag,
    "ListQueues": _check_page,
    "ListDeadLetterSourceQueues": _check_page,
    "ListMessageMoveTasks": lambda parameters: _check_range(parameters, "MaxResults", 1, MAX_TASKS),
    "StartMessageMoveTask": lambda parameters: _check_range(
        parameters, "MaxNumberOfMessagesPerSecond", 1, MAX_MOVES_PER_S
    ),
}
