"""A broker in memory with virtual time, for tests of services: the same clients, the same rules, no Kafka."""

from typing import TYPE_CHECKING

from marq.exports import loader

if TYPE_CHECKING:
    from marq.testing.broker import Broker, ClientLeftRunning
    from marq.testing.cluster import memory_cluster, memory_definition_log
    from marq.testing.letters import memory_letter_log
    from marq.testing.passage import Unfinished
    from marq.testing.views import DeadLetter, SeenMessage

__all__ = [
    "Broker",
    "ClientLeftRunning",
    "DeadLetter",
    "SeenMessage",
    "Unfinished",
    "memory_cluster",
    "memory_definition_log",
    "memory_letter_log",
]

_HOMES = {
    "Broker": "marq.testing.broker",
    "ClientLeftRunning": "marq.testing.broker",
    "DeadLetter": "marq.testing.views",
    "SeenMessage": "marq.testing.views",
    "Unfinished": "marq.testing.passage",
    "memory_cluster": "marq.testing.cluster",
    "memory_definition_log": "marq.testing.cluster",
    "memory_letter_log": "marq.testing.letters",
}

if not TYPE_CHECKING:
    __getattr__ = loader(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
