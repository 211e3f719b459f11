"""Where messages are sent to, and by which placements."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

import marq
import marq.producer.sending
import marq.queues.following
from marq.producer.sending import Batcher, ProducerBatch, default_partition
from marq.queues.following import encoded
from marq.queues.queues import Queues
from marq.settings.definitions import placement_key
from marq.settings.ordering_keys import partition_of
from marq.settings.placements import SENT_S, Placement, subset
from marq.testing import Broker
from marq.testing.cluster import Batch, MemoryDefinitionLog
from marq.testing.namespace import Namespace
from marq.wire.errors import BrokerUnavailable, ConfigError
from tests.unit.client.fakes import spin

PARTITIONS = 8
append = Batch.append


@pytest.fixture
async def broker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Broker]:
    monkeypatch.setenv("MARQ_PARTITIONS", str(PARTITIONS))
    async with Broker(queues={"few": {"partitions": 2}, "one": {"partitions": 1}}) as broker:
        yield broker


def places(broker: Broker, queue: str) -> Counter[int]:
    return Counter(int(message.id.split("/")[1]) for message in broker.sent(queue))


async def test_messages_go_to_the_partitions_of_their_queue_evenly(broker: Broker) -> None:
    async with broker.producer() as producer:
        await producer.send_many("few", [b"1"] * 50)
        for _ in range(10):
            await producer.send("few", b"2")
        await producer.send_many("one", [b"1"] * 50)
        await producer.send_many("wide", [b"1"] * 48)
        await producer.send(["few", "one"], b"3")

    few, one = subset("few", PARTITIONS, 2) or (), subset("one", PARTITIONS, 1) or ()
    assert sorted(places(broker, "few")) == sorted(few)
    assert max(places(broker, "few").values()) - min(places(broker, "few").values()) <= 2
    assert places(broker, "one") == {one[0]: 51}
    assert places(broker, "wide") == dict.fromkeys(range(PARTITIONS), 6)


async def test_a_queue_that_moves_is_sent_to_its_new_partitions_at_once(broker: Broker) -> None:
    async with broker.producer() as producer:
        await broker.queues.change("few", partitions="all")
        await broker.settle()
        await producer.send_many("few", [b"1"] * 16)
        assert places(broker, "few") == dict.fromkeys(range(PARTITIONS), 2)

        await broker.queues.change("few", partitions=1)
        await broker.settle()
        await producer.send_many("few", [b"1"] * 10)

    assert places(broker, "few")[(subset("few", PARTITIONS, 1) or ())[0]] == 12


async def test_copies_go_to_the_partitions_of_their_queue(broker: Broker) -> None:
    async with broker.producer() as producer, broker.consumer("few") as consumer:
        await producer.send_many("few", [b"1"] * 40, delay=1)
        await broker.advance(2)

        batch = await consumer.receive(100)

    assert len(batch) == 40
    assert sorted({message.partition for message in batch}) == list(subset("few", PARTITIONS, 2) or ())


async def test_what_was_sent_before_a_queue_moved_is_received_after_it(broker: Broker) -> None:
    async with broker.producer() as producer:
        await producer.send_many("wide", [b"%d" % number for number in range(16)])
        await broker.queues.change("wide", partitions=1)
        async with broker.consumer("wide") as consumer:
            found = [message.value async for message in _received(consumer, 16)]

    assert sorted(found) == sorted(b"%d" % number for number in range(16))


async def _received(consumer: marq.Consumer, count: int) -> AsyncIterator[marq.Message]:
    while count:
        for message in await consumer.receive(count):
            count -= 1
            await message.ack()
            yield message


# --- old placements ---------------------------------------------------------------------------------------------------


async def test_nothing_is_sent_by_placements_that_are_too_old(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    async with broker.producer(request_timeout=4) as producer:
        await producer.send("few", b"1")

        async def end(self: MemoryDefinitionLog) -> int:
            return 10_000

        monkeypatch.setattr(MemoryDefinitionLog, "end", end)
        producer._started().routes._queues._follower.synced_s = time.monotonic() - SENT_S
        with pytest.raises(BrokerUnavailable, match="the definitions of queues could not be read"):
            await producer.send("few", b"2")

        monkeypatch.undo()
        await producer.send("few", b"3")

    assert [message.body for message in broker.sent("few")] == [b"1", b"3"]


async def test_what_takes_too_long_to_send_counts_only_if_no_queue_has_moved(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marq.producer.sending, "SENT_S", -1.0)
    send = Batcher._send_to_kafka
    async with broker.producer() as producer:
        await producer.send("few", b"1")

        async def move_and_send(self: Batcher, batch: ProducerBatch) -> int:
            placement = Placement((0, 1), None)
            broker._namespace.define(placement_key("other"), encoded(placement.document()))
            return await send(self, batch)

        monkeypatch.setattr(Batcher, "_send_to_kafka", move_and_send)
        with pytest.raises(BrokerUnavailable, match="moved to other partitions"):
            await producer.send("few", b"2")


async def test_a_follower_makes_sure_now_and_then_that_it_knows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marq.queues.following, "SYNC_S", 0.0)
    async with Broker() as broker, Queues(broker.address) as queues:
        before_s = queues.synced_s
        await queues.change("few", partitions=1)
        await queues.sync(1)

        assert queues.synced_s > before_s
        assert queues.definitions.settings("few").partitions == 1


# --- ordering keys ----------------------------------------------------------------------------------------------------


@pytest.fixture
def unplaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker runs."""
    monkeypatch.setattr(Namespace, "_place", lambda self, queue: None)


def place(broker: Broker, placement: Placement) -> None:
    broker._namespace.define(placement_key("orders"), encoded(placement.document()))


@pytest.mark.usefixtures("unplaced")
async def test_a_key_waits_for_fixed_partitions_and_other_messages_do_not(broker: Broker) -> None:
    await broker.queues.change("orders", ordering="key")
    async with broker.producer(request_timeout=1) as producer:
        await producer.send("orders", b"0")
        with pytest.raises(BrokerUnavailable, match="no worker has fixed the partitions of its ordering keys"):
            await producer.send("orders", b"1", ordering_key="k")
        place(broker, Placement((1, 2), (0, 1, 2), None, 2))
        with pytest.raises(BrokerUnavailable, match="its partitions are changing"):
            await producer.send_many("orders", [b"2"], ordering_key="k")

    assert [message.body for message in broker.sent("orders")] == [b"0"]


@pytest.mark.usefixtures("unplaced")
async def test_calls_that_wait_for_partitions_do_not_fail_one_after_the_other(broker: Broker) -> None:
    await broker.queues.change("orders", ordering="key")
    async with broker.producer(request_timeout=1) as producer:
        began_s = time.monotonic()
        calls = [producer.send("orders", b"x", ordering_key="k") for _ in range(5)]
        calls.append(producer.send("orders", b"x", ordering_key="k", deduplication_id="i"))
        several: list[Coroutine[Any, Any, Any]] = [
            producer.send_many("orders", [b"x"], ordering_key="k"),
            producer.send_many("orders", [b"x"], ordering_key="k", deduplication_ids=["i"]),
            producer.send(["orders"], b"x", ordering_key="k"),
        ]

        outcomes = await asyncio.gather(*calls, *several, return_exceptions=True)

    assert {type(outcome) for outcome in outcomes} == {BrokerUnavailable}
    assert time.monotonic() - began_s < 4


@pytest.mark.usefixtures("unplaced")
async def test_the_time_for_earlier_messages_does_not_count_as_waiting_for_partitions(broker: Broker) -> None:
    await broker.queues.change("orders", ordering="key")
    async with broker.producer() as producer:
        routes = producer._started().routes
        called_s = asyncio.get_running_loop().time() - 1_000
        finding = asyncio.create_task(routes.find_by_key("orders", b"k", [], called_s))
        await spin()
        assert "orders" in routes._waited_since_s
        place(broker, Placement((1, 2), (1, 2), None, 2))

        route, _ = await finding

    assert route.cursor.take() == partition_of(b"k", (1, 2))


@pytest.mark.usefixtures("unplaced")
async def test_calls_that_wait_for_partitions_keep_their_order(broker: Broker) -> None:
    await broker.queues.change("orders", ordering="key")
    async with broker.producer() as producer:
        early = [asyncio.create_task(producer.send("orders", b"%d" % each, ordering_key="k")) for each in range(3)]
        many = asyncio.create_task(producer.send_many("orders", [b"3", b"4"], ordering_key="k"))
        both = asyncio.create_task(producer.send(["orders"], b"5", ordering_key="k"))
        await asyncio.sleep(0.05)
        place(broker, Placement((1, 2), (1, 2), None, 2))
        late = asyncio.create_task(producer.send("orders", b"6", ordering_key=b"k"))
        await asyncio.gather(*early, many, both, late)

    sent = broker.sent("orders")
    assert [message.body for message in sent] == [b"%d" % each for each in range(7)]
    assert {int(message.id.split("/")[1]) for message in sent} == {partition_of(b"k", (1, 2))}


async def test_a_batch_that_waits_for_definitions_is_not_overtaken(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.queues.change("orders", ordering="key")
    async with broker.producer() as producer:
        await producer.send("orders", b"0", ordering_key="k")
        follower = producer._started().routes._queues._follower
        follower.synced_s, sync = time.monotonic() - 100, follower.sync
        waiting, go = asyncio.Event(), asyncio.Event()

        async def slow_sync(limit_s: float) -> None:
            waiting.set()
            await go.wait()
            await sync(limit_s)

        monkeypatch.setattr(follower, "sync", slow_sync)
        first = asyncio.create_task(producer.send("orders", b"1", ordering_key="k"))
        await waiting.wait()
        follower.synced_s = time.monotonic()
        second = asyncio.create_task(producer.send("orders", b"2", ordering_key="k"))
        await asyncio.sleep(0.05)
        assert not second.done()
        go.set()
        await asyncio.gather(first, second)

    assert [message.body for message in broker.sent("orders")] == [b"0", b"1", b"2"]


async def test_after_a_batch_that_failed_no_later_item_of_the_key_is_sent(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.queues.change("orders", ordering="key")
    monkeypatch.setattr(
        Batch, "append", lambda self, **record: append(self, **record) if len(self.records) < 2 else None
    )
    send, calls = Batcher._send_to_kafka, 0

    async def second_fails(self: Batcher, batch: ProducerBatch) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise BrokerUnavailable("no answer")
        return await send(self, batch)

    monkeypatch.setattr(Batcher, "_send_to_kafka", second_fails)
    async with broker.producer() as producer:
        with pytest.raises(marq.SendManyFailed) as caught:
            await producer.send_many("orders", [b"%d" % each for each in range(6)], ordering_key="k")

    assert caught.value.index == 2
    assert [receipt is None for receipt in caught.value.receipts] == [False, False, True, True, True, True]
    assert [message.body for message in broker.sent("orders")] == [b"0", b"1"]


async def test_every_way_to_send_takes_a_key(broker: Broker) -> None:
    await broker.queues.change("orders", ordering="key")

    @marq.handler("orders")
    async def handle(value: bytes) -> None: ...

    async with broker.producer() as producer:
        await producer.send(handle, b"0", ordering_key="k")
        await handle.send(b"1", ordering_key="k")
        await producer.send_many(handle, [b"2"], ordering_key="k")

    def in_thread() -> None:
        with marq.SyncProducer(broker.address) as sync:
            sync.send("orders", b"3", ordering_key="k")
            sync.send_many("orders", [b"4", b"5"], ordering_key="k")

    await asyncio.to_thread(in_thread)
    sent = broker.sent("orders")
    assert [message.body for message in sent] == [b"%d" % each for each in range(6)]
    assert len({message.id.split("/")[1] for message in sent}) == 1


@pytest.mark.parametrize(
    ("key", "hashed"),
    [(b"21", -973932308), (b"foobar", -790332482), (b"a-little-bit-long-string", -985981536), (b"abc", 479470107)],
)
def test_the_partition_in_an_own_topic_is_that_of_kafkas_java_client(key: bytes, hashed: int) -> None:
    """The hashes are those of UtilsTest in Kafka's source."""
    assert default_partition(key, 12) == (hashed & 0x7FFFFFFF) % 12


async def test_a_test_broker_refuses_changes_that_break_the_order(broker: Broker) -> None:
    broker.define("orders", ordering="key")
    async with broker.producer() as producer:
        await producer.send("orders", b"0", ordering_key="k")

    with pytest.raises(ConfigError, match="queue 'orders': partitions can't change while the queue has messages"):
        broker.define("orders", ordering="key", partitions=1)
    broker.define("orders", ordering="key", lease=5)
