from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

import marq
from broker.embedded import EmbeddedBroker
from marq.core.names import HEADER_ROOM_BYTES
from marq.producer import SendManyFailed
from tests.client.waiting import read_all, until


@pytest.fixture
async def producer(servers, prefix):
    async with marq.Producer(servers, prefix=prefix) as producer:
        yield producer


@pytest.fixture
def own_broker():
    """A broker that the test may pause."""
    with EmbeddedBroker() as embedded:
        yield embedded


async def test_a_receipt_says_where_the_message_stands(producer, servers, names) -> None:
    receipt = await producer.send("emails", b"hello", headers={"tenant": b"acme"})

    (record,) = await read_all(servers, names.messages)
    assert (record.partition, record.offset) == (receipt.partition, receipt.offset)
    assert (record.key, record.value, record.headers) == (b"emails", b"hello", (("tenant", b"acme"),))
    assert receipt.id == f"{names.messages}/{receipt.partition}/{receipt.offset}"
    assert receipt.queue == "emails"


async def test_messages_are_spread_evenly_over_partitions(producer) -> None:
    receipts = await asyncio.gather(*[producer.send("q", b"%d" % number) for number in range(400)])
    receipts += [await producer.send("q", b"x") for _ in range(40)]

    assert set(Counter(receipt.partition for receipt in receipts).values()) == {110}


async def test_each_receipt_of_many_is_that_of_its_message(producer, servers, names) -> None:
    values = [b"%d" % number for number in range(10_000)]

    receipts = await producer.send_many("q", values)

    stored = {(record.partition, record.offset): record.value for record in await read_all(servers, names.messages)}
    assert [stored[receipt.partition, receipt.offset] for receipt in receipts] == values
    assert set(Counter(receipt.partition for receipt in receipts).values()) == {2_500}


async def test_more_than_fits_into_one_batch_is_sent_in_several(producer, servers, names) -> None:
    values = [b"%d" % number + b"x" * 100_000 for number in range(60)]

    receipts = await producer.send_many("q", values)

    stored = {(record.partition, record.offset): record.value for record in await read_all(servers, names.messages)}
    assert [stored[receipt.partition, receipt.offset] for receipt in receipts] == values


async def test_nothing_at_all_is_sent_of_many_when_one_is_not_allowed(producer, servers, names) -> None:
    with pytest.raises(TypeError, match="item 1"):
        await producer.send_many("q", [b"a", json.dumps({}), b"b"])
    with pytest.raises(marq.MessageTooLarge, match="item 2"):
        await producer.send_many("q", [b"a", b"b", b"x" * 2_000_000])

    assert await producer.send_many("q", []) == []
    assert await read_all(servers, names.messages) == []


async def test_the_largest_allowed_message_is_accepted_and_one_byte_more_refused(producer) -> None:
    limit = 1_048_588 - HEADER_ROOM_BYTES - len("q")

    await producer.send("q", b"x" * limit)

    with pytest.raises(marq.MessageTooLarge, match=str(limit + 1)):
        await producer.send("q", b"x" * (limit + 1))


async def test_start_and_stop_may_be_called_twice_and_a_stopped_producer_started_again(servers, prefix) -> None:
    producer = marq.Producer(servers, prefix=prefix)
    await producer.start()
    await producer.start()
    await producer.send("q", b"1")
    await producer.stop()
    await producer.stop()

    await producer.start()
    receipt = await producer.send("q", b"2")
    await producer.stop()

    assert receipt.queue == "q"


async def test_a_stop_waits_for_what_is_on_its_way(servers, prefix) -> None:
    producer = marq.Producer(servers, prefix=prefix)
    await producer.start()
    sends = [asyncio.create_task(producer.send("q", b"x")) for _ in range(100)]
    await asyncio.sleep(0)

    await producer.stop()

    assert len(await asyncio.gather(*sends)) == 100


async def test_a_cancelled_send_does_not_disturb_its_neighbours(producer) -> None:
    sends = [asyncio.create_task(producer.send("q", b"x")) for _ in range(8)]
    await asyncio.sleep(0)
    sends[3].cancel()

    results = await asyncio.gather(*sends, return_exceptions=True)

    assert [isinstance(result, marq.Receipt) for result in results] == [True] * 3 + [False] + [True] * 4


async def test_many_that_fail_say_which_were_sent(servers, prefix, monkeypatch) -> None:
    async with marq.Producer(servers, prefix=prefix) as producer:
        send = producer._send

        async def fail_third(parcel):
            if parcel.partition == 2:
                raise marq.BrokerUnavailable("by the test")
            return await send(parcel)

        monkeypatch.setattr(producer, "_send", fail_third)
        with pytest.raises(SendManyFailed) as caught:
            await producer.send_many("q", [b"%d" % number for number in range(8)])

    failed = [index for index, receipt in enumerate(caught.value.receipts) if receipt is None]
    assert failed == [4, 5]
    assert caught.value.index == 4


async def test_one_message_for_several_queues_is_one_record_for_each(producer, servers, names) -> None:
    receipts = await producer.send(["emails", "audit", "search"], b"hello", headers={"tenant": b"acme"})

    stored = {(record.partition, record.offset): record for record in await read_all(servers, names.messages)}
    assert [receipt.queue for receipt in receipts] == ["emails", "audit", "search"]
    for receipt in receipts:
        record = stored.pop((receipt.partition, receipt.offset))
        assert (record.key, record.value) == (receipt.queue.encode(), b"hello")
        assert record.headers == (("tenant", b"acme"),)
    assert stored == {}


async def test_of_several_queues_all_are_checked_before_the_first_is_sent(producer, servers, names) -> None:
    long = "q" * 200
    limit = 1_048_588 - HEADER_ROOM_BYTES - len(long)

    for queues in ([], ["a", "a"], ["a", ""], {"a"}, b"a", 5):
        with pytest.raises(marq.ConfigError):
            await producer.send(queues, b"x")
    with pytest.raises(marq.MessageTooLarge, match="qqq"):
        await producer.send(["a", long], b"x" * (limit + 1))
    with pytest.raises(TypeError, match="must be bytes"):
        await producer.send(["a", "b"], "x")
    with pytest.raises(marq.ConfigError, match=r"call it for each of them, or send\(queues, value\)"):
        await producer.send_many(["a", "b"], [b"x"])

    assert await read_all(servers, names.messages) == []


async def test_of_several_queues_a_failure_says_which_were_sent(servers, prefix, names, monkeypatch) -> None:
    async with marq.Producer(servers, prefix=prefix) as producer:
        send = producer._send

        async def fail_third(parcel):
            if parcel.partition == 2:
                raise marq.BrokerUnavailable("by the test")
            return await send(parcel)

        monkeypatch.setattr(producer, "_send", fail_third)
        with pytest.raises(SendManyFailed, match="queue 'c': item 2 of 4 is not known to be sent") as caught:
            await producer.send(["a", "b", "c", "d"], b"x")

    sent = [receipt for receipt in caught.value.receipts if receipt is not None]
    assert caught.value.index == 2
    assert [receipt.queue for receipt in sent] == ["a", "b", "d"]
    stored = {(record.partition, record.offset) for record in await read_all(servers, names.messages)}
    assert stored == {(receipt.partition, receipt.offset) for receipt in sent}


async def test_a_stop_lets_many_that_are_under_way_end_and_accepts_no_more(servers, prefix) -> None:
    producer = marq.Producer(servers, prefix=prefix)
    await producer.start()
    sending = asyncio.create_task(producer.send_many("q", [b"x" * 10_000] * 2_000))
    await until(lambda: producer._sending)

    stopping = asyncio.create_task(producer.stop())
    await asyncio.sleep(0)
    with pytest.raises(marq.MarqError, match="not started"):
        await producer.send("q", b"x")
    await stopping

    assert len(await sending) == 2_000


async def test_many_that_a_stop_can_not_wait_for_say_which_were_sent(servers, prefix, names, monkeypatch) -> None:
    monkeypatch.setattr("marq.producer.STOP_LIMIT_S", 0)
    producer = marq.Producer(servers, prefix=prefix)
    await producer.start()
    sending = asyncio.create_task(producer.send_many("q", [b"x" * 50_000] * 1_000))
    await until(lambda: producer._sending)

    await producer.stop()

    with pytest.raises(SendManyFailed) as caught:
        await sending
    assert len(caught.value.receipts) == 1_000
    assert caught.value.receipts[caught.value.index] is None
    stored = {(record.partition, record.offset) for record in await read_all(servers, names.messages)}
    assert {(each.partition, each.offset) for each in caught.value.receipts if each} <= stored


async def test_a_stop_that_is_cancelled_closes_all_the_same(own_broker, prefix) -> None:
    producer = marq.Producer(own_broker.bootstrap_servers, prefix=prefix)
    await producer.start()
    await asyncio.to_thread(own_broker.pause)
    sending = asyncio.create_task(producer.send("q", b"x"))
    await until(lambda: producer._sending)

    stopping = asyncio.create_task(producer.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    outcomes = await asyncio.gather(stopping, sending, return_exceptions=True)
    await asyncio.to_thread(own_broker.resume)

    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, marq.BrokerUnavailable]
    assert producer._kafka is None


async def test_values_are_encoded_and_an_item_that_can_not_be_is_named(servers, prefix, names) -> None:
    async with marq.Producer(servers, prefix=prefix, codec=marq.JSON) as producer:
        with pytest.raises(TypeError, match=r"queue 'q', item 1: marq\.JSON can't encode the value"):
            await producer.send_many("q", [1, {2}, 3])
        with pytest.raises(ValueError, match=r"queue \['a', 'b'\]: marq\.JSON can't encode the value"):
            await producer.send(["a", "b"], float("nan"))
        with pytest.raises(marq.MessageTooLarge, match="item 1"):
            await producer.send_many("q", ["a", "x" * 1_100_000])
        await producer.send_many("q", [{"a": 1}, None])
        await producer.send("q", "ä")

    stored = sorted(record.value for record in await read_all(servers, names.messages))
    assert stored == sorted([b'{"a":1}', b"null", '"ä"'.encode()])


async def test_many_callers_at_once_are_all_served(producer) -> None:
    """aiokafka 0.14 adds up the waiting of all who wait for a partition: 200 callers failed within a second."""
    receipts = await asyncio.gather(*[producer.send_many(f"q{n}", [b"x" * 200] * 500) for n in range(200)])

    assert [len(each) for each in receipts] == [500] * 200


@pytest.mark.parametrize("kind", [marq.Producer, marq.Queues])
async def test_a_stop_that_is_cancelled_closes_all_connections_all_the_same(servers, prefix, kind) -> None:
    before = asyncio.all_tasks()

    for turns in (1, 2, 4, 8):
        client = kind(servers, prefix=prefix)
        await client.start()
        stopping = asyncio.create_task(client.stop())
        for _ in range(turns):
            await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait([stopping])

    await until(lambda: asyncio.all_tasks() == before)
