"""The one error of everything around the broker, and its text when a broker does not start."""

import errno
import tempfile
from pathlib import Path


class BrokerError(Exception):
    """Java, Kafka's jars or the broker is not available; the text says why and what to do."""


LOG_TAIL_LINES = 15
#: A broker needs more than this to start.
PROBE_BYTES = 64 << 10
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}

# Output of Kafka or the JVM, and its meaning for the user; the first match counts.
_FULL = "the disk of {directory} is full: free space there or choose another directory"
_CAUSES = (
    ("No space left on device", _FULL),
    ("Failed to acquire lock", "another broker uses {directory}: stop that one or choose another directory"),
    # A broker sees this while another one writes.
    (
        "CorruptRecordException",
        "its data is damaged, or another broker uses {directory}: stop that one or choose another directory",
    ),
    ("Address already in use", "{address} is in use: stop what listens there or choose another address"),
    ("Cannot assign requested address", "{address} is not an address of this machine: choose one that is"),
    (
        "nonroutable meta-address",
        "clients cannot connect to 0.0.0.0 or [::]: choose an address of this machine, such as 127.0.0.1",
    ),
    ("Invalid maximum heap size", "Java does not accept the heap size: set MARQ_BROKER_HEAP to e.g. 512m"),
    ("Could not reserve enough space", "the machine lacks memory for the heap: set MARQ_BROKER_HEAP lower, e.g. 256m"),
    ("OutOfMemoryError", "the heap is too small: set MARQ_BROKER_HEAP higher, e.g. 1g"),
    ("ConfigException", "one of its settings is wrong: correct the properties given to it"),
    ("Permission denied", "files in {directory} belong to another user: remove it or choose another directory"),
)


def is_port_conflict(log: str) -> bool:
    """Whether another process took a port between the check and the broker's bind."""
    return "Address already in use" in log


def not_bound(host: str, port: int, error: OSError) -> str:
    """Return why a server cannot listen on this port, and what to do."""
    if error.errno == errno.EACCES:
        return f"{host}:{port}: this user may not listen there: choose a port above 1023"
    if error.errno != errno.EADDRINUSE:
        return f"{host}:{port}: {host} is not an address of this machine ({error.strerror}): use one, such as 127.0.0.1"
    return (
        f"{host}:{port} is in use: set MARQ_BOOTSTRAP_SERVERS to another host:port, or stop what listens there "
        f"(to see it: lsof -i :{port}, or ss -ltnp)"
    )


def not_written(what: str, error: OSError) -> str:
    """Return why a file or directory of a broker cannot be written, and what to do."""
    advice = "free space there" if error.errno in _NO_SPACE else "choose another directory"
    return f"the broker cannot write its {what}: {error}; {advice} (TMPDIR for temporary brokers)"


def not_ready(exit_code: int | None, limit_seconds: float) -> str:
    if exit_code is None:
        return f"the broker was not ready within {limit_seconds:g} s"
    return f"the broker ended with code {exit_code} while starting"


def explain(what: str, log: str, *, directory: Path, address: str) -> str:
    """Return what happened, why, what to do, and the end of the log; the cause may be anywhere in the log."""
    cause = next((means for printed, means in _CAUSES if printed in log), None)
    if cause is None:
        # A full disk has no space for the log either.
        cause = _FULL if is_full(directory) else "see the end of its log"
    return f"{what}; {cause.format(directory=directory, address=address)}\n{end(log)}"


def is_full(directory: Path) -> bool:
    """Whether the disk of a directory has no space."""
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as probe:
            return probe.write(bytes(PROBE_BYTES)) < PROBE_BYTES
    except OSError as error:
        return error.errno in _NO_SPACE


def end(log: str) -> str:
    """Return as much of a log as an error message can quote."""
    return "\n".join(log.splitlines()[-LOG_TAIL_LINES:])
