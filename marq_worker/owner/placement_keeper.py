"""Keeps the placements of queues in step with their settings: takes the steps of :mod:`marq.settings.placements`.

The owner of markers partition 0 does this, so there is usually a single writer. Two of them, during a takeover, do no
harm: the later one's write is rejected (:meth:`marq.queues.queues.Queues.replace`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from mode import Service

from marq.kafka.committed_offsets import positions_of
from marq.kafka.connection import plain_admin
from marq.kafka.log_reader import LogReader
from marq.kafka.queue_positions import Positions
from marq.kafka.topics import ensure_topics
from marq.queues.following import SYNC_LIMIT_S
from marq.queues.queues import Queues
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions, placement_key
from marq.settings.placements import GRACE_S, SYNCED_S, Partitions, Placement
from marq.wire.errors import MarqError
from marq.wire.markers import Source

log = logging.getLogger("marq.worker")

#: Interval between two checks for a possible step, and between two counts of the messages topic's partitions.
LOOK_S, COUNT_S = 10.0, 60.0
#: How often a worker that takes no steps checks whether it has to by now: senders with keys may be waiting.
OWNER_LOOK_S = 0.2
#: Time limit of one check.
LOOK_LIMIT_S = 60.0
STOP_SECONDS = 1.0


async def synced(queues: Queues) -> None:
    """Return once the known placements are recent enough for sending; raise TimeoutError if that takes too long."""
    if time.monotonic() - queues.synced_s > SYNCED_S:
        try:
            await queues.sync(SYNC_LIMIT_S)
        except MarqError as error:
            raise TimeoutError(str(error)) from error


class PlacementKeeper(Service):
    """Takes steps while ``keeps`` returns True."""

    def __init__(
        self,
        client: ClientSettings,
        queues: Queues,
        keeps: Callable[[], bool],
        *,
        look_s: float = LOOK_S,
        grace_s: float = GRACE_S,
    ) -> None:
        super().__init__()
        self._client = client
        self._queues = queues
        self._keeps = keeps
        self._look_s, self._shutdown_timeout_s = look_s, grace_s
        self._changed = asyncio.Event()
        self._partitions = 0
        self._counted_s = 0.0
        #: By queue: the number of its last move, and when this worker first saw it.
        self._seen: dict[str, tuple[int, float]] = {}
        self._owed: dict[tuple[str, int], int] = {}
        self._end_listening: Callable[[], None] = lambda: None

    async def on_start(self) -> None:
        self._end_listening = self._queues.listen(self._changed.set)
        self._keeping = self.add_future(self._keep())

    async def on_stop(self) -> None:
        self._end_listening()
        self._changed.set()
        # A running step may finish; then it is cancelled.
        await asyncio.wait([self._keeping], timeout=STOP_SECONDS)

    async def _keep(self) -> None:
        while not self.should_stop:
            self._changed.clear()
            keeps = self._keeps()
            if keeps:
                try:
                    async with asyncio.timeout(LOOK_LIMIT_S):
                        await self._look()
                except Exception as error:  # any error: placements must not stop following changes
                    log.warning("placements of queues are unchanged, retrying: %r", error)
            else:
                self._seen.clear()
                self._owed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_s if keeps else OWNER_LOOK_S):
                    await self._changed.wait()

    async def _look(self) -> None:
        definitions = self._queues.definitions
        queues = definitions.placed()
        if not queues:
            return
        partitions = await self._count()
        moves: dict[str, Placement] = {}
        unsettled: dict[str, Placement] = {}
        for queue in queues:
            placement = definitions.placement(queue)
            following = placement.following(queue, partitions, definitions.settings(queue))
            if following is not None:
                moves[queue] = following
            elif not placement.settled:
                unsettled[queue] = placement
        await self._write(moves)
        if unsettled:
            numbers = {queue: definitions.moved(queue) for queue in unsettled}
            further = await self._further(definitions, unsettled)
            # Except queues that another keeper has moved meanwhile.
            await self._write({queue: p for queue, p in further.items() if definitions.moved(queue) == numbers[queue]})

    async def _count(self) -> int:
        now_s = time.monotonic()
        if not self._partitions or now_s - self._counted_s > COUNT_S:
            self._partitions = (await ensure_topics(self._client)).messages_partitions
            self._counted_s = now_s
        return self._partitions

    async def _write(self, steps: Mapping[str, Placement]) -> None:
        if steps:
            await self._queues.replace(
                {placement_key(queue): placement.document() or None for queue, placement in steps.items()}
            )
        for queue, placement in steps.items():
            if placement.ends is None:
                sends, reads = _shown(placement.sends), _shown(placement.reads)
                log.info("queue %s: messages are sent to partitions %s, and read in %s", queue, sends, reads)

    async def _further(self, definitions: Definitions, unsettled: Mapping[str, Placement]) -> dict[str, Placement]:
        """Return the placements whose next step can be taken."""
        # Before the ends are read, because everything that was sent until then must count.
        over = {queue for queue in unsettled if self._is_over(definitions.moved(queue), queue)}
        if not over and all(placement.ends is None for placement in unsettled.values()):
            return {}
        steps: dict[str, Placement] = {}
        ends: dict[str, dict[int, int]] = {}
        async with former_partitions(self._client, self._owed) as former:
            log_ends = await former.ends(
                {p for placement in unsettled.values() for p in placement.former(self._partitions)}
            )
            for queue, placement in unsettled.items():
                if placement.ends is not None:
                    # A recreated topic may end earlier.
                    ends[queue] = {p: min(end, log_ends[p]) for p, end in placement.ends.items() if p in log_ends}
                elif queue in over:
                    steps[queue] = placement.ended({p: log_ends[p] for p in placement.former(self._partitions)})
            return steps | {queue: unsettled[queue].drained() for queue in await former.drained(definitions, ends)}

    def _is_over(self, move: int, queue: str) -> bool:
        """Return whether all senders know of a queue's last move by now."""
        now_s = time.monotonic()
        if self._seen.get(queue, (-1, 0.0))[0] != move:
            self._seen[queue] = (move, now_s)
        return now_s - self._seen[queue][1] >= self._shutdown_timeout_s


def _shown(partitions: Partitions) -> str:
    return "all" if partitions is None else ", ".join(map(str, partitions))


#: Maximum number of records before an end to search for the queue's; a longer range is left to its consumers.
MAX_GAP = 10_000

#: End offsets by queue and partition.
Ends = Mapping[str, Mapping[int, int]]


class FormerPartitions:
    """Finds out whether queues have read their messages in partitions that they no longer use."""

    def __init__(
        self,
        client: ClientSettings,
        reader: LogReader,
        admin: AIOKafkaAdminClient,
        owed: dict[tuple[str, int], int],
    ) -> None:
        self._client = client
        self._reader = reader
        self._admin = admin
        #: Where the last search that found a record began, by queue and partition: no need to search from there again.
        self._owed = owed

    async def ends(self, partitions: Iterable[int]) -> dict[int, int]:
        ends = await self._reader.ends([Source(self._client.names.messages, number) for number in sorted(partitions)])
        return {source.partition: end for source, end in ends.items()}

    async def drained(self, definitions: Definitions, ends: Ends) -> list[str]:
        """Return the queues that have received everything up to these offsets."""
        names = self._client.names
        groups: dict[str, list[str]] = {}
        for queue in ends:
            groups.setdefault(definitions.consumer_group(queue, names), []).append(queue)
        spans: dict[tuple[str, int], tuple[int, int]] = {}
        for group, queues in groups.items():
            spans |= await self._unread(group, {queue: ends[queue] for queue in queues})
        owing = {queue for queue, _ in await self._owing(spans)}
        return [queue for queue in ends if queue not in owing]

    async def _unread(self, group: str, ends: Ends) -> dict[tuple[str, int], tuple[int, int]]:
        """Return the unread ranges of a group's queues, by queue and partition."""
        topic = self._client.names.messages
        sources = {partition: Source(topic, partition) for queue_ends in ends.values() for partition in queue_ends}
        try:
            positions = await positions_of(self._client, self._admin, group, sources.values())
        except (KafkaError, MarqError) as error:
            # A new group lacks a coordinator at first. Other queues can continue.
            log.info("the positions of group %s are unknown: %r", group, error)
            positions = {source: Positions() for source in sources.values()}
        return {
            (queue, partition): (start, end)
            for queue, queue_ends in ends.items()
            for partition, end in queue_ends.items()
            if (start := positions[sources[partition]].start([queue], 0)) < end
        }

    async def _owing(self, spans: Mapping[tuple[str, int], tuple[int, int]]) -> set[tuple[str, int]]:
        """Return the ranges that contain a record of their queue, or are too long to read.

        The last records before an end are often control records of transactions, which no consumer commits.
        """
        if not spans:
            return set()
        topic = self._client.names.messages
        ranges = await self._reader.ranges(topic)
        left = {
            (queue, number): range(max(start, ranges[Source(topic, number)].start), end)
            for (queue, number), (start, end) in spans.items()
        }
        owing = {place for place, span in left.items() if len(span) > MAX_GAP or self._owed.get(place) == span.start}
        sought = {
            (queue.encode(), Source(topic, number)): span
            for (queue, number), span in left.items()
            if (queue, number) not in owing
        }
        async for fetched in self._reader.read(_by_source(sought)):
            for source, records in fetched.items():
                for key, offset in zip(records.keys, records.offsets, strict=True):
                    if key is not None and (span := sought.get((key, source))) is not None and offset in span:
                        owing.add((key.decode(), source.partition))
                        self._owed[key.decode(), source.partition] = span.start
        return owing


def _by_source(spans: Mapping[tuple[bytes, Source], range]) -> dict[Source, range]:
    """Merge the ranges of each partition into one, from the first start to the last end."""
    ranges: dict[Source, range] = {}
    for (_, source), span in spans.items():
        known = ranges.get(source, span)
        ranges[source] = range(min(known.start, span.start), max(known.stop, span.stop))
    return ranges


@asynccontextmanager
async def former_partitions(
    client: ClientSettings, owed: dict[tuple[str, int], int]
) -> AsyncIterator[FormerPartitions]:
    """Connect; ``owed`` is kept from one check to the next. Raises KafkaError and MarqError."""
    async with LogReader(client, committed=False) as reader, plain_admin(client) as admin:
        yield FormerPartitions(client, reader, admin, owed)
