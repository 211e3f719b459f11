"""Attributes of queues: from the text that clients send to values, to settings of Marq, and back.

Marq has no encryption keys or access policies, and refuses to set one: a client would rely on it in vain. SQS's own
encryption at rest is accepted and reported, and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from marq.settings.queue import QueueSettings
from marq_worker.sqs.arns import queue_of_arn
from marq_worker.sqs.errors import SqsError, invalid

#: Maximum visibility timeout, delay and wait for messages, in seconds.
MAX_VISIBILITY_S, MAX_DELAY_S, MAX_WAIT_S = 43_200, 900, 20
#: Maximum size of a message (body and attributes), and of all messages of a batch together.
MAX_MESSAGE_BYTES = 1_048_576
#: Names that GetQueueAttributes reports and no client can set.
READ_ONLY = frozenset(
    {
        "All",
        "QueueArn",
        "CreatedTimestamp",
        "LastModifiedTimestamp",
        "ApproximateNumberOfMessages",
        "ApproximateNumberOfMessagesNotVisible",
        "ApproximateNumberOfMessagesDelayed",
    }
)
_UNSUPPORTED = frozenset({"KmsMasterKeyId", "KmsDataKeyReusePeriodSeconds", "Policy"})
_POLICIES = ("RedrivePolicy", "RedriveAllowPolicy")
#: Marq's leases can't be 0.
_LEAST_LEASE_S = 0.1
_MAX_RECEIVES = 1_000
_MAX_SOURCES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueAttributes:
    """The attributes that a client can set, with the defaults of SQS."""

    visibility_timeout_s: int = 30
    delay_s: int = 0
    #: None if only Kafka's retention applies: no SQS client has created the queue or set this attribute.
    retention_s: int | None = 345_600
    wait_s: int = 0
    maximum_message_bytes: int = MAX_MESSAGE_BYTES
    #: Name of the queue in the redrive policy's ARN; all three or none are None.
    dead_letter_queue: str | None = None
    max_receive_count: int | None = None
    #: As the client sent it, because some wait until they read what they set; the name alone tells queues apart.
    dead_letter_arn: str | None = field(default=None, compare=False)
    #: JSON as the client sent it.
    redrive_allow_policy: str | None = None
    sqs_managed_sse: bool = True
    fifo: bool = False
    content_based_deduplication: bool = False
    fifo_throughput_limit: str = "perMessageGroupId"

    def is_too_old(self, age_s: float) -> bool:
        """Return whether a message that has been available for this long must not be delivered."""
        return self.retention_s is not None and age_s > self.retention_s

    def to_attributes(self) -> dict[str, str]:
        """Return the attributes as GetQueueAttributes does."""
        values = {name: getattr(self, field) for name, (field, _, _) in _INTEGERS.items()}
        attributes = {name: str(value) for name, value in values.items() if value is not None}
        attributes["SqsManagedSseEnabled"] = str(self.sqs_managed_sse).lower()
        if self.dead_letter_queue is not None:
            policy = {"deadLetterTargetArn": self.dead_letter_arn, "maxReceiveCount": self.max_receive_count}
            attributes["RedrivePolicy"] = json.dumps(policy, separators=(",", ":"))
        if self.redrive_allow_policy is not None:
            attributes["RedriveAllowPolicy"] = self.redrive_allow_policy
        if self.fifo:
            attributes["FifoQueue"] = "true"
            attributes["ContentBasedDeduplication"] = str(self.content_based_deduplication).lower()
            attributes["DeduplicationScope"] = _SCOPE
            attributes["FifoThroughputLimit"] = self.fifo_throughput_limit
        return attributes


#: Attribute -> field, least and largest value.
_INTEGERS = {
    "VisibilityTimeout": ("visibility_timeout_s", 0, MAX_VISIBILITY_S),
    "DelaySeconds": ("delay_s", 0, MAX_DELAY_S),
    "MessageRetentionPeriod": ("retention_s", 60, 1_209_600),
    "ReceiveMessageWaitTimeSeconds": ("wait_s", 0, MAX_WAIT_S),
    "MaximumMessageSize": ("maximum_message_bytes", 1_024, MAX_MESSAGE_BYTES),
}
#: Values of attributes of FIFO queues in SQS's spelling.
_FIFO_CHOICES = {
    "DeduplicationScope": ("queue", "messageGroup"),
    "FifoThroughputLimit": ("perQueue", "perMessageGroupId"),
}
#: The only scope: the tracker that keeps a group in order also checks its deduplication ids.
_SCOPE = "messageGroup"
#: Attribute -> field.
_FLAGS = {
    "SqsManagedSseEnabled": "sqs_managed_sse",
    "FifoQueue": "fifo",
    "ContentBasedDeduplication": "content_based_deduplication",
}
_FIFO_ONLY = frozenset({"FifoQueue", "ContentBasedDeduplication", *_FIFO_CHOICES})
#: Names that GetQueueAttributes can ask for.
NAMES = READ_ONLY | _UNSUPPORTED | {*_INTEGERS, *_FIFO_CHOICES, *_FLAGS, *_POLICIES}


def read_attributes(
    attributes: Mapping[str, str], *, fifo: bool, current: QueueAttributes | None = None
) -> QueueAttributes:
    """Read the attributes of CreateQueue, or those that SetQueueAttributes changes.

    Args:
        fifo: whether the queue is a FIFO queue, which has attributes of its own.
        current: the queue's attributes, kept unless the call sets them (default: those of a new queue).

    Raises:
        SqsError: a name is unknown or cannot be set, a value is out of range, or Marq does not support the attribute.
    """
    changes: dict[str, Any] = {}
    for name, value in attributes.items():
        changes.update(_read(name, value, fifo))
    result = replace(current or QueueAttributes(fifo=fifo), **changes)
    if result.fifo is not fifo:
        raise _wrong_value("FifoQueue", "true for a queue whose name ends in .fifo; it can't be changed")
    return result


def differing_attribute(
    attributes: Mapping[str, str], existing: QueueAttributes, maximum_bytes: int = MAX_MESSAGE_BYTES
) -> str | None:
    """Return the first attribute of a CreateQueue whose value differs from the existing queue's, or None.

    Attributes that the call does not name are not compared. Neither is a retention period if the queue has none.
    Sizes above ``maximum_bytes``, the largest message that Kafka accepts, are equal. Raises SqsError as
    :func:`read_attributes`.
    """
    existing = _limited(existing, maximum_bytes)
    for name, value in attributes.items():
        named = _limited(read_attributes({name: value}, fifo=existing.fifo, current=existing), maximum_bytes)
        if existing.retention_s is None:
            # CreateQueue does not change existing queues, and a call that names SQS's default must not fail.
            named = replace(named, retention_s=None)
        if named != existing:
            return name
    return None


def _limited(attributes: QueueAttributes, maximum_bytes: int) -> QueueAttributes:
    return replace(attributes, maximum_message_bytes=min(attributes.maximum_message_bytes, maximum_bytes))


def queue_options(attributes: QueueAttributes, named: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of Marq that the named attributes become, as for :meth:`Queues.change`."""
    options: dict[str, Any] = {}
    if "VisibilityTimeout" in named:
        options["lease"] = max(attributes.visibility_timeout_s, _LEAST_LEASE_S)
        # Clients may extend each lease up to it.
        options["max_lease"] = MAX_VISIBILITY_S
    if "DelaySeconds" in named and not attributes.fifo:
        options["delay"] = attributes.delay_s
    return options


def with_settings(attributes: QueueAttributes, settings: QueueSettings) -> QueueAttributes:
    """Return attributes with those that are settings of Marq."""
    return replace(
        attributes,
        visibility_timeout_s=settings.lease_ms // 1000,
        delay_s=attributes.delay_s if attributes.fifo else settings.delay_ms // 1000,
    )


def without_settings(attributes: Mapping[str, str], *, fifo: bool) -> dict[str, str]:
    """Return the attributes that are not settings of Marq."""
    # Ordering excludes the setting ``delay``.
    settings = ("VisibilityTimeout",) if fifo else ("VisibilityTimeout", "DelaySeconds")
    return {name: value for name, value in attributes.items() if name not in settings}


def target_of(policy: str) -> str | None:
    """Return the dead-letter queue of a redrive policy, None if it removes one. Raises SqsError."""
    target: str | None = _redrive_policy(policy)["dead_letter_queue"]
    return target


def _read(name: str, value: str, fifo: bool) -> dict[str, Any]:
    """Return the fields that an attribute sets."""
    if name in _INTEGERS:
        field, least, most = _INTEGERS[name]
        return {field: _integer(name, value, least, most)}
    if name == "RedrivePolicy":
        return _redrive_policy(value)
    if name == "RedriveAllowPolicy":
        return {"redrive_allow_policy": _redrive_allow_policy(value) if value else None}
    if name in _UNSUPPORTED:
        # Infrastructure tools send empty values.
        if value:
            raise SqsError("UnsupportedOperation", f"the queue attribute {name} is not supported; leave it out")
        return {}
    if name in _FIFO_ONLY and not fifo:
        raise SqsError("InvalidAttributeName", f"the attribute {name} is only for FIFO queues")
    if name in _FLAGS:
        if value.lower() not in ("true", "false"):
            raise _wrong_value(name, "true or false")
        return {_FLAGS[name]: value.lower() == "true"}
    if name in _FIFO_CHOICES:
        choices = _FIFO_CHOICES[name]
        if value not in choices:
            raise _wrong_value(name, " or ".join(choices))
        if name == "FifoThroughputLimit":
            return {"fifo_throughput_limit": value}
        if value != _SCOPE:
            raise SqsError(
                "UnsupportedOperation",
                f"DeduplicationScope={value} is not supported: deduplication ids are compared within a message group;"
                f" leave the attribute out, or set it to {_SCOPE}",
            )
        return {}
    reason = "can't be set" if name in READ_ONLY else "is not an attribute of queues"
    raise SqsError("InvalidAttributeName", f"{name[:80]!r} {reason}")


def _integer(name: str, value: str, least: int, most: int) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 10 and least <= int(value) <= most):
        raise _wrong_value(name, f"{least} to {most}")
    return int(value)


def _redrive_policy(value: str) -> dict[str, Any]:
    if not value:
        return {"dead_letter_queue": None, "max_receive_count": None, "dead_letter_arn": None}
    policy = _document("RedrivePolicy", value)
    arn, count = policy.get("deadLetterTargetArn"), policy.get("maxReceiveCount")
    if not isinstance(arn, str) or set(policy) != {"deadLetterTargetArn", "maxReceiveCount"}:
        raise _wrong_policy("RedrivePolicy", "deadLetterTargetArn and maxReceiveCount")
    # Both forms are in use: a number in the documentation, text in many tools.
    text = count if isinstance(count, str) else str(count)
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= _MAX_RECEIVES):
        raise _wrong_policy("RedrivePolicy", f"maxReceiveCount from 1 to {_MAX_RECEIVES}")
    return {"dead_letter_queue": queue_of_arn(arn), "max_receive_count": int(text), "dead_letter_arn": arn}


def _redrive_allow_policy(value: str) -> str:
    policy = _document("RedriveAllowPolicy", value)
    permission, sources = policy.get("redrivePermission"), policy.get("sourceQueueArns")
    if permission not in ("allowAll", "denyAll", "byQueue"):
        raise _wrong_policy("RedriveAllowPolicy", "redrivePermission allowAll, denyAll or byQueue")
    if permission != "byQueue":
        sources_fit = sources is None
    else:
        sources_fit = isinstance(sources, list) and 0 < len(sources) <= _MAX_SOURCES
    if not sources_fit:
        raise _wrong_policy("RedriveAllowPolicy", f"1 to {_MAX_SOURCES} sourceQueueArns with byQueue, else none")
    for source in sources or ():
        queue_of_arn(str(source))
    return value


def _document(name: str, value: str) -> dict[str, Any]:
    try:
        document = json.loads(value)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise _wrong_policy(name, "a JSON object")
    return document


def _wrong_policy(name: str, expected: str) -> SqsError:
    return invalid(f"{name}: expected {expected}")


def _wrong_value(name: str, expected: str) -> SqsError:
    return SqsError("InvalidAttributeValue", f"{name}: expected {expected}")
