"""What a process and all that it has started take: memory and processor time, from /proc."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: How often memory is looked at.
SAMPLE_SECONDS = 0.2
_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Taken:
    """``peak_bytes``: the most that was resident at a time, summed up over all processes; shared pages count twice."""

    code: int
    output: str
    errors: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def run(command: Sequence[str], environment: Mapping[str, str]) -> Taken:
    """Run a command to its end, and look at its processes all the while."""
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    tree = _Tree(process.pid)
    looking = threading.Thread(target=tree.look, daemon=True)
    looking.start()
    output, errors = process.communicate()
    seconds = time.monotonic() - began
    tree.ended.set()
    looking.join()
    return Taken(process.returncode, output, errors, seconds, sum(tree.cpu_seconds.values()), tree.peak_bytes)


class _Tree:
    """A process and its descendants; who has lost its parent since it was first seen stays one of them."""

    def __init__(self, root: int) -> None:
        self.ended = threading.Event()
        self.peak_bytes = 0
        self.cpu_seconds: dict[int, float] = {}
        self._known = {root}

    def look(self) -> None:
        while not self.ended.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        found = {pid: fields for pid in _pids() if (fields := _stat(pid)) is not None}
        self._known &= found.keys()
        while new := {pid for pid, fields in found.items() if int(fields[1]) in self._known} - self._known:
            self._known |= new
        resident = 0
        for pid in self._known:
            fields = found[pid]
            self.cpu_seconds[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
            resident += int(fields[21]) * _PAGE
        self.peak_bytes = max(self.peak_bytes, resident)


class Meter:
    """Processor time that processes take from now on; ``pids`` by the name of the part that they are."""

    def __init__(self, pids: Mapping[str, Sequence[int]]) -> None:
        self._pids = {part: tuple(each) for part, each in pids.items()}
        self._began = self._now()

    def seconds(self) -> dict[str, float]:
        """Return seconds of processor time, by part."""
        return {part: now - self._began[part] for part, now in self._now().items()}

    def _now(self) -> dict[str, float]:
        return {part: sum(map(cpu_seconds, pids)) for part, pids in self._pids.items()}


def cpu_seconds(pid: int) -> float:
    """Return what a process that runs has taken so far.

    Raises:
        ProcessLookupError: it has ended.
    """
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(f"process {pid} has ended")
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_bytes(pid: int, field: str) -> int:
    """Return ``VmRSS`` (now) or ``VmHWM`` (the most so far) of a process that runs."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(f"{field}:"))


def _pids() -> list[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]


def _stat(pid: int) -> list[str] | None:
    """Return the fields of its state from the third on; None if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
