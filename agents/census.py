"""The census: counts what waits in each queue, whoever sent it, also with many queues on one topic.

The owner of a markers partition reads the records of all partitions whose markers it has, looks at their keys only, and
holds them against the marks of its lease book: what no consumer has acquired waits. So a message is counted by one
worker at a time, without asking the groups of queues how far they are.

Where all that waits begins is committed in a group of its own. Whoever takes a partition over begins there, and reads
what waits once more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, KafkaTimeoutError, TopicAuthorizationFailedError

from agents.counted_topics import CountedTopics
from agents.tracker import TrackerOwners
from agents.waiting import MAX_QUEUES, Waiting
from marq.connection import client_options, started, stop_consumer
from marq.core.definitions import Definitions
from marq.core.errors import MarqError
from marq.core.leases import LeaseBook
from marq.core.markers import Source
from marq.core.marks import Marks
from marq.core.names import markers_partition
from marq.fetching import fetch_records
from marq.group_offsets import commit_offsets, committed_offsets
from marq.records import Records
from marq.settings import ClientSettings

log = logging.getLogger("marq.census")

#: Records that are looked at in one turn of the event loop.
AT_ONCE = 4_000
#: How many of what stood there at a takeover it counts a second while there are markers to fold.
BUSY_PER_SECOND = 20_000
#: A fetch waits so long for so much: few requests where little is sent.
FETCH_WAIT_MS, FETCH_BYTES = 250, 1 << 19
#: Of all partitions together: what a worker with many keeps in memory.
MAX_FETCH_BYTES = 1 << 23
#: How often the figures are made anew, and over how many of them arrivals are a rate.
SUM_S, RATE_SUMS = 1.0, 10
#: Figures of (queue, partition) that are made without giving way to others, and how much longer than that they rest.
_SUMS_AT_ONCE, _SUMS_REST = 1_000, 4
#: Names that get figures although nobody defined or read them: anybody may write any key, and each costs all pages.
MAX_UNKNOWN = 1_000
#: How often to look where partitions begin and end, and to commit, and how long either may take.
LOOK_S, LOOK_LIMIT_S, COMMIT_LIMIT_S = 5.0, 5.0, 5.0
#: How long to wait after an error, at first and at the most; also how often the log says the same.
RETRY_S, MAX_RETRY_S = 5.0, 60.0
STOP_S = 1.0
#: What was foreseen; anything else is a defect, of which the log needs to know more.
_FORESEEN = (KafkaError, MarqError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class QueueCensus:
    """What waits of a queue in this worker's partitions.

    ``oldest_ms``: when the first of it was sent, in ms since the epoch, to a second; None: nothing waits. ``arrived``:
    records that came since this worker counts, copies and redriven ones among them.
    """

    waiting: int = 0
    oldest_ms: int | None = None
    arrived: int = 0
    arrived_per_second: float = 0.0


@dataclass
class _Counted:
    """One source that is counted; ``owner``: the queue whose own topic it is of."""

    source: Source
    book: LeaseBook
    owner: str | None
    waiting: Waiting
    #: The next offset to read, where the source ended when it was taken over, and where it is known to end.
    position: int
    began_at: int
    end: int
    committed: int | None
    #: Where it ended at the last look, and at the one before: so far it must be read by now.
    seen: int = field(init=False)
    owed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seen = self.owed = self.began_at

    @property
    def uncounted(self) -> int:
        return max(0, self.end - self.position)

    def ends(self, end: int) -> None:
        """Note where it ends now."""
        self.owed, self.seen, self.end = self.seen, end, end

    def begin_anew(self, start: int, end: int) -> None:
        """Forget all: the topic was made anew."""
        self.waiting.forget()
        self.position, self.began_at = start, end
        self.seen = self.owed = self.end = end


@dataclass
class Census:
    """Counts for one worker; ``definitions``: what is known of queues now."""

    client: ClientSettings
    owners: TrackerOwners
    definitions: Callable[[], Definitions]
    #: By queue; made anew once a second.
    queues: Mapping[str, QueueCensus] = field(default_factory=dict)
    #: Whether anything is counted now; else the figures are not 0, but not known.
    counts: bool = False
    #: Messages of queues that nobody has defined or read, where these are too many for figures of their own.
    others: int = 0
    _trouble: str = "it has not begun"
    _said_s: dict[str, float] = field(default_factory=dict)
    _topics: CountedTopics = field(init=False)
    _sources: dict[Source, _Counted] = field(default_factory=dict)
    #: The markers partitions of which the sources are counted.
    _followed: Mapping[int, LeaseBook] = field(default_factory=dict)
    _arrived: Counter[str] = field(default_factory=Counter)
    #: (monotonic seconds, what had arrived by then).
    _samples: deque[tuple[float, Counter[str]]] = field(default_factory=lambda: deque(maxlen=RATE_SUMS + 1))
    #: When to look again at the latest, and whether the last look failed.
    _look_s: float = float("-inf")
    _failed: bool = False
    #: Marker records that were folded when it last looked.
    _folded: int = 0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._topics = CountedTopics(self.client.names.messages)

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._live(), name="census"),
            asyncio.create_task(self._sum_up(), name="census-sums"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        # Whatever became of them: what else the worker has to end must be ended.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    @property
    def uncounted(self) -> int:
        """How many records of this worker's partitions are not looked at yet, as far as is known."""
        return sum(each.uncounted for each in self._sources.values())

    @property
    def strangers(self) -> int:
        """How many records had a key that names no queue, of those that were read here."""
        return sum(each.waiting.strangers for each in self._sources.values())

    @property
    def trouble(self) -> str:
        """Why nothing is counted, or not all; empty: all is well."""
        crowded = (
            f"more than {MAX_QUEUES:,} names of queues are keys in {source.topic}/{source.partition}"
            for source, counted in self._sources.items()
            if counted.waiting.crowded
        )
        return "; ".join(filter(None, (self._trouble, self._topics.trouble, *crowded)))

    @property
    def complete(self) -> bool:
        """Whether all is counted that waited when partitions were taken over, or some seconds ago."""
        begun = self.counts and not self.trouble and self._followed.keys() == self.owners.owned.keys()
        return begun and all(each.position >= each.owed for each in self._sources.values())

    def figures(self) -> dict[str, Any]:
        """What pages show of it."""
        return {
            "complete": self.complete,
            "uncounted": self.uncounted,
            "strangers": self.strangers,
            "others": self.others,
            "trouble": self.trouble,
        }

    async def _live(self) -> None:
        wait_s = RETRY_S
        while True:
            began_s = time.monotonic()
            try:
                consumer = await started(self._make, self.client, lambda each: stop_consumer(each, 0))
                try:
                    await self._count(consumer)
                finally:
                    # First: what is not counted any more must not look like nothing.
                    self.counts, self._sources, self.queues = False, {}, {}
                    await stop_consumer(consumer, STOP_S)
            except Exception as error:  # whatever it is: a census that ended would leave old figures for new ones
                self._complain("messages can't be read", error)
            if time.monotonic() - began_s > MAX_RETRY_S:
                wait_s = RETRY_S
            await asyncio.sleep(wait_s)
            # What fails soon after each start makes it read all that waits again and again.
            wait_s = min(2 * wait_s, MAX_RETRY_S)

    def _complain(self, what: str, error: Exception) -> None:
        self._trouble = f"{what}: {error!r}"
        if self._is_new(self._trouble):
            defect = None if isinstance(error, _FORESEEN) else error
            log.warning("the census counts nothing new, and tries again: %s", self._trouble, exc_info=defect)

    def _is_new(self, text: str) -> bool:
        """Whether the log was not told this for a while."""
        now_s = time.monotonic()
        self._said_s = {each: said_s for each, said_s in self._said_s.items() if now_s - said_s < MAX_RETRY_S}
        return self._said_s.setdefault(text, now_s) == now_s

    def _make(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            **client_options(self.client),
            group_id=self.client.names.census,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            # As consumers do by default: a copy of a transaction that was aborted is delivered, so it waits.
            isolation_level="read_uncommitted",
            fetch_max_wait_ms=FETCH_WAIT_MS,
            fetch_min_bytes=FETCH_BYTES,
            fetch_max_bytes=MAX_FETCH_BYTES,
        )

    async def _count(self, consumer: AIOKafkaConsumer) -> None:
        self._look_s, self._followed = float("-inf"), {}
        await self._topics.learn(consumer, self._owners_of_topics())
        upkeep = asyncio.create_task(self._keep_up(consumer), name="census-upkeep")
        try:
            while not upkeep.done():
                await self._look_if_due(consumer)
                if self._sources:
                    await self._read(consumer)
                else:
                    await asyncio.sleep(SUM_S)
            upkeep.result()
        finally:
            upkeep.cancel()

    async def _keep_up(self, consumer: AIOKafkaConsumer) -> None:
        """Do what counting need not wait for."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._topics.learn(consumer, self._owners_of_topics())
                async with asyncio.timeout(COMMIT_LIMIT_S):
                    await self._commit(consumer)
            except (KafkaError, TimeoutError) as error:
                if self._is_new(repr(error)):
                    log.warning("the census could not look at topics, or commit where it would begin: %r", error)

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        try:
            fetched = await fetch_records(consumer, SUM_S, AT_ONCE)
        except TopicAuthorizationFailedError as error:
            self._shun(error)
            return
        began_s = time.monotonic()
        for source, records in fetched.items():
            await self._take(source, records)
        await self._pass_what_is_kafkas(consumer, fetched)
        await asyncio.sleep(self._rest_s(sum(map(len, fetched.values())), time.monotonic() - began_s))

    def _rest_s(self, records: int, took_s: float) -> float:
        """Return how long to leave the event loop to others after a turn.

        Far behind, as long as it looked at keys. What stood there at a takeover it counts slowly while there are
        markers to fold: that can be done later, and much of it will not wait any more.
        """
        if self.uncounted <= AT_ONCE:
            return 0.0
        before, self._folded = self._folded, sum(owner.folded for owner in self.owners.owned.values())
        begins = any(each.position < each.began_at for each in self._sources.values())
        return max(took_s, records / BUSY_PER_SECOND) if begins and self._folded != before else took_s

    async def _pass_what_is_kafkas(self, consumer: AIOKafkaConsumer, fetched: Mapping[Source, Records]) -> None:
        """Note how far sources were read that have nothing to count: the end marks of transactions may stand there."""
        for source, counted in self._sources.items():
            at = TopicPartition(*source)
            counted.end = max(counted.end, consumer.highwater(at) or 0)
            if source not in fetched and counted.position < counted.end:
                with suppress(TimeoutError):
                    async with asyncio.timeout(SUM_S):
                        counted.position = max(counted.position, await consumer.position(at))

    def _books(self) -> dict[int, LeaseBook]:
        return {number: owner.tracker.book for number, owner in self.owners.owned.items() if owner.state == "owner"}

    async def _take(self, source: Source, records: Records) -> None:
        counted = self._sources[source]
        if records.offsets[0] < counted.position:
            counted.begin_anew(0, counted.end)
        for first in range(0, len(records), AT_ONCE):
            some = records if len(records) <= AT_ONCE else records[first : first + AT_ONCE]
            arrived = counted.waiting.add(some)
            counted.position = some.offsets[-1] + 1
            # What stood there before has arrived before.
            if some.offsets[0] >= counted.began_at:
                self._arrived.update(arrived)
            if len(some) < len(records):
                await asyncio.sleep(0)

    # --- which sources ------------------------------------------------------------------------------------------------

    async def _look_if_due(self, consumer: AIOKafkaConsumer) -> None:
        books = self._books()
        same = books == self._followed
        if time.monotonic() < self._look_s and (same or self._failed):
            return
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                await self._look(consumer, books)
        except TopicAuthorizationFailedError as error:
            self._shun(error)
        except (KafkaError, TimeoutError) as error:
            if isinstance(error, KafkaError) and not error.retriable and not isinstance(error, KafkaTimeoutError):
                raise
            # What is counted stays, for the broker may be back in a moment. Or a topic was deleted.
            self._topics.doubt()
            self._complain("the broker does not say where partitions end", error)
            self._failed, self._look_s = True, time.monotonic() + (LOOK_S if same else SUM_S)
        else:
            self._failed, self._look_s = False, time.monotonic() + LOOK_S
            self._followed, self.counts, self._trouble = books, True, ""

    async def _look(self, consumer: AIOKafkaConsumer, books: Mapping[int, LeaseBook]) -> None:
        """Look which sources there are to count, and what the broker has of them."""
        wanted = self._wanted(books)
        partitions = [TopicPartition(*source) for source in wanted]
        starts = await consumer.beginning_offsets(partitions) if partitions else {}
        ends = await consumer.end_offsets(partitions) if partitions else {}
        kept = {
            source: counted
            for source, counted in self._sources.items()
            if source in wanted and counted.owner == wanted[source][1]
        }
        if not wanted.keys() == kept.keys() == self._sources.keys():
            found = dict(kept)
            new = [at for at in partitions if Source(*at) not in kept]
            committed = await committed_offsets(consumer, new)
            for at in new:
                source = Source(*at)
                found[source] = self._begun(source, *wanted[source], range(starts[at], ends[at]), committed.get(at))
            consumer.assign(partitions)
            for source, counted in found.items():
                consumer.seek(TopicPartition(*source), counted.position)
            self._sources = found
        for at in partitions:
            counted, start, end = self._sources[Source(*at)], starts[at], ends[at]
            counted.book = wanted[Source(*at)][0]
            if end < counted.position:
                counted.begin_anew(start, end)
                consumer.seek(at, start)
            counted.ends(end)
            # What retention took waits no more.
            counted.waiting.drop_before(start)
            await asyncio.sleep(0)

    def _shun(self, error: TopicAuthorizationFailedError) -> None:
        """Leave out a topic that may not be read, for a while: those of others can be counted."""
        topic = getattr(error.args[0], "topic", error.args[0]) if error.args else None
        if topic not in self._owners_of_topics() or topic == self.client.names.messages:
            raise error
        self._topics.close(str(topic), error)
        self._look_s = float("-inf")

    def _owners_of_topics(self) -> dict[str, str | None]:
        """Return the topics in which messages are sent, and the queues whose own they are."""
        definitions = self.definitions()
        topics: dict[str, str | None] = {self.client.names.messages: None}
        for queue in definitions.names():
            if (topic := definitions.settings(queue).topic) is not None:
                topics[topic] = queue
        return topics

    def _wanted(self, books: Mapping[int, LeaseBook]) -> dict[Source, tuple[LeaseBook, str | None]]:
        """Return the sources whose markers these books have, and the queue whose own their topic is."""
        around = self.owners.around
        assert around is not None, "there are books only when the topics are known"
        wanted = {}
        for topic, owner in self._owners_of_topics().items():
            for number in range(self._topics.partitions(topic)):
                book = books.get(markers_partition(topic, number, around.markers_partitions))
                if book is not None:
                    wanted[Source(topic, number)] = book, owner
        return wanted

    def _begun(
        self, source: Source, book: LeaseBook, owner: str | None, span: range, committed: int | None
    ) -> _Counted:
        # Of a topic that was made anew the offset is another one's.
        position = span.start if committed is None or committed > span.stop else max(span.start, committed)

        def marks(queue: str) -> Marks | None:
            return counted.book.marks.get((queue, source))

        def purged_to(queue: str, sent_ms: int) -> int:
            purge = self.definitions().purge(queue)
            return 0 if purge is None or sent_ms > purge.until_ms else purge.ends.get(source, 0)

        waiting = Waiting(marks, owner, purged_to, lambda queue: self.definitions().defines(queue))
        counted = _Counted(source, book, owner, waiting, position, span.stop, span.stop, committed)
        return counted

    async def _commit(self, consumer: AIOKafkaConsumer) -> None:
        """Commit where what waits begins, for whoever takes over."""
        new = {
            source: first
            for source, counted in self._sources.items()
            if (first := counted.waiting.first(counted.position)) != counted.committed
        }
        if not new:
            return
        sources = self._sources
        await commit_offsets(consumer, {TopicPartition(*source): first for source, first in new.items()})
        for source, first in new.items():
            sources[source].committed = first

    # --- figures ------------------------------------------------------------------------------------------------------

    async def _sum_up(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                self.queues = await self._sums() if self.counts else {}
            except Exception as error:  # as in _live
                self.counts, self.queues = False, {}
                self._complain("what waits can't be added up", error)
            await asyncio.sleep(max(SUM_S, _SUMS_REST * (time.monotonic() - began_s)))

    async def _sums(self) -> dict[str, QueueCensus]:
        counts: Counter[str] = Counter()
        oldest_ms: dict[str, int] = {}
        done, books = 0, list(map(id, self._books().values()))
        for counted in list(self._sources.values()):
            if id(counted.book) not in books:
                # Somebody else's by now.
                continue
            waiting = counted.waiting
            for queue in waiting.queues():
                count = waiting.count(queue)
                sent_ms = waiting.oldest_ms(queue) if count else None
                counts[queue] += count
                if sent_ms is not None:
                    oldest_ms[queue] = min(sent_ms, oldest_ms.get(queue, sent_ms))
                done += 1
                if done % _SUMS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        return self._figures_of(counts, oldest_ms)

    def _figures_of(self, counts: Counter[str], oldest_ms: Mapping[str, int]) -> dict[str, QueueCensus]:
        now_s, arrived = time.monotonic(), self._arrived.copy()
        self._samples.append((now_s, arrived))
        (since_s, before) = self._samples[0]
        took_s = now_s - since_s
        return {
            queue: QueueCensus(
                counts[queue],
                oldest_ms.get(queue),
                arrived[queue],
                (arrived[queue] - before[queue]) / took_s if took_s else 0.0,
            )
            for queue in self._shown(counts, arrived)
        }

    def _shown(self, counts: Counter[str], arrived: Counter[str]) -> set[str]:
        """Return the queues that get figures; of those that nobody knows, the ones with most waiting."""
        definitions, books = self.definitions(), list(self._books().values())
        names = {*counts, *arrived}
        unknown = [
            queue for queue in names if not (definitions.defines(queue) or any(queue in book.counts for book in books))
        ]
        if len(unknown) <= MAX_UNKNOWN:
            self.others = 0
            return names
        unknown.sort(key=lambda queue: (-counts[queue], queue))
        left_out = unknown[MAX_UNKNOWN:]
        self.others = sum(counts[queue] for queue in left_out)
        return names.difference(left_out)
