"""A downstream that is away for a day: nothing of a healthy queue is lost to the dead letters."""

from __future__ import annotations

import pytest

import marq
from marq.testing import Broker

DAY_S = 86_400


@pytest.mark.parametrize("messages", [1, 300])
async def test_a_day_long_outage_sends_nothing_to_the_dead_letters_and_all_is_done_afterwards(messages: int) -> None:
    up, done, calls = True, set(), 0
    # More is handled at a time than the breaker looks at, and 5 attempts are used up within half a minute.
    queues = {
        "orders": {
            "lease": 3_600,
            "breaker": {"failure_rate": 0.5, "window": 20, "reset_timeout": 60},
            "concurrency": 64,
        }
    }

    @marq.handler("orders")
    async def handle(message: marq.Message) -> None:
        nonlocal calls
        calls += 1
        if not up:
            raise ConnectionError("the downstream is away")
        done.add(message.value)

    async with Broker(queues=queues) as broker, broker.worker(handle):
        async with broker.producer() as producer:
            await producer.send_many("orders", [b"before-%d" % number for number in range(50)])
            await broker.advance(10)
            up = False
            await producer.send_many("orders", [b"during-%d" % number for number in range(messages)])
            for _ in range(24):
                await broker.advance(DAY_S / 24)
            tried = calls
            up = True
            await broker.advance(600)

        assert not broker.dead_letters("orders")
        assert len(done) == 50 + messages
        # About one for each pause.
        assert tried < 50 + 64 + 40 + DAY_S / 60


async def test_an_outage_with_breaks_costs_no_message_its_life() -> None:
    """The downstream comes back for a moment again and again, and breakers open each time."""
    up, done = True, set()
    queues = {
        "orders": {
            "lease": 3_600,
            "breaker": {"failure_rate": 0.5, "window": 10, "reset_timeout": 30},
            "max_attempts": 5,
        }
    }

    @marq.handler("orders")
    async def handle(message: marq.Message) -> None:
        if not up:
            raise ConnectionError("the downstream is away")
        done.add(message.value)

    async with Broker(queues=queues) as broker, broker.worker(handle):
        async with broker.producer() as producer:
            for hour in range(12):
                up = False
                await producer.send_many("orders", [b"%d-%d" % (hour, number) for number in range(30)])
                await broker.advance(3_300)
                up = True
                await broker.advance(300)
            await broker.advance(3_600)

        assert not broker.dead_letters("orders")
        assert len(done) == 12 * 30
