"""Marq: message-queue semantics on Apache Kafka."""

from typing import TYPE_CHECKING

from marq.client.exports import loader

if TYPE_CHECKING:
    from marq.client.codecs import BYTES, JSON, TEXT, Codec, Model
    from marq.client.dead_letter import DeadLetter
    from marq.client.outcomes import DecodeError, Reject, Retry
    from marq.client.receipt import Receipt
    from marq.consumer.consumer import Consumer
    from marq.dead_letters.dead_letters import DeadLetters, Deleted, Redriven
    from marq.handlers.decorator import handler
    from marq.handlers.lifespan import lifespan
    from marq.handlers.middleware import CallNext, middleware
    from marq.leases.message import Message
    from marq.producer.producer import Producer, SendManyFailed
    from marq.producer.sync import SyncProducer
    from marq.queues.queues import Queues
    from marq.queues.schedules import Schedules
    from marq.wire.errors import (
        BrokerUnavailable,
        ConfigError,
        CorruptMarker,
        LeaseLost,
        MarqError,
        MessageTooLarge,
        UnknownQueue,
    )

__all__ = [
    "BYTES",
    "JSON",
    "TEXT",
    "BrokerUnavailable",
    "CallNext",
    "Codec",
    "ConfigError",
    "Consumer",
    "CorruptMarker",
    "DeadLetter",
    "DeadLetters",
    "DecodeError",
    "Deleted",
    "LeaseLost",
    "MarqError",
    "Message",
    "MessageTooLarge",
    "Model",
    "Producer",
    "Queues",
    "Receipt",
    "Redriven",
    "Reject",
    "Retry",
    "Schedules",
    "SendManyFailed",
    "SyncProducer",
    "UnknownQueue",
    "handler",
    "lifespan",
    "middleware",
]

_HOMES = {
    "BYTES": "marq.client.codecs",
    "BrokerUnavailable": "marq.wire.errors",
    "CallNext": "marq.handlers.middleware",
    "Codec": "marq.client.codecs",
    "ConfigError": "marq.wire.errors",
    "Consumer": "marq.consumer.consumer",
    "CorruptMarker": "marq.wire.errors",
    "DeadLetter": "marq.client.dead_letter",
    "DeadLetters": "marq.dead_letters.dead_letters",
    "Deleted": "marq.dead_letters.dead_letters",
    "JSON": "marq.client.codecs",
    "LeaseLost": "marq.wire.errors",
    "MarqError": "marq.wire.errors",
    "Message": "marq.leases.message",
    "MessageTooLarge": "marq.wire.errors",
    "Model": "marq.client.codecs",
    "Producer": "marq.producer.producer",
    "Queues": "marq.queues.queues",
    "Receipt": "marq.client.receipt",
    "Redriven": "marq.dead_letters.dead_letters",
    "Reject": "marq.client.outcomes",
    "Retry": "marq.client.outcomes",
    "Schedules": "marq.queues.schedules",
    "SendManyFailed": "marq.producer.producer",
    "SyncProducer": "marq.producer.sync",
    "TEXT": "marq.client.codecs",
    "DecodeError": "marq.client.outcomes",
    "UnknownQueue": "marq.wire.errors",
    "handler": "marq.handlers.decorator",
    "lifespan": "marq.handlers.lifespan",
    "middleware": "marq.handlers.middleware",
}

if not TYPE_CHECKING:
    __getattr__ = loader(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
