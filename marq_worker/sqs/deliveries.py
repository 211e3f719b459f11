"""A delivery: one message that a poll has received, here or at another endpoint."""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple, Self

from marq.client import message_token
from marq.client.message_token import Token
from marq.leases.message import Message
from marq.wire.record_headers import first_received_ms, origin, record_id
from marq_worker.sqs.polling import PolledConsumer


class SqsDelivery(NamedTuple):
    """A leased message for one poll; times are in milliseconds since 1970."""

    token: Token
    id: str
    attempt: int
    sent_ms: int
    body: bytes
    headers: Mapping[str, bytes | None]
    #: 0 if it is unknown, or this is the first delivery.
    first_received_ms: int = 0
    #: When it could first be received: later than ``sent_ms`` if it was delayed or redriven, or its sender chose its
    #: timestamp; 0 if it is unknown.
    available_ms: int = 0
    #: The address of the endpoint that keeps the message until it is settled; empty if any endpoint can settle it.
    url: str = ""
    #: When it was received, by the brokers' clock; 0 if that is unknown.
    received_ms: int = 0
    #: When its lease ends, in seconds of this machine's monotonic clock.
    until_s: float = inf

    @classmethod
    def of(cls, message: Message, consumer: PolledConsumer) -> Self:
        """Return a message of a poll here."""
        # Not by the message's properties: looking up each of them costs several times as much.
        held, offset = message._batch, message._offset
        record = held.record(offset)
        token = Token(held.queue, held.holder, held.source, offset)
        received_ms, until_s = consumer.broker_ms() or 0, time.monotonic() + consumer.left_s(message)
        if not record.headers:
            sent_ms, message_id = record.timestamp, record_id(held.source.log, offset)
            return cls(token, message_id, 1, sent_ms, message.body, {}, 0, sent_ms, "", received_ms, until_s)
        facts = origin(held.source, offset, record.timestamp, record.headers)
        first_ms = first_received_ms(record.headers)
        # The record of a delayed or redriven message has the time of its first delivery. If a redelivery lacks the
        # header, its record is that first delivery, or its age is unknown. The message must not count as older than it
        # is.
        known = facts.attempt > 1 and first_ms
        return cls(
            token,
            facts.id,
            facts.attempt,
            facts.first_sent_ms,
            message.body,
            message.headers,
            first_ms,
            max(facts.first_sent_ms, first_ms) if known else record.timestamp,
            received_ms=received_ms,
            until_s=until_s,
        )

    @property
    def is_leased(self) -> bool:
        """Whether its lease has not ended. Otherwise, no poll may return it, because another client may have it."""
        return time.monotonic() < self.until_s

    @property
    def age_s(self) -> float:
        """For how long it has been available; 0 if that is unknown."""
        return (self.received_ms - self.available_ms) / 1000 if self.received_ms and self.available_ms else 0.0

    def document(self, asked_s: float) -> dict[str, Any]:
        """Return the delivery as JSON for another endpoint, whose request arrived at this monotonic time."""
        document = self._asdict()
        until_s = document.pop("until_s")
        return {
            **document,
            "token": message_token.encode(self.token),
            "body": b64encode(self.body).decode(),
            "headers": {
                name: None if value is None else b64encode(value).decode() for name, value in self.headers.items()
            },
            "lease_ms": None if until_s == inf else round((until_s - asked_s) * 1000),
        }

    @classmethod
    def read(cls, document: Mapping[str, Any], asked_s: float) -> Self:
        """Read the answer to a request that was sent at this monotonic time.

        The request arrived later, so the lease seems to end too early, but never too late.
        """
        lease_ms = document["lease_ms"]
        members = {name: document[name] for name in cls._fields if name != "until_s"}
        members |= {
            "token": message_token.decode(document["token"]),
            "body": b64decode(document["body"]),
            "headers": {
                name: None if value is None else b64decode(value) for name, value in document["headers"].items()
            },
            "until_s": inf if lease_ms is None else asked_s + lease_ms / 1000,
        }
        return cls(**members)
