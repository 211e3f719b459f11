"""Which topics the census reads, and how many partitions each has.

A topic of a queue's own is somebody else's: it may be missing, be deleted, or be closed to the worker. Then what waits
in it is not counted, which is said, and nothing else is held up: topics are asked about beside the counting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError, UnknownTopicOrPartitionError

from marq.log_ranges import log_ranges

log = logging.getLogger("marq.census")

#: For how long is believed what was said of a topic, and how long that may take; also of one that could not be read.
BELIEVE_S, ASK_S, ASK_AGAIN_S = 60.0, 5.0, 2.0
#: Reason for a topic that the broker does not list.
_MISSING = (
    "it does not exist, or this worker may not describe it. Create it, or remove `topic` from the queue's settings"
)
#: Topics that are asked about at a time.
_AT_ONCE = 50


class CountedTopics:
    """``messages``: the installation's topic, without which nothing can be counted."""

    def __init__(self, messages: str) -> None:
        self._messages = messages
        self._counts: dict[str, int] = {}
        self._asked_s: dict[str, float] = {}
        self._closed: dict[str, str] = {}

    def partitions(self, topic: str) -> int:
        """Return how many partitions a topic has; 0: it can't be read now, or was not asked about yet."""
        return self._counts.get(topic, 0)

    @property
    def trouble(self) -> str:
        """Which topics can't be read, and why; empty: all can."""
        return "; ".join(f"topic {topic} can't be read: {why}" for topic, why in sorted(self._closed.items()))

    def doubt(self) -> None:
        """Ask about all that can be read once more: something was wrong with one of them."""
        self._asked_s = {topic: asked_s for topic, asked_s in self._asked_s.items() if topic in self._closed}

    async def learn(self, consumer: AIOKafkaConsumer, topics: Collection[str]) -> None:
        """Ask about these topics, where that was not done for a while, and forget all others.

        Raises:
            KafkaError, TimeoutError: nothing can be learned of the messages topic, and so of none.
        """
        for known in (self._counts, self._asked_s, self._closed):
            for gone in known.keys() - topics:
                del known[gone]
        since_s = time.monotonic() - BELIEVE_S
        due = [topic for topic in topics if self._asked_s.get(topic, since_s) <= since_s]
        if self._messages in due:
            await self._ask(consumer, self._messages)
            due.remove(self._messages)
        if due:
            # One request for all: aiokafka asks for a missing topic ten times a second, and logs an error each time.
            async with asyncio.timeout(ASK_S):
                existing = await consumer.topics()
            for topic in set(due) - existing:
                self.close(topic, UnknownTopicOrPartitionError())
            due = [topic for topic in due if topic in existing]
        for first in range(0, len(due), _AT_ONCE):
            await asyncio.gather(*(self._ask_or_close(consumer, topic) for topic in due[first : first + _AT_ONCE]))

    def close(self, topic: str, error: Exception) -> None:
        """Leave a topic out for a while."""
        why = _MISSING if isinstance(error, UnknownTopicOrPartitionError) else repr(error)
        if topic not in self._closed:
            log.warning("topic %s can't be read, so its queue's messages are not counted: %s", topic, why)
        self._counts[topic], self._closed[topic] = 0, why
        self._asked_s[topic] = time.monotonic()

    async def _ask_or_close(self, consumer: AIOKafkaConsumer, topic: str) -> None:
        try:
            await self._ask(consumer, topic)
        except (KafkaError, TimeoutError) as error:
            self.close(topic, error)

    async def _ask(self, consumer: AIOKafkaConsumer, topic: str) -> None:
        async with asyncio.timeout(ASK_AGAIN_S if topic in self._closed else ASK_S):
            self._counts[topic] = len(await log_ranges(consumer, topic))
        self._asked_s[topic] = time.monotonic()
        self._closed.pop(topic, None)
