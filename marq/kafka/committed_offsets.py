"""Where reading resumes: the committed offsets of a group, and of the groups that served its queues before.

Another group may have served a queue before. All messages before the committed position of any group of the namespace
are acquired, so the tracker redelivers them or they are finished. A queue therefore resumes from the furthest position
of all groups, so that it misses nothing and receives nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.consumer.fetcher import READ_UNCOMMITTED
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest, OffsetResetStrategy
from aiokafka.structs import OffsetAndMetadata

from marq.kafka.connection import plain_admin
from marq.kafka.log_reader import LogReader
from marq.kafka.protocol import UNSTABLE_OFFSET_COMMIT, stable_offsets
from marq.kafka.queue_positions import (
    MAX_METADATA_BYTES,
    OffsetSnapshot,
    OffsetSnapshotLog,
    Positions,
    UnknownPositions,
    fits,
    in_the_metadata,
    is_older,
    new_snapshot,
    snapshot_named,
    topic_id_of,
)
from marq.kafka.queue_records import Serving
from marq.kafka.topics import ids_of
from marq.settings.client import ClientSettings
from marq.settings.skipped_records import SkippedRecords
from marq.wire.errors import BrokerUnavailable, Forbidden
from marq.wire.markers import Source
from marq.wire.names import Names, incarnation_id

log = logging.getLogger("marq")

#: Maximum number of groups to query at once: each joining queue may have had a group of its own.
AT_ONCE = 50
#: Time limit for the answer of one leader.
LEADER_LIMIT_S = 5.0


class Committed(NamedTuple):
    """The offset and metadata that a group has committed for a partition."""

    offset: int
    metadata: str


Offsets = Mapping[Source, Committed]


@dataclass(frozen=True)
class StartPosition:
    """Where to read a partition from, and how far each queue is there."""

    start: int
    positions: Positions
    #: The new snapshot that the positions' metadata names: it must be durable before anything is committed.
    snapshot: OffsetSnapshot | None = None
    #: Whether the log has lost records that some queue has received. Commit the place at once: if the log has grown
    #: past the former offset by the next start, the loss goes unnoticed, and the new records would be skipped.
    lost: bool = False
    #: The id of the queue's own topic; empty for the messages topic, and if the brokers have no ids.
    topic_id: str = ""


class StartPositionResolver:
    """The search for the places of partitions that a group's member was assigned.

    ``committed`` has the group's own commits; commits of other groups count only while :attr:`needs_others`.
    ``snapshots`` has all snapshots that ``committed`` names. Queues that need over ``plain_bytes`` of metadata get one;
    a snapshot stays while its name and what differs from it fit into ``room_bytes``.

    Raises UnknownPositions if a commit is unreadable.
    """

    def __init__(
        self,
        names: Names,
        group: str,
        serving: Serving,
        sources: Iterable[Source],
        committed: Offsets,
        snapshots: Mapping[str, OffsetSnapshot],
        *,
        plain_bytes: int = MAX_METADATA_BYTES,
        room_bytes: int = MAX_METADATA_BYTES,
        new_id: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self._names = names
        self._serving = serving
        self._committed = committed
        self._snapshots = snapshots
        self._plain_bytes, self._room_bytes = plain_bytes, room_bytes
        self._new_id = new_id
        self._positions = {source: _positions(names, group, committed.get(source), snapshots) for source in sources}
        self._newcomers = {
            source: self._newcomers_in(source, positions, committed.get(source))
            for source, positions in self._positions.items()
        }

    def _newcomers_in(self, source: Source, positions: Positions, commit: Committed | None) -> frozenset[str]:
        queues = self._serving.queues_in(source.topic)
        if commit is not None and is_older(commit.metadata, self._serving.changed_at):
            # A queue back from another group would be read again from where it left, even one at the group's offset.
            return frozenset(queues)
        return frozenset(positions.newcomers(queues, _offset(commit)))

    @property
    def newcomers(self) -> frozenset[str]:
        """The queues that another group may have read further."""
        return frozenset().union(*self._newcomers.values())

    @property
    def needs_others(self) -> bool:
        """Whether another group may have read some queue further."""
        return any(self._newcomers.values())

    def consider(self, group: str, committed: Offsets, snapshots: Mapping[str, OffsetSnapshot]) -> None:
        """Take the commits of another group of the namespace into account. Raises UnknownPositions."""
        for source, positions in self._positions.items():
            other = _positions(self._names, group, committed.get(source), snapshots)
            theirs, newcomers = other.by_queue, self._newcomers[source]
            for queue in [queue for queue in theirs if queue in newcomers]:
                positions.advance([queue], theirs[queue], other.behind)

    def places(self, ends: Mapping[Source, int] = MappingProxyType({})) -> dict[Source, StartPosition]:
        """Return the places of all partitions. No place is after the end of its log, if that end is known."""
        places = {}
        for source, positions in self._positions.items():
            end, furthest = ends.get(source), max(positions.furthest, _offset(self._committed.get(source)) or 0)
            if end is None or furthest <= end:
                places[source] = self._place(source, positions)
                continue
            log.error(
                "topic %s, partition %s: the log ends at %s, but it was read up to %s: it has lost records;"
                " reading from its end, so records sent between the loss and now are skipped", *source, end, furthest,
            )  # fmt: skip
            places[source] = replace(self._place(source, positions.until(end), end), lost=True)
        return places

    def _place(self, source: Source, positions: Positions, end: int | None = None) -> StartPosition:
        queues, committed = self._serving.queues_in(source.topic), self._committed.get(source)
        start = positions.start(queues, 0) if queues else _offset(committed) or 0
        if end is not None:
            start = min(start, end)
        if committed is not None and start != committed.offset:
            log.info("topic %s, partition %s: reading from %s instead of %s", *source, start, committed.offset)
        named = None if committed is None else snapshot_named(committed.metadata)
        current = None if named is None else self._snapshots[named]
        # If many queues have left, their positions are kept in case they return.
        if fits(queues if current is None else positions.by_queue.keys() | queues, self._plain_bytes):
            return StartPosition(start, positions)
        metadata = in_the_metadata(positions.by_queue, frozenset(queues), start, current, self._room_bytes)
        if metadata is not None:
            return StartPosition(start, Positions(positions.by_queue, metadata))
        snapshot = new_snapshot(self._new_id(), positions.by_queue, queues, start)
        return StartPosition(start, Positions(positions.by_queue, snapshot.metadata({}, {})), snapshot)


async def places(
    settings: ClientSettings, group: str, serving: Serving, sources: Iterable[Source]
) -> dict[Source, StartPosition]:
    """Return where a group's member continues in each partition that it was assigned.

    Raises KafkaError if the broker did not answer or refused, or a commit is unreadable; ConfigError if a permission is
    missing that a group with many queues needs.
    """
    wanted = list(sources)
    if not wanted:
        return {}
    try:
        async with plain_admin(settings) as admin:
            return await _places(settings, admin, group, serving, wanted)
    except (UnknownPositions, BrokerUnavailable) as error:
        # The caller retries: starting elsewhere would deliver messages twice, or lose some.
        raise KafkaError(f"group {group}: {error}") from error


async def _places(
    settings: ClientSettings, admin: AIOKafkaAdminClient, group: str, serving: Serving, sources: list[Source]
) -> dict[Source, StartPosition]:
    snapshots = OffsetSnapshotLog(settings)
    ids = await ids_of(admin, {source.topic for source in sources if serving.is_own(source.topic)})
    named = [source.of(ids.get(source.topic, "")) for source in sources]
    committed = of_incarnations(named, await _committed(admin, group, sources), group)
    known = await snapshots.read(_named([committed]), group, committed)
    resolver = StartPositionResolver(settings.names, group, serving, sources, committed, known)
    if resolver.needs_others:
        others = [other for other in await groups_of(admin, settings.names, resolver.newcomers) if other != group]
        theirs = {
            other: of_incarnations(named, offsets)
            for other, offsets in zip(others, await _of_groups(admin, others, sources), strict=True)
        }
        try:
            known = await snapshots.read(_named(theirs.values()))
        except Forbidden as error:
            # Continue as if their commits were not visible: a service must not stop because of another's large group.
            log.warning("group %s: the positions of queues in groups with snapshots are unknown: %s", group, error)
            theirs = {other: offsets for other, offsets in theirs.items() if not _named([offsets])}
            known = {}
        for other, offsets in theirs.items():
            resolver.consider(other, offsets, known)
    placed = resolver.places(await log_ends(admin, sources))
    placed = {source: replace(place, topic_id=ids.get(source.topic, "")) for source, place in placed.items()}
    found = await _past_skipped(settings, serving, placed)
    # Before anything is read: a commit must not name a snapshot that is not durable.
    await snapshots.write(group, {source: place.snapshot for source, place in found.items() if place.snapshot})
    return found


def of_incarnations(sources: Iterable[Source], committed: Offsets, group: str | None = None) -> Offsets:
    """Return the commits of partitions without those for former incarnations; log them for a ``group``.

    Kafka deletes the offsets of a deleted topic, but a consumer may commit once more before it notices the deletion.
    """
    kept, now_by_log = dict[Source, Committed](), {source.log: incarnation_id(source.topic) for source in sources}
    for source, commit in committed.items():
        former, now = topic_id_of(commit.metadata), now_by_log[source]
        if not former or not now or former == now:
            kept[source] = commit
        elif group is not None:
            log.warning(
                "topic %s, partition %s: it was deleted and created again: group %s starts over instead of at offset"
                " %s of the former topic (former id %s, id %s)", *source, group, commit.offset, former, now,
            )  # fmt: skip
    return kept


async def _past_skipped(
    settings: ClientSettings, serving: Serving, found: Mapping[Source, StartPosition]
) -> dict[Source, StartPosition]:
    """Move places past records of own topics that their queues skip, so that they are not read.

    Places of queues with ordering do not move: a purge leaves alone messages that a consumer has received.
    """
    places, purges = dict(found), dict[Source, SkippedRecords]()
    for source, place in found.items():
        queues = serving.queues_in(source.topic) if serving.is_own(source.topic) else ()
        for queue in [queue for queue in queues if queue not in place.positions.behind]:
            purge = serving.skipped(queue)
            if purge is not None and place.start < purge.ends.get(source.of(place.topic_id), 0):
                purges[source] = purge
    if purges:
        async with LogReader(settings, committed=False) as view:
            for source, purge in purges.items():
                named = source.of(places[source].topic_id)
                # If the topic was recreated, its records are newer, and none is skipped.
                newer = (await view.offsets_at([source], purge.until_of(named) + 1))[source]
                end = (await view.ends([source]))[source] if newer is None else newer
                places[source] = replace(places[source], start=max(places[source].start, min(end, purge.ends[named])))
    return places


def _named(committed: Iterable[Offsets]) -> set[str]:
    ids = {snapshot_named(commit.metadata) for offsets in committed for commit in offsets.values()}
    return {snapshot_id for snapshot_id in ids if snapshot_id is not None}


async def _of_groups(admin: AIOKafkaAdminClient, groups: Sequence[str], sources: list[Source]) -> list[Offsets]:
    found: list[Offsets] = []
    for first in range(0, len(groups), AT_ONCE):
        some = [_committed(admin, group, sources) for group in groups[first : first + AT_ONCE]]
        found += await asyncio.gather(*some)
    return found


async def positions_of(
    settings: ClientSettings, admin: AIOKafkaAdminClient, group: str, sources: Iterable[Source]
) -> dict[Source, Positions]:
    """Return the positions of the queues in a group's own commits. Raises KafkaError or MarqError."""
    wanted = list(sources)
    committed = of_incarnations(wanted, await _committed(admin, group, [source.log for source in wanted]))
    known = await OffsetSnapshotLog(settings).read(_named([committed]))
    return {source: _positions(settings.names, group, committed.get(source.log), known) for source in wanted}


async def _committed(admin: AIOKafkaAdminClient, group: str, sources: Iterable[Source]) -> Offsets:
    """Return a group's committed offsets; fail while a former owner's open transaction can still move one.

    Otherwise two members would continue from the same place and deliver the same messages.
    """
    partitions = [TopicPartition(*source) for source in sources]
    try:
        answer = await admin._send_request(stable_offsets(group, partitions), await admin.find_coordinator(group))
    except NotImplementedError:
        # Kafka before 2.5, where no member of a group can commit in a transaction.
        offsets_by_partition = await admin.list_consumer_group_offsets(group, partitions=partitions)
        commits = {Source(*tp): Committed(entry.offset, entry.metadata) for tp, entry in offsets_by_partition.items()}
        return {source: commit for source, commit in commits.items() if commit.offset >= 0}
    _check(group, answer.error_code)
    offsets: dict[Source, Committed] = {}
    for topic, entries, _ in answer.topics:
        for partition, offset, _, metadata, code, _ in entries:
            _check(f"{group}, {topic}/{partition}", code)
            if offset >= 0:
                offsets[Source(topic, partition)] = Committed(offset, metadata or "")
    return offsets


def _check(place: str, code: int) -> None:
    if code == UNSTABLE_OFFSET_COMMIT:
        raise KafkaError(f"group {place}: waiting for an open transaction of a former member")
    if code:
        raise for_code(code)(f"group {place}: the committed offset is not available")


async def groups_of(admin: AIOKafkaAdminClient, names: Names, queues: Collection[str]) -> list[str]:
    """Return the Kafka groups that may have read these queues, now or earlier, sorted. Raises KafkaError."""
    listed = {name for name, *_ in await admin.list_consumer_groups()}
    # A named group may have read any queue, all others only one.
    return sorted(
        name
        for name in listed
        if names.is_group(name) and ((owner := names.owner_of_group(name)) is None or owner in queues)
    )


def _positions(
    names: Names, group: str, committed: Committed | None, snapshots: Mapping[str, OffsetSnapshot]
) -> Positions:
    metadata = "" if committed is None else committed.metadata
    return Positions.decode(_offset(committed), metadata, names.owner_of_group(group), snapshots)


def _offset(committed: Committed | None) -> int | None:
    return None if committed is None else committed.offset


# --- ends of logs -----------------------------------------------------------------------------------------------------
# aiokafka's ``end_offsets`` waits until every partition has a leader, so a single partition would block all others.


async def log_ends(admin: AIOKafkaAdminClient, sources: Collection[Source]) -> dict[Source, int]:
    """Return the ends of partitions, open transactions included, with one request to each leader.

    Partitions whose leaders do not answer are left out. Raises KafkaError.
    """
    request = MetadataRequest(sorted({source.topic for source in sources}), allow_auto_topic_creation=False)
    topics = (await admin._send_request(request)).to_object()["topics"]
    asked: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for topic in topics:
        for partition in topic["partitions"]:
            source, leader = Source(topic["topic"], partition["partition"]), partition["leader"]
            if leader >= 0 and source in sources:
                wanted = asked.setdefault(leader, {}).setdefault(source.topic, [])
                wanted.append((source.partition, OffsetResetStrategy.LATEST))
    answers = await asyncio.gather(*[_ends(admin, *leader_and_topics) for leader_and_topics in asked.items()])
    return {source: end for ends in answers for source, end in ends.items()}


async def _ends(
    admin: AIOKafkaAdminClient, leader: int, topics: Mapping[str, Sequence[tuple[int, int]]]
) -> dict[Source, int]:
    try:
        async with asyncio.timeout(LEADER_LIMIT_S):
            answer = await admin._send_request(OffsetRequest(-1, READ_UNCOMMITTED, list(topics.items())), leader)
    except (KafkaError, TimeoutError) as error:
        log.warning("could not check where partitions end: broker=%s topics=%s error=%r", leader, [*topics], error)
        return {}
    return {
        Source(topic, number): end
        for topic, partitions in answer.topics
        for number, code, _, end in partitions
        if code == 0
    }


# --- consumers that assign partitions to themselves -------------------------------------------------------------------
# ``AIOKafkaConsumer.committed`` makes a request for each partition. After a timeout its ``commit`` continues in the
# background, and nothing retrieves its exception. tests/client/test_group_offsets.py fails if the private parts that
# are used here change.


async def committed_offsets(consumer: Any, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """Return the committed offsets of the consumer's group, with one request; the caller sets a limit."""
    offsets = await consumer._coordinator.fetch_committed_offsets(list(partitions))
    return {partition: entry.offset for partition, entry in offsets.items() if entry.offset >= 0}


async def commit_offsets(consumer: Any, offsets: Mapping[TopicPartition, int]) -> None:
    """Commit once, for assigned partitions; the caller sets a limit. Raises KafkaError."""
    coordinator, assignment = consumer._coordinator, consumer._subscription.subscription.assignment
    await coordinator.ensure_coordinator_known()
    await coordinator._do_commit_offsets(
        assignment, {partition: OffsetAndMetadata(offset, "") for partition, offset in offsets.items()}
    )
