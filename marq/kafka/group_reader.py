"""Reads the receiver's records as a member of a consumer group."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError
from aiokafka.structs import OffsetAndMetadata

from marq.kafka.assignor import SpreadAssignor
from marq.kafka.committed_offsets import places
from marq.kafka.connection import client_options, started, stop_consumer
from marq.kafka.fetched_columns import fetch_records
from marq.kafka.group_consumer import GroupConsumer, replaced
from marq.kafka.incarnations import Incarnations, Recreated
from marq.kafka.protocol import Generation
from marq.kafka.queue_positions import NOT_BEHIND, LowWatermarks, MemberPositions, Positions, committer
from marq.kafka.queue_records import Serving
from marq.kafka.records import Records
from marq.kafka.role_permissions import refused
from marq.settings.client import ClientSettings
from marq.wire.errors import BrokerUnavailable, ConfigError, MarqError, reason_of
from marq.wire.markers import Source
from marq.wire.names import incarnation_id

log = logging.getLogger("marq")

#: Maximum number of bytes of one partition in the answer to a fetch.
PARTITION_FETCH_BYTES = 1 << 20
#: Longest wait of a fetch for its first record, and so for a change of demand to take effect.
FETCH_WAIT_S = 0.5
#: Limit for the broker's answer to a commit.
COMMIT_LIMIT_S = 10.0
#: Longest wait of a rebalance for the group's members.
REBALANCE_TIMEOUT_MS = 30_000
#: A receiver that has not fetched for this long is assumed to have no room for records.
WANTED_S = 2.0
#: Limit for one attempt to find the places to continue from, with thousands of queues that had groups of their own.
PLACE_LIMIT_S = 60.0

Offsets = Mapping[Source, int]


class NotCommitted(Exception):
    """Offsets could not be committed: another member may own the partitions."""


@dataclass(frozen=True)
class GroupCommit:
    """The commit of a group's member: offsets with their metadata, and the positions after it."""

    group: str
    generation: Generation
    offsets: Mapping[TopicPartition, OffsetAndMetadata]
    after: Mapping[Source, Positions]
    #: The offsets of these positions.
    ends: Offsets


class Reader(Protocol):
    """The source of the receiver's records; the :class:`Assignee` learns about its partitions.

    A record of the shared topic that its queue has already received has no key, so no queue receives it again.
    """

    #: Call :meth:`keep_alive` this often while nothing is fetched.
    keep_alive_s: float

    async def fetch(self, max_records: int) -> Mapping[Source, Records]:
        """Return the next records of each partition, in order, or nothing after a while.

        Raises BrokerUnavailable if a retry can't help.
        """

    async def commit(self, offsets: Offsets, behind: LowWatermarks = NOT_BEHIND) -> None:
        """Commit the offset *after* the last record read, for each partition; ``behind``: positions of some queues.

        Raises NotCommitted if the group refused, or the outcome is unknown.
        """

    async def verify(self, sources: Collection[Source]) -> None:
        """Repeat the last commit. Raises NotCommitted like :meth:`commit`, or if another member owns a source."""

    def rewind(self, offsets: Offsets) -> None:
        """Continue from these offsets; partitions that are not assigned are ignored."""

    async def keep_alive(self) -> None:
        """Stay a member of the group although nothing is fetched."""

    def assigned_of(self, topic: str) -> tuple[Collection[int], int]:
        """Return the assigned partitions of a topic, and how many it has."""


class TransactionalReader(Reader, Protocol):
    """A reader whose offsets can be committed in a transaction."""

    def commit_of(self, offsets: Offsets, behind: LowWatermarks = NOT_BEHIND) -> GroupCommit:
        """Return what :meth:`commit` would commit now; call :meth:`note_committed` after committing it elsewhere.

        Raises NotCommitted if a partition is no longer assigned.
        """

    def note_committed(self, commit: GroupCommit) -> None:
        """Note that this commit has succeeded."""


class GroupMember(Reader, Protocol):
    """A reader that joins a group itself."""

    async def start(self, assignee: Assignee) -> None:
        """Join the group; return when it has assigned partitions (perhaps none).

        Raises BrokerUnavailable if that took longer than the connect timeout, or the broker refused; ConfigError if
        another client joined with the same instance id.
        """

    async def stop(self, limit_s: float) -> None:
        """Leave the group; a static member stays in it."""

    def serve(self, serving: Serving) -> None:
        """Read for other queues from now on; nothing is fetched before all partitions are assigned again."""


class Assignee(Protocol):
    """The receiver, which must know when partitions come and go."""

    async def revoked(self) -> None: ...
    def assigned(self) -> None: ...
    def fail(self, error: MarqError) -> None: ...

    def holders(self) -> Sequence[int]:
        """Return the holder of the next assignment and those of messages in flight; unchanged until then."""


class GroupReader:
    """Reads the topics of its queues as a member of a consumer group.

    aiokafka 0.14 lacks cooperative rebalancing, so each rebalance revokes all partitions for a moment. That costs
    little: each cycle ends with a commit, and leases do not depend on partitions.
    """

    def __init__(
        self,
        settings: ClientSettings,
        group: str,
        serving: Serving,
        *,
        instance_id: str | None = None,
        committed: bool = False,
        url: str = "",
        heartbeat_ms: int | None = None,
    ) -> None:
        self.keep_alive_s = settings.max_poll_interval_ms / 3000
        self._settings = settings
        self._group = group
        self._serving = serving
        self._instance_id = instance_id
        self._committer = committer(instance_id or settings.client_id)
        self._committed = committed
        self._url = url
        self._heartbeat_ms = heartbeat_ms or settings.session_timeout_ms // 3
        self._consumer: GroupConsumer | None = None
        self._listener: _Listener
        self._holders: Callable[[], Sequence[int]] = tuple
        #: Assigned partitions whose places are not known yet; they are paused.
        self._unplaced: set[Source] = set()
        #: Ends the wait of a fetch when there are such partitions.
        self._woken: asyncio.Future[None] | None = None
        self._progress = MemberPositions()
        #: The sources by assigned partition; all other offsets and positions here belong to sources.
        self._incarnations = Incarnations(self._topic_ids, self._seek)
        #: Partitions whose log was found to end before the committed offset, with that offset.
        self._recreated: dict[Source, int] = {}
        #: Number of changes to the assignment or the served queues.
        self.changes = 0
        #: Why this member no longer receives records.
        self._fenced: ConfigError | None = None
        #: Number of assigned partitions; None before the first assignment.
        self.partitions: int | None = None
        #: Whether partitions are revoked and not assigned yet.
        self.rebalancing = False
        self._fetching, self._fetched_s = False, -WANTED_S

    async def start(self, assignee: Assignee) -> None:
        self._listener = _Listener(self, assignee)
        self._holders = assignee.holders

        def make() -> GroupConsumer:
            # The listener uses the consumer before start() returns.
            self._consumer = consumer = self._make()
            consumer.on_fenced = partial(self._on_fenced, consumer)
            consumer.subscribe(self._serving.topics, listener=self._listener)
            return consumer

        try:
            self._consumer = await started(make, self._settings, lambda consumer: stop_consumer(consumer, 0))
        except BrokerUnavailable as error:
            if self._fenced is not None:
                raise self._fenced from error
            raise

    def _on_fenced(self, consumer: GroupConsumer) -> None:
        self._fenced = error = replaced(self._group, self._instance_id)
        # A start or a fetch may be waiting for the next assignment, which never comes.
        consumer._subscription.abort_waiters(KafkaError(str(error)))
        self._listener.assignee.fail(error)

    def _make(self) -> GroupConsumer:
        return GroupConsumer(
            **client_options(self._settings),
            group_id=self._group,
            group_instance_id=self._instance_id,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            isolation_level="read_committed" if self._reads_committed else "read_uncommitted",
            partition_assignment_strategy=(
                SpreadAssignor(lambda: self._serving.reads, lambda: self._holders(), self._url),
            ),
            max_partition_fetch_bytes=PARTITION_FETCH_BYTES,
            max_poll_interval_ms=self._settings.max_poll_interval_ms,
            session_timeout_ms=self._settings.session_timeout_ms,
            heartbeat_interval_ms=self._heartbeat_ms,
            rebalance_timeout_ms=REBALANCE_TIMEOUT_MS,
            messages_topic=self._serving.messages,
        )

    @property
    def _reads_committed(self) -> bool:
        # read_committed stops at a dead tracker's open transaction. read_uncommitted delivers redeliveries of aborted
        # transactions, and each can end its message a second time (docs/guarantees.md, cause 6), or come after later
        # messages of its key. Queues that deliver at most once are transactional.
        return self._committed or self._serving.ordered

    async def stop(self, limit_s: float) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_consumer(consumer, limit_s)

    def serve(self, serving: Serving) -> None:
        assert self._consumer is not None
        self._serving = serving
        self.changes += 1
        self._incarnations.clear()
        self._consumer.read_committed(self._reads_committed)
        # A new subscription, even to the same topics, drops the assignment at once and rejoins the group.
        self._consumer.subscribe(serving.topics, listener=self._listener)

    # --- places -------------------------------------------------------------------------------------------------------

    def assigned(self, sources: Sequence[Source]) -> None:
        """Pause new partitions until their places are known."""
        if self._consumer is None:
            # A rebalance ended during the stop. The stop leaves the group next, and other members get the partitions.
            return
        self.changes += 1
        self.partitions, self.rebalancing = len(sources), False
        self._progress.clear()
        self._incarnations.clear()
        self._unplaced = set(sources)
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
        self._consumer.pause(*[TopicPartition(*source) for source in sources])

    def revoked(self) -> None:
        self.changes += 1
        self._progress.clear()
        self._incarnations.clear()
        self._unplaced.clear()

    def assigned_of(self, topic: str) -> tuple[Collection[int], int]:
        if self._consumer is None:
            return [], 0
        assigned = [partition.partition for partition in self._consumer.assignment() if partition.topic == topic]
        return assigned, len(self._consumer.partitions_for_topic(topic) or ())

    # --- for a watchdog -----------------------------------------------------------------------------------------------

    @property
    def fenced(self) -> bool:
        """Whether another client has joined with the same instance id."""
        return self._fenced is not None

    @property
    def reads_committed(self) -> bool:
        """Whether records behind an open transaction wait for its end."""
        return self._consumer is not None and self._consumer.reads_committed

    def wanted(self) -> Offsets:
        """Return the next offsets of partitions from which records are wanted now; none while there is no room."""
        wants = self._fetching or time.monotonic() - self._fetched_s < WANTED_S
        if self._consumer is None or self._unplaced or not wants:
            return {}
        return {Source(*partition): offset for partition, offset in self._consumer.positions().items()}

    async def _place(self) -> None:
        wanted, changes = frozenset(self._unplaced), self.changes
        try:
            async with asyncio.timeout(PLACE_LIMIT_S):
                found = await places(self._settings, self._group, self._serving, wanted)
        except (TimeoutError, KafkaError) as error:
            log.warning("group %s: position to continue from is still unknown, retrying: %r", self._group, error)
            await asyncio.sleep(FETCH_WAIT_S)
            return
        # After any change the places are stale, even with the same partitions: another member may have advanced them
        # meanwhile, or records of newly served queues would be skipped.
        if changes != self.changes:
            return
        assert self._consumer is not None
        lost: list[Source] = []
        for assigned, place in found.items():
            partition = TopicPartition(*assigned)
            try:
                self._consumer.seek(partition, place.start)
                self._consumer.resume(partition)
            except IllegalStateError:
                continue
            source = self._incarnations.begin(assigned, place.topic_id)
            self._progress.begin(source, place.positions, place.start)
            if place.lost:
                lost.append(source)
        self._unplaced.clear()
        if lost:
            with suppress(NotCommitted):
                await self.verify(lost)

    # --- the receiver's calls -----------------------------------------------------------------------------------------

    async def fetch(self, max_records: int) -> Mapping[Source, Records]:
        self._fetching = True
        try:
            return await self._fetch(max_records)
        finally:
            self._fetching, self._fetched_s = False, time.monotonic()

    async def _fetch(self, max_records: int) -> Mapping[Source, Records]:
        if self._unplaced:
            await self._place()
        polled = await self._poll(max_records)
        # After a new assignment, the records are read again from their places.
        if self._unplaced:
            return {}
        try:
            fetched = await self._incarnations.checked(self._serving, polled)
        except Recreated:
            self.serve(self._serving)
            return {}
        if self._starts_over(fetched):
            return {}
        return self._progress.without_received(self._serving, fetched)

    async def _topic_ids(self, partitions: Collection[Source]) -> Collection[tuple[str, str]]:
        assert self._consumer is not None
        return await self._consumer.topic_ids([TopicPartition(*partition) for partition in partitions])

    def _starts_over(self, fetched: Mapping[Source, Records]) -> bool:
        """Rejoin the group if a topic was recreated or lost its end; return whether that is so.

        A topic's committed offsets are deleted with it, so its new messages are not mistaken for the former ones.
        """
        recreated = self._progress.recreated(fetched)
        # If the committed offset is unchanged after that, it was set deliberately, or the topic lost its end.
        if not recreated or recreated == self._recreated:
            return False
        self._recreated = recreated
        log.error(
            "group %s: %s: the log ends before the next offset: the topic was recreated or lost records; starting over",
            self._group,
            ", ".join(f"{topic}/{partition} at {start}" for (topic, partition), start in recreated.items()),
        )
        self.serve(self._serving)
        return True

    async def keep_alive(self) -> None:
        await self._poll(0)

    async def _poll(self, max_records: int) -> dict[Source, Records]:
        assert self._consumer is not None
        self._woken = asyncio.get_running_loop().create_future()
        wait_s = FETCH_WAIT_S if max_records and not self._unplaced else 0.0
        try:
            return await fetch_records(self._consumer, wait_s, max_records, self._woken)
        except KafkaError as error:
            if self._fenced is not None:
                raise self._fenced from error
            if not error.retriable:
                raise refused(self._settings, error, "Read") or BrokerUnavailable(
                    f"group {self._group}: {', '.join(self._serving.topics)} can't be read: {reason_of(error)}"
                ) from error
            log.warning("read failed, retrying: group=%s error=%s", self._group, error)
            await asyncio.sleep(FETCH_WAIT_S)
            return {}

    async def commit(self, offsets: Offsets, behind: LowWatermarks = NOT_BEHIND) -> None:
        await self._commit(self.commit_of(offsets, behind))

    async def verify(self, sources: Collection[Source]) -> None:
        offsets, current = self._progress.current(sources)
        await self._commit(self._commit_of(offsets, current, sources))

    async def _commit(self, commit: GroupCommit) -> None:
        assert self._consumer is not None
        try:
            async with asyncio.timeout(COMMIT_LIMIT_S):
                await self._consumer.commit(commit.offsets)
        except (TimeoutError, KafkaError) as error:
            raise NotCommitted(reason_of(error)) from error
        self.note_committed(commit)

    def commit_of(self, offsets: Offsets, behind: LowWatermarks = NOT_BEHIND) -> GroupCommit:
        return self._commit_of(offsets, self._progress.advanced_to(self._serving, offsets, behind), offsets)

    def _commit_of(
        self, offsets: Offsets, after: Mapping[Source, Positions], wanted: Collection[Source]
    ) -> GroupCommit:
        assert self._consumer is not None
        for topic, partition in set(wanted) - after.keys():
            raise NotCommitted(f"{topic}/{partition} is no longer assigned")
        by, changed_at = self._committer, self._serving.changed_at
        numbers = {
            source: after[source].committed_offset(self._serving.queues_in(source.topic), offset)
            for source, offset in offsets.items()
        }
        commits = {
            TopicPartition(*source.log): OffsetAndMetadata(
                number, after[source].encode(number, by, changed_at, incarnation_id(source.topic))
            )
            for source, number in numbers.items()
        }
        # Partitions and generation are ours from the end of a rebalance to the start of the next one.
        coordinator = self._consumer._coordinator
        generation = Generation(coordinator.generation, coordinator.member_id, self._instance_id)
        if generation.number < 0:
            # Without a generation the group would accept it as the commit of an administrator.
            raise NotCommitted("the group has removed this member")
        return GroupCommit(self._group, generation, commits, after, offsets)

    def note_committed(self, commit: GroupCommit) -> None:
        self._progress.take(commit.ends, commit.after)

    def rewind(self, offsets: Offsets) -> None:
        self._incarnations.rewind(offsets)

    def _seek(self, offsets: Offsets) -> None:
        assert self._consumer is not None
        for source, offset in offsets.items():
            try:
                self._consumer.seek(TopicPartition(*source), offset)
            except IllegalStateError:
                # Revoked meanwhile: its new owner starts at the committed offset.
                continue


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, reader: GroupReader, assignee: Assignee) -> None:
        self._reader = reader
        self.assignee = assignee

    async def on_partitions_revoked(self, revoked: Any) -> None:
        self._reader.rebalancing = True
        await self.assignee.revoked()
        self._reader.revoked()

    async def on_partitions_assigned(self, assigned: Any) -> None:
        self._reader.assigned([Source(*partition) for partition in assigned])
        self.assignee.assigned()
