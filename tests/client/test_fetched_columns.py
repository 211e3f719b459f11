"""What aiokafka has fetched, taken as columns: the same records as it would give, and the same errors."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.consumer.fetcher import FetchError
from aiokafka.errors import CorruptRecordException, TopicAuthorizationFailedError

import marq
from marq.kafka.fetched_columns import fetch_records
from marq.kafka.records import Records
from marq.kafka.topics import ensure_topics
from marq.settings.client import ClientSettings
from marq.wire.markers import Source
from tests.client.waiting import until


@pytest.fixture
async def topic(servers, prefix, names) -> str:
    await ensure_topics(ClientSettings.read(servers, {"prefix": prefix, "partitions": 2}, environment={}))
    return names.messages


@pytest.fixture
async def make_consumer(servers, topic):
    consumers: list[AIOKafkaConsumer] = []

    async def make(**options) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(bootstrap_servers=servers, enable_auto_commit=False, **options)
        consumers.append(consumer)
        await consumer.start()
        consumer.assign([TopicPartition(topic, 0), TopicPartition(topic, 1)])
        await consumer.seek_to_beginning()
        return consumer

    yield make
    await asyncio.gather(*[consumer.stop() for consumer in consumers])


async def send(servers: str, topic: str, count: int, *, start: int = 0, compression: str | None = None) -> None:
    async with AIOKafkaProducer(bootstrap_servers=servers, compression_type=compression, linger_ms=20) as producer:
        await asyncio.gather(
            *[
                await producer.send(
                    topic,
                    None if number % 7 == 0 else b"value %d" % number,
                    None if number % 7 == 1 else b"key %d" % number,
                    partition=number % 2,
                    headers=[("h", b"%d" % number), ("none", None)] if number % 50 == 1 else None,
                )
                for number in range(start, start + count)
            ]
        )


async def all_of(consumer: AIOKafkaConsumer, count: int, at_most: int) -> dict[Source, list[Records]]:
    found: dict[Source, list[Records]] = {}
    async with asyncio.timeout(60):
        while sum(len(part) for parts in found.values() for part in parts) < count:
            for source, records in (await fetch_records(consumer, 1.0, at_most)).items():
                found.setdefault(source, []).append(records)
    return found


async def test_the_records_are_those_that_aiokafka_gives(servers, topic, make_consumer) -> None:
    await send(servers, topic, 600)
    await send(servers, topic, 600, start=600, compression="gzip")
    consumer, other = await make_consumer(), await make_consumer()

    found = await all_of(consumer, 1_200, 100)

    for source, parts in found.items():
        partition, expected = TopicPartition(*source), []
        async with asyncio.timeout(60):
            while len(expected) < 600:
                expected += (await other.getmany(partition, timeout_ms=1_000)).get(partition, [])
        records = Records.joined(parts)
        assert isinstance(records.offsets, range)
        assert [(*record[:4], tuple(record.headers)) for record in records] == [
            (record.offset, record.timestamp, record.key, record.value, record.headers) for record in expected
        ]
        assert await consumer.position(partition) == 600


async def test_a_read_goes_on_from_the_middle_of_a_batch(servers, topic, make_consumer) -> None:
    await send(servers, topic, 400)
    consumer = await make_consumer()
    consumer.seek(TopicPartition(topic, 0), 150)
    consumer.seek(TopicPartition(topic, 1), 200)

    found = await all_of(consumer, 50, 10_000)

    assert {source: Records.joined(parts).offsets for source, parts in found.items()} == {
        Source(topic, 0): range(150, 200)
    }


@pytest.mark.parametrize("committed", [False, True])
async def test_aborted_records_are_seen_unless_only_committed_ones_are_asked_for(
    servers, topic, make_consumer, committed
) -> None:
    async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=f"{topic}-t") as producer:
        for number, fate in enumerate(["commit", "abort", "commit"]):
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"%d" % number, partition=0)
            await (producer.commit_transaction() if fate == "commit" else producer.abort_transaction())
    consumer = await make_consumer(isolation_level="read_committed" if committed else "read_uncommitted")

    expected = [b"0", b"2"] if committed else [b"0", b"1", b"2"]
    found = await all_of(consumer, len(expected), 1_000)

    assert Records.joined(found[Source(topic, 0)]).values == expected


async def test_nothing_comes_after_the_wait_and_what_comes_ends_it(servers, topic, make_consumer) -> None:
    consumer = await make_consumer()
    assert await fetch_records(consumer, 0.0, 100) == {}

    waiting = asyncio.create_task(all_of(consumer, 1, 100))
    await send(servers, topic, 1)

    assert [len(parts) for parts in (await waiting).values()] == [1]


async def test_a_wait_can_be_ended(topic, make_consumer) -> None:
    woken = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(fetch_records(await make_consumer(), 3600.0, 100, woken))
    await asyncio.sleep(0)
    woken.set_result(None)

    assert await waiting == {}


async def test_what_is_paused_is_not_taken(servers, topic, make_consumer) -> None:
    await send(servers, topic, 20)
    consumer = await make_consumer()
    consumer.pause(TopicPartition(topic, 0))

    found = await all_of(consumer, 10, 100)
    assert list(found) == [Source(topic, 1)]
    consumer.resume(TopicPartition(topic, 0))

    assert Records.joined((await all_of(consumer, 10, 100))[Source(topic, 0)]).offsets == range(10)


async def test_a_damaged_batch_is_told_and_read_again(servers, topic, make_consumer) -> None:
    await send(servers, topic, 2)
    consumer = await make_consumer()

    class Damaged:
        """Record batches of which the next one has a wrong CRC."""

        def has_next(self) -> bool:
            return True

        def next_batch(self) -> Damaged:
            return self

        def validate_crc(self) -> bool:
            return False

    await until(lambda: len(consumer._fetcher._records) == 2)
    for result in consumer._fetcher._records.values():
        result._partition_records._records = Damaged()

    for _ in range(2):
        with pytest.raises(CorruptRecordException, match="wrong CRC"):
            await fetch_records(consumer, 1.0, 100)

    assert {len(parts) for parts in (await all_of(consumer, 2, 100)).values()} == {1}


async def test_an_error_of_the_broker_is_raised_once_what_was_read_before_is_given(
    servers, topic, make_consumer
) -> None:
    await send(servers, topic, 2)
    consumer = await make_consumer()
    await until(lambda: len(consumer._fetcher._records) == 2)
    last = list(consumer._fetcher._records)[-1]
    consumer._fetcher._records[last] = FetchError(error=TopicAuthorizationFailedError(topic), backoff=0)

    assert len(await fetch_records(consumer, 1.0, 100)) == 1
    with pytest.raises(TopicAuthorizationFailedError):
        await fetch_records(consumer, 1.0, 100)


async def test_a_consumer_reads_what_plain_producers_have_compressed_in_any_way(servers, names) -> None:
    codecs = ["gzip", "lz4", "snappy", "zstd"]
    async with marq.Producer(servers, prefix=names.prefix):
        pass  # it makes the topics
    for codec in codecs:
        async with AIOKafkaProducer(bootstrap_servers=servers, compression_type=codec) as producer:
            await producer.send_and_wait(names.messages, codec.encode() * 500, b"q")

    async with marq.Consumer("q", servers, prefix=names.prefix) as consumer:
        found = set()
        async with asyncio.timeout(60):
            while len(found) < len(codecs):
                found |= {message.value for message in await consumer.receive(wait=1)}

    assert found == {codec.encode() * 500 for codec in codecs}
