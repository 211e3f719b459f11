"""A broker in memory with virtual time, for tests of services: the same clients, the same rules, no Kafka."""

from marq.testing.cluster import memory_cluster, memory_definition_log
from marq.testing.passage import Unfinished

__all__ = ["Unfinished", "memory_cluster", "memory_definition_log"]
