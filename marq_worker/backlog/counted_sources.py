"""The sources that the backlog counter reads: those whose markers are in this worker's partitions.

The counter commits the offset of a source's first waiting message in a group of its own. The next owner of the markers
partition starts there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError, UnknownTopicOrPartitionError

from marq.core.lease_book import LeaseBook
from marq.core.storage.acquired_ranges import AcquiredRanges
from marq.kafka.committed_offsets import commit_offsets, committed_offsets
from marq.kafka.incarnations import refreshed
from marq.kafka.log_reader import log_ranges
from marq.kafka.records import Records
from marq.settings.definitions import Definitions
from marq.wire.markers import Source
from marq.wire.names import Names, markers_partition
from marq_worker.backlog.waiting_messages import MAX_QUEUES, WaitingRecords
from marq_worker.owner.tracker_owners import TrackerOwners


@dataclass
class CountedSource:
    """A source that is counted; ``owners``: the queues that name its topic, none for the messages topic."""

    source: Source
    book: LeaseBook
    owners: Sequence[str]
    waiting: WaitingRecords
    #: The next offset to read, the end of the source at the takeover, and its last known end.
    position: int
    began_at: int
    end: int
    committed: int | None
    #: The end at the last lookup, and at the one before, up to which it must have been read by now.
    seen: int = field(init=False)
    owed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seen = self.owed = self.began_at

    @property
    def uncounted(self) -> int:
        return max(0, self.end - self.position)

    def ends(self, end: int) -> None:
        """Note the current end."""
        self.owed, self.seen, self.end = self.seen, end, end

    def start_again(self, start: int, end: int) -> None:
        """Forget everything, because the topic was recreated."""
        self.waiting.forget()
        self.position, self.began_at = start, end
        self.seen = self.owed = self.end = end


class CountedSources:
    """Keeps the sources in step with the partitions of this worker and with the topics of queues."""

    def __init__(self, names: Names, owners: TrackerOwners, definitions: Callable[[], Definitions]) -> None:
        self.by_source: dict[Source, CountedSource] = {}
        self.topics = CountedTopics(names.messages)
        self._names = names
        self._owners = owners
        self._definitions = definitions

    @property
    def trouble(self) -> str:
        """Why the count is incomplete; empty if it is complete."""
        crowded = (
            f"more than {MAX_QUEUES:,} names of queues are keys in {source.topic}/{source.partition}"
            for source, counted in self.by_source.items()
            if counted.waiting.crowded
        )
        return "; ".join(filter(None, (self.topics.trouble, *crowded)))

    async def learn_topics(self, consumer: AIOKafkaConsumer) -> None:
        """Ask for the partitions of the topics; raises as :meth:`CountedTopics.learn`."""
        await self.topics.learn(consumer, self._owners_of_topics())

    async def look(self, consumer: AIOKafkaConsumer, books: Mapping[int, LeaseBook]) -> None:
        """Update the sources to count, and where they begin and end."""
        wanted = self._wanted(books)
        partitions = {TopicPartition(*source.log): source for source in wanted}
        starts = await consumer.beginning_offsets([*partitions]) if partitions else {}
        ends = await consumer.end_offsets([*partitions]) if partitions else {}
        kept = {
            source: counted
            for source, counted in self.by_source.items()
            if source in wanted and counted.owners == wanted[source][1]
        }
        if not wanted.keys() == kept.keys() == self.by_source.keys():
            sources = dict(kept)
            new = [partition for partition, source in partitions.items() if source not in kept]
            committed = await committed_offsets(consumer, new)
            for partition in new:
                source = partitions[partition]
                sources[source] = self._begun(
                    source, *wanted[source], range(starts[partition], ends[partition]), committed.get(partition)
                )
            consumer.assign([*partitions])
            for source, counted in sources.items():
                consumer.seek(TopicPartition(*source.log), counted.position)
            self.by_source = sources
        for partition, source in partitions.items():
            counted, start, end = self.by_source[source], starts[partition], ends[partition]
            counted.book = wanted[source][0]
            # An open transaction may begin at ``end``, and consumers may have acquired later messages. If the topic was
            # recreated, the broker has rejected the position, and the consumer is at the start.
            if end < counted.position and await consumer.position(partition) < counted.position:
                counted.start_again(start, end)
                consumer.seek(partition, start)
            # Records after ``end`` can't be counted yet. With the high watermark as the end, the count is incomplete.
            counted.ends(max(end, consumer.highwater(partition) or 0))
            # Messages that retention has removed do not wait.
            counted.waiting.drop_before(start)
            await asyncio.sleep(0)

    def named(self, fetched: Mapping[Source, Records]) -> dict[Source, Records]:
        """Return the records of partitions by their sources."""
        sources = {source.log: source for source in self.by_source}
        return {sources[partition]: records for partition, records in fetched.items() if partition in sources}

    def leave_out(self, error: TopicAuthorizationFailedError) -> None:
        """Skip a queue's own topic that may not be read, for a while; raise the error for another topic."""
        topic = getattr(error.args[0], "topic", error.args[0]) if error.args else None
        if topic not in self._owners_of_topics() or topic == self._names.messages:
            raise error
        self.topics.close(str(topic), error)

    async def commit(self, consumer: AIOKafkaConsumer) -> None:
        """Commit the offsets of the first waiting messages for the next owner."""
        new = {
            source: first
            for source, counted in self.by_source.items()
            if (first := counted.waiting.first(counted.position)) != counted.committed
        }
        if not new:
            return
        sources = self.by_source
        await commit_offsets(consumer, {TopicPartition(*source.log): first for source, first in new.items()})
        for source, first in new.items():
            sources[source].committed = first

    def _owners_of_topics(self) -> dict[str, list[str]]:
        """Return the topics with messages, and the queues that name them."""
        return {self._names.messages: [], **self._definitions().owners_of_topics()}

    def _wanted(self, books: Mapping[int, LeaseBook]) -> dict[Source, tuple[LeaseBook, list[str]]]:
        """Return the sources whose markers are in these books, and the queues that name their topics."""
        context = self._owners.context
        assert context is not None, "there are books only when the topics are known"
        wanted = {}
        for topic, owners in self._owners_of_topics().items():
            for number in range(self.topics.partitions(topic)):
                book = books.get(markers_partition(topic, number, context.markers_partitions))
                if book is not None:
                    wanted[Source(self.topics.incarnation(topic), number)] = book, owners
        return wanted

    def _begun(
        self, source: Source, book: LeaseBook, owners: Sequence[str], span: range, committed: int | None
    ) -> CountedSource:
        begin = min([self._first_of(queue, source, book) for queue in owners], default=committed or 0)
        # It may be after the end that read_committed can reach now.
        position = max(span.start, begin)

        def acquired(queue: str) -> AcquiredRanges | None:
            return counted.book.acquired.get((queue, source))

        def purged_to(queue: str, sent_ms: int) -> int:
            purge = self._definitions().skipped(queue)
            return 0 if purge is None or sent_ms > purge.until_of(source) else purge.ends.get(source, 0)

        waiting = WaitingRecords(acquired, owners, purged_to, lambda queue: self._definitions().defines(queue))
        counted = CountedSource(source, book, owners, waiting, position, span.stop, span.stop, committed)
        return counted

    def _first_of(self, queue: str, source: Source, book: LeaseBook) -> int:
        """Return the offset before which no record of a queue's topic waits.

        The committed offset may be from a time when fewer queues named the topic.
        """
        marks, skipped = book.acquired.get((queue, source)), self._definitions().skipped(queue)
        begin = 0 if skipped is None else skipped.ends.get(source, 0)
        return begin if marks is None else max(begin, marks.first_free(0))


log = logging.getLogger("marq.backlog")

#: How long an answer about a topic is trusted, the time limit of a request, and that of a retry.
BELIEVE_S, ASK_S, ASK_AGAIN_S = 30.0, 5.0, 2.0
_MISSING = (
    "it does not exist, or this worker may not describe it. Create it, or remove `topic` from the queue's settings"
)
#: Topics per request.
_AT_ONCE = 50


class CountedTopics:
    """The topics that the backlog counter reads, and the number of partitions of each.

    A queue's own topic may be missing, deleted, or closed to the worker. Its messages are then not counted, which
    ``trouble`` reports, and counting continues. Nothing can be counted without ``messages``, the topic of the
    namespace.
    """

    def __init__(self, messages: str) -> None:
        self._messages = messages
        self._counts: dict[str, int] = {}
        self._incarnations: dict[str, str] = {}
        self._asked_s: dict[str, float] = {}
        self._closed: dict[str, str] = {}

    def partitions(self, topic: str) -> int:
        """Return the number of partitions; 0 if the topic can't be read or was not looked up yet."""
        return self._counts.get(topic, 0)

    def incarnation(self, topic: str) -> str:
        """Return the name of a topic's incarnation, as it was when the topic was last looked up."""
        return self._incarnations.get(topic, topic)

    @property
    def trouble(self) -> str:
        """Which topics can't be read, and why; empty if all can."""
        return "; ".join(f"topic {topic} can't be read: {why}" for topic, why in sorted(self._closed.items()))

    def doubt(self) -> None:
        """Look up all readable topics again: one of them has a problem."""
        self._asked_s = {topic: asked_s for topic, asked_s in self._asked_s.items() if topic in self._closed}

    async def learn(self, consumer: AIOKafkaConsumer, topics: Collection[str]) -> None:
        """Look up topics whose answers are old, and forget all others.

        Raises KafkaError or TimeoutError if the messages topic can't be looked up.
        """
        for known in (self._counts, self._asked_s, self._closed, self._incarnations):
            for gone in known.keys() - topics:
                del known[gone]
        since_s = time.monotonic() - BELIEVE_S
        due = [topic for topic in topics if self._asked_s.get(topic, since_s) <= since_s]
        if not due:
            return
        async with asyncio.timeout(ASK_S):
            names = await refreshed(consumer, due)
        self._incarnations |= {topic: name for topic, name in names.items() if topic != self._messages}
        if self._messages in due:
            await self._ask(consumer, self._messages)
            due.remove(self._messages)
        if due:
            # A single request: aiokafka asks for a missing topic ten times a second, and logs an error each time.
            async with asyncio.timeout(ASK_S):
                existing = await consumer.topics()
            for topic in set(due) - existing:
                self.close(topic, UnknownTopicOrPartitionError())
            due = [topic for topic in due if topic in existing]
        for first in range(0, len(due), _AT_ONCE):
            await asyncio.gather(*(self._ask_or_close(consumer, topic) for topic in due[first : first + _AT_ONCE]))

    def close(self, topic: str, error: Exception) -> None:
        """Skip a topic for a while."""
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
