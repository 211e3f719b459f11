"""TCP ports on the loopback interface."""

import random
import socket
from pathlib import Path

from broker.errors import BrokerError

EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_EPHEMERAL_START = 32768
LOWEST_PORT = 18000
ATTEMPTS = 200


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on this port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the JVM does: without it a port in TIME_WAIT after a restart would look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(host: str) -> int:
    """A free port below the ephemeral range.

    A port that the kernel picks (bind to 0) lies in the range of outgoing connections: while the broker is down, a
    client that reconnects may be given the broker's own port, and then the broker cannot come back.
    """
    for _ in range(ATTEMPTS):
        # Not the global generator: tests seed it, and two of them would then race for the same ports.
        port = random.SystemRandom().randrange(LOWEST_PORT, _ephemeral_start())
        if is_free(host, port):
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
    # Some machines widen the range down to 1024: then no port is outside it, and the default is as good as any.
    return start if start > LOWEST_PORT + 1000 else DEFAULT_EPHEMERAL_START


def split_address(address: str) -> tuple[str, int]:
    """`host:port` in two parts. Raises BrokerError where it is not that."""
    host, colon, port = address.strip().rpartition(":")
    if not colon or not host or "," in host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise BrokerError(
            f"{address!r} is not an address: the embedded broker listens on one host:port such as 127.0.0.1:9092; "
            "set MARQ_BOOTSTRAP_SERVERS to that, or unset it"
        )
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """The reverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
