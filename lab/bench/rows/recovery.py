"""How a worker with many open leases recovers: ``make recovery LEASES=1000000``.

The worker is killed three times (kill -9): it restarts with its data, then without; finally a standby takes over. It is
*firing again* when a redelivery from each markers partition has been read from the messages topic.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from dataclasses import dataclass, field

from lab.bench.leases import Copies, Opener, copies, opener
from lab.bench.load import QUEUE
from lab.bench.suite import Bar, Bench, Measurements, Medians, Row, peak_mib
from lab.program import LIMIT_SECONDS, Worker
from lab.topics import log_end, make_topics
from marq.wire.names import Names
from marq_worker.config.settings import load_settings

MAX_MEMORY_MIB = 700
RESTART_SECONDS = 5.0
REBUILD_SECONDS = 30.0
TAKEOVER_SECONDS = 2.0

#: Overdue messages of each partition, and their leases.
PROBES = 10
PROBE_LEASE_MS = 15_000
#: Time without new records after which the changelog is complete: longer than a flush.
QUIET_SECONDS = 2.0

_COPIED = re.compile(r"local copies of .* up to date")
_OWNED = re.compile(r"owner of markers partition (\d+)")


@dataclass(kw_only=True)
class Recovery:
    """One namespace with its open leases; ``measurements`` fills up as the phases pass."""

    bench: Bench
    names: Names
    opener: Opener
    copies: Copies
    opened: int = 0
    measurements: Measurements = field(default_factory=dict)
    _running: list[Worker] = field(default_factory=list)

    async def measure(self) -> None:
        worker, count = self._start("first"), self.bench.size.messages
        await asyncio.to_thread(worker.wait_until_owner)
        began = time.monotonic()
        await self.opener.open(0, count)
        self.opened = count
        await self._wait_until_written(worker)
        self.measurements["opened_per_second"] = count / (time.monotonic() - began)
        self.measurements |= worker.memory_mib("opened")
        worker = await self._kill_and_restart("restart", worker, lose=False)
        worker = await self._kill_and_restart("rebuild", worker, lose=True)
        await self._take_over(worker)

    def close(self) -> None:
        for worker in tuple(self._running):
            self._kill(worker)

    def _start(self, machine: str) -> Worker:
        worker = self.bench.start_worker(self.names.prefix, machine)
        self._running.append(worker)
        return worker

    def _kill(self, worker: Worker) -> None:
        worker.kill()
        self._running.remove(worker)

    async def _kill_and_restart(self, name: str, worker: Worker, *, lose: bool) -> Worker:
        probes, due = await self._open_probes()
        self._kill(worker)
        if lose:
            shutil.rmtree(worker.data)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        began = time.monotonic()
        worker = self._start("first")
        owner, (first, last) = await asyncio.gather(
            self._owner_of_all(worker), self.copies.all_of(probes, LIMIT_SECONDS)
        )
        self.measurements |= {
            f"{name}_owner_seconds": owner - began,
            f"{name}_first_copy_seconds": first - began,
            f"{name}_firing_seconds": last - began,
            f"{name}_cpu_seconds": worker.cpu_seconds(),
            **worker.memory_mib(name),
        }
        return worker

    async def _take_over(self, worker: Worker) -> None:
        standby = self._start("standby")
        # Both workers own partitions, and the standby has copies of those that it may take over.
        await asyncio.to_thread(standby.wait_until_shared, 2, self.bench.size.partitions)
        await asyncio.to_thread(standby.wait_until, lambda: _COPIED.search(standby.log()))
        probes, due = await self._open_probes()
        self._kill(worker)
        killed = time.monotonic()
        assert killed < due, "the leases of the probes ended before the kill"
        _, last = await self.copies.all_of(probes, LIMIT_SECONDS)
        self.measurements |= {
            "takeover_seconds": last - killed,
            "takeover_over_session_seconds": last - killed - load_settings().session_timeout,
            **standby.memory_mib("takeover"),
        }

    async def _open_probes(self) -> tuple[range, float]:
        """Open a few short leases in each partition; return the messages, and when they are overdue."""
        numbers = range(self.opened, self.opened + PROBES * self.bench.size.partitions)
        await self.opener.open(numbers.start, len(numbers), PROBE_LEASE_MS, batch=PROBES)
        due = time.monotonic() + PROBE_LEASE_MS / 1000
        self.opened += len(numbers)
        # Until shortly before they are due: that is more than one flush, so the table has their rows.
        await asyncio.sleep(due - QUIET_SECONDS - time.monotonic())
        return numbers, due

    async def _wait_until_written(self, worker: Worker) -> None:
        """Wait until the worker knows all leases and the changelog has all rows."""
        await asyncio.to_thread(
            worker.wait_until, lambda: worker.row(QUEUE).get("in_flight") == self.opened, LIMIT_SECONDS, 1.0
        )
        async with log_end(self.bench.servers, self.names.changelog, self.bench.size.partitions) as end:
            before = -1
            while (now := await end()) != before:
                before = now
                await asyncio.sleep(QUIET_SECONDS)

    async def _owner_of_all(self, worker: Worker) -> float:
        await asyncio.to_thread(
            worker.wait_until, lambda: len(set(_OWNED.findall(worker.log()))) == self.bench.size.partitions
        )
        return time.monotonic()


async def recover(bench: Bench) -> Measurements:
    size = bench.size
    client, _ = await make_topics(bench.servers, bench.prefix(), size.partitions)
    opening = opener(bench.servers, client.names, size.partitions, size.value_bytes)
    async with opening as leases, copies(bench.servers, client.names, size.partitions) as seen:
        recovery = Recovery(bench=bench, names=client.names, opener=leases, copies=seen)
        try:
            await recovery.measure()
        finally:
            recovery.close()
    return recovery.measurements


def bars(medians: Medians) -> list[Bar]:
    measurements, limit = medians["marq"], load_settings().session_timeout + TAKEOVER_SECONDS
    return [
        Bar("peak memory of a worker", peak_mib(measurements), MAX_MEMORY_MIB, "MiB"),
        Bar("restart with its data: firing after", measurements["restart_firing_seconds"], RESTART_SECONDS, "s"),
        Bar("data lost: firing after", measurements["rebuild_firing_seconds"], REBUILD_SECONDS, "s"),
        Bar("standby: firing after", measurements["takeover_seconds"], limit, "s"),
    ]


RECOVERY = Row(
    "recovery",
    "a worker with open leases is killed three times: it restarts with its data and without, then a standby takes over",
    {"marq": lambda bench: asyncio.run(recover(bench))},
    bars,
    warm=0,
    by_name=True,
)
