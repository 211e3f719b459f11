"""Committed offsets of a consumer that assigns partitions to itself: one request each, which can be cancelled.

``AIOKafkaConsumer.committed`` makes a request for each partition. Its ``commit`` goes on behind the back of whoever
gave it up after a while, and ends in an exception that nobody retrieves. tests/client/test_group_offsets.py tells when
what is relied on here changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from aiokafka.structs import OffsetAndMetadata, TopicPartition


async def committed_offsets(consumer: Any, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """Return what the consumer's group has committed of these, where it has; the caller sets a limit.

    Raises:
        KafkaError: refused.
    """
    found = await consumer._coordinator.fetch_committed_offsets(list(partitions))
    return {partition: each.offset for partition, each in found.items() if each.offset >= 0}


async def commit_offsets(consumer: Any, offsets: Mapping[TopicPartition, int]) -> None:
    """Commit once, of partitions that are assigned now; the caller sets a limit.

    Raises:
        KafkaError: not committed, or not known to be.
    """
    coordinator, assignment = consumer._coordinator, consumer._subscription.subscription.assignment
    await coordinator.ensure_coordinator_known()
    await coordinator._do_commit_offsets(
        assignment, {partition: OffsetAndMetadata(offset, "") for partition, offset in offsets.items()}
    )
