"""How a worker with many open leases recovers: ``make recovery LEASES=1000000``.

The worker is killed three times (kill -9): it restarts with its data, then without; finally a standby takes over. It is
*firing again* when a redelivery from each markers partition has been read from the messages topic.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time

from lab.bench.leases import Opener, copies, marker_producer
from lab.bench.load import QUEUE
from lab.bench.suite import Bar, Bench, BenchRow, Measurements, Medians, peak_mib
from lab.program import LIMIT_SECONDS, Worker
from lab.topics import TopicScan
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


async def recover(bench: Bench) -> Measurements:
    """Open the leases, and measure two restarts and a take-over."""
    size, prefix = bench.size, bench.prefix()
    client, _ = await bench.make_topics(prefix)
    measurements: Measurements = {}
    opened = 0
    async with marker_producer(bench.servers) as producer, copies(client) as seen:
        leases = Opener(producer, client.names, size.partitions, size.value_bytes)

        async def open_probes() -> tuple[range, float]:
            """Open a few short leases in each partition; return the messages, and when they are overdue."""
            nonlocal opened
            numbers = range(opened, opened + PROBES * size.partitions)
            await leases.open(numbers.start, len(numbers), PROBE_LEASE_MS, batch=PROBES)
            due = time.monotonic() + PROBE_LEASE_MS / 1000
            opened = numbers.stop
            # Until shortly before they are due: that is more than one flush, so the table has their rows.
            await asyncio.sleep(due - QUIET_SECONDS - time.monotonic())
            return numbers, due

        async def owner_of_all(worker: Worker) -> float:
            await asyncio.to_thread(
                worker.wait_until, lambda: len(set(_OWNED.findall(worker.log()))) == size.partitions
            )
            return time.monotonic()

        async def restarted(name: str, former: Worker, *, lose: bool) -> Worker:
            probes, due = await open_probes()
            former.kill()
            if lose:
                shutil.rmtree(former.data)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            began = time.monotonic()
            worker = bench.start_worker(prefix)
            owner, (first, last) = await asyncio.gather(owner_of_all(worker), seen.all_of(probes, LIMIT_SECONDS))
            measurements.update(
                {
                    f"{name}_owner_seconds": owner - began,
                    f"{name}_first_copy_seconds": first - began,
                    f"{name}_firing_seconds": last - began,
                    f"{name}_cpu_seconds": worker.cpu_seconds(),
                    **worker.memory_mib(name),
                }
            )
            return worker

        worker = await asyncio.to_thread(bench.worker, prefix)
        began = time.monotonic()
        await leases.open(0, size.messages)
        opened = size.messages
        await asyncio.to_thread(
            worker.wait_until, lambda: worker.row(QUEUE).get("in_flight") == opened, LIMIT_SECONDS, 1.0
        )
        async with TopicScan(client, client.names.changelog, committed=False) as changelog:
            before = -1
            while (now := await changelog.written()) != before:
                before = now
                await asyncio.sleep(QUIET_SECONDS)
        measurements["opened_per_second"] = size.messages / (time.monotonic() - began)
        measurements |= worker.memory_mib("opened")
        worker = await restarted("restart", worker, lose=False)
        worker = await restarted("rebuild", worker, lose=True)

        standby = bench.start_worker(prefix, "standby")
        # Both workers own partitions, and the standby has copies of those that it may take over.
        await asyncio.to_thread(standby.wait_until_shared, 2, size.partitions)
        await asyncio.to_thread(standby.wait_until, lambda: _COPIED.search(standby.log()))
        probes, due = await open_probes()
        worker.kill()
        killed = time.monotonic()
        assert killed < due, "the leases of the probes ended before the kill"
        _, last = await seen.all_of(probes, LIMIT_SECONDS)
        return measurements | {
            "takeover_seconds": last - killed,
            "takeover_over_session_seconds": last - killed - load_settings().session_timeout,
            **standby.memory_mib("takeover"),
        }


def bars(medians: Medians) -> list[Bar]:
    found, limit = medians["marq"], load_settings().session_timeout + TAKEOVER_SECONDS
    return [
        Bar("peak memory of a worker", peak_mib(found), MAX_MEMORY_MIB, "MiB"),
        Bar("restart with its data: firing after", found["restart_firing_seconds"], RESTART_SECONDS, "s"),
        Bar("data lost: firing after", found["rebuild_firing_seconds"], REBUILD_SECONDS, "s"),
        Bar("standby: firing after", found["takeover_seconds"], limit, "s"),
    ]


RECOVERY = BenchRow(
    "recovery",
    "a worker with open leases is killed three times: it restarts with its data and without, then a standby takes over",
    {"marq": lambda bench: asyncio.run(recover(bench))},
    bars,
    warm=0,
    by_name=True,
)
