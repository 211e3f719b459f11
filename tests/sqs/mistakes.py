"""Calls with mistakes, and those that the endpoint and moto do not answer alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.sqs.script import Call, PolicyTo, text

#: Queues for messages, for attributes that are changed, and for all other mistakes.
SINK, CHANGED, IDLE = QUEUES = ("mistakes-sink", "mistakes-changed", "mistakes-idle")
_MISSING = "mistakes-missing"


def mistakes() -> Iterator[Call]:
    """Yield each mistake once."""
    for name, value in _WRONG_QUEUE_NAMES.items():
        yield Call(f"create: name {name}", "create_queue", None, {"QueueName": value})
    for name, attributes in _WRONG_ATTRIBUTES.items():
        yield Call(f"set: {name}", "set_queue_attributes", CHANGED, {"Attributes": attributes})
    parameters = {"QueueName": "mistakes-new", "Attributes": {"VisibilityTimeout": "43201"}}
    yield Call("create: VisibilityTimeout 43201", "create_queue", None, parameters)
    for operation, parameters in _ON_MISSING_QUEUE:
        yield Call(f"missing queue: {operation}", operation, _MISSING, parameters)
    yield Call("missing queue: url", "get_queue_url", None, {"QueueName": _MISSING})
    for name, message in _WRONG_MESSAGES.items():
        yield Call(f"send: {name}", "send_message", SINK, {"MessageBody": "x", **message})
    for name, ids in _WRONG_IDS.items():
        for operation, entry in _BATCHES.items():
            entries = [{"Id": entry_id, **entry} for entry_id in ids]
            if operation == "delete_message_batch":
                # moto compares handles in place of ids.
                entries = [{**entry, "ReceiptHandle": f"x{number}"} for number, entry in enumerate(entries)]
            yield Call(f"{operation}: {name}", operation, IDLE, {"Entries": entries})
    for name, parameters in _WRONG_RECEIVES.items():
        yield Call(f"receive: {name}", "receive_message", IDLE, parameters)
    for operation in ("delete_message", "change_message_visibility"):
        for handle in ("nonsense", ""):
            more = {"VisibilityTimeout": 1} if operation.startswith("change") else {}
            yield Call(f"{operation}: handle {handle!r}", operation, IDLE, {"ReceiptHandle": handle, **more})
    yield Call("attributes: unknown name", "get_queue_attributes", IDLE, {"AttributeNames": ["Unknown"]})
    for name, tags in _WRONG_TAGS.items():
        yield Call(f"tag: {name}", "tag_queue", IDLE, {"Tags": tags})
    yield Call("untag: no keys", "untag_queue", IDLE, {"TagKeys": []})
    yield Call("list: MaxResults 1001", "list_queues", None, {"MaxResults": 1001})


_WRONG_QUEUE_NAMES = {"empty": "", "with a space": "a b", "of 81 characters": "x" * 81, "with a dot": "a.b"}
_WRONG_ATTRIBUTES = {
    "unknown attribute": {"Unknown": "1"},
    "read-only attribute": {"QueueArn": "x"},
    "VisibilityTimeout 43201": {"VisibilityTimeout": "43201"},
    "VisibilityTimeout abc": {"VisibilityTimeout": "abc"},
    "DelaySeconds 901": {"DelaySeconds": "901"},
    "MessageRetentionPeriod 59": {"MessageRetentionPeriod": "59"},
    "MaximumMessageSize 1023": {"MaximumMessageSize": "1023"},
    "RedrivePolicy that is not JSON": {"RedrivePolicy": "{"},
    "RedrivePolicy without members": {"RedrivePolicy": "{}"},
    "RedrivePolicy to a missing queue": {"RedrivePolicy": PolicyTo(_MISSING, 3)},
}
_ON_MISSING_QUEUE: list[tuple[str, dict[str, Any]]] = [
    ("send_message", {"MessageBody": "x"}),
    ("send_message_batch", {"Entries": [{"Id": "a", "MessageBody": "x"}]}),
    ("receive_message", {}),
    ("delete_message", {"ReceiptHandle": "x"}),
    ("delete_message_batch", {"Entries": [{"Id": "a", "ReceiptHandle": "x"}]}),
    ("change_message_visibility", {"ReceiptHandle": "x", "VisibilityTimeout": 1}),
    ("get_queue_attributes", {"AttributeNames": ["All"]}),
    ("set_queue_attributes", {"Attributes": {"VisibilityTimeout": "1"}}),
    ("purge_queue", {}),
    ("delete_queue", {}),
    ("tag_queue", {"Tags": {"a": "b"}}),
    ("untag_queue", {"TagKeys": ["a"]}),
    ("list_queue_tags", {}),
    ("list_dead_letter_source_queues", {}),
]
_WRONG_MESSAGES: dict[str, dict[str, Any]] = {
    "empty body": {"MessageBody": ""},
    "body with U+0001": {"MessageBody": "\x01"},
    "body of more than 1 MiB": {"MessageBody": "x" * 1_048_577},
    "DelaySeconds 901": {"DelaySeconds": 901},
    "DelaySeconds -1": {"DelaySeconds": -1},
    "attribute without a name": {"MessageAttributes": {"": text("x")}},
    "attribute name with a space": {"MessageAttributes": {"a b": text("x")}},
    "attribute name AWS.a": {"MessageAttributes": {"AWS.a": text("x")}},
    "attribute of an unknown type": {"MessageAttributes": {"a": text("x", "Text")}},
    "attribute without a type": {"MessageAttributes": {"a": text("x", "")}},
    "attribute without a value": {"MessageAttributes": {"a": {"DataType": "String"}}},
    "empty attribute": {"MessageAttributes": {"a": text("")}},
    "number that is not one": {"MessageAttributes": {"a": text("x", "Number")}},
    "text in a binary attribute": {"MessageAttributes": {"a": text("x", "Binary")}},
    "11 attributes": {"MessageAttributes": {f"a{n}": text("x") for n in range(11)}},
}
_WRONG_IDS = {"no entries": [], "two entries with one id": ["a", "a"], "id with a slash": ["a/b"], "empty id": [""],
              "11 entries": [f"{n}" for n in range(11)]}  # fmt: skip
_BATCHES: dict[str, dict[str, Any]] = {
    "send_message_batch": {"MessageBody": "x"},
    "delete_message_batch": {"ReceiptHandle": "x"},
    "change_message_visibility_batch": {"ReceiptHandle": "x", "VisibilityTimeout": 1},
}
_WRONG_RECEIVES = {
    "MaxNumberOfMessages 0": {"MaxNumberOfMessages": 0},
    "MaxNumberOfMessages 11": {"MaxNumberOfMessages": 11},
    "WaitTimeSeconds -1": {"WaitTimeSeconds": -1},
    "WaitTimeSeconds 21": {"WaitTimeSeconds": 21},
    "VisibilityTimeout 43201": {"VisibilityTimeout": 43_201},
    "VisibilityTimeout -1": {"VisibilityTimeout": -1},
    "unknown system attribute": {"MessageSystemAttributeNames": ["Unknown"]},
}
_WRONG_TAGS: dict[str, dict[str, str]] = {
    "no tags": {},
    "key of 129 characters": {"x" * 129: "x"},
    "value of 257 characters": {"x": "x" * 257},
    "key that begins with aws:": {"aws:x": "x"},
    "51 tags": {f"{n}": "x" for n in range(51)},
}

# --- differences ------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """The answers to a mistake (:func:`outcome`), and why the endpoint's one is right."""

    marq: str
    moto: str
    reason: str


def outcome(answer: tuple[int, Any]) -> str:
    """Return status and code of an answer; of a batch, the codes of entries that failed."""
    status, content = answer
    if status != 200:
        return f"{status} {content}"
    return " ".join(["200", *(f"{entry['Id']}:{entry['Code']}" for entry in content.get("Failed", ()))])


_PREFIX = "AWS.SimpleQueueService."
#: Mistakes that SQS documents as refused, by the code of the endpoint. moto does not look at them.
_UNCHECKED_BY_MOTO = {
    "InvalidAttributeName": ("set: unknown attribute", "set: read-only attribute", "receive: unknown system attribute"),
    "InvalidAttributeValue": (
        "create: VisibilityTimeout 43201",
        "set: VisibilityTimeout 43201",
        "set: DelaySeconds 901",
        "set: MessageRetentionPeriod 59",
        "set: MaximumMessageSize 1023",
    ),
    "InvalidMessageContents": ("send: body with U+0001",),
    "InvalidParameterValue": (
        "set: RedrivePolicy without members",
        "send: DelaySeconds -1",
        "send: attribute name AWS.a",
        "send: attribute without a value",
        "send: empty attribute",
        "send: number that is not one",
        "send: text in a binary attribute",
        "send: 11 attributes",
        "receive: VisibilityTimeout -1",
        "tag: key of 129 characters",
        "tag: value of 257 characters",
        "tag: key that begins with aws:",
        "list: MaxResults 1001",
    ),
    "MissingParameter": ("send: empty body",),
    f"{_PREFIX}EmptyBatchRequest": ("change_message_visibility_batch: no entries",),
}
_CRASH = "an error of moto's own"
DIFFERENCES = {
    **{
        name: Difference(f"400 {code}", "200", "moto does not check this limit, which SQS documents")
        for code, names in _UNCHECKED_BY_MOTO.items()
        for name in names
    },
    **{
        f"{operation}: {name}": Difference(
            f"400 {_PREFIX}{code}",
            " ".join(["200", *(f"{entry_id}:ReceiptHandleIsInvalid" for entry_id in sorted(_WRONG_IDS[name]))]),
            "moto checks the ids of sends only",
        )
        for operation in ("delete_message_batch", "change_message_visibility_batch")
        for name, code in (
            ("two entries with one id", "BatchEntryIdsNotDistinct"),
            ("id with a slash", "InvalidBatchEntryId"),
            ("empty id", "InvalidBatchEntryId"),
            ("11 entries", "TooManyEntriesInBatchRequest"),
        )
    },
    "set: VisibilityTimeout abc": Difference("400 InvalidAttributeValue", "500 500", _CRASH),
    "set: RedrivePolicy that is not JSON": Difference("400 InvalidParameterValue", "500 500", _CRASH),
    "set: RedrivePolicy to a missing queue": Difference(
        "400 InvalidParameterValue",
        f"400 {_PREFIX}NonExistentQueue",
        "the call names a queue that exists; its parameter is wrong",
    ),
}
