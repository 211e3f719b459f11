"""Redeliveries that the broker refuses for their size, among others of the same partition."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable

import pytest

import marq
from tests.worker.conftest import client_of
from tests.worker.harness import Worker, eventually

pytestmark = pytest.mark.verify

COUNT = 20


async def test_a_redelivery_that_is_too_large_does_not_hold_up_the_others(new_worker: Callable[..., Worker]) -> None:
    worker = await new_worker(environment={"MARQ_PARTITIONS": "1"}).start().ready(1)
    attempts: Counter[bytes] = Counter()

    async def handle(message: marq.Message) -> None:
        attempts[message.value[:10]] += 1
        if message.attempt == 1:
            # Its text is a header of the redelivery.
            raise ValueError("x" * 1_024)

    client = client_of(worker)
    async with marq.Queues(**client) as queues, marq.Producer(**client) as producer:
        await queues.change("q", backoff={"base": 1, "jitter": False})
        largest = await largest_size(producer)
        for number in range(COUNT):
            await producer.send("q", b"%010d" % number)
            if number == COUNT // 2:
                await producer.send("q", b"large".ljust(largest, b"."))
    async with marq.Consumer("q", **client) as consumer, marq.DeadLetters(**client) as dead_letters:
        running = asyncio.create_task(consumer.run(handle, concurrency=100))

        async def ended() -> tuple[int, int]:
            # Copies of refused transactions come, too.
            again = [number for number, count in attempts.items() if count >= 2]
            return len(again), sum([count.dead_letters for count in await dead_letters.count("q")])

        await eventually(ended, lambda found: found == (COUNT, 1))
        running.cancel()

    assert attempts[b"large....."] == 1


async def largest_size(producer: marq.Producer) -> int:
    """Return the size of the largest value that can be sent to the queue ``q``."""
    with pytest.raises(marq.MessageTooLarge) as caught:
        await producer.send("q", bytes(2_000_000))
    has, most = map(int, re.findall(r"\d{6,}", str(caught.value).replace(",", "")))
    return 2_000_000 - (has - most)
