"""A worker process for a benchmark, and what its web page says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.processes import cpu_seconds, memory_bytes

START_SECONDS = 180.0


class BenchWorker:
    """``faust -A app worker`` on a prefix of its own; ``machine`` names one of the prefix's data directories.

    ``settings`` are further variables of its environment.
    """

    def __init__(
        self, servers: str, prefix: str, folder: Path, machine: str = "first", settings: Mapping[str, str] | None = None
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.data = folder / prefix / machine
        self._log = folder / f"{prefix}-{self.port}.log"
        environment = {
            **os.environ,
            "MARQ_BOOTSTRAP_SERVERS": servers,
            "MARQ_PREFIX": prefix,
            "MARQ_DATA_DIR": str(self.data),
            "MARQ_WEB_PORT": str(self.port),
            # A machine that does other things, too, may let a start wait for long.
            "MARQ_CONNECT_TIMEOUT": str(START_SECONDS),
            # A worker that was started before on its machine finds its modules compiled.
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(folder / "compiled"),
            **(settings or {}),
        }
        command = [sys.executable, "-m", "faust", "-A", "app", "worker", "-l", "info"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def figures(self) -> dict[str, Any]:
        """What ``/api/queues`` says; empty while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/queues", timeout=2) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except OSError:
            return {}

    def wait_until_owner(self) -> None:
        """Return when the worker owns all markers partitions."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            states = [p["state"] for w in self.figures().get("workers", []) for p in w["partitions"]]
            if states and all(state == "owner" for state in states):
                return
            time.sleep(0.1)
        raise SystemExit(f"bench: the worker was not ready after {START_SECONDS} s; see {self._log}")

    def wait_until_drained(self, queue: str, acked: int, limit: float = 60.0) -> None:
        """Return when the tracker has folded every ack and its table is empty."""
        until = time.monotonic() + limit
        while time.monotonic() < until:
            row = self.figures().get("queues", {}).get(queue, {})
            if row.get("acked") == acked and row.get("in_flight") == 0:
                return
            time.sleep(0.02)
        raise SystemExit(f"bench: the tracker was not done after {limit} s: {self.figures().get('queues')}")

    def memory(self, field: str) -> int:
        """Return ``VmRSS`` (now) or ``VmHWM`` (the most so far) in bytes."""
        return memory_bytes(self.process.pid, field)

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
