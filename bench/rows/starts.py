"""The two ways to start messages, with markers or in transactions, as ``make starts`` compares them.

*kills*: a consumer under a steady load is killed (kill -9) at random moments and started again. *drain*: throughput.
*delays*: how late redeliveries of another queue are while a dead process's transaction is open in their markers
partitions.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition

import marq
from bench.clients.consumers import CONNECT_TIMEOUT_S
from bench.clients.producers import transactions
from bench.load import QUEUE
from bench.processes import Child
from bench.rows import drain
from bench.suite import Bench, Measurements, Medians, Row
from bench.worker import BenchWorker
from marq.kafka.acquire_strategies import MARKED, STARTS, TRANSACTIONAL
from marq.wire.marker_codec import decode
from marq.wire.markers import Acquire
from marq.wire.names import Names

#: Time limit of any wait.
LIMIT_S = 300.0

# --- kills ------------------------------------------------------------------------------------------------------------

KILLS = 20
LEASES_S = (2.0, 30.0)
#: The load keeps a consumer busy all the time, so that a kill may come at any step.
BURST, BURST_S = 10, 0.005
#: Seconds from the first message that a consumer handles until it is killed.
KILL_AFTER_S = (0.2, 1.2)


@dataclass
class Victims:
    """Consumers of one namespace that are killed one after the other."""

    servers: str
    prefix: str
    folder: Path
    start: str
    lease_s: float
    sent: int = 0

    @property
    def path(self) -> Path:
        """The file to which consumers write each message that they handle."""
        return self.folder / f"{self.prefix}.seen"

    def seen(self) -> list[tuple[int, int]]:
        """Return number and attempt of each handled message, without a line that a kill has cut."""
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        return [(int(number), int(attempt)) for number, attempt in map(bytes.split, lines)]

    async def run(self, worker: BenchWorker, kills: int) -> Measurements:
        """Kill consumers, let the last one drain the queue, and count."""
        await asyncio.to_thread(worker.wait_until_owner)
        stopped = asyncio.Event()
        feeding = asyncio.create_task(self._feed(stopped))
        try:
            for _ in range(kills):
                with self._consumer() as consumer:
                    await self._until_handled()
                    await asyncio.sleep(random.uniform(*KILL_AFTER_S))
                    consumer.kill()
        finally:
            # Not cancelled, because every message sent must be counted.
            stopped.set()
            await feeding
        with self._consumer():
            await self._until(partial(self._drained, worker), 0.5)
        return {"kills": kills, **self.count(), **await self._acquired()}

    async def _feed(self, stopped: asyncio.Event) -> None:
        async with marq.Producer(self.servers, prefix=self.prefix, connect_timeout=CONNECT_TIMEOUT_S) as producer:
            while not stopped.is_set():
                await producer.send_many(QUEUE, [b"%d" % number for number in range(self.sent, self.sent + BURST)])
                self.sent += BURST
                await asyncio.sleep(BURST_S)

    def _consumer(self) -> Child:
        return Child("consumers", "victim", self.servers, self.prefix, self.start, self.lease_s, self.path)

    async def _until_handled(self) -> None:
        before = self._size()

        async def handled() -> bool:
            return self._size() > before

        await self._until(handled, 0.05)

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    async def _until(self, condition: Callable[[], Awaitable[bool]], pause_s: float) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not await condition():  # noqa: ASYNC110 - other processes fulfil it
                await asyncio.sleep(pause_s)

    async def _drained(self, worker: BenchWorker) -> bool:
        row = await asyncio.to_thread(worker.row, QUEUE)
        return row.get("in_flight") == 0 and len(dict(self.seen())) >= self.sent

    def count(self) -> Measurements:
        attempts: dict[int, list[int]] = {}
        for number, attempt in self.seen():
            attempts.setdefault(number, []).append(attempt)
        return {
            "sent": self.sent,
            "lost": self.sent - len(attempts),
            "duplicates": sum(len(each) - 1 for each in attempts.values()),
            # Those before the last attempt that was seen.
            "attempts_unseen": sum(max(each) - len(set(each)) for each in attempts.values()),
        }

    async def _acquired(self) -> Measurements:
        """Count the records that stand in more than one ACQUIRE."""
        times: Counter[tuple[object, int]] = Counter()
        for value in await committed(self.servers, Names(self.prefix).markers):
            marker = decode(value)
            if isinstance(marker, Acquire):
                times.update((marker.source, offset) for offset in marker.offsets)
        return {"reacquired": sum(count > 1 for count in times.values())}


async def committed(servers: str, topic: str) -> list[bytes]:
    """Return the values of a topic's committed records."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=servers, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        partitions = [TopicPartition(topic, number) for number in await consumer._client._wait_on_metadata(topic)]
        consumer.assign(partitions)
        ends, values = await consumer.end_offsets(partitions), []
        async with asyncio.timeout(LIMIT_S):
            while any([await consumer.position(partition) < ends[partition] for partition in partitions]):
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    values += [record.value for record in records]
        return values
    finally:
        await consumer.stop()


def kill(bench: Bench, start: str, lease_s: float) -> Measurements:
    prefix = bench.prefix()
    with bench.worker(prefix) as worker:
        return asyncio.run(Victims(bench.servers, prefix, bench.folder, start, lease_s).run(worker, KILLS))


KILLS_ROW = Row(
    "starts-kills",
    f"a consumer under load is killed {KILLS} times: messages lost, delivered twice, and acquired more than once",
    {
        f"{start}, lease {lease_s:g} s": partial(kill, start=start, lease_s=lease_s)
        for lease_s in LEASES_S
        for start in STARTS
    },
    runs=1,
    warm=0,
    by_name=True,
)

# --- drain ------------------------------------------------------------------------------------------------------------


def ratio(medians: Medians) -> list[str]:
    return [f"{TRANSACTIONAL}: {medians[TRANSACTIONAL]['rate'] / medians[MARKED]['rate']:.2f} of the rate of {MARKED}"]


DRAIN_ROW = Row(
    "starts-drain",
    "a full queue drained by run, with each way to start messages",
    {start: partial(drain.marq, start=start) for start in STARTS},
    notes=ratio,
    warm=0,
    by_name=True,
)

# --- delays -----------------------------------------------------------------------------------------------------------

CLOSED, OPEN, RESTARTED = "no open transaction", "open", "open, member restarted"
ROUNDS = 5
#: Redeliveries of each round, and their leases.
PROBES, PROBE_LEASE_S = 40, 1.0


async def late_redeliveries(servers: str, prefix: str, during: Callable[[], Awaitable[None]]) -> list[float]:
    """Forget some messages and call ``during`` when all are leased; return how many seconds late each returns."""
    late: list[float] = []
    options: Any = {"prefix": prefix, "connect_timeout": CONNECT_TIMEOUT_S}
    async with (
        marq.Producer(servers, **options) as producer,
        marq.Consumer("other", servers, lease=PROBE_LEASE_S, max_lease=PROBE_LEASE_S, **options) as consumer,
        asyncio.timeout(LIMIT_S),
    ):
        await producer.send_many("other", [b"%d" % number for number in range(PROBES)])
        ends: dict[bytes, float] = {}
        called = False
        while len(late) < PROBES:
            for message in await consumer.receive(PROBES, wait=20):
                if message.attempt == 1:
                    ends[message.value] = message.lease_expires_at.timestamp()
                    continue
                late.append(max(0.0, time.time() - ends[message.value]))
                await message.ack(wait=False)
            if len(ends) == PROBES and not called:
                called = True
                await during()
        await consumer.flush()
    return late


async def one_round(servers: str, prefix: str, state: str) -> list[float]:
    """Return how late the redeliveries of a round are, with a transaction in this state."""

    async def nothing() -> None:
        pass

    if state == CLOSED:
        return await late_redeliveries(servers, prefix, nothing)
    with Child("producers", "leave_open", servers, prefix) as process:

        async def open_and_kill() -> None:
            process.go()
            await asyncio.to_thread(process.read)
            process.kill()
            if state == RESTARTED:
                again = await transactions(servers, prefix)
                await again.start()
                await again.stop(1)

        await asyncio.to_thread(process.read)
        return await late_redeliveries(servers, prefix, open_and_kill)


def late(bench: Bench, state: str) -> Measurements:
    prefix = bench.prefix()
    seconds: list[float] = []
    with bench.worker(prefix):
        for _ in range(ROUNDS):
            seconds += asyncio.run(one_round(bench.servers, prefix, state))
    return {"late_p50_s": median(seconds), "late_max_s": max(seconds)}


DELAYS_ROW = Row(
    "starts-delays",
    "how late redeliveries of another queue are while a dead process's transaction is open",
    {state: partial(late, state=state) for state in (CLOSED, OPEN, RESTARTED)},
    runs=1,
    warm=0,
    by_name=True,
)
