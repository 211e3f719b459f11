"""The topics that the backlog counter reads if a queue's own topic is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from types import SimpleNamespace

import pytest
from aiokafka import TopicPartition

from marq.core.lease_book import LeaseBook
from marq.core.storage.acquired_ranges import AcquiredRanges
from marq.settings.definitions import Definitions
from marq.wire.markers import Source
from marq.wire.names import Names, incarnation
from marq_worker.backlog import counted_sources
from marq_worker.backlog.backlog_counter import LOOK_S
from marq_worker.backlog.counted_sources import CountedSource, CountedSources, CountedTopics
from marq_worker.backlog.waiting_messages import WaitingRecords
from marq_worker.owner.tracker_owners import TrackerOwners

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


@pytest.fixture(autouse=True)
def ids(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The ids of topics."""
    topic_ids: dict[str, str] = {}

    async def refreshed(consumer: Consumer, topics: Collection[str]) -> dict[str, str]:
        return {topic: incarnation(topic, topic_ids[topic]) for topic in topics if topic in topic_ids}

    monkeypatch.setattr(counted_sources, "refreshed", refreshed)
    return topic_ids


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


async def test_the_metadata_of_topics_is_refreshed_before_their_partitions_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """aiokafka refreshes it after five minutes: until then, messages in added partitions would not be counted."""
    monkeypatch.setattr(counted_sources, "BELIEVE_S", 0.0)
    counted, consumer = CountedTopics(MESSAGES), Consumer(MESSAGES, OWN)
    known = {MESSAGES: {0, 1}, OWN: {0}}
    monkeypatch.setattr(consumer, "partitions_for_topic", known.get)
    await counted.learn(consumer, [MESSAGES, OWN])

    async def refreshed(_: Consumer, topics: Collection[str]) -> dict[str, str]:
        known[OWN] = {0, 1, 2}
        return {}

    monkeypatch.setattr(counted_sources, "refreshed", refreshed)
    before = counted.partitions(OWN)
    await counted.learn(consumer, [MESSAGES, OWN])

    assert (before, counted.partitions(OWN)) == (1, 3)


def test_added_partitions_are_counted_within_a_minute() -> None:
    assert counted_sources.BELIEVE_S + LOOK_S + counted_sources.ASK_S < 60


async def test_a_topic_that_was_created_again_has_sources_of_its_own(
    ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted_sources, "BELIEVE_S", 0.0)
    definitions, owners = Definitions(), TrackerOwners("markers")
    monkeypatch.setattr(Definitions, "owners_of_topics", lambda _: {OWN: ["orders"]})
    owners.context = SimpleNamespace(markers_partitions=1)
    sources, book, consumer = (
        CountedSources(Names("marq"), owners, lambda: definitions),
        LeaseBook(None),
        SeekingConsumer(),
    )
    # In the former topic, a consumer has acquired everything.
    book.acquired["orders", Source(f"{OWN}@aaaaaaaaaaaa", 0)] = AcquiredRanges([(0, 7)])
    starts = []
    for topic_id in ("aaaaaaaaaaaa", "bbbbbbbbbbbb"):
        ids[OWN] = topic_id
        await sources.learn_topics(consumer)
        await sources.look(consumer, {0: book})
        [source] = [candidate for candidate in sources.by_source if candidate.log == Source(OWN, 0)]
        starts.append((source.topic, sources.by_source[source].position, consumer.sought[TopicPartition(OWN, 0)]))

    assert starts == [(f"{OWN}@aaaaaaaaaaaa", 7, 7), (f"{OWN}@bbbbbbbbbbbb", 0, 0)]
    assert sources.named({Source(OWN, 0): "records"}) == {Source(f"{OWN}@bbbbbbbbbbbb", 0): "records"}


class SeekingConsumer(Consumer):
    """Notes where it is told to read."""

    def __init__(self) -> None:
        super().__init__(MESSAGES, OWN)
        self.sought: dict[TopicPartition, int] = {}
        self._coordinator = self

    async def fetch_committed_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, object]:
        return {}

    def assign(self, partitions: list[TopicPartition]) -> None: ...

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.sought[partition] = offset

    def highwater(self, _: TopicPartition) -> int:
        return 7


class PartitionsConsumer(Consumer):
    """Knows what the broker says of one partition, and where it reads."""

    def __init__(self, end: int, position: int, highwater: int) -> None:
        super().__init__(MESSAGES)
        self.end, self.at, self.high = end, position, highwater

    async def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, self.end)

    async def position(self, _: TopicPartition) -> int:
        return self.at

    def highwater(self, _: TopicPartition) -> int:
        return self.high

    def seek(self, _: TopicPartition, offset: int) -> None:
        self.at = offset


@pytest.mark.parametrize(
    ("consumer", "position", "uncounted"),
    [
        (PartitionsConsumer(end=3, position=5, highwater=9), 5, 4),
        (PartitionsConsumer(end=3, position=0, highwater=3), 0, 3),
    ],
    ids=["an open transaction at offset 3", "a recreated topic"],
)
async def test_a_position_after_the_end_is_given_up_only_if_the_broker_rejects_it(
    consumer: PartitionsConsumer, position: int, uncounted: int
) -> None:
    definitions, owners = Definitions(), TrackerOwners("markers")
    owners.context = SimpleNamespace(markers_partitions=1)
    sources, book, source = CountedSources(Names("marq"), owners, lambda: definitions), object(), Source(MESSAGES, 0)
    counted = CountedSource(source, book, [], WaitingRecords(lambda _: None), 5, 5, 5, None)
    sources.by_source, sources.topics._counts = {source: counted}, {MESSAGES: 1}

    await sources.look(consumer, {0: book})

    assert (counted.position, counted.uncounted) == (position, uncounted)
