"""Marq: message-queue semantics on Apache Kafka."""

from marq.codecs import BYTES, JSON, Codec, Model
from marq.consumer import Consumer
from marq.core.errors import (
    BrokerUnavailable,
    ConfigError,
    CorruptMarker,
    LeaseLost,
    MarqError,
    MessageTooLarge,
)
from marq.handlers import handler
from marq.message import Message
from marq.outcomes import Reject, Retry, Undecodable
from marq.producer import Producer, SendManyFailed
from marq.queues import Queues
from marq.receipt import Receipt
from marq.sync import SyncProducer

__all__ = [
    "BYTES",
    "JSON",
    "BrokerUnavailable",
    "Codec",
    "ConfigError",
    "Consumer",
    "CorruptMarker",
    "LeaseLost",
    "MarqError",
    "Message",
    "MessageTooLarge",
    "Model",
    "Producer",
    "Queues",
    "Receipt",
    "Reject",
    "Retry",
    "SendManyFailed",
    "SyncProducer",
    "Undecodable",
    "handler",
]
