"""Three Kafka nodes as one cluster, each broker and controller, that a scenario starts and kills one by one.

By default, topics have three replicas, two of which must have a record before `acks=all` answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Self

from marq.kafka.connection import admin_client
from marq.settings.client import ClientSettings
from marq_worker.broker import EmbeddedBroker, ports
from marq_worker.broker.settings import FIRST_NODE_ID, Membership, new_cluster_id

HOST = "127.0.0.1"
#: Heap of each node; two nodes must carry the load of three.
HEAP = "256m"
MIN_IN_SYNC = 2
#: Three JVMs start at the same time, and each waits for the others.
START_LIMIT_SECONDS = 180.0


class Cluster:
    """Nodes 1 to ``nodes``, each with its own data directory until `close()`.

    Methods block, except ``leader_of``. ``properties`` are on top of the settings of all nodes.
    """

    def __init__(self, nodes: int = 3, *, properties: Mapping[str, str] | None = None) -> None:
        ids = range(FIRST_NODE_ID, FIRST_NODE_ID + nodes)
        controllers = {node: ports.free_port(HOST) for node in ids}
        cluster_id = new_cluster_id()
        settings = {**_replicas(nodes), **(properties or {})}
        self.nodes = {
            node: EmbeddedBroker(
                address=ports.join_address(HOST, ports.free_port(HOST)),
                membership=Membership(node, controllers, cluster_id),
                properties=settings,
                heap=HEAP,
            )
            for node in ids
        }

    @property
    def bootstrap_servers(self) -> str:
        """All nodes' addresses, as clients expect them."""
        return ",".join(node.bootstrap_servers for node in self.nodes.values())

    @property
    def running(self) -> set[int]:
        return {node for node, broker in self.nodes.items() if broker.running}

    def start(self, *nodes: int) -> Self:
        """Start these nodes, or all, at the same time, because none is ready before most of the cluster runs.

        Raises:
            BrokerError: one could not be started.
        """
        with ThreadPoolExecutor() as pool:
            starts = [pool.submit(self.nodes[node].start, START_LIMIT_SECONDS) for node in nodes or self.nodes]
        for start in starts:
            start.result()
        return self

    def kill(self, *nodes: int) -> None:
        """Send kill -9 to these nodes, or to all."""
        for node in nodes or self.nodes:
            self.nodes[node].kill()

    async def leader_of(self, topic: str, partition: int) -> int | None:
        """Return the node that leads this partition; None while there is none, or no such topic."""
        async with admin_client(ClientSettings.read(self.bootstrap_servers, environment={})) as admin:
            [described] = await admin.describe_topics([topic])
        leaders = {part["partition"]: part["leader"] for part in described["partitions"]}
        leader = leaders.get(partition, -1)
        return None if leader == -1 else leader

    def close(self) -> None:
        """End all nodes and delete their data."""
        self.kill()
        for node in self.nodes.values():
            node.close()

    def __enter__(self) -> Self:
        with ExitStack() as unless_started:
            unless_started.callback(self.close)
            self.start()
            unless_started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _replicas(nodes: int) -> dict[str, str]:
    replicas, in_sync = str(nodes), str(min(nodes, MIN_IN_SYNC))
    return {
        "default.replication.factor": replicas,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
    }
