"""Limits of calls: good and bad inputs, and the error that each bad one gets."""

from __future__ import annotations

from typing import Any

import pytest

from marq_worker.sqs.attributes import MAX_MESSAGE_BYTES, NAMES
from marq_worker.sqs.aws_json import Call, operations
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.limits import SYSTEM_ATTRIBUTES, check, message_bytes

URL = "http://127.0.0.1:9324/000000000000/orders"
FIFO_URL = f"{URL}.fifo"
INVALID = "InvalidParameterValue"


def sent(**changes: Any) -> Call:
    return Call("SendMessage", {"QueueUrl": URL, "MessageBody": "hello", **changes})


def attribute(data_type: str = "String", /, **values: Any) -> Call:
    return sent(MessageAttributes={"name": {"DataType": data_type, **values}})


def named(name: str) -> Call:
    return sent(MessageAttributes={name: {"DataType": "String", "StringValue": "x"}})


def batch(*entries: dict[str, Any], operation: str = "SendMessageBatch", url: str = URL) -> Call:
    return Call(operation, {"QueueUrl": url, "Entries": list(entries)})


def entry(entry_id: str = "a", **changes: Any) -> dict[str, Any]:
    return {"Id": entry_id, "MessageBody": "hello", **changes}


def received(**changes: Any) -> Call:
    return Call("ReceiveMessage", {"QueueUrl": URL, **changes})


def created(name: str, attributes: dict[str, str] | None = None, **changes: Any) -> Call:
    return Call("CreateQueue", {"QueueName": name, "Attributes": attributes or {}, **changes})


def visible(seconds: int) -> Call:
    return Call("ChangeMessageVisibility", {"QueueUrl": URL, "ReceiptHandle": "h", "VisibilityTimeout": seconds})


def refused(call: Call, **options: int) -> SqsError:
    with pytest.raises(SqsError) as caught:
        check(call, **options)
    return caught.value


GOOD = {
    "every character of XML 1.0": sent(MessageBody="\t\n\r \ud7ff\ue000\ufffd\U00010000\U0010ffff"),
    "a body of one character": sent(MessageBody="x"),
    "the largest message": sent(MessageBody="x" * MAX_MESSAGE_BYTES),
    "delays": batch(entry("a", DelaySeconds=0), entry("b", DelaySeconds=900)),
    "a group of a standard queue": sent(MessageGroupId="tenant-1"),
    "ids of a FIFO queue": sent(QueueUrl=FIFO_URL, MessageGroupId="!~" * 64, MessageDeduplicationId="d" * 128),
    "a delay of 0 in a FIFO queue": sent(QueueUrl=FIFO_URL, MessageGroupId="g", DelaySeconds=0),
    "ten attributes": sent(
        MessageAttributes={f"a{n}": {"DataType": "String", "StringValue": "x"} for n in range(10)}
    ),
    "a long name": named("a" * 256),
    "a name with marks": named("A-Z_0.9.x"),
    "a name that only resembles Amazon's": named("awsome.Amazon"),
    "a labelled string": attribute("String.json", StringValue="{}"),
    "a number with 38 digits": attribute("Number", StringValue="-1" + "0" * 37),
    "a number with an exponent": attribute("Number.float", StringValue="+1.5E-128"),
    "binary": attribute("Binary", BinaryValue=b"\x00"),
    "binary with labels": attribute("Binary.a.b", BinaryValue=b"\x00"),
    "binary with a long label": attribute("Binary." + "x" * 249, BinaryValue=b"\x00"),
    "empty lists": attribute("String", StringValue="x", StringListValues=[], BinaryListValues=[]),
    "a trace": sent(MessageSystemAttributes={"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1"}}),
    "ten entries": batch(*(entry(f"id_-{n}") for n in range(10))),
    "a long id": batch(entry("a" * 80)),
    "deletes": batch({"Id": "a", "ReceiptHandle": "anything"}, operation="DeleteMessageBatch"),
    "visibility": visible(0),
    "the longest visibility": visible(43_200),
    "visibilities": batch(
        {"Id": "a", "ReceiptHandle": "h", "VisibilityTimeout": 1}, operation="ChangeMessageVisibilityBatch"
    ),
    "a receive without options": received(),
    "a receive with the least": received(MaxNumberOfMessages=1, VisibilityTimeout=0, WaitTimeSeconds=0),
    "a receive with the most": received(MaxNumberOfMessages=10, VisibilityTimeout=43_200, WaitTimeSeconds=20),
    "names of attributes": received(AttributeNames=["All"], MessageSystemAttributeNames=sorted(SYSTEM_ATTRIBUTES)),
    "an attribute that only the model has": received(AttributeNames=["SqsManagedSseEnabled"]),
    "kombu's name for all": received(AttributeNames=["ALL"], MessageAttributeNames=["ALL"]),
    "an attempt": received(ReceiveRequestAttemptId="a" * 128),
    "a queue": created("Orders_-1"),
    "a queue with a long name": created("a" * 80),
    "a FIFO queue": created("a" * 75 + ".fifo", {"FifoQueue": "true"}),
    "tags": created("orders", tags={f"k{n}": "v" for n in range(50)} | {"k0": "v" * 256}),
    "tags of a queue": Call("TagQueue", {"QueueUrl": URL, "Tags": {"k" * 128: ""}}),
    "attributes of a queue": Call("GetQueueAttributes", {"QueueUrl": URL, "AttributeNames": sorted(NAMES)}),
    "a list": Call("ListQueues", {"QueueNamePrefix": "", "MaxResults": 1_000}),
    "a list without limit": Call("ListQueues", {}),
    "sources": Call("ListDeadLetterSourceQueues", {"QueueUrl": URL, "MaxResults": 1}),
    "tasks": Call("ListMessageMoveTasks", {"SourceArn": "a", "MaxResults": 10}),
    "a task": Call("StartMessageMoveTask", {"SourceArn": "a", "MaxNumberOfMessagesPerSecond": 500}),
    "a call without rules": Call("DeleteQueue", {"QueueUrl": URL}),
}  # fmt: skip

BAD = {
    "an empty body": (sent(MessageBody=""), "MissingParameter"),
    **{
        f"a body with {character!r}": (sent(MessageBody=f"a{character}"), "InvalidMessageContents")
        for character in "\x00\x01\x0b\x1f\ufffe\uffff"
    },
    "a message over the limit": (sent(MessageBody="x" * (MAX_MESSAGE_BYTES + 1)), INVALID),
    "a message over the limit in UTF-8": (sent(MessageBody="ü" * (MAX_MESSAGE_BYTES // 2 + 1)), INVALID),
    "a message over the limit with its attribute": (
        sent(
            MessageBody="x" * (MAX_MESSAGE_BYTES - 10),
            MessageAttributes={"name": {"DataType": "String", "StringValue": "x"}},
        ),
        INVALID,
    ),
    "a negative delay": (sent(DelaySeconds=-1), INVALID),
    "a delay over 15 minutes": (sent(DelaySeconds=901), INVALID),
    "an empty group": (sent(MessageGroupId=""), INVALID),
    "a group with a space": (sent(MessageGroupId="a b"), INVALID),
    "a long group": (sent(MessageGroupId="g" * 129), INVALID),
    "a deduplication id of a standard queue": (sent(MessageDeduplicationId="d"), INVALID),
    "a FIFO message without group": (sent(QueueUrl=FIFO_URL), "MissingParameter"),
    "a FIFO message with a delay": (sent(QueueUrl=FIFO_URL, MessageGroupId="g", DelaySeconds=1), INVALID),
    "eleven attributes": (
        sent(MessageAttributes={f"a{n}": {"DataType": "String", "StringValue": "x"} for n in range(11)}),
        INVALID,
    ),
    **{
        f"an attribute called {name[:20]!r}": (named(name), INVALID)
        for name in ("", ".a", "a.", "a..b", "a b", "ü", "AWS.a", "aws.a", "Amazon.a", "a" * 257, "a\n")
    },
    **{
        f"the type {data_type[:20]!r}": (attribute(data_type, StringValue="x"), INVALID)
        for data_type in ("", "string", "Strings", "Text", ".x", "String.", "String.\x00", "String." + "x" * 250)
    },
    **{
        f"{data_type} with two values": (attribute(data_type, StringValue="x", BinaryValue=b"x"), INVALID)
        for data_type in ("String", "Binary")
    },
    "a string without a value": (attribute("String"), INVALID),
    "an empty string": (attribute("String", StringValue=""), INVALID),
    "a string with binary": (attribute("String", BinaryValue=b"x"), INVALID),
    "empty binary": (attribute("Binary", BinaryValue=b""), INVALID),
    "a string with a control character": (attribute("String", StringValue="\x01"), INVALID),
    **{
        f"the number {text[:20]!r}": (attribute("Number", StringValue=text), INVALID)
        for text in ("one", "1,5", "0x1", "1e", ".", "1e1000", "٣", " 1", "1\n", "1" * 39, "NaN")
    },
    "a list of strings": (attribute("String", StringValue="x", StringListValues=["y"]), "UnsupportedOperation"),
    "a list of blobs": (attribute("Binary", BinaryValue=b"x", BinaryListValues=[b"y"]), "UnsupportedOperation"),
    "another system attribute": (
        sent(MessageSystemAttributes={"SenderId": {"DataType": "String", "StringValue": "x"}}),
        INVALID,
    ),
    "a trace of another type": (
        sent(MessageSystemAttributes={"AWSTraceHeader": {"DataType": "Binary", "BinaryValue": b"x"}}),
        INVALID,
    ),
    "an empty trace": (
        sent(MessageSystemAttributes={"AWSTraceHeader": {"DataType": "String", "StringValue": ""}}),
        INVALID,
    ),
    "no entries": (batch(), "EmptyBatchRequest"),
    "eleven entries": (batch(*(entry(f"{n}") for n in range(11))), "TooManyEntriesInBatchRequest"),
    "equal ids": (batch(entry("a"), entry("b"), entry("a")), "BatchEntryIdsNotDistinct"),
    **{
        f"the id {entry_id[:20]!r}": (batch(entry(entry_id)), "InvalidBatchEntryId")
        for entry_id in ("", "a/b", "a b", "ü", "a\n", "a" * 81)
    },
    "equal ids of deletes": (
        batch(*[{"Id": "a", "ReceiptHandle": "h"}] * 2, operation="DeleteMessageBatch"),
        "BatchEntryIdsNotDistinct",
    ),
    "no entries of visibility": (batch(operation="ChangeMessageVisibilityBatch"), "EmptyBatchRequest"),
    "a batch over the limit": (
        batch(*(entry(f"{n}", MessageBody="x" * (MAX_MESSAGE_BYTES // 2 + 1)) for n in range(2))),
        "BatchRequestTooLong",
    ),
    "a negative visibility": (visible(-1), INVALID),
    "a visibility over 12 hours": (visible(43_201), INVALID),
    "no messages": (received(MaxNumberOfMessages=0), INVALID),
    "eleven messages": (received(MaxNumberOfMessages=11), INVALID),
    "a long wait": (received(WaitTimeSeconds=21), INVALID),
    "a negative wait": (received(WaitTimeSeconds=-1), INVALID),
    "a long visibility": (received(VisibilityTimeout=43_201), INVALID),
    "an attempt with a space": (received(ReceiveRequestAttemptId="a b"), INVALID),
    "an unknown attribute": (received(AttributeNames=["VisibilityTimeout"]), "InvalidAttributeName"),
    "an unknown system attribute": (received(MessageSystemAttributeNames=["None"]), "InvalidAttributeName"),
    "an unknown queue attribute": (
        Call("GetQueueAttributes", {"QueueUrl": URL, "AttributeNames": ["SentTimestamp"]}),
        "InvalidAttributeName",
    ),
    **{
        f"the queue {name[:20]!r}": (created(name), INVALID)
        for name in ("", "a b", "a.b", "ü", "a/b", "a\n", ".fifo", "a" * 81, "orders.fifo")
    },
    "a FIFO queue without its suffix": (created("orders", {"FifoQueue": "true"}), INVALID),
    "a FIFO queue with a long name": (created("a" * 76 + ".fifo", {"FifoQueue": "true"}), INVALID),
    "51 tags": (created("orders", tags={f"k{n}": "v" for n in range(51)}), INVALID),
    "no tags": (Call("TagQueue", {"QueueUrl": URL, "Tags": {}}), "MissingParameter"),
    "no keys of tags": (Call("UntagQueue", {"QueueUrl": URL, "TagKeys": []}), INVALID),
    **{
        f"the tag {key[:20]!r}={value[:5]!r}": (Call("TagQueue", {"QueueUrl": URL, "Tags": {key: value}}), INVALID)
        for key, value in (("", "v"), ("k" * 129, "v"), ("AWS:k", "v"), ("k", "v" * 257))
    },
    "a list of none": (Call("ListQueues", {"MaxResults": 0}), INVALID),
    "a long list": (Call("ListQueues", {"MaxResults": 1_001}), INVALID),
    "a long list of sources": (Call("ListDeadLetterSourceQueues", {"QueueUrl": URL, "MaxResults": 1_001}), INVALID),
    "eleven tasks": (Call("ListMessageMoveTasks", {"SourceArn": "a", "MaxResults": 11}), INVALID),
    "a fast task": (Call("StartMessageMoveTask", {"SourceArn": "a", "MaxNumberOfMessagesPerSecond": 501}), INVALID),
}


@pytest.mark.parametrize("call", GOOD.values(), ids=GOOD.keys())
def test_calls_within_the_limits_have_no_errors(call: Call) -> None:
    assert check(call) == {}


@pytest.mark.parametrize(("call", "shape"), BAD.values(), ids=BAD.keys())
def test_calls_outside_the_limits_are_refused(call: Call, shape: str) -> None:
    error = refused(call)

    assert (error.shape, error.status) == (shape, 400)
    assert error.message


def test_the_tables_are_of_operations_that_exist() -> None:
    assert {call.operation for call in [*GOOD.values(), *(call for call, _ in BAD.values())]} <= operations()


def test_a_mistake_in_an_entry_fails_that_entry_only() -> None:
    call = batch(
        entry("good"),
        entry("delayed", DelaySeconds=901),
        entry("empty", MessageBody=""),
        entry("control", MessageBody="\x01"),
        entry("attribute", MessageAttributes={"a b": {"DataType": "String", "StringValue": "x"}}),
        entry("fine", DelaySeconds=900),
    )

    errors = check(call)

    assert {name: error.shape for name, error in errors.items()} == {
        "delayed": INVALID,
        "empty": "MissingParameter",
        "control": "InvalidMessageContents",
        "attribute": INVALID,
    }


def test_entries_of_visibility_fail_one_by_one() -> None:
    call = batch(
        {"Id": "good", "ReceiptHandle": "h", "VisibilityTimeout": 0},
        {"Id": "long", "ReceiptHandle": "h", "VisibilityTimeout": 43_201},
        {"Id": "none", "ReceiptHandle": "h"},
        operation="ChangeMessageVisibilityBatch",
    )

    assert {name: error.shape for name, error in check(call).items()} == {"long": INVALID, "none": "MissingParameter"}


def test_entries_of_a_fifo_queue_need_a_group() -> None:
    errors = check(batch(entry("a", MessageGroupId="g"), entry("b"), url=FIFO_URL))

    assert {name: error.shape for name, error in errors.items()} == {"b": "MissingParameter"}


def test_the_size_of_a_message_counts_bytes_of_body_names_types_and_values() -> None:
    message = {
        "MessageBody": "grüße",
        "MessageAttributes": {
            "ab": {"DataType": "Number.int", "StringValue": "17"},
            "c": {"DataType": "Binary", "BinaryValue": b"\x00\x01\x02"},
        },
        "MessageSystemAttributes": {"AWSTraceHeader": {"DataType": "String", "StringValue": "not counted"}},
    }

    assert message_bytes(message) == 7 + (2 + 10 + 2) + (1 + 6 + 3)


def test_the_endpoint_may_have_a_lower_limit_for_messages() -> None:
    assert check(sent(MessageBody="x" * 100), maximum_bytes=100) == {}
    assert refused(sent(MessageBody="x" * 101), maximum_bytes=100).shape == INVALID
    errors = check(batch(entry("a", MessageBody="x" * 100), entry("b", MessageBody="x" * 101)), maximum_bytes=100)
    assert {name: error.shape for name, error in errors.items()} == {"b": INVALID}


def test_a_batch_may_have_one_mebibyte_whatever_the_limit_of_a_message() -> None:
    quarter, most = "x" * 262_144, 262_144
    full = [entry(name, MessageBody=quarter) for name in "abcd"]
    assert check(batch(*full), maximum_bytes=most) == {}
    assert refused(batch(*full, entry("e", MessageBody="x")), maximum_bytes=most).shape == "BatchRequestTooLong"
