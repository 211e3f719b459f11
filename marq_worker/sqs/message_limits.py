"""Limits of one message to send: characters, size, attributes. The model of SQS has none of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marq_worker.sqs.characters import FIFO_SUFFIX, MAX_DIGITS, is_attribute_name, is_number, is_text, is_token
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.message_attributes import Attributes, base_type

#: Maximum size of a message (body and attributes), and of all messages of a batch together.
MAX_MESSAGE_BYTES = 1_048_576
MAX_ATTRIBUTES = 10
MAX_DELAY_S = 900
#: The member with the value, by base type.
_MEMBERS = {"String": "StringValue", "Number": "StringValue", "Binary": "BinaryValue"}
_TRACE = "AWSTraceHeader"


def message_bytes(message: Mapping[str, Any]) -> int:
    """Return the size that counts against the limits: the body, and names, types and values of attributes."""
    size = _bytes(message["MessageBody"])
    for name, attribute in message.get("MessageAttributes", {}).items():
        size += len(name) + len(attribute["DataType"])
        size += len(attribute.get("BinaryValue", b"")) + _bytes(attribute.get("StringValue", ""))
    return size


def check_size(message: Mapping[str, Any], maximum_bytes: int) -> None:
    """Check the size of a message. Raises SqsError."""
    size = message_bytes(message)
    if size > maximum_bytes:
        raise _invalid(f"the message has {size} bytes with its attributes; at most {maximum_bytes} are allowed")


def check_message(message: Mapping[str, Any], queue_url: str, maximum_bytes: int) -> None:
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
    check_range(message, "DelaySeconds", 0, MAX_DELAY_S)
    for name in ("MessageGroupId", "MessageDeduplicationId"):
        check_token(message, name)
    if queue_url.endswith(FIFO_SUFFIX):
        if "MessageGroupId" not in message:
            raise SqsError("MissingParameter", "MessageGroupId is missing; each message of a FIFO queue has one")
        if message.get("DelaySeconds"):
            raise _invalid("DelaySeconds can't be set for a message of a FIFO queue; set it for the queue")
    elif "MessageDeduplicationId" in message:
        raise _invalid("MessageDeduplicationId is only for FIFO queues")


def check_range(parameters: Mapping[str, Any], name: str, least: int, most: int) -> None:
    """Check an integer if the parameters have it. Raises SqsError."""
    value = parameters.get(name)
    if value is not None and not least <= value <= most:
        raise _invalid(f"{name}: expected {least} to {most}, got {value}")


def check_token(parameters: Mapping[str, Any], name: str) -> None:
    """Check an id of a group, a deduplication or a receive attempt, if the parameters have it. Raises SqsError."""
    value = parameters.get(name)
    if value is not None and not is_token(value):
        raise _invalid(f"{name}: expected 1 to 128 alphanumeric or ASCII punctuation characters")


def _check_attributes(attributes: Attributes) -> None:
    if len(attributes) > MAX_ATTRIBUTES:
        raise _invalid(f"the message has {len(attributes)} attributes; at most {MAX_ATTRIBUTES} are allowed")
    for name, attribute in attributes.items():
        if not is_attribute_name(name):
            raise _invalid(
                f"message attribute {name[:80]!r}: expected a name of 1 to 256 of A-Z a-z 0-9 _ - . that does not begin"
                " with AWS. or Amazon., without a dot at an end or two in a row"
            )
        _check_value(name, attribute)


def _check_value(name: str, attribute: Mapping[str, Any]) -> None:
    base = base_type(attribute["DataType"])
    if not base:
        raise _invalid(
            f"message attribute {name!r}: expected a DataType of String, Number or Binary, with or without .LABEL"
        )
    for member in ("StringListValues", "BinaryListValues"):
        if attribute.get(member):
            raise SqsError("UnsupportedOperation", f"message attribute {name!r}: {member} is not supported")
    member = _MEMBERS[base]
    if not attribute.get(member) or len({"StringValue", "BinaryValue"} & attribute.keys()) > 1:
        raise _invalid(
            f"message attribute {name!r}: expected a {member} that is not empty, and no other value, because its"
            f" DataType is {base}"
        )
    if base == "String" and not is_text(attribute[member]):
        raise _invalid(f"message attribute {name!r}: the value has a character that XML 1.0 does not allow")
    if base == "Number" and not is_number(attribute[member]):
        raise _invalid(f"message attribute {name!r}: expected a number with at most {MAX_DIGITS} digits")


def _check_system_attributes(attributes: Attributes) -> None:
    for name, attribute in attributes.items():
        if name != _TRACE:
            raise _invalid(f"message system attribute {name[:80]!r}: only {_TRACE} can be sent")
        if attribute["DataType"] != "String":
            raise _invalid(f"message system attribute {name}: expected the DataType String")
        _check_value(name, attribute)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _invalid(message: str) -> SqsError:
    return SqsError("InvalidParameterValue", message)
