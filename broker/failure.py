"""Turns a broker's log into the sentence that says why it did not start and what to do."""

from pathlib import Path

LOG_TAIL_LINES = 15

# What Kafka or the JVM prints, and what that means to whoever started it; the first match counts.
_CAUSES = (
    ("No space left on device", "the disk of {directory} is full: make room there or choose another directory"),
    ("Failed to acquire lock", "another broker uses {directory}: stop that one or choose another directory"),
    # What a broker reads while another one writes it.
    (
        "CorruptRecordException",
        "its data are damaged, or another broker uses {directory}: stop that one or choose another directory",
    ),
    ("Address already in use", "{address} is in use: stop what listens there or choose another address"),
    ("Cannot assign requested address", "{address} is no address of this machine: choose one that is"),
    ("Invalid maximum heap size", "the heap size is not one that Java takes: set MARQ_BROKER_HEAP to e.g. 512m"),
    ("Could not reserve enough space", "the machine lacks memory for the heap: set MARQ_BROKER_HEAP lower, e.g. 256m"),
    ("OutOfMemoryError", "the heap is too small: set MARQ_BROKER_HEAP higher, e.g. 1g"),
    ("ConfigException", "one of its settings is wrong: correct the properties given to it"),
    ("Permission denied", "files in {directory} belong to somebody else: remove it or choose another directory"),
)


def is_port_conflict(log: str) -> bool:
    """Whether somebody else took a port between our look and the broker's bind."""
    return "Address already in use" in log


def port_taken(host: str, port: int) -> str:
    return (
        f"{host}:{port} is in use: set MARQ_BOOTSTRAP_SERVERS to another host:port, or stop what listens there "
        f"(to see it: lsof -i :{port}, or ss -ltnp)"
    )


def not_ready(exit_code: int | None, limit_seconds: float) -> str:
    if exit_code is None:
        return f"the broker was not ready within {limit_seconds:g} s"
    return f"the broker ended with code {exit_code} while starting"


def explain(what: str, log: str, *, directory: Path, address: str) -> str:
    """What happened, why and what to do, then the end of the log.

    The cause is looked for in all of it: a stack trace, or what other threads still say, may come after it.
    """
    cause = next((means for printed, means in _CAUSES if printed in log), "see the end of its log")
    return f"{what}; {cause.format(directory=directory, address=address)}\n{end(log)}"


def end(log: str) -> str:
    """As much of a log as a message can carry."""
    return "\n".join(log.splitlines()[-LOG_TAIL_LINES:])
