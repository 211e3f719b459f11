"""The broker's place in a cluster and its server.properties: a KRaft node that starts quickly on two cores."""

import base64
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_NODE_ID = 1

# Kafka's default is 50 each, and every partition costs files and time at start.
INTERNAL_TOPIC_PARTITIONS = 8
# The default of 128 MB is a quarter of the small heap this broker gets.
CLEANER_BUFFER_BYTES = 16 << 20

_FIXED: Mapping[str, str] = {
    "process.roles": "broker,controller",
    "inter.broker.listener.name": "BROKER",
    "controller.listener.names": "CONTROLLER",
    # A misspelt queue name must be an error, not a new topic.
    "auto.create.topics.enable": "false",
    "default.replication.factor": "1",
    "min.insync.replicas": "1",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": str(INTERNAL_TOPIC_PARTITIONS),
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": str(INTERNAL_TOPIC_PARTITIONS),
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    # After kill -9 the controller keeps the broker's registration until its session ends: by default 9 s.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "log.cleaner.dedupe.buffer.size": str(CLEANER_BUFFER_BYTES),
}


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of a cluster; ``controllers`` are the controller ports of all nodes on 127.0.0.1, by node id."""

    node_id: int
    controllers: Mapping[int, int]
    cluster_id: str


def new_cluster_id() -> str:
    # Begins with "u", because Kafka's tools would take a leading "-" for an option.
    return "u" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]


def server_properties(
    *,
    host: str,
    port: int,
    membership: ClusterNode,
    log_directory: str,
    extra: Mapping[str, str],
    further: Mapping[str, int],
    proxied: Mapping[str, int],
) -> dict[str, str]:
    """Return all settings; `extra` overrides the defaults.

    `further` has the ports of more listeners by name, `proxied` the ports that clients get instead. A listener that is
    not proxied is named by its security protocol.
    """
    # IPv6 addresses need their brackets in a listener.
    name = f"[{host}]" if ":" in host else host
    listeners = {"BROKER": port, **further}
    bound = [f"{listener}://{name}:{at}" for listener, at in listeners.items()]
    protocols = {listener: "PLAINTEXT" if listener in proxied else listener for listener in further}
    protocols |= {"BROKER": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
    addresses = {
        "node.id": str(membership.node_id),
        "listeners": ",".join([*bound, f"CONTROLLER://127.0.0.1:{membership.controllers[membership.node_id]}"]),
        "advertised.listeners": ",".join(
            f"{listener}://{name}:{proxied.get(listener, at)}" for listener, at in listeners.items()
        ),
        "listener.security.protocol.map": ",".join(
            f"{listener}:{protocol}" for listener, protocol in protocols.items()
        ),
        # Static voters: a dynamic quorum writes the controller's port into the data, which could then not be opened on
        # another port.
        "controller.quorum.voters": ",".join(f"{node}@127.0.0.1:{at}" for node, at in membership.controllers.items()),
        "log.dirs": log_directory,
    }
    return {**_FIXED, **addresses, **extra}


def render(properties: Mapping[str, str]) -> str:
    """Return the text of a Java properties file."""
    return "".join(f"{key}={_escaped(value)}\n" for key, value in properties.items())


def _escaped(value: str) -> str:
    # Java reads the file as ISO-8859-1 with \uXXXX, and a backslash or a leading space would be lost.
    text = "".join(
        char if ord(char) < 127 else "".join(f"\\u{unit:04x}" for unit in _utf16(char))
        for char in value.replace("\\", "\\\\").replace("\n", "\\n")
    )
    return f"\\{text}" if text.startswith(" ") else text


def _utf16(char: str) -> list[int]:
    encoded = char.encode("utf-16-be")
    return [int.from_bytes(encoded[at : at + 2], "big") for at in range(0, len(encoded), 2)]
