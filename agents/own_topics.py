"""Whether copies can go back to the topics that queues have of their own.

Such a topic is somebody else's: it may be deleted, compacted, or closed to the worker. The copy then goes to the
installation's messages topic, which the queue's consumers read, too. Waiting for the topic would hold up all queues of
the partition.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from aiokafka.errors import KafkaError, UnknownTopicOrPartitionError

log = logging.getLogger("marq.tracker")

#: How long to wait for what the broker says of a topic, and for how long that is believed.
LOOK_SECONDS = 2.0
BELIEVE_SECONDS = 60.0


class OwnTopics:
    """What one owner of a markers partition knows of them."""

    def __init__(self) -> None:
        self._usable: dict[str, tuple[bool, float]] = {}

    async def usable(self, producer: Any, topic: str) -> bool:
        """Whether a topic exists and may be described."""
        found, until = self._usable.get(topic, (False, 0.0))
        if time.monotonic() < until:
            return found
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await producer.partitions_for(topic)
        except (KafkaError, TimeoutError) as error:
            self.close(topic, error if isinstance(error, KafkaError) else UnknownTopicOrPartitionError())
            return False
        self._usable[topic] = True, time.monotonic() + BELIEVE_SECONDS
        return True

    def close(self, topic: str, error: KafkaError | TimeoutError) -> None:
        """Send no copies there for a while."""
        log.error(
            "topic %s can't be written (%s): copies of its queue's messages go to the installation's messages topic",
            topic,
            type(error).__name__,
        )
        self._usable[topic] = False, time.monotonic() + BELIEVE_SECONDS
