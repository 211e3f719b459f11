"""Three Kafka nodes as one cluster, each broker and controller, that a scenario starts, stops and kills one by one.

All of Kafka's topics and those that are made without a number of copies have three of them, two of which must have
a record before `acks=all` answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Self

from aiokafka.admin import AIOKafkaAdminClient

from broker import EmbeddedBroker, ports
from broker.membership import FIRST_NODE_ID, Membership, new_cluster_id

HOST = "127.0.0.1"
#: For each node; two nodes must carry the load of three.
HEAP = "256m"
MIN_IN_SYNC = 2
#: Three Java machines start at the same time, and each waits for the others.
START_LIMIT_SECONDS = 180.0


class Cluster:
    """Nodes 1 to ``nodes``; each has its data in a directory of its own, which is deleted by `close()`.

    Methods block; asynchronous callers use `asyncio.to_thread`, ``leader_of`` apart. ``properties`` go over the
    settings of all nodes.
    """

    def __init__(self, nodes: int = 3, *, properties: Mapping[str, str] | None = None, heap: str = HEAP) -> None:
        ids = range(FIRST_NODE_ID, FIRST_NODE_ID + nodes)
        controllers = {node: ports.free_port(HOST) for node in ids}
        cluster_id = new_cluster_id()
        settings = {**_copies(nodes), **(properties or {})}
        self.nodes = {
            node: EmbeddedBroker(
                address=ports.join_address(HOST, ports.free_port(HOST)),
                membership=Membership(node, controllers, cluster_id),
                properties=settings,
                heap=heap,
            )
            for node in ids
        }

    @property
    def bootstrap_servers(self) -> str:
        """All nodes' addresses, as clients want them."""
        return ",".join(node.bootstrap_servers for node in self.nodes.values())

    @property
    def running(self) -> set[int]:
        return {node for node, broker in self.nodes.items() if broker.running}

    def start(self, *nodes: int) -> Self:
        """Start these nodes, or all, at the same time: none is ready before most of the cluster runs.

        Raises:
            BrokerError: one could not be started.
        """
        _at_once([partial(self.nodes[node].start, START_LIMIT_SECONDS) for node in nodes or self.nodes])
        return self

    def stop(self, *nodes: int) -> None:
        """Stop these nodes cleanly, or all: each hands its partitions over first, if there is somebody."""
        _at_once([self.nodes[node].stop for node in nodes or self.nodes])

    def kill(self, *nodes: int) -> None:
        """kill -9 of these nodes, or all."""
        for node in nodes or self.nodes:
            self.nodes[node].kill()

    def restart(self, node: int) -> None:
        """Stop a node cleanly and start it with its data."""
        self.nodes[node].restart()

    async def leader_of(self, topic: str, partition: int) -> int | None:
        """Return the node that leads this partition; None while there is none, or no such topic."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap_servers)
        await admin.start()
        try:
            [described] = await admin.describe_topics([topic])
        finally:
            await admin.close()
        leaders = {each["partition"]: each["leader"] for each in described["partitions"]}
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _copies(nodes: int) -> dict[str, str]:
    copies, in_sync = str(nodes), str(min(nodes, MIN_IN_SYNC))
    return {
        "default.replication.factor": copies,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": in_sync,
    }


def _at_once(actions: Iterable[Callable[[], object]]) -> None:
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(action) for action in actions]:
            done.result()
