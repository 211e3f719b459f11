"""Where messages are sent to, and by which placements."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest

import marq
import marq.producer.routes
import marq.queues.following
from marq.producer.batches import Batcher, ProducerBatch
from marq.queues.queues import Queues
from marq.settings.definitions import placement_key
from marq.settings.partitions import SENT_S, Placement, subset
from marq.testing import Broker
from marq.testing.cluster import MemoryDefinitionLog
from marq.testing.namespace import encoded
from marq.wire.errors import BrokerUnavailable

PARTITIONS = 8


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
    monkeypatch.setattr(marq.producer.routes, "SENT_S", -1.0)
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
