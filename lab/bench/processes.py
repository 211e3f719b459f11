"""Processes of a measurement: clients that a row starts, and the memory and CPU time of processes, from /proc."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

#: Time limit for a client's next line, and for its exit.
LIMIT_SECONDS = 300.0
#: Interval between samples of memory.
SAMPLE_SECONDS = 0.2
_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


class Child:
    """A client as a process: a module of ``lab.bench.clients`` and its arguments.

    It writes lines of JSON and waits for empty lines (:mod:`lab.bench.clients.client`); leaving the context kills it.
    """

    def __init__(self, client: str, *arguments: object) -> None:
        self._client = client
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit
        command = [sys.executable, "-m", f"lab.bench.clients.{client}", *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reading = threading.Thread(target=self._read_lines, daemon=True)
        self._reading.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> dict[str, Any]:
        """Return its next line.

        Raises:
            SystemExit: it ended, or wrote nothing within the limit.
        """
        try:
            line = self._lines.get(timeout=LIMIT_SECONDS)
        except queue.Empty:
            raise SystemExit(f"bench: {self._client} wrote nothing for {LIMIT_SECONDS:g} s") from None
        if not line:
            raise self._failure()
        values: dict[str, Any] = json.loads(line)
        return values

    def go(self) -> None:
        """Let it continue."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def join(self) -> None:
        """Wait for it to exit.

        Raises:
            SystemExit: its exit code is not 0, or it did not end within the limit.
        """
        try:
            code = self._process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"bench: {self._client} did not end within {LIMIT_SECONDS:g} s") from None
        if code:
            raise self._failure()

    def check(self) -> None:
        """Raise SystemExit if it has ended."""
        if self._process.poll() is not None:
            raise self._failure()

    def kill(self) -> None:
        """Send kill -9, and wait for the exit."""
        self._process.kill()
        self._process.wait()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _failure(self) -> SystemExit:
        self._process.wait()
        length = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, length - 4_000))
        return SystemExit(f"bench: {self._client} failed: {self._errors.read().decode(errors='replace')}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reading.join()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()


def measured(client: str, *arguments: object) -> dict[str, float]:
    """Run a client to its end; return the measurements that it writes.

    Raises:
        SystemExit: it failed, or took longer than the limit.
    """
    with Child(client, *arguments) as child:
        measurements = child.read()
        child.join()
    return measurements


@dataclass(frozen=True)
class Taken:
    """Result and cost of a command.

    ``peak_bytes``: the peak of the resident memory of all processes together; shared pages count for each.
    """

    code: int
    output: str
    errors: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def run(command: Sequence[str], environment: Mapping[str, str]) -> Taken:
    """Run a command to its end, and sample the memory of its processes meanwhile."""
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    tree = _Tree(process.pid)
    sampling = threading.Thread(target=tree.sample_until_end, daemon=True)
    sampling.start()
    output, errors = process.communicate()
    seconds = time.monotonic() - began
    tree.ended.set()
    sampling.join()
    return Taken(process.returncode, output, errors, seconds, sum(tree.cpu_seconds.values()), tree.peak_bytes)


class _Tree:
    """A process and its descendants; a descendant that loses its parent still counts."""

    def __init__(self, root: int) -> None:
        self.ended = threading.Event()
        self.peak_bytes = 0
        self.cpu_seconds: dict[int, float] = {}
        self._known = {root}

    def sample_until_end(self) -> None:
        while not self.ended.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
        stats = {pid: fields for pid in pids if (fields := _stat(pid)) is not None}
        self._known &= stats.keys()
        while new := {pid for pid, fields in stats.items() if int(fields[1]) in self._known} - self._known:
            self._known |= new
        resident = 0
        for pid in self._known:
            fields = stats[pid]
            self.cpu_seconds[pid] = _cpu_seconds(fields)
            resident += int(fields[21]) * _PAGE
        self.peak_bytes = max(self.peak_bytes, resident)


class Meter:
    """CPU time of processes since this object's creation; ``pids`` by the part of the system that they run."""

    def __init__(self, pids: Mapping[str, Sequence[int]]) -> None:
        self._pids = pids
        self._began = self._now()

    def seconds(self) -> dict[str, float]:
        """Return the CPU seconds of each part."""
        return {part: now - self._began[part] for part, now in self._now().items()}

    def _now(self) -> dict[str, float]:
        return {part: sum(map(cpu_seconds, pids)) for part, pids in self._pids.items()}


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a running process has used.

    Raises:
        ProcessLookupError: it has ended.
    """
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(f"process {pid} has ended")
    return _cpu_seconds(fields)


def _cpu_seconds(fields: Sequence[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_bytes(pid: int, field: str) -> int:
    """Return ``VmRSS`` (now) or ``VmHWM`` (the peak) of a running process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(f"{field}:"))


def _stat(pid: int) -> list[str] | None:
    """Return the fields of its status from the third on; None if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
