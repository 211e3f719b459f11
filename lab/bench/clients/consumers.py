"""Consumer processes of Marq: ``python -m lab.bench.clients.consumers FUNCTION ...``."""

from __future__ import annotations

import asyncio
import time
from array import array
from pathlib import Path

import marq
from lab.bench.clients.client import call, percentiles, read_stamp, say, told, until_handled
from lab.bench.load import QUEUE, check, queue_name

#: `forgetting` forgets one in this many messages.
FORGOTTEN = 10
#: Number of consumers that start at the same time.
STARTING = 10
#: While `expiring` receives messages, the library renews their leases; then all leases are set to end at one time.
TAKING_S, LEASE_S = 8.0, 8.0
CHUNK = 20_000
#: Messages that a consumer of a queue with ordering handles at a time.
KEYS_AT_ONCE = 1_000


class Handled:
    """The messages that a handler has seen; ``done`` is set when all have come."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.values: list[bytes] = []
        self.first_s = 0.0
        self.done = asyncio.Event()

    def add(self, message: marq.Message) -> None:
        self.first_s = self.first_s or time.monotonic()
        self.values.append(message.value)
        if len(self.values) == self.count:
            self.done.set()


async def group(servers: str, prefix: str, name: str, count: int) -> None:
    """Handle all messages of the queues of a named group."""
    messages, began_s = Handled(count), time.monotonic()

    async def handler(message: marq.Message) -> None:
        messages.add(message)

    async with marq.Consumer(group=name, bootstrap_servers=servers, prefix=prefix) as consumer:
        cpu_s = time.process_time()
        ended_s = await until_handled(consumer, consumer.run(handler), messages.done)
        cpu_s = time.process_time() - cpu_s
    check(messages.values, count)
    say(
        messages_per_second=count / (ended_s - messages.first_s),
        start_seconds=messages.first_s - began_s,
        consumer_cpu_seconds_per_million=cpu_s / count * 1e6,
    )


async def timed(
    servers: str, prefix: str, queue: str, count: int, unmeasured: int, keys: int = 0, poison: int = 0
) -> None:
    """Measure the time from each message's planned send until its handler begins; leave out the first messages.

    With ``keys`` ordering keys, messages of the first key are not measured; if ``poison`` is 1, each of them fails.
    """
    milliseconds: list[float] = []
    seen: set[int] = set()
    expected = count - len(range(0, count, keys)) if keys else count
    done = asyncio.Event()

    async def handler(message: marq.Message) -> None:
        number, intended_s = read_stamp(message.value)
        if keys and number % keys == 0:
            if poison:
                raise ConnectionError("poisoned")
            return
        seen.add(number)
        if number >= unmeasured:
            milliseconds.append((time.monotonic() - intended_s) * 1000)
        if len(seen) == expected:
            done.set()

    async with marq.Consumer(queue, servers, prefix=prefix) as consumer:
        say(ready=True)
        await until_handled(consumer, consumer.run(handler, concurrency=KEYS_AT_ONCE if keys else None), done)
    say(**percentiles(milliseconds))


async def pausing(servers: str, prefix: str, queue: str, words: int) -> None:
    """Join when told; at each of ``words`` signals, report the longest gap between messages since the last; leave."""
    longest_s = last_s = 0.0

    async def handler(message: marq.Message) -> None:
        nonlocal longest_s, last_s
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s

    say(ready=True)
    await told()
    async with marq.Consumer(queue, servers, prefix=prefix) as consumer:
        running = asyncio.create_task(consumer.run(handler))
        say(joined=True)
        for _ in range(words):
            await told()
            say(longest_ms=1000 * max(longest_s, time.monotonic() - last_s))
            longest_s = 0.0
        await told()
        running.cancel()
        await asyncio.wait([running])
    say(left=True)


async def shared(servers: str, prefix: str, path: str) -> None:
    """Join, wait for the other consumers, handle messages until told; write their numbers, 8 bytes each, to a file."""
    numbers = array("Q")

    async def handler(message: marq.Message) -> None:
        numbers.append(int.from_bytes(message.value[:8], "big"))

    async with marq.Consumer(QUEUE, servers, prefix=prefix) as consumer:
        say(joined=True)
        await told()
        running = asyncio.create_task(consumer.run(handler))
        await told()
        running.cancel()
        await asyncio.wait([running])
    await asyncio.to_thread(Path(path).write_bytes, numbers.tobytes())
    say(messages=len(numbers))


async def forgetting(servers: str, prefix: str, count: int, lease_s: float) -> None:
    """Forget one message in ten, and measure how late it is redelivered."""
    dropped: dict[int, float] = {}
    late_ms: list[float] = []
    done: set[int] = set()
    duplicates, first_s = 0, 0.0
    # A lease that may not be renewed ends by itself.
    async with marq.Consumer(QUEUE, servers, prefix=prefix, lease=lease_s, max_lease=lease_s) as consumer:
        say(ready=True)
        while len(done) < count:
            for message in await consumer.receive(max_messages=500, wait=20):
                number = int.from_bytes(message.value[:8], "big")
                first_s = first_s or time.monotonic()
                if message.attempt == 1 and number % FORGOTTEN == 0 and number not in dropped:
                    dropped[number] = message.lease_expires_at.timestamp()
                    continue
                if number in done or (message.attempt > 1) != (number in dropped):
                    duplicates += 1
                elif number in dropped:
                    late_ms.append((time.time() - dropped[number]) * 1000)
                done.add(number)
                await message.ack(wait=False)
        await consumer.flush()
        seconds = time.monotonic() - first_s
    lateness = {f"lateness_{name}": value for name, value in percentiles(late_ms).items()}
    say(**lateness, all_acked_seconds=seconds, duplicates=duplicates)


async def expiring(servers: str, prefix: str, count: int) -> None:
    """Receive all messages and leave without settling them; then handle them again when their leases end."""
    first_s, last_s = await _take(servers, prefix, count)
    if time.monotonic() > first_s:
        raise SystemExit("bench: the first lease ended before all were written")
    messages, attempts = Handled(count), set[int]()

    async def handler(message: marq.Message) -> None:
        attempts.add(message.attempt)
        messages.add(message)

    async with marq.Consumer(QUEUE, servers, prefix=prefix) as consumer:
        ended_s = await until_handled(consumer, consumer.run(handler), messages.done)
    check(messages.values, count)
    if attempts != {2}:
        raise SystemExit(f"bench: expected only second attempts, got {attempts}")
    say(
        redelivered_per_second=count / (ended_s - first_s),
        first_after_seconds=messages.first_s - first_s,
        leases_ended_within_seconds=last_s - first_s,
    )


async def _take(servers: str, prefix: str, count: int) -> tuple[float, float]:
    """Return the times at which the first lease ends, and the last."""
    messages: list[marq.Message] = []
    async with marq.Consumer(QUEUE, servers, prefix=prefix, lease=TAKING_S, max_in_flight=2 * count) as consumer:
        while len(messages) < count:
            messages += await consumer.receive(max_messages=CHUNK)
        first_s = time.monotonic() + LEASE_S
        for message in messages:
            await message.renew(LEASE_S, wait=False)
        await consumer.flush()
        return first_s, time.monotonic() + LEASE_S


async def readers(servers: str, prefix: str, first: int, consumers: int, messages: int) -> None:
    """Run many consumers, each with its own queue, and count the bytes that the process receives for their messages.

    The count begins when all have joined, and ends when the last message is acked.
    """
    received = _count_received()
    left = consumers * messages
    done = asyncio.Event()

    async def handler(message: marq.Message) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            done.set()

    own = [marq.Consumer(queue_name(first + number), servers, prefix=prefix) for number in range(consumers)]
    for start in range(0, consumers, STARTING):
        await asyncio.gather(*(consumer.start() for consumer in own[start : start + STARTING]))
    before = received[0]
    say(joined=True)
    await told()
    running = [asyncio.create_task(consumer.run(handler)) for consumer in own]
    await done.wait()
    await asyncio.gather(*(consumer.flush() for consumer in own))
    say(bytes_received=received[0] - before, left=left)
    await told()
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    await asyncio.gather(*(consumer.stop() for consumer in own))


def _count_received() -> list[int]:
    """Count incoming bytes from now on; the count is the list's only item."""
    received = [0]
    feed = asyncio.StreamReader.feed_data

    def feed_data(self: asyncio.StreamReader, data: bytes) -> None:
        received[0] += len(data)
        feed(self, data)

    asyncio.StreamReader.feed_data = feed_data  # type: ignore[method-assign]
    return received


if __name__ == "__main__":
    call(group, timed, pausing, shared, forgetting, expiring, readers)
