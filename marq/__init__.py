"""Marq: message-queue semantics on Apache Kafka."""

from marq.consumer import Consumer
from marq.core.errors import (
    BrokerUnavailable,
    ConfigError,
    CorruptMarker,
    LeaseLost,
    MarqError,
    MessageTooLarge,
)
from marq.message import Message
from marq.outcomes import Reject, Retry
from marq.producer import Producer, SendManyFailed
from marq.receipt import Receipt

__all__ = [
    "BrokerUnavailable",
    "ConfigError",
    "Consumer",
    "CorruptMarker",
    "LeaseLost",
    "MarqError",
    "Message",
    "MessageTooLarge",
    "Producer",
    "Receipt",
    "Reject",
    "Retry",
    "SendManyFailed",
]
