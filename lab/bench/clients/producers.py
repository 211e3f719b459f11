"""Producer processes: ``python -m lab.bench.clients.producers FUNCTION ...``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import marq
from lab.bench.clients.client import call, say, stamped, told
from lab.bench.leases import BATCH, HOLDER, LONG_MS, marker_producer
from lab.bench.load import CHUNK, QUEUE, values
from marq.wire.marker_codec import encode
from marq.wire.markers import Ack, Acquire, Source
from marq.wire.markers_partitions import markers_partition
from marq.wire.names import Names
from marq.wire.payload_columns import Columns

#: Tasks that send one by one.
TASKS = 100
#: Time from the start signal until the first paced message is due.
AHEAD_S = 0.1
#: Interval between bursts of `traffic`.
TURN_S = 0.005


async def send(servers: str, prefix: str, way: str, count: int, size: int) -> None:
    """Send messages in calls of ``send_many``, or one by one from many tasks."""
    messages = values(0, count, size)
    async with marq.Producer(servers, prefix=prefix) as producer:
        # Connects, and is not measured.
        await producer.send("another", b"")
        began_s, cpu_s = time.monotonic(), time.process_time()
        await (_in_calls if way == "send_many" else _one_by_one)(producer, messages)
        seconds, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    say(messages_per_second=count / seconds, producer_cpu_seconds_per_million=cpu_s / count * 1e6)


async def _in_calls(producer: marq.Producer, messages: list[bytes]) -> None:
    for start in range(0, len(messages), CHUNK):
        await producer.send_many(QUEUE, messages[start : start + CHUNK])


async def _one_by_one(producer: marq.Producer, messages: list[bytes]) -> None:
    left = iter(messages)

    async def work(left: Iterator[bytes]) -> None:
        for message in left:
            await producer.send(QUEUE, message)

    await asyncio.gather(*(work(left) for _ in range(TASKS)))


async def paced(
    servers: str, prefix: str, queue: str, rate: float, count: int, size: int, burst: int, keys: int = 0
) -> None:
    """Send messages at a steady rate, ``burst`` at a time, however long each takes (an open loop).

    With ``keys``, each message is sent by its own call, with one of this number of ordering keys in turn.
    """
    async with marq.Producer(servers, prefix=prefix) as producer:
        await producer.send("another", b"")
        say(ready=True)
        await told()
        await _send_paced(producer, queue, rate, count, size, burst, keys)
    say(sent=count)


async def _send_paced(
    producer: marq.Producer, queue: str, rate: float, count: int, size: int, burst: int, keys: int
) -> None:
    """Send all messages that are due in one call, and do not wait for it.

    A message that is sent late, because the process was busy, still carries the time when it should have been sent.
    """
    start_s, sent = time.monotonic() + AHEAD_S, 0
    async with asyncio.TaskGroup() as calls:
        while sent < count:
            now_s = time.monotonic()
            due = min(count, burst * (int((now_s - start_s) * rate / burst) + 1)) if now_s >= start_s else sent
            if due > sent:
                intended_s = [start_s + number // burst * burst / rate for number in range(sent, due)]
                messages = [stamped(n, at, size) for n, at in zip(range(sent, due), intended_s, strict=True)]
                if keys:
                    for number, message in enumerate(messages, sent):
                        calls.create_task(producer.send(queue, message, ordering_key=str(number % keys)))
                else:
                    calls.create_task(_send(producer, queue, messages))
                sent = due
            await asyncio.sleep(max(0.0, start_s + sent / rate - time.monotonic()))


def _send(producer: marq.Producer, queue: str, messages: list[bytes]) -> Coroutine[Any, Any, Any]:
    return producer.send(queue, messages[0]) if len(messages) == 1 else producer.send_many(queue, messages)


async def traffic(servers: str, prefix: str, queue: str, rate: int) -> None:
    """Send to a queue and handle its messages, at a steady rate, until told to end."""
    handled = asyncio.Event()
    messages = [b"x" * 200] * int(rate * TURN_S)

    async def handler(message: marq.Message) -> None:
        handled.set()

    async def feed(producer: marq.Producer) -> None:
        while True:
            await producer.send_many(queue, messages)
            await asyncio.sleep(TURN_S)

    async with (
        marq.Producer(servers, prefix=prefix) as producer,
        marq.Consumer(queue, servers, prefix=prefix) as consumer,
    ):
        tasks = [asyncio.create_task(consumer.run(handler)), asyncio.create_task(feed(producer))]
        await handled.wait()
        say(ready=True)
        await told()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def markers(servers: str, prefix: str, partitions: int, count: int, size: int, kinds: str) -> None:
    """Write a consumer's markers without a consumer, so that a tracker finds all of them when it starts."""
    names = Names(prefix)

    async def write(partition: int, share: int) -> None:
        where = markers_partition(names.messages, partition, partitions)
        for record in marker_records(names, partition, share, size, kinds):
            sent = await producer.send(names.markers, record, partition=where)
        await sent

    async with marker_producer(servers) as producer:
        shares = [len(range(partition, count, partitions)) for partition in range(partitions)]
        await asyncio.gather(*(write(partition, share) for partition, share in enumerate(shares)))
    say(messages=count)


def marker_records(names: Names, partition: int, count: int, size: int, kinds: str) -> Iterator[bytes]:
    """Yield the ACQUIREs of one partition's messages, their ACKs, or both: each ACK after its ACQUIRE."""
    source, now_ms = Source(names.messages, partition), int(time.time() * 1000)
    for start in range(0, count, BATCH):
        stop = min(start + BATCH, count)
        if "acquire" in kinds:
            columns = Columns(QUEUE.encode(), [now_ms] * (stop - start), values(start, stop, size))
            yield encode(Acquire(QUEUE, HOLDER, source, range(start, stop), LONG_MS, start, columns))
        if "ack" in kinds:
            yield encode(Ack(QUEUE, HOLDER, source, range(start, stop)))


if __name__ == "__main__":
    call(send, paced, traffic, markers)
