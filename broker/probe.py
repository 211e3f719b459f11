"""Asks a broker, in Kafka's own protocol, whether it is ready.

An open port is not enough: the listener is up before the broker is registered and unfenced, and topics created in
between fail. The broker lists itself in a Metadata answer only when it is unfenced.
"""

import socket
import struct

METADATA_API_KEY = 3
METADATA_VERSION = 1  # the oldest whose empty list of topics means none, not all
CORRELATION_ID = 1
NO_CLIENT_ID = -1
ANSWER_LIMIT_BYTES = 1 << 20


def is_ready(host: str, port: int, node_id: int, limit_seconds: float = 1.0) -> bool:
    """Whether a broker answers and counts this node, which should be itself, among the live ones."""
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
    """The ids in the answer's list of brokers; each has host, port and rack after it."""
    (size,) = struct.unpack(">i", _read(connection, 4))
    if not 8 <= size <= ANSWER_LIMIT_BYTES:
        return set()  # something else than Kafka listens there
    correlation_id, brokers = struct.unpack(">ii", _read(connection, 8))
    if correlation_id != CORRELATION_ID:
        return set()
    found: set[int] = set()
    for _ in range(brokers):
        found.update(struct.unpack(">i", _read(connection, 4)))
        _skip_text(connection)
        _read(connection, 4)
        _skip_text(connection)
    return found


def _skip_text(connection: socket.socket) -> None:
    (size,) = struct.unpack(">h", _read(connection, 2))
    _read(connection, max(0, size))  # -1: there is none


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
