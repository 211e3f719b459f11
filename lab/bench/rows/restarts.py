"""A worker has many leases, delayed messages or deduplication ids, is killed (kill -9), and another one goes on.

``make recovery LEASES=1000000``: it restarts with its data, then without; finally a standby takes over.
``make delays PENDING=1000000``: messages wait within a day; others are due at a steady rate, and how late each arrives
is measured; then the worker restarts with its data.
``make ids IDS=1000000``: it remembers the ids of messages, and restarts with its data until it has dropped a duplicate.

A worker *redelivers again* when a copy of an overdue message of each markers partition has been read.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from aiokafka import AIOKafkaProducer

import marq
from lab.bench.client import CHUNK, QUEUE, percentiles, plain_producer, values
from lab.bench.suite import Bar, Bench, BenchRow, Measurements, Medians, Size, peak_mib
from lab.program import POLL_SECONDS, Worker
from lab.proof.history import wall_clock_ahead_s
from lab.resources import cpu_seconds
from lab.topics import TopicScan
from marq.settings.client import ClientSettings
from marq.wire.marker_codec import Columns, encode
from marq.wire.markers import Acquire, Source
from marq.wire.names import ATTEMPT_HEADER, Names, markers_partition
from marq_worker.config.settings import load_settings

HOLDER = 0xA11CE
#: A lease, or another time, that outlives the measurement.
LONG_MS = 24 * 3_600_000
DAY_S = 24 * 3600
#: Messages per ACQUIRE, as in a consumer's fetch, and batches in flight at a time.
BATCH, WINDOW = 500, 16
#: Time limit until messages are known to a worker or copied by it.
WAIT_SECONDS = 900.0
#: Time within which rows are written to the changelog: it is complete after that time without new records.
WRITTEN_SECONDS = 2.0
_COPIED = re.compile(r"local copies of .* up to date")
_OWNED = re.compile(r"owner of markers partition (\d+)")


#: The time at which the first copy of each message was read (a redelivery, or a delayed message), by its number.
Copies = dict[int, float]


@asynccontextmanager
async def copies(client: ClientSettings) -> AsyncIterator[Copies]:
    """Read the messages topic from now on."""
    seen: Copies = {}

    async def read() -> None:
        async for record in reader.follow():
            if any(name == ATTEMPT_HEADER for name, _ in record.headers):
                seen.setdefault(int.from_bytes(record.value[:8], "big"), time.monotonic())

    async with TopicScan(client, client.names.messages, new=True) as reader:
        reading = asyncio.create_task(read())
        try:
            yield seen
        finally:
            reading.cancel()
            await asyncio.wait([reading])


async def until(worker: Worker, condition: Callable[[], object], pause: float = 0.5) -> None:
    await asyncio.to_thread(worker.wait_until, condition, WAIT_SECONDS, pause)


async def all_of(numbers: range, seen: Copies, worker: Worker) -> tuple[float, float]:
    """Wait until a worker has sent copies of all these messages; return when the first and the last arrived."""
    await until(worker, lambda: all(number in seen for number in numbers), 0.01)
    times = [seen[number] for number in numbers]
    return min(times), max(times)


async def changelog_written(worker: Worker, client: ClientSettings, in_flight: int, quiet_s: float) -> float:
    """Return when the changelog was complete: no new records followed, and so many messages are in flight.

    The worker is asked only then, because counting messages in flight costs it time.
    """
    async with TopicScan(client, client.names.changelog, committed=False) as changelog, asyncio.timeout(WAIT_SECONDS):
        records, ended = await changelog.written(), time.monotonic()
        while time.monotonic() - ended < quiet_s or worker.row(QUEUE).get("in_flight") != in_flight:
            await asyncio.sleep(POLL_SECONDS)
            if (now := await changelog.written()) != records:
                records, ended = now, time.monotonic()
    return ended


async def owner_of_all(worker: Worker, partitions: int) -> float:
    """Return when a worker that has just started owned all partitions, by its log."""
    await until(worker, lambda: len({*_OWNED.findall(worker.log())}) == partitions, 0.02)
    return time.monotonic()


async def killed_before(due_s: float, worker: Worker) -> None:
    """Kill a worker shortly before messages are due, when its table has their rows."""
    await asyncio.sleep(due_s - WRITTEN_SECONDS - time.monotonic())
    worker.kill()
    assert time.monotonic() < due_s, "the messages were due before the kill"


# --- leases -----------------------------------------------------------------------------------------------------------

MAX_MEMORY_MIB = 700
RECOVERY_SECONDS = {"restart": ("restart with its data", 5.0), "rebuild": ("data lost", 30.0)}
TAKEOVER_SECONDS = 2.0
#: Overdue messages of each partition, and their leases.
PROBES, PROBE_LEASE_MS = 10, 15_000


async def open_leases(
    producer: AIOKafkaProducer, names: Names, size: Size, numbers: range, lease_ms: int = LONG_MS, batch: int = BATCH
) -> None:
    """Send messages to the partitions in turn, and write their leases; both topics have equally many partitions."""
    window, key = asyncio.Semaphore(WINDOW), QUEUE.encode()

    async def open_batch(partition: int, messages: list[bytes]) -> None:
        source, times_ms = Source(names.messages, partition), [int(time.time() * 1000)] * len(messages)
        records = producer.create_batch()
        for value, now_ms in zip(messages, times_ms, strict=True):
            assert records.append(key=key, value=value, timestamp=now_ms) is not None, "a batch is larger than a record"
        records.close()
        async with window:
            sent = await (await producer.send_batch(records, names.messages, partition=partition))
            offsets = range(sent.offset, sent.offset + len(messages))
            payloads = Columns(key, times_ms, messages)
            acquire = Acquire(QUEUE, HOLDER, source, offsets, lease_ms, sent.offset, payloads)
            where = markers_partition(*source, size.partitions)
            await producer.send_and_wait(names.markers, encode(acquire), partition=where)

    async with asyncio.TaskGroup() as tasks:
        for turn, start in enumerate(range(numbers.start, numbers.stop, batch)):
            messages = values(start, min(start + batch, numbers.stop), size.value_bytes)
            tasks.create_task(open_batch(turn % size.partitions, messages))


async def recover(bench: Bench) -> Measurements:
    """Open the leases, and measure two restarts and a take-over."""
    size, client = bench.size, bench.client
    await bench.make_topics()
    measurements: Measurements = {}
    async with plain_producer(bench.servers) as producer, copies(client) as seen:
        starts = itertools.count(size.messages, PROBES * size.partitions)

        async def killed(worker: Worker) -> tuple[range, float]:
            """Open a few short leases in each partition, and kill the worker; return them, and when they end."""
            start = next(starts)
            probes = range(start, start + PROBES * size.partitions)
            await open_leases(producer, client.names, size, probes, PROBE_LEASE_MS, PROBES)
            due_s = time.monotonic() + PROBE_LEASE_MS / 1000
            await killed_before(due_s, worker)
            return probes, due_s

        worker = await asyncio.to_thread(bench.worker)
        began = time.monotonic()
        await open_leases(producer, client.names, size, range(size.messages))
        await changelog_written(worker, client, size.messages, WRITTEN_SECONDS)
        measurements["opened_per_second"] = size.messages / (time.monotonic() - began)
        measurements |= worker.memory_mib("opened")
        for name in RECOVERY_SECONDS:
            probes, due_s = await killed(worker)
            if name == "rebuild":
                shutil.rmtree(worker.data)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            began = time.monotonic()
            worker = bench.start_worker()
            owner, (first, last) = await asyncio.gather(
                owner_of_all(worker, size.partitions), all_of(probes, seen, worker)
            )
            measurements |= {
                f"{name}_owner_seconds": owner - began,
                f"{name}_first_copy_seconds": first - began,
                f"{name}_firing_seconds": last - began,
                f"{name}_cpu_seconds": cpu_seconds(worker.pid),
                **worker.memory_mib(name),
            }

        standby = bench.start_worker("standby")
        # Both workers own partitions, and the standby has copies of those that it may take over.
        await asyncio.to_thread(standby.wait_until_owned, 2, size.partitions)
        await until(standby, lambda: _COPIED.search(standby.log()))
        probes, _ = await killed(worker)
        killed_s = time.monotonic()
        _, last = await all_of(probes, seen, standby)
        return measurements | {
            "takeover_seconds": last - killed_s,
            "takeover_over_session_seconds": last - killed_s - load_settings().session_timeout,
            **standby.memory_mib("takeover"),
        }


def recovery_bars(medians: Medians) -> list[Bar]:
    found, limit = medians["marq"], load_settings().session_timeout + TAKEOVER_SECONDS
    return [
        Bar("peak memory of a worker", peak_mib(found), MAX_MEMORY_MIB, "MiB"),
        *[
            Bar(f"{what}: firing after", found[f"{name}_firing_seconds"], seconds, "s")
            for name, (what, seconds) in RECOVERY_SECONDS.items()
        ],
        Bar("standby: firing after", found["takeover_seconds"], limit, "s"),
    ]


RECOVERY = BenchRow(
    "recovery",
    "a worker with open leases is killed three times: it restarts with its data and without, then a standby takes over",
    {"marq": lambda bench: asyncio.run(recover(bench))},
    recovery_bars,
    warm=0,
    by_name=True,
)

# --- delayed messages -------------------------------------------------------------------------------------------------

RESTART_SECONDS = 10.0
LATENESS_P99_MS = 250.0
SCHEDULED_PER_SECOND = 50_000.0
#: Largest number of messages, or ids, for which the bars apply.
BARRED = 1_000_000
#: Messages that are due per second, and for how many seconds.
RATE, SECONDS = 5_000, 20
#: Shortest delay of the messages that wait: longer than the measurement.
FAR_S = 2 * 3600
#: Time between the last send at the steady rate and the first delivery.
AHEAD_S = 10
#: Number of messages that are overdue at the restart, and their delay.
DELAYED_PROBES, PROBE_S = 40, 15.0
#: Rows are written within a second or two.
SETTLE_SECONDS = 5.0


async def delay(bench: Bench, rate: int = RATE, seconds: int = SECONDS) -> Measurements:
    """Measure the three phases: messages wait, others are due at a steady rate, the worker restarts."""
    servers, prefix = bench.namespace
    pending, chance = bench.size.messages, random.Random(1)
    await bench.make_topics()
    sent, measurements = 0, dict[str, float]()

    async def send(delays: list[float] | None = None, at: list[datetime] | None = None) -> range:
        nonlocal sent
        numbers = range(sent, sent + len(delays or at or ()))
        sent = numbers.stop
        await producer.send_many(QUEUE, values(numbers.start, sent, bench.size.value_bytes), delay=delays, at=at)
        return numbers

    def note(name: str, worker: Worker) -> None:
        disk = sum(path.stat().st_size for path in worker.data.rglob("*") if path.is_file())
        measurements.update({**worker.memory_mib(name), f"{name}_disk_mib": disk / 2**20})

    async with marq.Producer(servers, prefix=prefix, request_timeout=300) as producer, copies(bench.client) as seen:
        first = await asyncio.to_thread(bench.worker)
        began = time.monotonic()
        for start in range(0, pending, CHUNK):
            await send([FAR_S + chance.random() * DAY_S for _ in range(min(CHUNK, pending - start))])
        measurements |= {"pending": pending, "scheduled_per_second": pending / (time.monotonic() - began)}
        await until(first, lambda: first.row(QUEUE).get("waiting_for_delivery") == pending)
        measurements["known_per_second"] = pending / (time.monotonic() - began)
        await asyncio.sleep(SETTLE_SECONDS)
        note("pending", first)

        count, start = rate * seconds, sent
        # The broker's clock, which is this machine's, minus the one that measures arrival.
        ahead_s = wall_clock_ahead_s()
        first_s = time.time() + AHEAD_S + count / SCHEDULED_PER_SECOND
        dues_s = [first_s + index / rate for index in range(count)]
        for index in range(0, count, CHUNK):
            await send(at=[datetime.fromtimestamp(due_s, UTC) for due_s in dues_s[index : index + CHUNK]])
        assert time.time() < first_s, "the machine is too slow: the first message was due before the last was sent"
        await all_of(range(start, start + count), seen, first)
        late_ms = [(seen[start + index] + ahead_s - due_s) * 1000 for index, due_s in enumerate(dues_s)]
        assert min(late_ms) > -5, f"a message came {-min(late_ms)} ms too early"
        measurements |= {f"lateness_{name}": value for name, value in percentiles(late_ms).items()}

        probes = await send([PROBE_S] * DELAYED_PROBES)
        due_s = time.monotonic() + PROBE_S
        await killed_before(due_s, first)
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        began = time.monotonic()
        again = bench.start_worker()
        earliest, last = await all_of(probes, seen, again)
        measurements |= {"restart_first_seconds": earliest - began, "restart_seconds": last - began}
        note("restarted", again)
    return measurements


def delays_bars(medians: Medians) -> list[Bar]:
    found = medians["marq"]
    if found["pending"] > BARRED:
        return []
    return [
        Bar("peak memory of the worker", peak_mib(found), MAX_MEMORY_MIB, "MiB"),
        Bar("restart with its data: delivering after", found["restart_seconds"], RESTART_SECONDS, "s"),
        Bar("lateness, 99 of 100 messages", found["lateness_p99_ms"], LATENESS_P99_MS, "ms"),
        Bar("scheduled", found["scheduled_per_second"], SCHEDULED_PER_SECOND, "a second", at_least=True),
    ]


DELAYS = BenchRow(
    "delays",
    f"messages wait for hours, {RATE:,} more are due each second for {SECONDS} s, and the worker is killed",
    {"marq": lambda bench: asyncio.run(delay(bench))},
    delays_bars,
    warm=0,
    by_name=True,
)

# --- deduplication ids ------------------------------------------------------------------------------------------------

MAX_IDS_MIB = 300


async def remember(bench: Bench) -> Measurements:
    """Return the memory of the ids, how fast they are accepted, and how long a restart takes."""
    servers, prefix = bench.namespace
    count = bench.size.messages
    worker = await asyncio.to_thread(bench.worker)
    idle_mib = worker.memory_mib("idle")["idle_mib"]
    measurements: Measurements = {"ids": count, "idle_mib": idle_mib}
    async with (
        marq.Queues(servers, prefix=prefix) as queues,
        marq.Producer(servers, prefix=prefix, request_timeout=300) as producer,
    ):
        await queues.change(QUEUE, deduplication_window=DAY_S)
        began = time.monotonic()
        for start in range(0, count, CHUNK):
            numbers = range(start, min(start + CHUNK, count))
            messages = values(numbers.start, numbers.stop, bench.size.value_bytes)
            await producer.send_many(QUEUE, messages, deduplication_ids=[f"order-{number}" for number in numbers])
        measurements["sent_per_second"] = count / (time.monotonic() - began)
        await until(worker, lambda: worker.row(QUEUE).get("delivered") == count)
        measurements["delivered_per_second"] = count / (time.monotonic() - began)
        await asyncio.sleep(SETTLE_SECONDS)
        measurements |= worker.memory_mib("remembered")
        worker.kill()
        began = time.monotonic()
        again = bench.start_worker()
        await producer.send(QUEUE, b"again", deduplication_id="order-0")
        await until(again, lambda: again.row(QUEUE).get("deduplicated") == 1, 0.02)
        measurements["restart_seconds"] = time.monotonic() - began
        measurements |= again.memory_mib("restarted")
    # Measured on the restarted worker, because the first one also had all messages in memory.
    measurements["ids_mib"] = measurements["restarted_mib"] - idle_mib
    return measurements


def ids_bars(medians: Medians) -> list[Bar]:
    found = medians["marq"]
    if found["ids"] > BARRED:
        return []
    return [
        Bar("memory of the ids", found["ids_mib"], MAX_IDS_MIB, "MiB"),
        Bar("restart with its data: dropping a duplicate after", found["restart_seconds"], RESTART_SECONDS, "s"),
    ]


DEDUPLICATION = BenchRow(
    "deduplication",
    "messages with different deduplication ids are delivered, and the worker is killed",
    {"marq": lambda bench: asyncio.run(remember(bench))},
    ids_bars,
    warm=0,
    by_name=True,
)
