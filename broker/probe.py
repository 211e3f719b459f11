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


def is_ready(host: str, port: int, limit_seconds: float = 1.0) -> bool:
    """Whether a broker answers and counts itself among the live ones."""
    try:
        with socket.create_connection((host, port), timeout=limit_seconds) as connection:
            connection.sendall(_metadata_request())
            return _live_brokers(connection) > 0
    except (OSError, EOFError, struct.error):
        return False


def _metadata_request() -> bytes:
    header = struct.pack(">hhih", METADATA_API_KEY, METADATA_VERSION, CORRELATION_ID, NO_CLIENT_ID)
    body = header + struct.pack(">i", 0)
    return struct.pack(">i", len(body)) + body


def _live_brokers(connection: socket.socket) -> int:
    (size,) = struct.unpack(">i", _read(connection, 4))
    if not 8 <= size <= ANSWER_LIMIT_BYTES:
        return 0  # something else than Kafka listens there
    correlation_id, brokers = struct.unpack(">ii", _read(connection, 8))
    return int(brokers) if correlation_id == CORRELATION_ID else 0


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
