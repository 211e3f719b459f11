"""A broker in memory with virtual time, for tests of services: the same clients, the same rules, no Kafka."""

from marq.testing.broker import Broker, ClientLeftRunning
from marq.testing.cluster import memory_cluster, memory_definition_log
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
]
