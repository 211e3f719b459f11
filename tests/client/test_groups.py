"""Groups of queues whose members start, hear of changes at different times, or are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

import marq
from marq.kafka.group_reader import Assignee, GroupReader
from marq.kafka.inspector import Inspector
from marq.settings.client import ClientSettings
from tests.client.waiting import until
from tests.conformance.receiving import Served, numbered


@pytest.fixture
async def serve(servers: str, prefix: str) -> AsyncIterator[Callable[[], Awaitable[Served]]]:
    """Start members of the group "g"."""
    running: list[Served] = []

    async def start() -> Served:
        consumer = marq.Consumer(group="g", bootstrap_servers=servers, prefix=prefix)
        await consumer.start()
        running.append(Served(consumer))
        return running[-1]

    yield start
    await asyncio.gather(*[served.stop() for served in running])


async def send(producer: marq.Producer, *messages: tuple[str, bytes]) -> None:
    await asyncio.gather(*[producer.send(queue, value) for queue, value in messages])


async def test_a_queue_that_joins_while_a_consumer_starts_is_served(producer, queues, serve, monkeypatch) -> None:
    await queues.change("a", group="g")
    await producer.send("late", b"0")
    start = GroupReader.start

    async def start_slowly(reader: GroupReader, assignee: Assignee) -> None:
        changing.set()
        await changed.wait()
        await start(reader, assignee)

    changing, changed = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(GroupReader, "start", start_slowly)
    starting = asyncio.create_task(serve())
    async with asyncio.timeout(60):
        await changing.wait()
        await queues.change("late", group="g")
        changed.set()
        served = await starting

    await until(lambda: served.seen)
    assert served.seen == [("late", b"0")]


async def test_two_members_that_hear_of_a_queue_at_different_times_lose_nothing(producer, queues, serve) -> None:
    await queues.change("a", group="g")
    first, second = await serve(), await serve()
    await send(producer, *numbered("a", 0, 100), *numbered("b", 0, 100))
    await until(lambda: len(first.seen) + len(second.seen) >= 100)

    change = asyncio.create_task(queues.change("b", group="g"))
    await send(producer, *numbered("a", 100, 200), *numbered("b", 100, 200))
    await change
    await until(lambda: len({*first.seen, *second.seen}) >= 400)

    assert {*first.seen, *second.seen} == {*numbered("a", 0, 200), *numbered("b", 0, 200)}


async def test_finished_messages_never_count_as_waiting_after_a_change_of_group(
    producer, queues, serve, servers: str, prefix: str
) -> None:
    settings = ClientSettings.read(servers, {"prefix": prefix}, owner="test")
    await queues.change("a", group="g")
    await queues.change("b", group="g")
    await send(producer, *numbered("a", 0, 20), *numbered("b", 0, 5))
    served = await serve()
    await until(lambda: len(served.seen) >= 25)
    await served.stop()

    async def waiting() -> tuple[int, int]:
        inspector = Inspector(settings, queues.definitions)
        counted, (peeked, _) = await inspector.waiting(["a"]), await inspector.peek("a", 100)
        return counted.counts["a"], len(peeked)

    assert await waiting() == (0, 0)
    for number, group in enumerate([None, "elsewhere", "g"]):
        await queues.change("a", group=group)

        assert await waiting() == (number, number), group

        await producer.send("a", b"new")
        assert await waiting() == (number + 1, number + 1), group
