"""Sends with deduplication ids: in the order of the calls, one batch of a markers partition after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from marq.backend.cluster import Cluster
from marq.client.receipt import Receipt
from marq.client.send_options import AT_ONCE, When
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.topics import Topics
from marq.producer.delays import Delays
from marq.producer.sending import SendCounts
from marq.wire.errors import BrokerUnavailable, MarqError
from marq.wire.marker_codec import decode
from marq.wire.markers import Delay
from marq.wire.names import deduplicating_partition
from marq.wire.record_headers import sequence

LIMIT_S = 60.0


class Broker:
    """A cluster whose writes wait until they are let through; also the writer."""

    def __init__(self) -> None:
        self.written: list[list[bytes | None]] = []
        self.partitions: set[int] = set()
        self.open = asyncio.Event()
        self.begun = asyncio.Event()
        self.failures = 0

    def writer(self, topics: Topics) -> Broker:
        return self

    def wall_s(self) -> float:
        return 1.0

    async def start(self) -> None:
        return

    async def stop(self, limit_s: float) -> None:
        return

    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> list[int]:
        batches = [cast("Delay", decode(record.value)) for record in records]
        first = len(self.written)
        self.written += [[payload.value for payload in batch.payloads] for batch in batches]
        self.partitions |= {record.partition for record in records}
        self.begun.set()
        await self.open.wait()
        if self.failures:
            self.failures -= 1
            raise BrokerUnavailable("not written")
        return list(range(first, first + len(batches)))


def delays(broker: Broker) -> Delays:
    return Delays(cast("Cluster", broker), Topics(4, 4, 1_000_000, 1_065_536), LIMIT_S, SendCounts())


async def test_messages_that_are_sent_during_a_write_wait_for_it_and_go_together() -> None:
    broker = Broker()
    sending = delays(broker)
    first = sending.post("q", b"0", [], AT_ONCE, b"k")
    await broker.begun.wait()
    others = [sending.post("q", b"%d" % number, [], AT_ONCE, b"k") for number in (1, 2)]
    unplaced = sending.post("q", b"any", [], When(5, True))
    broker.begun.clear()
    await broker.begun.wait()
    assert broker.written == [[b"0"], [b"any"]]

    broker.open.set()
    receipts = await asyncio.wait_for(asyncio.gather(first, *others, unplaced), LIMIT_S)

    assert broker.written == [[b"0"], [b"any"], [b"1", b"2"]]
    sequences = [receipt.sequence for receipt in receipts]
    # The message without a key may have taken a number of theirs.
    number = receipts[1].offset
    assert sequences == [sequence(0, 0), sequence(2, number), sequence(2, number + 1), None]
    assert deduplicating_partition("q", b"k", 4) in broker.partitions


async def test_a_failed_write_does_not_hold_up_the_next_one() -> None:
    broker = Broker()
    broker.failures = 1
    sending = delays(broker)
    first = sending.post("q", b"0", [], AT_ONCE, b"k")
    await broker.begun.wait()
    second = sending.post("q", b"1", [], AT_ONCE, b"k")
    broker.open.set()

    with pytest.raises(BrokerUnavailable):
        await asyncio.wait_for(first, LIMIT_S)
    assert isinstance(await asyncio.wait_for(second, LIMIT_S), Receipt)


async def test_a_stop_sends_what_waits_within_its_limit() -> None:
    broker = Broker()
    sending = delays(broker)
    futures = [sending.post("q", b"0", [], AT_ONCE, b"k")]
    await broker.begun.wait()
    futures.append(sending.post("q", b"1", [], AT_ONCE, b"k"))
    asyncio.get_running_loop().call_soon(broker.open.set)

    await sending.stop(LIMIT_S)

    assert [future.result().offset for future in futures] == [0, 1]
    with pytest.raises(MarqError, match="was stopped"):
        sending.post("q", b"2", [], AT_ONCE, b"k")


async def test_after_the_limit_of_a_stop_each_caller_gets_an_error() -> None:
    broker = Broker()
    sending = delays(broker)
    futures: list[asyncio.Future[Any]] = [sending.post("q", b"0", [], AT_ONCE, b"k")]
    await broker.begun.wait()
    futures.append(sending.post("q", b"1", [], AT_ONCE, b"k"))

    await sending.stop(0)

    assert isinstance(futures[0].exception(), BrokerUnavailable)
    assert isinstance(futures[1].exception(), MarqError)
    assert broker.written == [[b"0"]]


async def test_a_message_whose_turn_comes_at_the_end_of_a_stop_gets_an_error() -> None:
    broker = Broker()
    sending = delays(broker)
    futures: list[asyncio.Future[Any]] = [sending.post("q", b"0", [], AT_ONCE, b"k")]
    await broker.begun.wait()
    futures.append(sending.post("q", b"1", [], AT_ONCE, b"k"))
    stopping = asyncio.create_task(sending.stop(0))
    await asyncio.sleep(0)
    # The write of the first message ends after the stop's limit, but before the stop continues.
    broker.open.set()

    await stopping

    assert futures[0].result().offset == 0
    assert futures[1].done()
    assert isinstance(futures[1].exception(), MarqError)
