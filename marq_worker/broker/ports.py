"""TCP ports on the loopback interface, and the check whether the broker on one is ready.

The check speaks Kafka's own protocol, because an open port is not enough: the listener is up before the broker is
registered and unfenced, and topics created in between fail. The broker lists itself in a Metadata response only when it
is unfenced.
"""

import random
import socket
import struct
from pathlib import Path

from marq_worker.broker.errors import BrokerError

EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_EPHEMERAL_START = 32768
LOWEST_PORT = 18000
ATTEMPTS = 200

METADATA_API_KEY = 3
METADATA_VERSION = 1  # the oldest in which an empty list of topics means none, not all
CORRELATION_ID = 1
NO_CLIENT_ID = -1
ANSWER_LIMIT_BYTES = 1 << 20

#: Ports that this process has already returned. They look free until a server listens on them.
_returned: set[int] = set()


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on this port now."""
    return bind_error(host, port) is None


def bind_error(host: str, port: int) -> OSError | None:
    """Return why a server could not listen on this port now, or None."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the JVM does; otherwise a port in TIME_WAIT after a restart would look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None


def free_port(host: str) -> int:
    """Return a free port below the ephemeral range, never the same one twice.

    Ports that the kernel picks (bind to 0) are those of outgoing connections: while the broker is down, a reconnecting
    client might get the broker's own port, and the broker could not return.
    """
    for _ in range(ATTEMPTS):
        # Not the global generator, because tests with equal seeds would compete for the same ports.
        port = random.SystemRandom().randrange(LOWEST_PORT, _ephemeral_start())
        if port not in _returned and is_free(host, port):
            _returned.add(port)
            return port
    raise BrokerError(
        f"found no free port between {LOWEST_PORT} and {_ephemeral_start()} on {host}: "
        "stop some of the servers on this machine, or give the broker an address"
    )


def _ephemeral_start() -> int:
    try:
        start = int(EPHEMERAL_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_EPHEMERAL_START
    # Some machines widen the range down to 1024. Then no port is outside it, and any default will do.
    return start if start > LOWEST_PORT + 1000 else DEFAULT_EPHEMERAL_START


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`. Raises BrokerError."""
    host, colon, port = address.strip().rpartition(":")
    if not colon or not host or "," in host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise BrokerError(
            f"{address!r} is not an address: expected one host:port such as 127.0.0.1:9092; "
            "set MARQ_BOOTSTRAP_SERVERS to that, or unset it"
        )
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return `host:port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ready(host: str, port: int, node_id: int, limit_seconds: float = 1.0) -> bool:
    """Whether a broker answers and lists this node, which should be itself, as live."""
    try:
        with socket.create_connection((host, port), timeout=limit_seconds) as connection:
            connection.sendall(_metadata_request())
            return node_id in _live_brokers(connection)
    except (OSError, EOFError, struct.error):
        return False


def _metadata_request() -> bytes:
    header = struct.pack(">hhih", METADATA_API_KEY, METADATA_VERSION, CORRELATION_ID, NO_CLIENT_ID)
    body = header + struct.pack(">i", 0)
    return struct.pack(">i", len(body)) + body


def _live_brokers(connection: socket.socket) -> set[int]:
    """Return the ids in the response's list of brokers; host, port and rack follow each."""
    (size,) = struct.unpack(">i", _read(connection, 4))
    if not 8 <= size <= ANSWER_LIMIT_BYTES:
        return set()  # not Kafka
    correlation_id, brokers = struct.unpack(">ii", _read(connection, 8))
    if correlation_id != CORRELATION_ID:
        return set()
    ids: set[int] = set()
    for _ in range(brokers):
        ids.update(struct.unpack(">i", _read(connection, 4)))
        _skip_text(connection)
        _read(connection, 4)
        _skip_text(connection)
    return ids


def _skip_text(connection: socket.socket) -> None:
    (size,) = struct.unpack(">h", _read(connection, 2))
    _read(connection, max(0, size))  # -1: null


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
