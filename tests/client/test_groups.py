"""Groups of queues, and queues with topics of their own, on a real broker."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

import marq
from marq.core.names import Names
from marq.inspector import Inspector
from marq.reader import Assignee, GroupReader
from marq.settings import ClientSettings
from tests.client.tracking import tracking
from tests.client.waiting import until

#: In which nothing more must come.
QUIET_S = 1.5


class Served:
    """A consumer that acks whatever comes, and what came."""

    def __init__(self, consumer: marq.Consumer) -> None:
        self.consumer = consumer
        self.seen: list[tuple[str, bytes]] = []
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        async for message in self.consumer:
            async with message:
                self.seen.append((message.queue, message.value))

    async def has(self, count: int) -> Counter[tuple[str, bytes]]:
        await until(lambda: len(self.seen) >= count or self._task.done())
        return Counter(self.seen)

    async def error(self) -> BaseException:
        """Wait for the error that ends it."""
        async with asyncio.timeout(60):
            await asyncio.wait([self._task])
        error = self._task.exception()
        assert error is not None
        return error

    async def stop(self) -> None:
        await self.consumer.stop()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture
async def producer(servers: str, prefix: str) -> AsyncIterator[marq.Producer]:
    async with marq.Producer(servers, prefix=prefix) as producer:
        yield producer


@pytest.fixture
async def queues(servers: str, prefix: str) -> AsyncIterator[marq.Queues]:
    async with marq.Queues(servers, prefix=prefix) as queues:
        yield queues


Serve = Callable[..., "asyncio.Future[Served]"]


@pytest.fixture
async def serve(servers: str, prefix: str) -> AsyncIterator[Callable[..., object]]:
    running: list[Served] = []

    async def start(*names: str, **options: str) -> Served:
        consumer = marq.Consumer(*names, bootstrap_servers=servers, prefix=prefix, **options)
        await consumer.start()
        running.append(Served(consumer))
        return running[-1]

    yield start
    await asyncio.gather(*[served.stop() for served in running])


def numbered(queue: str, count: int, start: int = 0) -> list[tuple[str, bytes]]:
    return [(queue, b"%d" % number) for number in range(start, start + count)]


async def send(producer: marq.Producer, *messages: tuple[str, bytes]) -> None:
    await asyncio.gather(*[producer.send(queue, value) for queue, value in messages])


async def test_a_group_serves_all_of_its_queues_and_no_other(producer, queues, serve) -> None:
    await queues.change("a", group="g")
    await queues.change("b", group="g")
    await send(producer, *numbered("a", 50), *numbered("b", 50), *numbered("c", 50))

    served = await serve(group="g")

    assert await served.has(100) == Counter(numbered("a", 50) + numbered("b", 50))


async def test_a_queue_that_joins_a_running_group_misses_nothing_and_the_others_get_nothing_twice(
    producer, queues, serve
) -> None:
    await queues.change("a", group="g")
    await send(producer, *numbered("a", 50), *numbered("late", 50))
    served = await serve(group="g")
    assert await served.has(50) == Counter(numbered("a", 50))

    await queues.change("late", group="g")
    await send(producer, *numbered("a", 50, 50), *numbered("late", 50, 50))

    assert await served.has(200) == Counter(numbered("a", 100) + numbered("late", 100))


async def test_a_queue_that_joins_while_a_consumer_starts_is_served(
    producer, queues, servers, prefix, monkeypatch
) -> None:
    await queues.change("a", group="g")
    await producer.send("late", b"0")
    consumer = marq.Consumer(group="g", bootstrap_servers=servers, prefix=prefix)
    start = GroupReader.start

    async def start_slowly(reader: GroupReader, assignee: Assignee) -> None:
        changing.set()
        await changed.wait()
        await start(reader, assignee)

    changing, changed = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(GroupReader, "start", start_slowly)
    starting = asyncio.create_task(consumer.start())
    async with asyncio.timeout(60):
        await changing.wait()
        await queues.change("late", group="g")
        changed.set()
        await starting
    served = Served(consumer)

    try:
        assert await served.has(1) == Counter({("late", b"0"): 1})
    finally:
        await served.stop()


async def test_a_queue_that_moves_to_another_group_goes_on_where_it_was(producer, queues, serve) -> None:
    await queues.change("a", group="old")
    await queues.change("b", group="old")
    await send(producer, *numbered("a", 50), *numbered("b", 50))
    old = await serve(group="old")
    await old.has(100)

    await queues.change("b", group="new")
    await send(producer, *numbered("a", 50, 50), *numbered("b", 50, 50))
    new = await serve(group="new")
    await old.has(150)

    assert await new.has(50) == Counter(numbered("b", 50, 50))
    assert Counter(old.seen) == Counter(numbered("a", 100) + numbered("b", 50))


async def test_a_queue_that_leaves_its_own_group_for_a_named_one_goes_on_there(producer, queues, serve) -> None:
    await send(producer, *numbered("a", 50))
    own = await serve("a")
    await own.has(50)

    await queues.change("a", group="g")
    await queues.change("b", group="g")
    error = await own.error()
    await own.stop()
    await send(producer, *numbered("a", 50, 50))
    named = await serve(group="g")

    assert isinstance(error, marq.ConfigError)
    assert "Consumer(group='g')" in str(error)
    assert await named.has(50) == Counter(numbered("a", 50, 50))


async def test_two_members_that_hear_of_a_queue_at_different_times_lose_nothing(producer, queues, serve) -> None:
    await queues.change("a", group="g")
    first, second = await serve(group="g"), await serve(group="g")
    await send(producer, *numbered("a", 100), *numbered("b", 100))
    await until(lambda: len(first.seen) + len(second.seen) >= 100)

    change = asyncio.create_task(queues.change("b", group="g"))
    await send(producer, *numbered("a", 100, 100), *numbered("b", 100, 100))
    await change
    await until(lambda: len({*first.seen, *second.seen}) >= 400)

    assert {*first.seen, *second.seen} == {*numbered("a", 200), *numbered("b", 200)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "expected a queue's name"),
        ({"queue": "a", "group": "g"}, "expected one of them"),
        ({"group": ""}, "group"),
    ],
)
def test_a_consumer_has_a_queue_or_a_group(arguments: dict[str, str], words: str) -> None:
    with pytest.raises(marq.ConfigError, match=words):
        marq.Consumer(**arguments)


async def test_a_consumer_of_a_part_of_a_group_is_told_what_to_do(queues, servers, prefix) -> None:
    await queues.change("a", group="g")
    await queues.change("b", group="g")

    with pytest.raises(marq.ConfigError, match=r"belongs to group 'g' together with 'b'.*send it to two queues"):
        await marq.Consumer("a", servers, prefix=prefix).start()


async def test_the_only_queue_of_a_group_may_be_named_and_shares_the_work_of_the_group(producer, queues, serve) -> None:
    await queues.change("a", group="g")
    by_name, by_group = await serve("a"), await serve(group="g")
    await send(producer, *numbered("a", 200))

    await until(lambda: len(by_name.seen) + len(by_group.seen) >= 200)

    assert Counter(by_name.seen + by_group.seen) == Counter(numbered("a", 200))


async def test_a_queue_with_a_handler_is_not_for_consumers(queues, servers, prefix) -> None:
    await queues.change("a", handler="module:function")

    with pytest.raises(marq.ConfigError, match=r"has the handler 'module:function'"):
        await marq.Consumer("a", servers, prefix=prefix).start()


async def test_a_group_that_no_queue_names_is_an_error_that_says_which_there_are(queues, servers, prefix) -> None:
    await queues.change("a", group="g")

    with pytest.raises(marq.ConfigError, match=r"no queue's settings name it \(groups that queues name: 'g'\)"):
        await marq.Consumer(group="gg", bootstrap_servers=servers, prefix=prefix).start()


# --- own topics -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def orders(servers: str, prefix: str) -> AsyncIterator[str]:
    """A topic of somebody else's, with two partitions."""
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    await admin.create_topics([NewTopic(f"{prefix}-orders", 2, 1)])
    yield f"{prefix}-orders"
    await admin.close()


@pytest.fixture
async def kafka(servers: str) -> AsyncIterator[AIOKafkaProducer]:
    async with AIOKafkaProducer(bootstrap_servers=servers) as kafka:
        yield kafka


async def test_a_queue_with_a_topic_of_its_own_gets_what_plain_producers_wrote_before_and_write_after(
    orders, kafka, queues, servers, prefix
) -> None:
    for number in range(10):
        await kafka.send_and_wait(orders, b"%d" % number, key=b"customer", headers=[("tenant", b"acme")])
    await queues.change("orders", topic=orders)

    async with marq.Consumer("orders", servers, prefix=prefix) as consumer:
        await kafka.send_and_wait(orders, b"10")
        messages: list[marq.Message] = []
        async with asyncio.timeout(60):
            while len(messages) < 11:
                messages += await consumer.receive(11)
        await consumer.ack(messages)

    assert sorted(int(message.value) for message in messages) == list(range(11))
    assert {message.key for message in messages} == {b"customer", None}
    assert [message.headers for message in messages].count({"tenant": b"acme"}) == 10
    assert {message.id.split("/")[0] for message in messages} == {orders}


async def test_what_a_producer_sends_to_such_a_queue_goes_to_its_topic(orders, producer, queues, serve) -> None:
    await producer.send("orders", b"before it had one")
    await queues.change("orders", topic=orders)

    async with asyncio.timeout(60):
        while (await producer.send("orders", b"x")).topic != orders:
            pass  # the producer has not heard of it yet
    served = await serve("orders")

    found = await served.has(2)
    assert found["orders", b"before it had one"] == 1
    assert found["orders", b"x"] >= 1


async def test_a_redelivery_keeps_key_and_headers(orders, kafka, queues, servers, names: Names, prefix) -> None:
    await queues.change("orders", topic=orders)
    await kafka.send_and_wait(orders, b"value", key=b"customer", headers=[("tenant", b"acme")])

    async with tracking(servers, names), marq.Consumer("orders", servers, prefix=prefix) as consumer:
        [first] = await consumer.receive(1)
        await first.release(0)
        [second] = await consumer.receive(1)

    assert (second.attempt, second.key, second.headers) == (2, b"customer", {"tenant": b"acme"})
    assert second.id == first.id


async def test_a_topic_that_does_not_exist_is_named_and_not_made(queues, servers, prefix) -> None:
    await queues.change("orders", topic=f"{prefix}-missing")

    with pytest.raises(marq.ConfigError, match=f"topic {prefix}-missing does not exist"):
        await marq.Consumer("orders", servers, prefix=prefix).start()
    async with marq.Producer(servers, prefix=prefix) as producer:
        with pytest.raises(marq.ConfigError, match=f"topic {prefix}-missing does not exist"):
            await producer.send("orders", b"x")


async def test_a_running_group_takes_up_a_queue_with_a_topic_of_its_own(orders, kafka, producer, queues, serve) -> None:
    await queues.change("a", group="g")
    await send(producer, *numbered("a", 10))
    served = await serve(group="g")
    await served.has(10)
    await kafka.send_and_wait(orders, b"order")

    await queues.change("orders", topic=orders, group="g")

    assert (await served.has(11))["orders", b"order"] == 1
    assert Counter(served.seen) == Counter([*numbered("a", 10), ("orders", b"order")])


async def test_messages_that_a_queue_has_had_never_count_as_waiting_whatever_its_group_becomes(
    producer, queues, serve, servers: str, prefix: str
) -> None:
    settings = ClientSettings.read(servers, {"prefix": prefix}, owner="test")
    await queues.change("a", group="g")
    await queues.change("b", group="g")
    await send(producer, *numbered("a", 20), *numbered("b", 5))
    served = await serve(group="g")
    await served.has(25)
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
