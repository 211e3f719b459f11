"""Evidence that the machine was too busy: when waiting for a CPU counts as the cause of an expired lease.

A thread that computes uses a CPU, and a thread that blocks sleeps. Only a thread that could run, but gets no CPU, waits
for one. So this time tells a busy machine from a slow program, which cannot cause it by blocking its own event loop.
The kernel counts it for each thread in ``/proc``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

#: The request threads of a Kafka broker, as the kernel abbreviates their names.
_BROKER_THREADS = "data-plane-kafk"
#: Interval between two readings of a broker, which has a hundred threads.
_LOOK_INTERVAL_S = 0.5
#: Interval between two checks of the event loop, in seconds.
_CHECK_INTERVAL_S = 0.1


@asynccontextmanager
async def recorded_stalls(process: str, add: Callable[..., None], lease_s: float) -> AsyncIterator[None]:
    """Record a pause whenever this event loop waits for a CPU too long, until the context ends.

    Too long is a quarter of a lease at once, or half a lease within the duration of one lease.

    ``lease_s`` is the shortest lease of the messages that the process receives.
    """
    recording = asyncio.create_task(_record_stalls(process, add, lease_s))
    try:
        yield
    finally:
        recording.cancel()


async def _record_stalls(process: str, add: Callable[..., None], lease_s: float) -> None:
    starvation, total_s = Starvation(lease_s), 0.0
    while True:
        began_s, used_s, before_s = time.monotonic(), time.process_time(), waited_s()
        await asyncio.sleep(_CHECK_INTERVAL_S)
        now_s, after_s = time.monotonic(), waited_s()
        late_s = now_s - began_s - _CHECK_INTERVAL_S
        if before_s is None or after_s is None:
            # The time in which the process neither slept nor used a CPU. Without the kernel's count, a blocking call
            # looks like a wait.
            wait_s = max(late_s - (time.process_time() - used_s), 0.0)
        else:
            wait_s = after_s - before_s
        total_s += wait_s
        since_s = starvation.take(now_s, total_s)
        if since_s is None and is_stall(late_s, wait_s, lease_s):
            since_s = began_s
        if since_s is not None:
            add("invoke", "pause", target=process, at_ms=since_s * 1000)
            add("ok", "pause", target=process)


def is_stall(late_s: float, wait_s: float, lease_s: float) -> bool:
    """Whether a check of the event loop was so late that leases may have ended, and not by the process's own fault.

    If most of the delay was not a wait for a CPU (``wait_s``), the process blocked its own event loop, by computing or
    by a blocking call. That does not explain a duplicate.
    """
    return late_s > lease_s / 4 and wait_s > late_s / 2


def waited_s(thread: Path = Path("/proc/thread-self")) -> float | None:
    """Return the seconds that a thread has waited for a CPU since its start; None if they are not counted."""
    try:
        return int((thread / "schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError):
        return None


class Starvation:
    """Readings of how long a thread has waited for a CPU.

    Half a lease within the duration of one lease counts, because leases may then end although each turn of the event
    loop is short.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._readings: deque[tuple[float, float]] = deque()

    def take(self, now_s: float, waited_s: float) -> float | None:
        """Take a reading; return since when the thread has waited for half a lease, or None. Each wait counts once."""
        readings = self._readings
        readings.append((now_s, waited_s))
        while readings[0][0] < now_s - self._lease_s and len(readings) > 2:
            readings.popleft()
        began_s, before_s = readings[0]
        if waited_s - before_s < self._lease_s / 2:
            return None
        readings.clear()
        readings.append((now_s, waited_s))
        return began_s


class BrokerWatch:
    """Notices when the broker's request threads wait for a CPU, which is a pause of all processes.

    Args:
        threads: directory of the broker's threads, ``/proc/PID/task``.
        lease_s: the shortest lease.
    """

    def __init__(self, threads: Path, lease_s: float) -> None:
        self._threads = threads
        self._lease_s = lease_s
        self._readings: dict[str, Starvation] = {}
        self._looked_s = -_LOOK_INTERVAL_S

    def look(self) -> float | None:
        """Return the start of a pause that has lasted until now, on ``time.monotonic``; None if there was none."""
        if time.monotonic() < self._looked_s + _LOOK_INTERVAL_S:
            return None
        self._looked_s = time.monotonic()
        starts_s = [since_s for since_s in map(self._since_s, self._request_threads()) if since_s is not None]
        return min(starts_s, default=None)

    def _request_threads(self) -> list[Path]:
        try:
            return [thread for thread in self._threads.iterdir() if _name(thread) == _BROKER_THREADS]
        except OSError:
            return []

    def _since_s(self, thread: Path) -> float | None:
        waited = waited_s(thread)
        if waited is None:
            return None
        return self._readings.setdefault(thread.name, Starvation(self._lease_s)).take(time.monotonic(), waited)


def _name(thread: Path) -> str:
    try:
        return (thread / "comm").read_text().strip()
    except OSError:
        return ""
