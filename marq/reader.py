"""Where the flow's records come from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError
from aiokafka.structs import OffsetAndMetadata

from marq.assignor import SpreadAssignor
from marq.connection import client_options, started, stop_consumer
from marq.core.errors import BrokerUnavailable, ConfigError, MarqError
from marq.core.markers import Source
from marq.fetching import fetch_records
from marq.group_consumer import GroupConsumer
from marq.offsets import Place, places
from marq.positions import Positions, Progress, committer
from marq.records import Records
from marq.requests import Generation
from marq.rights import refused
from marq.serving import Serving
from marq.settings import ClientSettings

log = logging.getLogger("marq")

#: One fetch answers for each partition with at most so much.
PARTITION_FETCH_BYTES = 1 << 20
#: How long a fetch waits for a first record: also how long a change of demand can go unnoticed.
FETCH_WAIT_S = 0.5
#: A commit that the broker does not answer fails after this.
COMMIT_LIMIT_S = 10.0
#: How long a rebalance waits for its members.
REBALANCE_TIMEOUT_MS = 30_000
#: How long finding out where to read on may take, with thousands of queues that had groups of their own; it is tried
#: again.
PLACE_LIMIT_S = 60.0

Offsets = Mapping[Source, int]


class NotCommitted(Exception):
    """Offsets could not be committed: the partitions may belong to somebody else."""


@dataclass(frozen=True)
class GroupCommit:
    """What a member of a group commits: offsets with their metadata, and the positions behind them."""

    group: str
    generation: Generation
    offsets: Mapping[TopicPartition, OffsetAndMetadata]
    after: Mapping[Source, Positions]


class Reader(Protocol):
    """What the flow needs of its source. Partitions come and go by ``Flow.revoked`` and ``Flow.assigned``.

    A record of the shared topic that its queue has had before comes without its key, so that it is nobody's.
    """

    #: How often :meth:`keep_alive` must be called while nothing is fetched.
    keep_alive_s: float

    async def fetch(self, max_records: int) -> Mapping[Source, Records]:
        """Return the next records of each partition, in order; after a while without any, nothing.

        Raises:
            BrokerUnavailable: reading is refused for good.
        """

    async def commit(self, offsets: Offsets) -> None:
        """Commit the offset *after* the last record read, for each partition.

        Raises:
            NotCommitted: refused, or not known to have happened.
        """

    def rewind(self, offsets: Offsets) -> None:
        """Read on from these offsets; partitions that are not assigned any more are ignored."""

    async def keep_alive(self) -> None:
        """Stay a member of the group although nothing is fetched."""


class GroupMember(Reader, Protocol):
    """A reader that joins a group itself."""

    async def start(self, assignee: Assignee) -> None:
        """Join the group and return when it has assigned partitions (perhaps none).

        Raises:
            BrokerUnavailable: that took longer than the connect timeout, or the broker refused.
            ConfigError: another client joined with the same instance id meanwhile.
        """

    async def stop(self, limit_s: float) -> None:
        """Leave the group (a static member stays)."""

    def serve(self, serving: Serving) -> None:
        """Read for other queues from now on: all partitions are assigned anew, and nothing is fetched before."""


class Assignee(Protocol):
    """Who must know when partitions come and go: the flow."""

    async def revoked(self) -> None: ...
    def assigned(self) -> None: ...
    def fail(self, error: MarqError) -> None: ...

    def holders(self) -> Sequence[int]:
        """Return the holder of the next assignment and those of messages in flight; the same until then."""


class GroupReader:
    """Reads the topics of its queues as a member of a consumer group.

    aiokafka 0.14 has no cooperative rebalancing, so every rebalance takes all partitions away for a moment. That costs
    little: each cycle ends with a commit, and leases do not depend on partitions. Round robin spreads one topic best.
    It is over the partitions in which the queues may have records (:mod:`marq.assignor`).
    """

    def __init__(
        self,
        settings: ClientSettings,
        group: str,
        serving: Serving,
        *,
        instance_id: str | None = None,
        committed: bool = False,
    ) -> None:
        self.keep_alive_s = settings.max_poll_interval_ms / 3000
        self._settings = settings
        self._group = group
        self._serving = serving
        self._instance_id = instance_id
        self._committer = committer(instance_id or settings.client_id)
        self._committed = committed
        self._consumer: GroupConsumer | None = None
        self._listener: _Listener
        self._holders: Callable[[], Sequence[int]] = tuple
        #: Assigned partitions of which it is not known yet where to read on; they are paused.
        self._unplaced: set[Source] = set()
        self._progress = Progress()
        #: Partitions that were read from before where reading began, and where that was.
        self._anew: dict[Source, int] = {}
        #: How often partitions have come or gone, or other queues have come to be served.
        self._changes = 0
        #: Why this member no longer receives anything.
        self._fenced: ConfigError | None = None

    async def start(self, assignee: Assignee) -> None:
        self._listener = _Listener(self, assignee)
        self._holders = assignee.holders

        def make() -> GroupConsumer:
            # The listener needs it before start() returns.
            self._consumer = consumer = self._make()
            consumer.on_fenced = partial(self._on_fenced, consumer)
            consumer.subscribe(self._serving.topics, listener=self._listener)
            return consumer

        async def close(consumer: GroupConsumer) -> None:
            await stop_consumer(consumer, 0)

        try:
            self._consumer = await started(make, self._settings, close)
        except BrokerUnavailable as error:
            if self._fenced is not None:
                raise self._fenced from error
            raise

    def _on_fenced(self, consumer: GroupConsumer) -> None:
        self._fenced = error = ConfigError(
            f"group {self._group}: this consumer has stopped, because another client joined the group with the same"
            f" instance_id {self._instance_id!r}. Give each consumer of a group its own instance_id"
        )
        # A start or a fetch may wait for the next assignment, which does not come.
        consumer._subscription.abort_waiters(KafkaError(str(error)))
        self._listener.assignee.fail(error)

    def _make(self) -> GroupConsumer:
        return GroupConsumer(
            **client_options(self._settings),
            group_id=self._group,
            group_instance_id=self._instance_id,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            # read_committed would stop at a dead tracker's open transaction. read_uncommitted delivers redeliveries of
            # aborted transactions, and each can end its message a second time (docs/guarantees.md, cause 6). Only
            # transactional consumers and queues that deliver at most once use read_committed.
            isolation_level="read_committed" if self._committed else "read_uncommitted",
            partition_assignment_strategy=(SpreadAssignor(lambda: self._serving.reads, lambda: self._holders()),),
            max_partition_fetch_bytes=PARTITION_FETCH_BYTES,
            max_poll_interval_ms=self._settings.max_poll_interval_ms,
            session_timeout_ms=self._settings.session_timeout_ms,
            heartbeat_interval_ms=self._settings.session_timeout_ms // 3,
            rebalance_timeout_ms=REBALANCE_TIMEOUT_MS,
        )

    async def stop(self, limit_s: float) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_consumer(consumer, limit_s)

    def serve(self, serving: Serving) -> None:
        assert self._consumer is not None
        self._serving = serving
        self._changes += 1
        # A new subscription drops the assignment at once, whether or not its topics differ, and joins the group anew.
        self._consumer.subscribe(serving.topics, listener=self._listener)

    # --- where to read on ---------------------------------------------------------------------------------------------

    def assigned(self, sources: Sequence[Source]) -> None:
        """Begin with new partitions: none of them is read before its place is known."""
        assert self._consumer is not None
        self._changes += 1
        self._progress.clear()
        self._unplaced = set(sources)
        self._consumer.pause(*[TopicPartition(*source) for source in sources])

    def revoked(self) -> None:
        self._changes += 1
        self._progress.clear()
        self._unplaced.clear()

    async def _place(self) -> None:
        wanted, changes = frozenset(self._unplaced), self._changes
        try:
            async with asyncio.timeout(PLACE_LIMIT_S):
                found = await places(self._settings, self._group, self._serving, wanted)
        except (TimeoutError, KafkaError) as error:
            log.warning("group %s: not known yet where to read on, trying again: %r", self._group, error)
            await asyncio.sleep(FETCH_WAIT_S)
            return
        # Also when it gave the same partitions again: others may have read on in them meanwhile, or other queues are
        # served now, whose records would be passed over.
        if changes == self._changes:
            self._begin(found)

    def _begin(self, found: Mapping[Source, Place]) -> None:
        assert self._consumer is not None
        for source, place in found.items():
            partition = TopicPartition(*source)
            try:
                self._consumer.seek(partition, place.start)
                self._consumer.resume(partition)
            except IllegalStateError:
                continue
            self._progress.begin(source, place.positions, place.start)
        self._unplaced.clear()

    # --- what the flow asks -------------------------------------------------------------------------------------------

    async def fetch(self, max_records: int) -> Mapping[Source, Records]:
        if self._unplaced:
            await self._place()
        fetched = await self._poll(max_records)
        # Assigned anew meanwhile: whatever it is, it is read again from its place.
        if self._unplaced or self._begins_anew(fetched):
            return {}
        return self._progress.unmet(self._serving, fetched)

    def _begins_anew(self, fetched: Mapping[Source, Records]) -> bool:
        """Whether a topic was deleted and made anew, or has lost its end: then all partitions are assigned anew.

        With a topic its offsets go, so that its new messages are not taken for those of the former one.
        """
        anew = self._progress.made_anew(fetched)
        # Offsets that are still there after that are somebody's decision, or the topic's end was lost.
        if not anew or anew == self._anew:
            return False
        self._anew = anew
        log.error(
            "group %s: %s: the log ended before the offset that was read next: the topic was made anew, or has lost"
            " records; beginning again with what is committed",
            self._group, ", ".join(f"{topic}/{partition} at {start}" for (topic, partition), start in anew.items()),
        )  # fmt: skip
        self.serve(self._serving)
        return True

    async def keep_alive(self) -> None:
        await self._poll(0)

    async def _poll(self, max_records: int) -> dict[Source, Records]:
        assert self._consumer is not None
        try:
            return await fetch_records(self._consumer, FETCH_WAIT_S if max_records else 0.0, max_records)
        except KafkaError as error:
            if self._fenced is not None:
                raise self._fenced from error
            if not error.retriable:
                raise refused(self._settings, error, "Read") or BrokerUnavailable(
                    f"group {self._group}: the broker refuses to let {', '.join(self._serving.topics)} be read:"
                    f" {error or type(error).__name__}"
                ) from error
            log.warning("read failed, trying again: group=%s error=%s", self._group, error)
            await asyncio.sleep(FETCH_WAIT_S)
            return {}

    async def commit(self, offsets: Offsets) -> None:
        assert self._consumer is not None
        commit = self.commit_of(offsets)
        try:
            async with asyncio.timeout(COMMIT_LIMIT_S):
                await self._consumer.commit(commit.offsets)
        except (TimeoutError, KafkaError) as error:
            raise NotCommitted(str(error) or type(error).__name__) from error
        self.committed(commit)

    def commit_of(self, offsets: Offsets) -> GroupCommit:
        """Return what :meth:`commit` would commit now, for somebody who does it; then comes :meth:`committed`.

        Raises:
            NotCommitted: a partition is not ours any more.
        """
        assert self._consumer is not None
        after = self._progress.after(self._serving, offsets)
        for topic, partition in offsets.keys() - after.keys():
            raise NotCommitted(f"{topic}/{partition} is not assigned any more")
        commits = {
            TopicPartition(*source): OffsetAndMetadata(offset, after[source].encode(offset, self._committer))
            for source, offset in offsets.items()
        }
        # Partitions are ours from the end of a rebalance to the beginning of the next one, and so is the generation.
        coordinator = self._consumer._coordinator
        generation = Generation(coordinator.generation, coordinator.member_id, self._instance_id)
        if generation.number < 0:
            # Without a generation the group would take it for the commit of an administrator, and not refuse it.
            raise NotCommitted("the group has thrown this member out")
        return GroupCommit(self._group, generation, commits, after)

    def committed(self, commit: GroupCommit) -> None:
        """Go on from what has been committed."""
        self._progress.take(commit.after)

    def rewind(self, offsets: Offsets) -> None:
        assert self._consumer is not None
        for source, offset in offsets.items():
            try:
                self._consumer.seek(TopicPartition(*source), offset)
            except IllegalStateError:
                # Revoked meanwhile: whoever has it now begins at the committed offset.
                continue


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, reader: GroupReader, assignee: Assignee) -> None:
        self._reader = reader
        self.assignee = assignee

    async def on_partitions_revoked(self, revoked: Any) -> None:
        await self.assignee.revoked()
        self._reader.revoked()

    async def on_partitions_assigned(self, assigned: Any) -> None:
        self._reader.assigned([Source(*partition) for partition in assigned])
        self.assignee.assigned()
