"""Producers: what is in the topic, and what callers are told when something fails or ends."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from typing import Any

import pytest
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.record.memory_records import MemoryRecords

import marq
from marq.producer.producer import SendManyFailed
from marq.wire.errors import Refused
from marq.wire.names import HEADER_ROOM_BYTES, Names
from tests.client.waiting import read_all, until


async def stored(servers: str, names: Names) -> dict[tuple[int, int], Any]:
    """Return the records of the messages topic by partition and offset."""
    return {(record.partition, record.offset): record for record in await read_all(servers, names.messages)}


async def test_more_than_fits_into_one_batch_is_sent_in_several(producer, servers, names) -> None:
    values = [b"%d" % number + b"x" * 100_000 for number in range(60)]

    receipts = await producer.send_many("q", values)

    records = await stored(servers, names)
    assert [records[receipt.partition, receipt.offset].value for receipt in receipts] == values


@pytest.mark.parametrize(("compression", "codec"), [("none", 0), ("gzip", 1), ("snappy", 2), ("lz4", 3), ("zstd", 4)])
async def test_messages_are_stored_with_the_codec_that_was_asked_for(
    servers, prefix, names, monkeypatch, compression, codec
) -> None:
    values = [b"%d" % number + b"x" * 1_000 for number in range(20)]
    async with marq.Producer(servers, prefix=prefix, compression=compression) as producer:
        receipts = [await producer.send("q", b"one" * 500), *await producer.send_many("q", values)]

    codecs = set()

    def read(data: bytes) -> MemoryRecords:
        # The codec is the lowest bits of a batch's attributes.
        if data:
            codecs.add(struct.unpack_from(">h", data, 21)[0] & 7)
        return MemoryRecords(data)

    monkeypatch.setattr("aiokafka.consumer.fetcher.MemoryRecords", read)
    records = await stored(servers, names)
    assert codecs == {codec}
    assert [records[receipt.partition, receipt.offset].value for receipt in receipts] == [b"one" * 500, *values]


async def test_a_message_that_no_codec_makes_smaller_may_have_the_largest_size(servers, prefix, names) -> None:
    value = os.urandom(1_048_588 - HEADER_ROOM_BYTES - len("q"))
    async with marq.Producer(servers, prefix=prefix, compression="zstd") as producer:
        receipt = await producer.send("q", value)

    records = await stored(servers, names)
    assert records[receipt.partition, receipt.offset].value == value


async def test_the_longest_name_of_several_queues_decides_whether_a_message_is_too_large(
    producer, servers, names
) -> None:
    long = "q" * 200

    with pytest.raises(marq.MessageTooLarge, match="qqq"):
        await producer.send(["a", long], b"x" * (1_048_588 - HEADER_ROOM_BYTES - len(long) + 1))

    assert await stored(servers, names) == {}


async def test_a_cancelled_send_does_not_disturb_its_neighbours(producer) -> None:
    sends = [asyncio.create_task(producer.send("q", b"x")) for _ in range(8)]
    await asyncio.sleep(0)
    sends[3].cancel()

    results = await asyncio.gather(*sends, return_exceptions=True)

    assert [isinstance(result, marq.Receipt) for result in results] == [True] * 3 + [False] + [True] * 4


@pytest.mark.parametrize(
    ("send", "receipts", "said"),
    [
        (lambda producer: producer.send_many("q", [b"x"] * 8), [0, 0, 1, 1, None, None, 3, 3], "item 4 of 8"),
        (lambda producer: producer.send(["a", "b", "c", "d"], b"x"), [0, 1, None, 3], "queue 'c': item 2 of 4"),
    ],
    ids=["send_many", "several queues"],
)
async def test_an_error_says_which_messages_were_sent(
    producer, servers, names, monkeypatch, send, receipts, said
) -> None:
    batches = producer._running.batches
    really_send = batches._send

    async def fail_third(batch):
        if batch.partition == 2:
            raise marq.BrokerUnavailable("by the test")
        return await really_send(batch)

    monkeypatch.setattr(batches, "_send", fail_third)
    with pytest.raises(SendManyFailed, match=f"{said} was not confirmed") as caught:
        await send(producer)

    error = caught.value
    assert [receipt and receipt.partition for receipt in error.receipts] == receipts
    assert error.index == receipts.index(None)
    assert {(receipt.partition, receipt.offset) for receipt in error.receipts if receipt} == set(
        await stored(servers, names)
    )


async def test_a_stop_lets_many_that_are_under_way_end_and_accepts_no_more(servers, prefix, monkeypatch) -> None:
    monkeypatch.setattr("marq.producer.sending.STOP_LIMIT_S", 60)
    producer = marq.Producer(servers, prefix=prefix)
    await producer.start()
    single = [asyncio.create_task(producer.send("q", b"x")) for _ in range(100)]
    many = asyncio.create_task(producer.send_many("q", [b"x" * 10_000] * 2_000))
    await until(lambda: producer._running.batches._sending)

    stopping = asyncio.create_task(producer.stop())
    await asyncio.sleep(0)
    with pytest.raises(marq.MarqError, match="the producer is stopped"):
        await producer.send("q", b"x")
    await stopping

    assert len(await many) == 2_000
    assert len(await asyncio.gather(*single)) == 100


async def test_many_that_a_stop_can_not_wait_for_say_which_were_sent(servers, prefix, names, monkeypatch) -> None:
    monkeypatch.setattr("marq.producer.sending.STOP_LIMIT_S", 0)
    producer = marq.Producer(servers, prefix=prefix)
    await producer.start()
    sending = asyncio.create_task(producer.send_many("q", [b"x" * 50_000] * 1_000))
    await until(lambda: producer._running.batches._sending)

    await producer.stop()

    with pytest.raises(SendManyFailed) as caught:
        await sending
    assert len(caught.value.receipts) == 1_000
    assert caught.value.receipts[caught.value.index] is None
    sent = {(receipt.partition, receipt.offset) for receipt in caught.value.receipts if receipt}
    assert sent <= set(await stored(servers, names))


async def test_many_callers_at_once_are_all_served(producer) -> None:
    """aiokafka 0.14 adds up the waiting times of all callers of a partition: 200 callers failed within a second."""
    receipts = await asyncio.gather(*[producer.send_many(f"q{n}", [b"x" * 200] * 500) for n in range(200)])

    assert [len(batch) for batch in receipts] == [500] * 200


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


async def test_a_clock_that_is_ahead_is_named_and_nothing_is_sent(producer, servers, names, monkeypatch) -> None:
    """Brokers refuse records whose time is more than an hour ahead."""
    append = BatchBuilder.append

    def append_ahead(self: BatchBuilder, **record: Any) -> Any:
        return append(self, **{**record, "timestamp": int(time.time() * 1000) + 7_200_000})

    with monkeypatch.context() as patched:
        patched.setattr(BatchBuilder, "append", append_ahead)
        with pytest.raises(Refused, match=r"refused the records, so nothing was sent: .* set the clock"):
            await producer.send("q", b"early")

    await producer.send("q", b"now")
    assert [record.value for record in (await stored(servers, names)).values()] == [b"now"]
