"""The topics that the backlog counter reads if a queue's own topic is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from aiokafka import TopicPartition

from marq_worker.agents import counted_sources
from marq_worker.agents.counted_sources import CountedTopics

MESSAGES, OWN = "marq.messages", "orders"


class Consumer:
    """Knows some topics, and which of them it was asked about."""

    def __init__(self, *topics: str) -> None:
        self.existing = set(topics)
        self.asked: list[str] = []

    async def topics(self) -> set[str]:
        return self.existing

    def partitions_for_topic(self, topic: str) -> set[int]:
        return {0, 1}

    async def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        self.asked += [partition.topic for partition in partitions]
        return dict.fromkeys(partitions, 7)

    async def beginning_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 0)


async def test_a_missing_topic_is_one_warning_that_says_what_to_do_and_is_not_asked_about(
    caplog: pytest.LogCaptureFixture, logged: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted_sources, "BELIEVE_S", 0.0)
    counted, consumer = CountedTopics(MESSAGES), Consumer(MESSAGES)

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await counted.learn(consumer, [MESSAGES, OWN])

    assert (counted.partitions(MESSAGES), counted.partitions(OWN)) == (2, 0)
    assert OWN not in consumer.asked
    [message] = logged()
    assert message.startswith("topic orders can't be read")
    assert "does not exist" in counted.trouble
    assert "Create it, or remove `topic`" in counted.trouble


async def test_a_missing_topic_is_counted_once_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_sources, "BELIEVE_S", 0.0)
    counted, consumer = CountedTopics(MESSAGES), Consumer(MESSAGES)
    await counted.learn(consumer, [MESSAGES, OWN])

    consumer.existing.add(OWN)
    await counted.learn(consumer, [MESSAGES, OWN])

    assert (counted.partitions(OWN), counted.trouble) == (2, "")
