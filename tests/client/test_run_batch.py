"""Handlers that take lists of messages, and decorated handlers, on a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

import marq
from marq.core.backoff import Backoff
from marq.core.markers import Ack, Release
from marq.core.names import Names
from tests.client.tracking import tracking
from tests.client.waiting import LIMIT_S, read_all, read_markers, until


@pytest.fixture
async def producer(servers: str, prefix: str) -> AsyncIterator[marq.Producer]:
    async with marq.Producer(servers, prefix=prefix) as producer:
        yield producer


@pytest.fixture
async def make_consumer(servers: str, prefix: str) -> AsyncIterator[Callable[..., marq.Consumer]]:
    consumers: list[marq.Consumer] = []

    def make(queue: str | None = "q", **options) -> marq.Consumer:
        consumers.append(marq.Consumer(queue, servers, prefix=prefix, **options))
        return consumers[-1]

    yield make
    await asyncio.gather(*[consumer.stop() for consumer in consumers])


def numbers(start: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, end)]


async def test_all_messages_come_once_in_lists_and_each_is_acked(producer, make_consumer, servers, names) -> None:
    await producer.send_many("q", numbers(0, 20_000))
    seen: list[int] = []
    sizes: list[int] = []

    async def handler(messages: list[marq.Message]) -> None:
        sizes.append(len(messages))
        seen.extend(int(message.value) for message in messages)

    consumer = make_consumer()
    await consumer.start()
    running = asyncio.create_task(consumer.run_batch(handler, max_messages=500, concurrency=2))
    await until(lambda: len(seen) >= 20_000 or running.done())
    await consumer.stop()
    await running

    assert sorted(seen) == list(range(20_000))
    assert max(sizes) == 500
    markers = await read_markers(servers, names.markers)
    assert sum(len(each.offsets) for each in markers if isinstance(each, Ack)) == 20_000


async def test_a_plain_function_takes_lists_in_a_thread(producer, make_consumer) -> None:
    await producer.send_many("q", numbers(0, 100))
    seen: list[bytes] = []

    consumer = make_consumer()
    await consumer.start()
    running = asyncio.create_task(consumer.run_batch(lambda messages: seen.extend(each.value for each in messages)))
    await until(lambda: len(seen) == 100)
    await consumer.stop()
    await running


async def test_a_list_that_fails_comes_back_and_what_it_had_finished_does_not(
    producer, make_consumer, servers, names
) -> None:
    await producer.send_many("q", numbers(0, 100))
    delivered: list[tuple[int, int]] = []

    async def handler(messages: list[marq.Message]) -> None:
        delivered.extend((int(message.value), message.attempt) for message in messages)
        for message in messages:
            if int(message.value) % 10 == 0:
                await message.ack(wait=False)
            elif int(message.value) % 10 == 1:
                await message.reject("no use", wait=False)
        if any(message.attempt == 1 for message in messages):
            raise RuntimeError("no connection")

    async with tracking(servers, names, backoff=Backoff(base_ms=10, jitter=False)) as tracker:
        consumer = make_consumer()
        await consumer.start()
        running = asyncio.create_task(consumer.run_batch(handler))
        await until(lambda: tracker.counts("q").get("acked") == 90 and tracker.open == 0)
        await consumer.stop()
        await running
        dead = await read_all(servers, names.dead_letters)

    assert sorted(delivered) == sorted(
        [(number, 1) for number in range(100)] + [(number, 2) for number in range(100) if number % 10 > 1]
    )
    assert len(dead) == 10


async def test_a_stop_releases_the_list_of_a_handler_that_runs_at_once_and_uncounted(
    producer, make_consumer, servers, names
) -> None:
    await producer.send_many("q", numbers(0, 100))
    holding = asyncio.Event()

    async def stuck(messages: list[marq.Message]) -> None:
        holding.set()
        await asyncio.Event().wait()

    async with tracking(servers, names):
        one, two = make_consumer(grace=0), make_consumer()
        await one.start()
        running = asyncio.create_task(one.run_batch(stuck, max_messages=10))
        await asyncio.wait_for(holding.wait(), LIMIT_S)
        await one.stop()
        await running
        await two.start()
        messages: list[marq.Message] = []
        async with asyncio.timeout(LIMIT_S):
            while len(messages) < 100:
                messages += await two.receive(100, wait=1)

    assert {message.attempt for message in messages} == {1}
    assert len({message.value for message in messages}) == 100
    releases = [each for each in await read_markers(servers, names.markers) if isinstance(each, Release)]
    assert any(not each.counted for each in releases)


async def test_a_list_may_have_messages_of_all_queues_of_a_group(producer, make_consumer, servers, prefix) -> None:
    async with marq.Queues(servers, prefix=prefix) as queues:
        for queue in ("a", "b"):
            await queues.change(queue, group="g")
    await producer.send_many("a", numbers(0, 50))
    await producer.send_many("b", numbers(50, 100))
    seen: set[tuple[str, int]] = set()

    async def handler(messages: list[marq.Message]) -> None:
        seen.update((message.queue, int(message.value)) for message in messages)

    consumer = make_consumer(None, group="g")
    await consumer.start()
    running = asyncio.create_task(consumer.run_batch(handler))
    await until(lambda: len(seen) == 100 or running.done())
    await consumer.stop()
    await running

    assert seen == {("a", number) for number in range(50)} | {("b", number) for number in range(50, 100)}


async def test_run_takes_codec_and_concurrency_from_the_decorator(producer, make_consumer) -> None:
    running_now, most_running, seen = 0, 0, []
    three_run = asyncio.Event()

    @marq.handler("q", concurrency=3, codec=marq.JSON)
    async def handler(message: marq.Message) -> None:
        nonlocal running_now, most_running
        running_now += 1
        most_running = max(most_running, running_now)
        if running_now == 3:
            three_run.set()
        await asyncio.wait_for(three_run.wait(), LIMIT_S)
        running_now -= 1
        seen.append(message.value["number"])

    await producer.send_many("q", [b'{"number": %d}' % number for number in range(30)])
    consumer = make_consumer()
    await consumer.start()
    running = asyncio.create_task(consumer.run(handler))
    await until(lambda: len(seen) == 30 or running.done())
    await consumer.stop()
    await running

    assert sorted(seen) == list(range(30))
    assert most_running == 3


async def test_a_handler_of_another_queue_is_refused(make_consumer, names: Names) -> None:
    @marq.handler("emails")
    async def handler(message: marq.Message) -> None: ...

    async with make_consumer() as consumer:
        with pytest.raises(marq.ConfigError, match=r"handler of queue 'emails'.*messages of queue 'q'"):
            await consumer.run(handler)
        with pytest.raises(marq.ConfigError, match="takes one message; use run"):
            await consumer.run_batch(handler)
        with pytest.raises(marq.ConfigError, match="expected a function that takes a list of messages"):
            await consumer.run_batch(lambda: None)
        with pytest.raises(marq.ConfigError, match="max_messages=0"):
            await consumer.run_batch(print, max_messages=0)
