"""The broker's server.properties: a KRaft node that is broker and controller, quick to start on two cores."""

from collections.abc import Mapping

from broker.membership import Membership

# Kafka's default is 50 each. Every partition costs files and time at start, and one node has nobody to share them with.
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
    # After kill -9 the controller keeps the broker's old registration until its session has run out: with the default
    # of 9 s every test of a crash would wait that long for the broker to come back.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "log.cleaner.dedupe.buffer.size": str(CLEANER_BUFFER_BYTES),
}


def server_properties(
    *,
    host: str,
    port: int,
    membership: Membership,
    log_directory: str,
    extra: Mapping[str, str],
    further: Mapping[str, int],
    proxied: Mapping[str, int],
) -> dict[str, str]:
    """All settings of the broker; `extra` wins over the defaults.

    `further`: the ports of more listeners, by name; `proxied`: of these, the ports that clients are told instead. A
    listener that is not proxied has its security protocol as its name.
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
        "listener.security.protocol.map": ",".join(f"{listener}:{each}" for listener, each in protocols.items()),
        # A static voter, not a dynamic quorum: that one writes the controller's port into the data, and a data
        # directory then could not be opened again on another port.
        "controller.quorum.voters": ",".join(f"{node}@127.0.0.1:{at}" for node, at in membership.controllers.items()),
        "log.dirs": log_directory,
    }
    return {**_FIXED, **addresses, **extra}


def render(properties: Mapping[str, str]) -> str:
    """The text of a Java properties file."""
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
