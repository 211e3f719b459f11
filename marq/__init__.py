"""Marq: message-queue semantics on Apache Kafka."""

from typing import TYPE_CHECKING

from marq.exports import loader

if TYPE_CHECKING:
    from marq.codecs import BYTES, JSON, Codec, Model
    from marq.consumer import Consumer
    from marq.core.errors import (
        BrokerUnavailable,
        ConfigError,
        CorruptMarker,
        LeaseLost,
        MarqError,
        MessageTooLarge,
        UnknownQueue,
    )
    from marq.dead_letter import DeadLetter
    from marq.dead_letters import DeadLetters, Deleted, Redriven
    from marq.handlers import handler
    from marq.message import Message
    from marq.outcomes import Reject, Retry, Undecodable
    from marq.producer import Producer, SendManyFailed
    from marq.queues import Queues
    from marq.receipt import Receipt
    from marq.schedules import Schedules
    from marq.sync import SyncProducer

__all__ = [
    "BYTES",
    "JSON",
    "BrokerUnavailable",
    "Codec",
    "ConfigError",
    "Consumer",
    "CorruptMarker",
    "DeadLetter",
    "DeadLetters",
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
    "Undecodable",
    "UnknownQueue",
    "handler",
]

_HOMES = {
    "BYTES": "marq.codecs",
    "BrokerUnavailable": "marq.core.errors",
    "Codec": "marq.codecs",
    "ConfigError": "marq.core.errors",
    "Consumer": "marq.consumer",
    "CorruptMarker": "marq.core.errors",
    "DeadLetter": "marq.dead_letter",
    "DeadLetters": "marq.dead_letters",
    "Deleted": "marq.dead_letters",
    "JSON": "marq.codecs",
    "LeaseLost": "marq.core.errors",
    "MarqError": "marq.core.errors",
    "Message": "marq.message",
    "MessageTooLarge": "marq.core.errors",
    "Model": "marq.codecs",
    "Producer": "marq.producer",
    "Queues": "marq.queues",
    "Receipt": "marq.receipt",
    "Redriven": "marq.dead_letters",
    "Reject": "marq.outcomes",
    "Retry": "marq.outcomes",
    "Schedules": "marq.schedules",
    "SendManyFailed": "marq.producer",
    "SyncProducer": "marq.sync",
    "Undecodable": "marq.outcomes",
    "UnknownQueue": "marq.core.errors",
    "handler": "marq.handlers",
}

if not TYPE_CHECKING:
    __getattr__ = loader(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
