"""Version, uptime, memory and CPU time of a worker and its handler processes, and whether one is stopped.

Memory and CPU time come from /proc; on a system without it they are None. A service samples the CPU time, so that the
load is that of the last seconds, not of the time since the last request.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mode import Service

from marq.version import VERSION

#: Interval between samples; the load is measured over one to two of them.
SAMPLE_SECONDS = 5.0
#: CPU time is counted in hundredths of a second, so a shorter interval measures nothing.
_LEAST_SECONDS = 0.5
#: The report of a worker of an older version, which reports nothing about its own process.
UNKNOWN: dict[str, Any] = dict.fromkeys(("version", "uptime_seconds", "cpu", "memory_bytes", "loop_lag_seconds"))


class Usage(NamedTuple):
    """CPU time of a process since its start, and its memory now."""

    cpu_seconds: float
    memory_bytes: int


def _stat(pid: int) -> list[str]:
    """Return the fields of a process, from its state on; [] if it has ended, or the system has no /proc."""
    try:
        # The name of the program comes first, in brackets, and may contain spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Return whether a signal (SIGSTOP, SIGTSTP) has stopped a process; False on a system without /proc."""
    return _stat(pid)[:1] == ["T"]


def usage_of(pid: int) -> Usage | None:
    """Return the usage of a process; None if it has ended, or the system has no /proc."""
    fields = _stat(pid)
    if not fields:
        return None
    user, system, pages = (int(fields[index]) for index in (11, 12, 21))
    return Usage((user + system) / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"))


class ProcessUsage(Service):
    """Samples the CPU time of this process and of its handler processes; ``pids`` returns the latter."""

    def __init__(
        self,
        pids: Callable[[], Iterable[int]] = tuple,
        read: Callable[[int], Usage | None] = usage_of,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._pids = pids
        self._read = read
        self._now_s = now_s
        self._began_s = now_s()
        #: (monotonic seconds, CPU seconds by process).
        self._samples: deque[tuple[float, dict[int, float]]] = deque(maxlen=2)

    def worker(self) -> dict[str, Any]:
        """Return version, uptime and usage of this process."""
        uptime_s = round(self._now_s() - self._began_s, 1)
        return {**UNKNOWN, "version": VERSION, "uptime_seconds": uptime_s, **self.of(os.getpid())}

    def of(self, pid: int | None) -> dict[str, Any]:
        """Return the load of a process (``cpu``: 1.0 is one core) and its memory; None for what is not known."""
        usage = None if pid is None else self._read(pid)
        if pid is None or usage is None:
            return {"cpu": None, "memory_bytes": None}
        return {"cpu": self._load(pid, usage.cpu_seconds), "memory_bytes": usage.memory_bytes}

    def _load(self, pid: int, cpu_s: float) -> float | None:
        for then_s, samples in self._samples:
            took_s = self._now_s() - then_s
            if pid in samples and took_s >= _LEAST_SECONDS:
                # A new process may have the number of one that has ended.
                return round(max(0.0, cpu_s - samples[pid]) / took_s, 3)
        return None

    def sample(self) -> None:
        usages = {pid: self._read(pid) for pid in (os.getpid(), *self._pids())}
        self._samples.append(
            (self._now_s(), {pid: usage.cpu_seconds for pid, usage in usages.items() if usage is not None})
        )

    @Service.task
    async def _sample(self) -> None:
        while not self.should_stop:
            self.sample()
            await asyncio.sleep(SAMPLE_SECONDS)
