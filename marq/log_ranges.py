"""Which offsets a topic has, asked by a consumer without a group."""

from __future__ import annotations

import asyncio

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, KafkaTimeoutError

_PAUSE_S = 0.1


async def log_ranges(consumer: AIOKafkaConsumer, topic: str) -> dict[int, range]:
    """Return the offsets that each partition of a topic has now; the caller sets a limit.

    Raises:
        KafkaError: refused.
    """
    # Of a topic that it does not know yet the client learns by asking about one partition.
    await _end_of(consumer, TopicPartition(topic, 0))
    numbers = consumer.partitions_for_topic(topic) or {0}
    partitions = [TopicPartition(topic, number) for number in sorted(numbers)]
    starts = await consumer.beginning_offsets(partitions)
    ends = await consumer.end_offsets(partitions)
    return {each.partition: range(starts[each], max(starts[each], ends[each])) for each in partitions}


async def _end_of(consumer: AIOKafkaConsumer, partition: TopicPartition) -> None:
    """Ask where a partition ends, until there is an answer: one that was just made has no leader for a moment."""
    while True:
        try:
            await consumer.end_offsets([partition])
            return
        except KafkaError as error:
            if not (error.retriable or isinstance(error, KafkaTimeoutError)):
                raise
        await asyncio.sleep(_PAUSE_S)
