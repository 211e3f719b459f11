"""Queues that live on some partitions of the messages topic, on a real broker: how they are read, and how they move."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor

import marq
import marq.kafka.group_reader
from marq.settings.client import ClientSettings
from marq.settings.placements import subset
from marq.wire.markers import Release, Source
from marq.wire.names import Names
from marq_worker.owner.placement_keeper import PlacementKeeper
from tests.client.waiting import read_all, read_markers, until
from tests.conformance.receiving import Served

PARTITIONS = 8
GRACE_S = 1.0


@pytest.fixture
async def queues(servers: str, prefix: str) -> AsyncIterator[marq.Queues]:
    # Before any other client makes the topics.
    async with marq.Queues(servers, prefix=prefix, partitions=PARTITIONS) as queues:
        yield queues


@pytest.fixture
async def keeper(servers: str, prefix: str, queues: marq.Queues) -> AsyncIterator[None]:
    """What a worker does for placements, with less patience."""
    client = ClientSettings.read(servers, {"prefix": prefix}, owner="test")
    async with PlacementKeeper(client, queues, lambda: True, look_s=0.1, grace_s=GRACE_S):
        yield


class Reading(Served):
    @property
    def partitions(self) -> set[int]:
        running = self.consumer._running
        assert running is not None
        reader = running._reader
        assert isinstance(reader, marq.kafka.group_reader.GroupReader)
        return {partition.partition for partition in reader._consumer.assignment()}


class Readers:
    """Consumers of one queue, and what all of them have got together."""

    def __init__(self, servers: str, prefix: str) -> None:
        # The shortest that a broker allows: members hear of each other within a third of it.
        self._client = {"bootstrap_servers": servers, "prefix": prefix, "session_timeout": 6}
        self.running: list[Reading] = []
        #: Those that were stopped, too.
        self._all: list[Reading] = []

    async def start(self, queue: str | None = None, **options: str) -> Reading:
        consumer = marq.Consumer(queue, **self._client, **options)  # type: ignore[arg-type]
        await consumer.start()
        self.running.append(Reading(consumer))
        self._all.append(self.running[-1])
        return self.running[-1]

    async def stop(self) -> None:
        await asyncio.gather(*[member.stop() for member in self.running])
        self.running.clear()

    @property
    def seen(self) -> list[bytes]:
        return [value for member in self._all for _, value in member.seen]

    @property
    def partitions(self) -> list[int]:
        return sorted(partition for member in self.running for partition in member.partitions)

    async def have(self, values: list[bytes]) -> Counter[bytes]:
        await until(lambda: len(self.seen) >= len(values))
        return Counter(self.seen)


@pytest.fixture
async def readers(servers: str, prefix: str) -> AsyncIterator[Readers]:
    readers = Readers(servers, prefix)
    yield readers
    await readers.stop()


def of(queue: str, count: int) -> list[int]:
    found = subset(queue, PARTITIONS, count)
    assert found is not None
    return list(found)


def values(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


async def released(servers: str, prefix: str) -> list[bytes]:
    """Return the messages that a stopped consumer had prefetched: a tracker would redeliver them, but none runs."""
    names = Names(prefix)
    places = {
        (batch.source, offset)
        for batch in await read_markers(servers, names.markers)
        if isinstance(batch, Release)
        for offset in batch.offsets
    }
    records: list[Any] = await read_all(servers, names.messages)
    return [record.value for record in records if (Source(record.topic, record.partition), record.offset) in places]


async def where(servers: str, prefix: str, queue: str) -> Counter[int]:
    records = await read_all(servers, Names(prefix).messages)
    return Counter(record.partition for record in records if record.key == queue.encode())  # type: ignore[attr-defined]


async def test_messages_with_keys_can_be_sent_as_soon_as_a_worker_owns_the_first_partition(
    servers: str, prefix: str, queues: marq.Queues, producer: marq.Producer
) -> None:
    await queues.change("q", ordering="key")
    client, looks = ClientSettings.read(servers, {"prefix": prefix}, owner="test"), 0

    def keeps() -> bool:
        nonlocal looks
        looks += 1
        return looks > 1

    async with PlacementKeeper(client, queues, keeps, look_s=3_600):
        await producer.send("q", b"one", ordering_key="key")


@pytest.mark.usefixtures("keeper")
async def test_a_new_queue_is_soon_sent_to_and_read_on_its_partitions_alone(
    servers: str, prefix: str, queues: marq.Queues, producer: marq.Producer, readers: Readers
) -> None:
    for name, group in (("a", "g"), ("b", "g"), ("c", None)):
        await queues.change(name, partitions=1, group=group)
    await until(lambda: all(queues.definitions.placement(name).reads == tuple(of(name, 1)) for name in "abc"))

    await producer.send_many("a", values(20))
    await producer.send_many("b", values(20, 20))
    group, alone = await readers.start(group="g"), await readers.start("c")

    assert await readers.have(values(40)) == Counter(values(40))
    assert group.partitions == {*of("a", 1), *of("b", 1)}
    assert alone.partitions == set(of("c", 1))
    assert await where(servers, prefix, "a") == {of("a", 1)[0]: 20}


@pytest.mark.usefixtures("keeper")
async def test_a_queue_that_moves_under_load_again_and_again_loses_and_doubles_nothing(
    servers: str, prefix: str, queues: marq.Queues, producer: marq.Producer, readers: Readers
) -> None:
    sent: list[bytes] = []
    enough = asyncio.Event()

    async def send() -> None:
        while not enough.is_set():
            batch = values(20, len(sent))
            await producer.send_many("q", batch)
            sent.extend(batch)
            await asyncio.sleep(0.005)

    sending = asyncio.create_task(send())
    first = await readers.start("q")
    await readers.start("q")

    await queues.change("q", partitions=2)
    await until(lambda: readers.partitions == of("q", 2))
    await queues.change("q", partitions=4)
    await until(lambda: readers.partitions == sorted(of("q", 4)))
    # During a move, one consumer leaves and another one joins.
    await queues.change("q", partitions=1)
    readers.running.remove(first)
    await first.stop()
    await readers.start("q")
    await until(lambda: readers.partitions == of("q", 1))
    await queues.change("q", partitions=None)
    await until(lambda: readers.partitions == list(range(PARTITIONS)))
    enough.set()
    await sending

    delivered = Counter(sent) - Counter(await released(servers, prefix))
    assert await readers.have(list(delivered)) == delivered


@pytest.mark.usefixtures("keeper")
async def test_consumers_that_were_away_while_a_queue_moved_twice_find_everything(
    queues: marq.Queues, producer: marq.Producer, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marq_worker.owner.placement_keeper.MAX_GAP", 20)
    await producer.send_many("q", values(400))
    await queues.change("q", partitions=2)
    await until(lambda: queues.definitions.placement("q").sends == tuple(of("q", 2)))
    await producer.send_many("q", values(100, 400))
    await until(lambda: queues.definitions.placement("q").ends is not None)
    await queues.change("q", partitions=1)
    await until(lambda: queues.definitions.placement("q").sends == tuple(of("q", 1)))
    await producer.send_many("q", values(100, 500))
    await until(lambda: queues.definitions.placement("q").ends is not None)
    assert queues.definitions.placement("q").reads is None

    await readers.start("q")

    assert await readers.have(values(600)) == Counter(values(600))
    await until(lambda: readers.partitions == of("q", 1))
    assert Counter(readers.seen) == Counter(values(600))


@pytest.mark.usefixtures("keeper")
async def test_the_ends_of_transactions_which_no_consumer_commits_do_not_hold_a_move_up(
    servers: str, prefix: str, queues: marq.Queues, readers: Readers
) -> None:
    messages = Names(prefix).messages
    async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=f"{prefix}-x") as copies:
        for partition in range(PARTITIONS):
            async with copies.transaction():
                await copies.send(messages, b"%d" % partition, b"q", partition=partition)
    await readers.start("q")
    assert await readers.have(values(PARTITIONS)) == Counter(values(PARTITIONS))

    await queues.change("q", partitions=1)

    await until(lambda: readers.partitions == of("q", 1))


@pytest.mark.usefixtures("keeper")
async def test_a_group_in_which_an_older_member_leads_reads_all(
    queues: marq.Queues, producer: marq.Producer, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queues.change("q", partitions=1)
    await until(lambda: queues.definitions.placement("q").reads == tuple(of("q", 1)))
    with monkeypatch.context() as older:
        older.setattr(marq.kafka.group_reader, "SpreadAssignor", lambda *_: RoundRobinPartitionAssignor)
        former = await readers.start("q")
    await readers.start("q")
    await until(lambda: readers.partitions == list(range(PARTITIONS)))

    readers.running.remove(former)
    await former.stop()
    await until(lambda: readers.partitions == of("q", 1))
    await producer.send_many("q", values(10))

    assert await readers.have(values(10)) == Counter(values(10))
