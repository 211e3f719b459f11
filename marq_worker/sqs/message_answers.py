"""A delivered message in the form of ReceiveMessage's answer."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Mapping
from itertools import chain
from typing import Any

from marq_worker.sqs.characters import is_text
from marq_worker.sqs.deliveries import SqsDelivery
from marq_worker.sqs.message_attributes import (
    OWN_HEADER,
    AttributeNames,
    from_headers,
    md5_of_attributes,
    md5_of_body,
)

#: Headers for the id of a message's group, which names a tenant in a standard queue, and for X-Ray's trace.
GROUP_HEADER, TRACE_HEADER = f"{OWN_HEADER}group", f"{OWN_HEADER}trace"
#: The header of a dead letter: the ARN of the queue from which the endpoint moved it.
SOURCE_HEADER = f"{OWN_HEADER}source"
#: The attribute of a message whose Body is base64, because SQS's characters can't express it.
ENCODING_ATTRIBUTE = "Marq.BodyEncoding"
#: Headers of a message in a FIFO queue: its sequence number, and a dead letter's original deduplication id.
SEQUENCE_HEADER, DEDUPLICATION_HEADER = f"{OWN_HEADER}sequence", f"{OWN_HEADER}deduplication"
_FROM_HEADERS = {
    "MessageGroupId": GROUP_HEADER,
    "MessageDeduplicationId": DEDUPLICATION_HEADER,
    "SequenceNumber": SEQUENCE_HEADER,
    "AWSTraceHeader": TRACE_HEADER,
    "DeadLetterQueueSourceArn": SOURCE_HEADER,
}


class MessageForm:
    """The form of the messages in one answer; ``parameters`` are those of ReceiveMessage."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._names = AttributeNames(parameters.get("MessageAttributeNames", ()))
        system = (parameters.get(member, ()) for member in ("MessageSystemAttributeNames", "AttributeNames"))
        self._system_names = AttributeNames(chain(*system))

    def formatted(self, delivery: SqsDelivery, message_id: str, handle: str) -> dict[str, Any]:
        """Return a message as the receiver asked for it."""
        body, attributes = _text(delivery.body), from_headers(delivery.headers)
        if body is None:
            body = b64encode(delivery.body).decode()
            attributes[ENCODING_ATTRIBUTE] = {"DataType": "String", "StringValue": "base64"}
        message: dict[str, Any] = {
            "MessageId": message_id,
            "ReceiptHandle": handle,
            "MD5OfBody": md5_of_body(body),
            "Body": body,
        }
        if self._system_names and (system := self._system_names.selected(_system_attributes(delivery))):
            message["Attributes"] = system
        if attributes and (chosen := self._names.selected(attributes)):
            message["MessageAttributes"] = chosen
            message["MD5OfMessageAttributes"] = md5_of_attributes(chosen)
        return message


def _system_attributes(delivery: SqsDelivery) -> dict[str, str]:
    # If it is not known when a redelivered message was first received, the send time stands for it.
    first_ms = round(time.time() * 1000) if delivery.attempt == 1 else delivery.first_received_ms or delivery.sent_ms
    attributes = {
        "SentTimestamp": str(delivery.sent_ms),
        "ApproximateReceiveCount": str(delivery.attempt),
        "ApproximateFirstReceiveTimestamp": str(first_ms),
    }
    if delivery.headers:
        for name, header in _FROM_HEADERS.items():
            if value := delivery.headers.get(header):
                attributes[name] = value.decode("utf-8", "replace")
    return attributes


def _text(body: bytes) -> str | None:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return text if is_text(text) else None
