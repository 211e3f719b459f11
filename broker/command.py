"""Runs the tools that set-up borrows: Maven, pip, the system's package manager."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from broker.errors import BrokerError

LIMIT_SECONDS = 900.0
TAIL_LINES = 8

# What the tools print, and what that means to whoever runs the set-up; the first match counts.
_CAUSES = (
    ("No space left on device", "the disk is full: make room; MARQ_CACHE names another place for Kafka and its tools"),
    ("THESE PACKAGES DO NOT MATCH THE HASHES", "the registry serves other files than those locked: do not use them"),
    ("No matching distribution", "the registry has no such package for this machine and Python, or could not be read"),
)
_NO_REGISTRY = (
    "Temporary failure in name resolution",
    "Name or service not known",
    "Unknown host",
    "UnknownHostException",
    "Failed to resolve",
    "Could not transfer artifact",
    "Failed to establish a new connection",
    "Connection refused",
    "Connection timed out",
    "Network is unreachable",
    "ProxyError",
    "Could not resolve",
)


class Failed(Exception):
    """A tool ended badly; `output` is what it printed."""

    def __init__(self, what: str, output: str) -> None:
        super().__init__(what)
        self.what = what
        self.output = output

    def sentence(self) -> str:
        """Why, what to do, and the end of the tool's own words."""
        tail = "\n".join(self.output.strip().splitlines()[-TAIL_LINES:])
        return f"{self.what} failed: {_cause(self.output)}\n{tail}"


def _cause(output: str) -> str:
    # First, because pip that reaches no registry ends with "No matching distribution" too.
    if any(printed in output for printed in _NO_REGISTRY):
        return "the registry cannot be reached: check the network, the proxy and the mirror settings, then run it again"
    return next((means for printed, means in _CAUSES if printed in output), "see what it says")


def run(
    what: str, command: Sequence[str | Path], *, stdin: str = "", environment: Mapping[str, str] | None = None
) -> str:
    """The command's output. Raises Failed; `environment` is added to this process's."""
    try:
        result = subprocess.run(
            [str(part) for part in command],
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            text=True,
            errors="replace",
            timeout=LIMIT_SECONDS,
            check=False,
        )
    except OSError as error:
        raise Failed(what, str(error)) from error
    except subprocess.TimeoutExpired as error:
        raise BrokerError(f"{what} took over {LIMIT_SECONDS:g} s: check the network and run it again") from error
    if result.returncode != 0:
        raise Failed(what, result.stdout)
    return result.stdout
