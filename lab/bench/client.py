"""The clients that the benchmark measures, and the numbered messages that it fills queues with.

A client is a function in a process of its own, ``python -m lab.bench.client MODULE:FUNCTION ARGUMENTS``
(:class:`lab.program.BenchClient`), and its arguments are a JSON array. It writes lines of JSON to the row that started
it, and waits for empty lines.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pkgutil
import struct
import sys
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer

import marq
from lab.resources import memory_bytes
from marq.settings.definitions import layer_key, placement_key
from marq.settings.placements import Placement, subset
from marq.wire.names import Names

# --- messages ---------------------------------------------------------------------------------------------------------

QUEUE = "bench"
#: How long a worker may take to fix the partitions of a queue.
FIXED_SECONDS = 60.0
CHUNK = 20_000
#: Messages per batch of a plain producer.
PLAIN_BATCH = 2_000


def queue_name(number: int) -> str:
    return f"queue-{number}"


def values(start: int, end: int, size: int) -> list[bytes]:
    """Return messages whose first 8 bytes are their number."""
    padding = b"x" * (size - 8)
    return [number.to_bytes(8, "big") + padding for number in range(start, end)]


def check(numbers: Sequence[int], count: int) -> None:
    """Check that each message arrived.

    Raise SystemExit if one is missing, or one arrived twice, which nothing in a benchmark explains.
    """
    different = set(numbers)
    if different != set(range(count)) or len(numbers) != count:
        raise SystemExit(f"bench: {count} sent, {len(numbers)} received, {len(different)} different: not a valid run")


async def fill(servers: str, prefix: str, count: int, size: int, keys: int = 0) -> None:
    """Send numbered messages to QUEUE, with this many ordering keys in turn."""
    async with marq.Producer(servers, prefix=prefix) as producer:
        for start in range(0, count, CHUNK):
            messages = values(start, min(start + CHUNK, count), size)
            if keys:
                sends = [producer.send(QUEUE, one, ordering_key=str(n % keys)) for n, one in enumerate(messages, start)]
                await asyncio.gather(*sends)
            else:
                await producer.send_many(QUEUE, messages)


async def take_keys(servers: str, prefix: str, settings: Mapping[str, Any]) -> None:
    """Change QUEUE; return when a running worker has fixed its partitions, because messages with keys wait for that."""
    async with marq.Queues(servers, prefix=prefix) as queues, asyncio.timeout(FIXED_SECONDS):
        changed = asyncio.Event()
        queues.listen(changed.set)
        await queues.change(QUEUE, **settings)
        while not queues.definitions.placement(QUEUE).takes_keys:
            changed.clear()
            await changed.wait()


def plain_producer(servers: str) -> AIOKafkaProducer:
    """Return a Kafka producer for large batches, whose requests may take long on busy machines."""
    sizes = {"max_batch_size": 1 << 20, "max_request_size": 4 << 20, "request_timeout_ms": 300_000}
    return AIOKafkaProducer(bootstrap_servers=servers, enable_idempotence=True, **sizes)


async def fill_queues(
    servers: str, names: Names, queues: Sequence[str], count: int, size: int, partitions: int
) -> None:
    """Write numbered messages to several queues in turn, as a plain Kafka producer does."""
    keys = [queue.encode() for queue in queues]
    async with plain_producer(servers) as producer:
        for turn, start in enumerate(range(0, count, PLAIN_BATCH)):
            batch = producer.create_batch()
            for number, value in enumerate(values(start, min(start + PLAIN_BATCH, count), size), start):
                assert batch.append(key=keys[number % len(keys)], value=value, timestamp=None) is not None
            await producer.send_batch(batch, names.messages, partition=turn % partitions)
        await producer.flush()


async def place(servers: str, prefix: str, queues: Iterable[str], count: int, partitions: int) -> None:
    """Place queues on few partitions, as after a completed change of ``partitions``."""
    documents: dict[bytes, Mapping[str, Any] | None] = {}
    for queue in queues:
        own = subset(queue, partitions, count)
        documents[layer_key("change", queue)] = {"partitions": count}
        documents[placement_key(queue)] = Placement(own, own).document()
    async with marq.Queues(servers, prefix=prefix) as definitions:
        await definitions.publish(documents)


# --- clients ----------------------------------------------------------------------------------------------------------

_STAMP = struct.Struct(">Qd")
#: The bytes of a value that are kept: its number.
NUMBER = slice(8)


def say(**measurements: object) -> None:
    """Send a line to the row."""
    print(json.dumps(measurements), flush=True)


async def told() -> None:
    """Wait until the row says to continue, or has ended."""
    await asyncio.to_thread(sys.stdin.readline)


class ReceivedMessages:
    """The messages that a client has received; its clock starts when it is made, after all imports.

    Every ``every``-th message waits ``ms`` milliseconds, as if for a service's response.
    """

    def __init__(self, count: int, ms: float = 0, every: int = 1) -> None:
        self.count, self.ms, self.every = count, ms, every
        self.values: list[bytes] = []
        #: Set when all have come.
        self.done = asyncio.Event()
        self.first_s = 0.0
        self.restart()
        self._measurements: dict[str, float] = {}

    def restart(self) -> None:
        """Restart the clock, after a preparation that is not measured."""
        self.began_s, self._cpu_s = time.monotonic(), time.process_time()

    @property
    def complete(self) -> bool:
        return len(self.values) >= self.count

    def begin(self) -> None:
        """Note that the first message has arrived; only the first call counts."""
        self.first_s = self.first_s or time.monotonic()

    def add(self, values: Iterable[bytes]) -> None:
        self.begin()
        self.values += [value[NUMBER] for value in values]
        if self.complete:
            self.done.set()

    async def work(self, value: bytes) -> None:
        if self.ms and int.from_bytes(value[NUMBER], "big") % self.every == 0:
            await asyncio.sleep(self.ms / 1000)

    def end(self) -> None:
        """Measure, when all acknowledgements are durable."""
        self._measurements = {
            "rate": self.count / (time.monotonic() - self.first_s),
            "startup_seconds": self.first_s - self.began_s,
            "cpu_seconds": time.process_time() - self._cpu_s,
            "peak_bytes": memory_bytes(os.getpid(), "VmHWM"),
            "ended_at": time.time(),
        }

    def check(self) -> None:
        """Raise SystemExit if a message is missing, or arrived twice."""
        check([int.from_bytes(value, "big") for value in self.values], self.count)

    def report(self) -> None:
        """Send the measurements to the row; raise like :meth:`check`."""
        self.check()
        say(**self._measurements)


async def until_handled(consumer: marq.Consumer, running: Awaitable[None], done: asyncio.Event) -> float:
    """Await a call of `run` until ``done`` is set and every ack is durable; return the monotonic time then."""
    task, waiting = asyncio.ensure_future(running), asyncio.ensure_future(done.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    await consumer.flush()
    ended_s = time.monotonic()
    task.cancel()
    await asyncio.wait([task])
    return ended_s


def stamped(number: int, intended_s: float, size: int) -> bytes:
    """Return a message of ``size`` bytes with its number and intended time, by the machine's monotonic clock."""
    return _STAMP.pack(number, intended_s).ljust(size, b"x")


def read_stamp(value: bytes) -> tuple[int, float]:
    """Return the number and the intended time of a message."""
    number, intended_s = _STAMP.unpack_from(value)
    return number, intended_s


def percentiles(milliseconds: list[float]) -> dict[str, float]:
    """Return p50, p99 and the maximum of a list that is not empty."""
    ordered = sorted(milliseconds)
    return {"p50_ms": ordered[len(ordered) // 2], "p99_ms": ordered[len(ordered) * 99 // 100], "max_ms": ordered[-1]}


def main() -> None:
    result = pkgutil.resolve_name(sys.argv[1])(*json.loads(sys.argv[2]))
    if inspect.iscoroutine(result):
        asyncio.run(result)


if __name__ == "__main__":
    main()
