"""Batches of a transaction's records, without a broker."""

from __future__ import annotations

from aiokafka.producer.message_accumulator import BatchBuilder

from marq_worker.owner.partition_writer import RecordBatches

LIMIT_BYTES = 10_000


class Producer:
    """Keeps what is sent: partition, number of records, and bytes of each batch."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, int]] = []

    def create_batch(self) -> BatchBuilder:
        return BatchBuilder(LIMIT_BYTES, 0, is_transactional=True)

    async def send_batch(self, batch: BatchBuilder, topic: str, *, partition: int) -> str:
        self.sent.append((partition, batch.record_count(), batch.size()))
        return topic


def add(batches: RecordBatches, partition: int, value_bytes: int) -> None:
    batches.add(partition, b"orders", b"x" * value_bytes, [("marq-attempt", b"2")], 0)


async def test_no_batch_of_several_records_is_larger_than_the_producers_limit() -> None:
    producer = Producer()
    batches = RecordBatches(producer, "marq.messages")  # type: ignore[arg-type]

    for number in range(200):
        add(batches, number % 2, 200)
    sends = await batches.send()

    assert sends == ["marq.messages"] * len(producer.sent)
    assert [sum(count for where, count, _ in producer.sent if where == partition) for partition in (0, 1)] == [100, 100]
    assert max(size for _, _, size in producer.sent) <= LIMIT_BYTES
    assert len(producer.sent) == 6


async def test_a_record_that_is_larger_than_a_batch_may_be_is_alone_in_one() -> None:
    """The broker says whether it takes it."""
    producer = Producer()
    batches = RecordBatches(producer, "marq.messages")  # type: ignore[arg-type]

    for size in (200, 2_000_000, 200):
        add(batches, 0, size)
    await batches.send()

    assert [count for _, count, _ in producer.sent] == [1, 1, 1]
