"""Batches of copies, without a broker."""

from __future__ import annotations

from aiokafka.producer.message_accumulator import BatchBuilder

from marq.core.deliveries.redeliveries import Redelivery
from marq.core.redeliver_or_dead_letter import Destination
from marq_worker.agents.partition_writer import CopyBatches

LIMIT_BYTES = 10_000


class Producer:
    """Keeps what is sent: partition, number of copies, and bytes of each batch."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, int]] = []

    def create_batch(self) -> BatchBuilder:
        return BatchBuilder(1 << 20, 0, is_transactional=True)

    async def send_batch(self, batch: BatchBuilder, topic: str, *, partition: int) -> str:
        self.sent.append((partition, batch.record_count(), batch.size()))
        return topic


def copy(value_bytes: int) -> Redelivery:
    return Redelivery(Destination.QUEUE, b"orders", b"x" * value_bytes, [("marq-attempt", b"2")])


async def test_no_batch_of_several_copies_is_larger_than_the_topic_accepts() -> None:
    producer = Producer()
    batches = CopyBatches(producer, "marq.messages", LIMIT_BYTES)  # type: ignore[arg-type]

    for number in range(200):
        batches.add(number % 2, copy(200), 0)
    sends = await batches.send()

    assert sends == ["marq.messages"] * len(producer.sent)
    assert [sum(count for where, count, _ in producer.sent if where == each) for each in (0, 1)] == [100, 100]
    assert max(size for _, _, size in producer.sent) <= LIMIT_BYTES
    assert len(producer.sent) == 6


async def test_a_copy_that_is_larger_than_a_batch_may_be_is_alone_in_one() -> None:
    """The broker says whether it takes it."""
    producer = Producer()
    batches = CopyBatches(producer, "marq.messages", LIMIT_BYTES)  # type: ignore[arg-type]

    for size in (200, 2_000_000, 200):
        batches.add(0, copy(size), 0)
    await batches.send()

    assert [count for _, count, _ in producer.sent] == [1, 1, 1]
