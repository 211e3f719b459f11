"""The rows of the benchmark: each measures one system once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import marq
from bench.load import QUEUE, fill
from bench.settings import Size
from bench.worker import BenchWorker

#: Redelivery: so many messages, of which each tenth is forgotten; seconds of lease.
REDELIVERY_MESSAGES = 20_000
REDELIVERY_LEASE = 3.0
IDLE_SECONDS = 10.0


class Rows:
    """Measures on one broker; each measurement has a prefix, and so topics, of its own."""

    def __init__(self, servers: str, folder: Path, size: Size) -> None:
        self._servers = servers
        self._folder = folder
        self._size = size
        self._count = 0

    def _prefix(self) -> str:
        self._count += 1
        return f"bench{int(time.time())}-{self._count}"

    def _fill(self, prefix: str) -> float:
        return asyncio.run(fill(self._servers, prefix, self._size.messages, self._size.value_bytes))

    def drain(self, start: str = "marked") -> dict[str, float]:
        return self._drain("run", start)

    def iterate(self) -> dict[str, float]:
        return self._drain("iterate")

    def _drain(self, *how: str) -> dict[str, float]:
        prefix = self._prefix()
        sent = self._fill(prefix)
        with BenchWorker(self._servers, prefix, self._folder) as worker:
            worker.wait_until_owner()
            before = worker.cpu_seconds()
            figures = _run("bench.drain_marq", self._servers, prefix, str(self._size.messages), *how)
            worker.wait_until_drained(QUEUE, self._size.messages)
            figures["tracker_behind_seconds"] = max(0.0, time.time() - figures.pop("ended_at"))
            figures["tracker_cpu_seconds"] = worker.cpu_seconds() - before
        figures["sent_per_second"] = sent
        return figures

    def confluent(self) -> dict[str, float]:
        prefix = self._prefix()
        self._fill(prefix)
        return _run("bench.drain_confluent", self._servers, f"{prefix}.messages", str(self._size.messages))

    def redelivery(self) -> dict[str, float]:
        prefix = self._prefix()
        with BenchWorker(self._servers, prefix, self._folder) as worker:
            worker.wait_until_owner()
            late = asyncio.run(redeliver(self._servers, prefix))
        late.sort()
        return {"lateness_p50_ms": late[len(late) // 2], "lateness_p99_ms": late[len(late) * 99 // 100]}

    def idle(self) -> dict[str, float]:
        with BenchWorker(self._servers, self._prefix(), self._folder) as worker:
            worker.wait_until_owner()
            time.sleep(2)
            before = worker.cpu_seconds()
            time.sleep(IDLE_SECONDS)
            return {"idle_core_percent": 100 * (worker.cpu_seconds() - before) / IDLE_SECONDS}


async def redeliver(servers: str, prefix: str) -> list[float]:
    """Forget each tenth message; return by how many ms each came after its lease had run out.

    Measured at the consumer, from the moment the lease was written until the message was in hand again.
    """
    dropped: dict[bytes, float] = {}
    late: list[float] = []
    async with marq.Producer(servers, prefix=prefix) as producer:
        values = [number.to_bytes(8, "big") for number in range(REDELIVERY_MESSAGES)]
        await producer.send_many(QUEUE, values)
    lease = REDELIVERY_LEASE
    done = 0
    # A lease that may not be renewed runs out by itself.
    async with marq.Consumer(QUEUE, servers, prefix=prefix, lease=lease, max_lease=lease) as consumer:
        while done < REDELIVERY_MESSAGES:
            for message in await consumer.receive(max_messages=500, wait=20):
                if message.attempt == 1 and int.from_bytes(message.value, "big") % 10 == 0:
                    dropped[message.value] = message.lease_expires_at.timestamp()
                    continue
                if message.attempt > 1:
                    late.append(max(0.0, (time.time() - dropped[message.value]) * 1000))
                await message.ack(wait=False)
                done += 1
        await consumer.flush()
    return late


def _run(module: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if result.returncode:
        raise SystemExit(f"bench: {module} failed:\n{result.stdout}{result.stderr}")
    figures: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return figures
