"""``transactional=True`` on a real broker: ACQUIRE and offset in one transaction, which fences former members."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

import marq
from marq.kafka.broker_clock import BrokerClock
from marq.kafka.committed_offsets import StartPosition, places
from marq.kafka.group_reader import GroupCommit, NotCommitted
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.protocol import Generation
from marq.kafka.queue_positions import Positions
from marq.kafka.queue_records import serving
from marq.kafka.transactions import MarkerTransactions
from marq.settings.client import ClientSettings
from marq.wire.marker_codec import decode, encode
from marq.wire.markers import Ack, Acquire, Source
from marq.wire.names import Names
from tests.client.waiting import LIMIT_S, read_markers, until
from tests.worker.harness import eventually, take

LIMIT_BYTES = 1_000_000
NewConsumer = Callable[..., marq.Consumer]


@pytest.fixture
def settings(servers: str, prefix: str) -> ClientSettings:
    return ClientSettings(servers, Names(prefix))


@pytest.fixture
async def producer(servers: str, prefix: str) -> AsyncIterator[marq.Producer]:
    async with marq.Producer(servers, prefix=prefix, partitions=1) as producer:
        yield producer


@pytest.fixture
async def new_consumer(producer: marq.Producer, servers: str, prefix: str) -> AsyncIterator[NewConsumer]:
    consumers: list[marq.Consumer] = []

    def new(**options: Any) -> marq.Consumer:
        consumers.append(marq.Consumer("q", servers, prefix=prefix, transactional=True, **options))
        return consumers[-1]

    yield new
    await asyncio.gather(*[consumer.stop() for consumer in consumers])


@pytest.fixture
async def new_transactions(settings: ClientSettings) -> AsyncIterator[Callable[[str], MarkerTransactions]]:
    made: list[MarkerTransactions] = []

    def new(member: str) -> MarkerTransactions:
        made.append(MarkerTransactions(settings, LIMIT_BYTES, settings.names.start_id("g", member), BrokerClock()))
        return made[-1]

    yield new
    await asyncio.gather(*[transactions.stop(1) for transactions in made])


async def place_now(settings: ClientSettings) -> StartPosition:
    """Where a member of the queue's group goes on; KafkaError while a transaction is open."""
    names = settings.names
    source = Source(names.messages, 0)
    return (await places(settings, names.group("q"), serving(names.messages, ["q"], {}), [source]))[source]


async def place(settings: ClientSettings) -> StartPosition:
    """The same where all transactions were ended: the broker ends one a moment after it says so."""

    async def look() -> StartPosition | None:
        with suppress(KafkaError):
            return await place_now(settings)
        return None

    found = await eventually(look)
    assert found is not None
    return found


async def committed_acks(servers: str, names: Names) -> int:
    """How many ACKs a reader of committed markers sees when no transaction is open any more."""
    partition = TopicPartition(names.markers, 0)
    options = {"bootstrap_servers": servers, "auto_offset_reset": "earliest"}
    all_records = AIOKafkaConsumer(**options)
    consumer = AIOKafkaConsumer(isolation_level="read_committed", **options)
    await all_records.start()
    await consumer.start()
    try:
        consumer.assign([partition])
        # The broker ends a transaction a moment after it says so; until then a reader of committed records stops there.
        end, found = (await all_records.end_offsets([partition]))[partition], 0
        async with asyncio.timeout(LIMIT_S):
            while await consumer.position(partition) < end:
                for batch in (await consumer.getmany(timeout_ms=200)).values():
                    found += sum(isinstance(decode(record.value), Ack) for record in batch)
        return found
    finally:
        await consumer.stop()
        await all_records.stop()


def records(names: Names) -> list[MarkerRecord]:
    return [MarkerRecord(0, encode(Ack("q", 1, Source(names.messages, 0), [0])))]


def commit(names: Names, generation: Generation, offset: int = 1) -> GroupCommit:
    offsets = {TopicPartition(names.messages, 0): OffsetAndMetadata(offset, Positions({"q": offset}).encode(offset))}
    return GroupCommit(names.group("q"), generation, offsets, {}, {})


def generation_of(consumer: marq.Consumer) -> Generation:
    coordinator = consumer._running._reader._consumer._coordinator
    return Generation(coordinator.generation, coordinator.member_id, None)


async def test_each_message_is_delivered_once_and_the_offset_has_the_positions_of_the_queues(
    producer, new_consumer, servers, settings
) -> None:
    await producer.send_many("q", [b"%d" % number for number in range(500)])
    consumer = new_consumer(max_in_flight=100)
    await consumer.start()

    seen = []
    while len(seen) < 500:
        messages = await take(consumer, 50)
        seen += [int(message.value) for message in messages]
        await consumer.ack(messages)

    assert sorted(seen) == list(range(500))
    assert await place(settings) == StartPosition(500, Positions({"q": 500}))
    acquired = [batch for batch in await read_markers(servers, settings.names.markers) if isinstance(batch, Acquire)]
    assert sum(len(batch.offsets) for batch in acquired) == 500


async def test_copies_of_an_aborted_transaction_are_not_delivered(
    producer, new_consumer, servers, names: Names
) -> None:
    """A tracker died with them: its successor sends them again, and a dead letter of each would follow on both."""
    tracker = AIOKafkaProducer(bootstrap_servers=servers, transactional_id=names.transactional_id(0))
    await tracker.start()
    try:
        await tracker.begin_transaction()
        await tracker.send_and_wait(names.messages, b"aborted", b"q", partition=0)
        await tracker.abort_transaction()
    finally:
        await tracker.stop()
    await producer.send("q", b"sent")
    consumer = new_consumer()
    await consumer.start()

    assert [message.value for message in await take(consumer, 1)] == [b"sent"]


async def test_the_group_refuses_a_former_member_and_nothing_of_its_transaction_is_seen(
    producer, new_consumer, new_transactions, servers, settings
) -> None:
    await producer.send_many("q", [b"value"] * 3)
    consumer, names = new_consumer(), settings.names
    await consumer.start()
    await take(consumer, 3)
    ours = generation_of(consumer)
    transactions = new_transactions("zombie")

    for generation in (ours._replace(number=ours.number - 1), ours._replace(member_id="somebody")):
        with pytest.raises(NotCommitted, match=r"refuses the commit: (ILLEGAL_GENERATION|UNKNOWN_MEMBER_ID)"):
            await transactions.write(records(names), commit(names, generation), LIMIT_S)

    assert (await place(settings)).start == 3
    # They are aborted at once, for trackers see nothing that comes after an open one.
    assert await committed_acks(servers, names) == 0
    await transactions.write(records(names), commit(names, ours, 2), LIMIT_S)
    assert (await place(settings)).start == 2
    assert await committed_acks(servers, names) == 1


async def test_a_member_that_was_thrown_out_does_not_pass_for_an_administrator(producer, new_consumer) -> None:
    await producer.send("q", b"value")
    consumer = new_consumer()
    await consumer.start()
    await take(consumer, 1)
    reader = consumer._running._reader

    reader._consumer._coordinator.reset_generation()

    with pytest.raises(NotCommitted, match="removed this member"):
        reader.commit_of({Source(*partition): 1 for partition in reader._consumer.assignment()})


async def test_the_next_owner_waits_for_an_open_transaction_which_a_restart_of_its_member_ends(
    producer, new_consumer, new_transactions, servers, settings, monkeypatch
) -> None:
    await producer.send_many("q", [b"value"] * 3)
    consumer, names = new_consumer(), settings.names
    await consumer.start()
    await take(consumer, 3)
    dead, hanging = new_transactions("named"), asyncio.Event()
    running = await dead._running()

    async def hang() -> None:
        hanging.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(running, "commit_transaction", hang)
    writing = asyncio.create_task(dead.write(records(names), commit(names, generation_of(consumer), 2), LIMIT_S))
    await asyncio.wait_for(hanging.wait(), LIMIT_S)
    with pytest.raises(KafkaError, match="open transaction of a former member"):
        await place_now(settings)
    # A process that was killed says nothing more.
    writing.cancel()
    await asyncio.wait([writing])
    running._txn_manager.state = None
    await new_transactions("named").start()

    assert (await place(settings)).start == 3
    assert await committed_acks(servers, names) == 0


async def test_after_an_unknown_outcome_the_messages_are_read_again_and_delivered_once(
    producer, new_consumer, servers, names: Names, monkeypatch
) -> None:
    transact, lost = MarkerTransactions._transact, []

    async def lose_the_answer(self: MarkerTransactions, *arguments: Any) -> None:
        await transact(self, *arguments)
        if not lost:
            lost.append(True)
            raise KafkaError("the answer was lost")

    monkeypatch.setattr(MarkerTransactions, "_transact", lose_the_answer)
    await producer.send_many("q", [b"%d" % number for number in range(10)])
    consumer = new_consumer()
    await consumer.start()

    messages = await take(consumer, 10)
    await consumer.ack(messages)

    assert sorted(int(message.value) for message in messages) == list(range(10))
    assert await consumer.receive(wait=0.5) == []
    acquired = [batch for batch in await read_markers(servers, names.markers) if isinstance(batch, Acquire)]
    assert lost
    assert sum(len(batch.offsets) for batch in acquired) == 20


async def test_members_of_a_group_take_over_from_each_other(producer, new_consumer, servers, prefix) -> None:
    values = [b"%d" % number for number in range(300)]
    first, seen = new_consumer(max_in_flight=20), []

    async def handler(message: marq.Message) -> None:
        seen.append(message.value)

    await first.start()
    running = [asyncio.create_task(first.run(handler))]
    await producer.send_many("q", values[:100])
    await until(lambda: len(seen) == 100)
    second = marq.Consumer("q", servers, prefix=prefix)
    await second.start()
    running.append(asyncio.create_task(second.run(handler)))
    await producer.send_many("q", values[100:200])
    await until(lambda: len(seen) == 200)
    await first.stop()
    await producer.send_many("q", values[200:])
    await until(lambda: len(seen) == 300)
    await second.stop()
    await asyncio.gather(*running)

    assert sorted(seen) == sorted(values)


async def test_one_queue_with_the_setting_makes_the_consumer_of_its_group_transactional(
    producer, servers, prefix, settings
) -> None:
    names, client = settings.names, {"bootstrap_servers": servers, "prefix": prefix}
    async with marq.Queues(**client) as queues:
        await queues.change("q", group="g", transactional=True)
        await queues.change("other", group="g")
    async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=f"{prefix}-x") as others:
        await others.begin_transaction()
        await others.send_and_wait(names.messages, b"aborted", key=b"other", partition=0)
        await others.abort_transaction()
    await producer.send("other", b"kept")

    async with marq.Consumer(group="g", instance_id="one", **client) as consumer:
        [message] = await take(consumer)
        await message.ack()

    assert message.value == b"kept"
    assert await was_used(servers, names.start_id(names.named_group("g"), "one"))


async def was_used(servers: str, transactional_id: str) -> bool:
    """Whether a producer has used a transactional id: each one raises its epoch, from 0."""
    async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=transactional_id) as producer:
        return bool(producer._txn_manager.producer_epoch > 0)
