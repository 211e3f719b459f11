"""The backlog counter: counts the waiting messages of each queue, even if many queues share a topic.

The owner of a markers partition reads the keys of all records in the partitions whose markers it has, and compares
their offsets with the acquired ranges of its lease book: a message that no consumer has acquired is waiting. So each
message is counted by one worker at a time, without asking the broker for the positions of groups.

The counter commits the offset of the first waiting message in a group of its own. The next owner starts there, and
reads the waiting messages once more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, KafkaTimeoutError, TopicAuthorizationFailedError
from mode import Service

from marq.core.lease_book import LeaseBook
from marq.kafka.connection import client_options, started, stop_consumer
from marq.kafka.fetched_columns import fetch_records
from marq.kafka.records import Records
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.errors import MarqError
from marq.wire.markers import Source
from marq_worker.agents.tracker import TrackerOwners
from marq_worker.backlog.counted_sources import CountedSources

log = logging.getLogger("marq.backlog")

#: Records to process in one turn of the event loop.
AT_ONCE = 4_000
#: How many records from before a takeover to count per second while there are markers to fold.
BUSY_PER_SECOND = 20_000
#: Maximum wait and minimum bytes of a fetch, so that quiet topics cause few requests.
FETCH_WAIT_MS, FETCH_BYTES = 250, 1 << 19
#: Maximum bytes of a fetch over all partitions, which limits the memory of a worker with many partitions.
MAX_FETCH_BYTES = 1 << 23
#: Interval between sums, and the number of sums over which arrivals become a rate.
SUM_S, RATE_SUMS = 1.0, 10
#: Sums of (queue, partition) to compute before yielding to other tasks, and the factor of the pause after them.
_SUMS_AT_ONCE, _SUMS_REST = 1_000, 4
#: Maximum number of unknown queues with metrics. Senders can write any key, and each queue makes every page larger.
MAX_UNKNOWN = 1_000
#: Interval between two lookups of partition ends and two commits, and the time limit of each.
LOOK_S, LOOK_LIMIT_S, COMMIT_LIMIT_S = 5.0, 5.0, 5.0
#: Backoff after an error: first and longest; also the interval between equal log lines.
RETRY_S, MAX_RETRY_S = 5.0, 60.0
STOP_S = 1.0
#: Expected errors; any other is a defect and is logged with its traceback.
_FORESEEN = (KafkaError, MarqError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class QueueBacklog:
    """The waiting messages of a queue in this worker's partitions.

    ``oldest_ms`` is when the oldest was sent, in ms since the epoch, to the second; None if none waits. ``arrived``
    counts records since the start of this worker, redelivered and redriven ones included.
    """

    waiting: int = 0
    oldest_ms: int | None = None
    arrived: int = 0
    arrived_per_second: float = 0.0


class BacklogCounter(Service):
    """Counts for one worker; ``definitions`` returns the definitions of queues."""

    def __init__(self, client: ClientSettings, owners: TrackerOwners, definitions: Callable[[], Definitions]) -> None:
        super().__init__()
        self.client = client
        self.owners = owners
        self.definitions = definitions
        #: Backlog by queue, computed once a second.
        self.queues: Mapping[str, QueueBacklog] = {}
        #: True while the counter runs; otherwise the backlog is unknown, not 0.
        self.counts = False
        #: Messages of unknown queues beyond the ones listed by name.
        self.unknown_queues = 0
        self._trouble = "it has not begun"
        self._logged_s: dict[str, float] = {}
        self._sources = CountedSources(client.names, owners, definitions)
        #: The lease books of the markers partitions whose sources are counted.
        self._followed: Mapping[int, LeaseBook] = {}
        self._arrived: Counter[str] = Counter()
        #: (monotonic seconds, records that had arrived by then).
        self._samples: deque[tuple[float, Counter[str]]] = deque(maxlen=RATE_SUMS + 1)
        #: When the next lookup is due, and whether the last one failed.
        self._look_s = float("-inf")
        self._failed = False
        #: Marker records that had been folded at the last read.
        self._folded = 0

    @property
    def uncounted(self) -> int:
        """Records of this worker's partitions that have not been read yet, as far as known."""
        return sum(source.uncounted for source in self._sources.by_source.values())

    @property
    def unknown(self) -> int:
        """Records whose key does not name a queue."""
        return sum(source.waiting.unknown for source in self._sources.by_source.values())

    @property
    def trouble(self) -> str:
        """Why the count is missing or incomplete; empty if it is complete."""
        return "; ".join(filter(None, (self._trouble, self._sources.trouble)))

    @property
    def complete(self) -> bool:
        """Whether everything that was waiting at the takeover, or a few seconds ago, has been counted."""
        begun = self.counts and not self.trouble and self._followed.keys() == self.owners.owned.keys()
        return begun and all(source.position >= source.owed for source in self._sources.by_source.values())

    def metrics(self) -> dict[str, Any]:
        return {
            "complete": self.complete,
            "uncounted": self.uncounted,
            "unknown": self.unknown,
            "unknown_queues": self.unknown_queues,
            "trouble": self.trouble,
        }

    @Service.task
    async def _read_messages(self) -> None:
        wait_s = RETRY_S
        while not self.should_stop:
            began_s = time.monotonic()
            try:
                consumer = await started(self._make, self.client, lambda failed: stop_consumer(failed, 0))
                try:
                    await self._count(consumer)
                finally:
                    # First, because uncounted messages must not look like no messages.
                    self.counts, self._sources.by_source, self.queues = False, {}, {}
                    await stop_consumer(consumer, STOP_S)
            except Exception as error:  # any error: a stopped backlog counter would leave outdated metrics
                self._complain("messages can't be read", error)
            if time.monotonic() - began_s > MAX_RETRY_S:
                wait_s = RETRY_S
            await asyncio.sleep(wait_s)
            # After each start, the counter reads all waiting messages again.
            wait_s = min(2 * wait_s, MAX_RETRY_S)

    def _complain(self, what: str, error: Exception) -> None:
        self._trouble = f"{what}: {error!r}"
        if self._is_new(self._trouble):
            defect = None if isinstance(error, _FORESEEN) else error
            log.warning("the backlog counter cannot read messages, retrying: %s", self._trouble, exc_info=defect)

    def _is_new(self, text: str) -> bool:
        """Return whether this text was not logged recently."""
        now_s = time.monotonic()
        self._logged_s = {old: at_s for old, at_s in self._logged_s.items() if now_s - at_s < MAX_RETRY_S}
        return self._logged_s.setdefault(text, now_s) == now_s

    def _make(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            **client_options(self.client),
            group_id=self.client.names.backlog,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            # Consumers that read committed never acquire messages of aborted transactions, which would wait for good.
            isolation_level="read_committed",
            fetch_max_wait_ms=FETCH_WAIT_MS,
            fetch_min_bytes=FETCH_BYTES,
            fetch_max_bytes=MAX_FETCH_BYTES,
        )

    async def _count(self, consumer: AIOKafkaConsumer) -> None:
        self._look_s, self._followed = float("-inf"), {}
        await self._sources.learn_topics(consumer)
        upkeep = asyncio.create_task(self._keep_up(consumer), name="backlog-upkeep")
        try:
            while not upkeep.done():
                await self._look_if_due(consumer)
                if self._sources.by_source:
                    await self._read(consumer)
                else:
                    await asyncio.sleep(SUM_S)
            upkeep.result()
        finally:
            upkeep.cancel()

    async def _keep_up(self, consumer: AIOKafkaConsumer) -> None:
        """Look up topics and commit positions while the counter runs."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._sources.learn_topics(consumer)
                async with asyncio.timeout(COMMIT_LIMIT_S):
                    await self._sources.commit(consumer)
            except (KafkaError, TimeoutError) as error:
                if self._is_new(repr(error)):
                    log.warning("the backlog counter could not look up topics or commit its position: %r", error)

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        try:
            fetched = self._sources.named(await fetch_records(consumer, SUM_S, AT_ONCE))
        except TopicAuthorizationFailedError as error:
            self._leave_out(error)
            return
        began_s = time.monotonic()
        for source, records in fetched.items():
            await self._take(source, records)
        await self._pass_what_is_kafkas(consumer, fetched)
        await asyncio.sleep(self._rest_s(sum(map(len, fetched.values())), time.monotonic() - began_s))

    def _rest_s(self, records: int, took_s: float) -> float:
        """Return how long to yield the event loop to other tasks after a read.

        While far behind, that is as long as the read took. Records from before a takeover are counted slowly while
        there are markers to fold: many of them will have been received by then.
        """
        if self.uncounted <= AT_ONCE:
            return 0.0
        before, self._folded = self._folded, sum(owner.engine.folded for owner in self.owners.owned.values())
        begins = any(source.position < source.began_at for source in self._sources.by_source.values())
        return max(took_s, records / BUSY_PER_SECOND) if begins and self._folded != before else took_s

    async def _pass_what_is_kafkas(self, consumer: AIOKafkaConsumer, fetched: Mapping[Source, Records]) -> None:
        """Advance sources that end with records to skip: control records of transactions."""
        for source, counted in self._sources.by_source.items():
            partition = TopicPartition(*source.log)
            counted.end = max(counted.end, consumer.highwater(partition) or 0)
            if source not in fetched and counted.position < counted.end:
                with suppress(TimeoutError):
                    async with asyncio.timeout(SUM_S):
                        counted.position = max(counted.position, await consumer.position(partition))

    def _books(self) -> dict[int, LeaseBook]:
        return {number: owner.tracker.book for number, owner in self.owners.owned.items() if owner.state == "owner"}

    async def _take(self, source: Source, records: Records) -> None:
        counted = self._sources.by_source[source]
        if records.offsets[0] < counted.position:
            counted.start_again(0, counted.end)
        for first in range(0, len(records), AT_ONCE):
            some = records if len(records) <= AT_ONCE else records[first : first + AT_ONCE]
            arrived = counted.waiting.add(some)
            counted.position = some.offsets[-1] + 1
            # Records from before the takeover do not count as arrivals.
            if some.offsets[0] >= counted.began_at:
                self._arrived.update(arrived)
            if len(some) < len(records):
                await asyncio.sleep(0)

    def _leave_out(self, error: TopicAuthorizationFailedError) -> None:
        self._sources.leave_out(error)
        self._look_s = float("-inf")

    async def _look_if_due(self, consumer: AIOKafkaConsumer) -> None:
        books = self._books()
        same = books == self._followed
        if time.monotonic() < self._look_s and (same or self._failed):
            return
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                await self._sources.look(consumer, books)
        except TopicAuthorizationFailedError as error:
            self._leave_out(error)
        except (KafkaError, TimeoutError) as error:
            if isinstance(error, KafkaError) and not error.retriable and not isinstance(error, KafkaTimeoutError):
                raise
            # Keep the counts, because the broker may be back in a moment. A topic may also have been deleted.
            self._sources.topics.doubt()
            self._complain("the broker does not return end offsets", error)
            self._failed, self._look_s = True, time.monotonic() + (LOOK_S if same else SUM_S)
        else:
            self._failed, self._look_s = False, time.monotonic() + LOOK_S
            self._followed, self.counts, self._trouble = books, True, ""

    @Service.task
    async def _sum_up(self) -> None:
        while not self.should_stop:
            began_s = time.monotonic()
            try:
                self.queues = await self._sums() if self.counts else {}
            except Exception as error:  # as in _read_messages
                self.counts, self.queues = False, {}
                self._complain("waiting messages can't be counted", error)
            await asyncio.sleep(max(SUM_S, _SUMS_REST * (time.monotonic() - began_s)))

    async def _sums(self) -> dict[str, QueueBacklog]:
        counts: Counter[str] = Counter()
        oldest_ms: dict[str, int] = {}
        done, books = 0, list(map(id, self._books().values()))
        for counted in list(self._sources.by_source.values()):
            if id(counted.book) not in books:
                # Another worker owns it now.
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
        return self._backlogs_of(counts, oldest_ms)

    def _backlogs_of(self, counts: Counter[str], oldest_ms: Mapping[str, int]) -> dict[str, QueueBacklog]:
        now_s, arrived = time.monotonic(), self._arrived.copy()
        self._samples.append((now_s, arrived))
        (since_s, before) = self._samples[0]
        took_s = now_s - since_s
        return {
            queue: QueueBacklog(
                counts[queue],
                oldest_ms.get(queue),
                arrived[queue],
                (arrived[queue] - before[queue]) / took_s if took_s else 0.0,
            )
            for queue in self._shown(counts, arrived)
        }

    def _shown(self, counts: Counter[str], arrived: Counter[str]) -> set[str]:
        """Return the queues that get metrics; among unknown ones, those with the most waiting messages."""
        definitions, books = self.definitions(), list(self._books().values())
        names = {*counts, *arrived}
        unknown = [
            queue for queue in names if not (definitions.defines(queue) or any(queue in book.counts for book in books))
        ]
        if len(unknown) <= MAX_UNKNOWN:
            self.unknown_queues = 0
            return names
        unknown.sort(key=lambda queue: (-counts[queue], queue))
        left_out = unknown[MAX_UNKNOWN:]
        self.unknown_queues = sum(counts[queue] for queue in left_out)
        return names.difference(left_out)
