"""The namespace that a benchmark measures: its topics, and workers with their memory and CPU time."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import lab.rig.worker
from lab.bench.processes import cpu_seconds, memory_bytes
from lab.rig.worker import START_SECONDS
from marq.kafka.log_reader import LogReader
from marq.kafka.topics import Topics, ensure_topics
from marq.settings.client import ClientSettings
from marq.wire.markers import Source

#: Time limit of a wait; on a busy machine, a worker may have a million rows to restore.
LIMIT_SECONDS = 600.0
POLL_SECONDS = 0.02
#: Gives each worker of a prefix its own log.
_numbers = itertools.count(1)


async def make_topics(servers: str, prefix: str, partitions: int, **options: int) -> tuple[ClientSettings, Topics]:
    """Create the topics of a namespace, including the changelog."""
    settings: Mapping[str, Any] = {"prefix": prefix, "partitions": partitions, **options}
    client = ClientSettings.read(servers, settings, environment={})
    return client, await ensure_topics(client, changelog=True)


@asynccontextmanager
async def log_end(servers: str, topic: str, partitions: int) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """Return a context whose value is a function that returns the sum of the partitions' end offsets."""
    sources = [Source(topic, number) for number in range(partitions)]

    async def end() -> int:
        return sum((await reader.ends(sources)).values())

    async with LogReader(ClientSettings.read(servers, environment={}), committed=False) as reader:
        yield end


class BenchWorker(lab.rig.worker.Worker):
    """A worker; ``machine`` names its data directory, ``settings`` are further variables of its environment."""

    def __init__(
        self, servers: str, prefix: str, folder: Path, machine: str = "first", settings: Mapping[str, str] | None = None
    ) -> None:
        environment = {
            "MARQ_BOOTSTRAP_SERVERS": servers,
            "MARQ_PREFIX": prefix,
            "MARQ_CONNECT_TIMEOUT": str(START_SECONDS),
            # As on a machine where a worker has run before, modules are compiled.
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(folder / "compiled"),
            **(settings or {}),
        }
        name = f"{prefix}-{next(_numbers)}"
        super().__init__(name, folder, environment, data=folder / prefix / machine)
        self.start()

    def row(self, queue: str) -> dict[str, Any]:
        """Return the statistics of a queue; {} while there are none."""
        row: dict[str, Any] = self.statistics().get("queues", {}).get(queue, {})
        return row

    def wait_until(
        self, condition: Callable[[], object], limit: float = LIMIT_SECONDS, pause: float = POLL_SECONDS
    ) -> None:
        """Wait for a condition.

        Raises:
            SystemExit: it does not hold within the limit; the text has the worker's statistics.
        """
        until = time.monotonic() + limit
        while not condition():
            if time.monotonic() > until:
                queues = str(self.statistics().get("queues"))[:2_000]
                raise SystemExit(f"bench: not within {limit:g} s; log: {self.log_file}; queues: {queues}")
            time.sleep(pause)

    def wait_until_drained(self, queue: str, acked: int) -> None:
        """Wait until the tracker has folded every ack and its table is empty."""

        def drained() -> bool:
            row = self.row(queue)
            return row.get("acked") == acked and row.get("in_flight") == 0

        self.wait_until(drained)

    def wait_until_shared(self, workers: int, partitions: int) -> None:
        """Wait until this many workers own all partitions, and each owns some."""

        def shared() -> bool:
            parts = [worker["partitions"] for worker in self.statistics().get("workers", [])]
            owned = [part for own in parts for part in own if part["state"] == "owner"]
            return len(parts) == workers and all(parts) and len(owned) == partitions

        self.wait_until(shared, pause=0.2)

    def memory(self, field: str) -> int:
        """Return ``VmRSS`` (now) or ``VmHWM`` (the peak) in bytes."""
        return memory_bytes(self.pid, field)

    def memory_mib(self, name: str) -> dict[str, float]:
        """Return peak and current memory under names that begin with ``name``."""
        return {f"{name}_peak_mib": self.memory("VmHWM") / 2**20, f"{name}_mib": self.memory("VmRSS") / 2**20}

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)


def peak_mib(measurements: Mapping[str, float]) -> float:
    """Return the highest of the peaks that `memory_mib` noted."""
    return max(value for name, value in measurements.items() if name.endswith("_peak_mib"))
