"""Memory, CPU time and open files of processes, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, field: str = "VmRSS") -> int:
    """Return ``VmRSS`` (now) or ``VmHWM`` (the peak) of a process; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(f"{field}:")), 0)


def open_files(pid: int) -> int:
    """Return how many files a process has open; 0 if it has ended."""
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a running process has used; raise ProcessLookupError if it has ended."""
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(f"process {pid} has ended")
    return _cpu_seconds(fields)


class Meter:
    """CPU time of processes since this object's creation; ``pids`` by the part of the system that they run."""

    def __init__(self, pids: Mapping[str, Sequence[int]]) -> None:
        self._pids = pids
        self._began = self._now()
        self._began_s = time.monotonic()

    def seconds(self) -> dict[str, float]:
        """Return the CPU seconds of each part."""
        return {part: now - self._began[part] for part, now in self._now().items()}

    def cores(self) -> dict[str, float]:
        """Return how many cores each part has used on average, as ``PART_cores``."""
        passed_s = time.monotonic() - self._began_s
        return {f"{part}_cores": taken / passed_s for part, taken in self.seconds().items()}

    def _now(self) -> dict[str, float]:
        return {part: sum(map(cpu_seconds, pids)) for part, pids in self._pids.items()}


class ProcessTree:
    """A process and its descendants; a descendant that loses its parent still counts.

    ``peak_bytes``: the peak of the resident memory of all of them together; shared pages count for each. A peak counts
    if two successive samples have it, because a process counts twice at the moment when it starts another one.
    """

    def __init__(self, root: int) -> None:
        self.peak_bytes = 0
        self._resident_before = 0
        self._known = {root}
        self._cpu_seconds: dict[int, float] = {}

    @property
    def cpu_seconds(self) -> float:
        return sum(self._cpu_seconds.values())

    def sample(self) -> None:
        pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
        stats = {pid: fields for pid in pids if (fields := _stat(pid)) is not None}
        self._known &= stats.keys()
        while new := {pid for pid, fields in stats.items() if int(fields[1]) in self._known} - self._known:
            self._known |= new
        resident = 0
        for pid in self._known:
            fields = stats[pid]
            self._cpu_seconds[pid] = _cpu_seconds(fields)
            resident += int(fields[21]) * _PAGE
        self.peak_bytes = max(self.peak_bytes, min(resident, self._resident_before))
        self._resident_before = resident


def _cpu_seconds(fields: Sequence[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _stat(pid: int) -> list[str] | None:
    """Return the fields of its status from the third on; None if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
