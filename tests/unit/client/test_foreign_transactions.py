"""Fetches that contain transactions: those of trackers are read at once, those of other programs when committed."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, READ_UNCOMMITTED, FetchResult, PartitionRecords
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from marq.kafka.foreign_transactions import CautiousFetcher
from marq.kafka.lenient_names import _Records

SHARED, OWN = TopicPartition("marq.messages", 0), TopicPartition("orders", 0)
REDELIVERY = [("marq-id", b"orders/0/1"), ("marq-attempt", b"2")]
DEAD_LETTER = [*REDELIVERY, ("marq-dead-lettered-at", b"9")]
PLAIN, TRACKER, PROGRAM = -1, 7, 8


def batch(producer_id: int = PLAIN, headers: list[tuple[str, bytes]] | None = None, *, offset: int = 0) -> bytes:
    transactional = producer_id != PLAIN
    builder = DefaultRecordBatchBuilder(2, 0, transactional, producer_id, 0 if transactional else -1, 0, 100_000)
    for number in range(2):
        builder.append(number, 5, b"orders", b"value", headers or [])
    data = bytearray(builder.build())
    # The base offset is not part of what the checksum covers.
    data[:8] = offset.to_bytes(8)
    return bytes(data)


class Assignment:
    active = False


class Broker:
    """A fetcher that has just received batches for one partition."""

    def __init__(self, partition: TopicPartition, *batches: bytes) -> None:
        self.partition = partition
        self.fetcher = fetcher = CautiousFetcher.__new__(CautiousFetcher)
        fetcher.messages_topic, fetcher._trackers = SHARED.topic, set()
        fetcher._records, fetcher._isolation_level = {}, READ_UNCOMMITTED
        self._data = b"".join(batches)

    def answers(self) -> list[int] | None:
        """Return the offsets that can be read of one fetch; None if it is to be repeated."""
        records = PartitionRecords(
            self.partition, _Records(self._data), None, 0, None, None, True, self.fetcher._isolation_level
        )
        result = FetchResult(self.partition, assignment=Assignment(), partition_records=records, backoff=0)
        self.fetcher._records[self.partition] = result
        self.fetcher._check(self.partition)
        kept = self.fetcher._records.pop(self.partition, None)
        return None if kept is None else [record.offset for record in kept._partition_records]

    @property
    def level(self) -> Any:
        return self.fetcher._isolation_level


@pytest.mark.parametrize("partition", [SHARED, OWN])
def test_records_outside_transactions_are_read_at_once(partition: TopicPartition) -> None:
    broker = Broker(partition, batch(), batch(offset=2))

    assert broker.answers() == [0, 1, 2, 3]
    assert broker.level == READ_UNCOMMITTED


def test_redeliveries_of_a_trackers_open_transaction_are_read_at_once() -> None:
    broker = Broker(SHARED, batch(), batch(TRACKER, REDELIVERY, offset=2))

    assert broker.answers() == [0, 1, 2, 3]
    assert broker.answers() == [0, 1, 2, 3]
    assert broker.level == READ_UNCOMMITTED


@pytest.mark.parametrize(
    ("partition", "headers"),
    [(SHARED, []), (SHARED, DEAD_LETTER), (OWN, []), (OWN, REDELIVERY), (OWN, DEAD_LETTER)],
)
def test_another_programs_transaction_is_fetched_again_with_read_committed(
    partition: TopicPartition, headers: list[tuple[str, bytes]]
) -> None:
    broker = Broker(partition, batch(), batch(PROGRAM, headers, offset=2))

    assert broker.answers() is None
    assert broker.level == READ_COMMITTED


def test_an_answer_from_before_the_change_is_dropped() -> None:
    """It does not name the aborted transactions."""
    broker = Broker(SHARED, batch())
    broker.fetcher._isolation_level = READ_COMMITTED

    assert broker.answers() is None


def test_a_batch_that_the_broker_cut_off_is_not_looked_at() -> None:
    broker = Broker(OWN, batch(), batch(PROGRAM, offset=2)[:-1])

    assert broker.answers() == [0, 1]
    assert broker.level == READ_UNCOMMITTED


def test_a_damaged_batch_is_an_error_of_the_reader_and_does_not_end_the_fetch_task() -> None:
    damaged = bytearray(batch(PROGRAM, offset=2))
    damaged[-1] ^= 1
    broker = Broker(OWN, batch(), bytes(damaged))

    with pytest.raises(CorruptRecordException):
        broker.answers()
    assert broker.level == READ_UNCOMMITTED
