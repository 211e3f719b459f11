"""A consumer group: the assignment of partitions, and the committed offsets with their metadata.

A member learns of a rebalance late or not at all. Until then it keeps reading partitions that another member reads too,
but the group refuses its commits, because they have an old generation.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

from marq.kafka.committed_offsets import Committed
from marq.kafka.queue_records import Serving, serving
from marq.wire.markers import Source
from tests.simulation.log import Outcome, Transaction

if TYPE_CHECKING:
    from tests.simulation.consumer import Consumer
    from tests.simulation.world import World


class Commit(Enum):
    DONE = 1
    FAILED = 2
    REFUSED = 3


class PendingOffsets:
    """Offsets committed in transactions that are open, or whose end the group has not learned of."""

    def __init__(self, group: Group) -> None:
        self.name = group.kafka_name
        self._group = group
        self._pending: dict[Transaction, list[tuple[int, Source, Committed]]] = {}

    def add(self, transaction: Transaction, number: int, source: Source, committed: Committed) -> None:
        self._pending.setdefault(transaction, []).append((number, source, committed))
        transaction.partitions.add(self)

    def finish(self, transaction: Transaction) -> None:
        for number, source, committed in self._pending.pop(transaction):
            if transaction.outcome is Outcome.COMMITTED:
                self._group.set_offset(number, source, committed)

    def of(self, sources: Iterable[Source]) -> bool:
        """Whether the offset of one of these may still be moved."""
        wanted = set(sources)
        return any(source in wanted for each in self._pending.values() for _, source, _ in each)


class Group:
    """The coordinator of one group: a queue's own (``queue``), or one that queues' settings name (``name``)."""

    def __init__(self, world: World, *, name: str | None = None, queue: str | None = None) -> None:
        self.world = world
        self.name = name
        self.queue = queue
        self.kafka_name = world.names.group(queue) if queue is not None else world.names.named_group(name or "")
        #: The default is False: a dead tracker's open transaction must not stall consumers.
        self.committed_reads = world.rng.random() < 0.25 or world.at_most_once
        self.generation = 0
        self.committed: dict[Source, Committed] = {}
        self.pending = PendingOffsets(self)
        #: Commits are ordered by when they were requested, not by when their transactions end.
        self._commits = 0
        self._last: dict[Source, int] = {}
        self.members: list[Consumer] = []
        self.assignment: dict[Source, Consumer] = {}

    def serving(self, member: Consumer) -> Serving:
        """What a member serves by the definitions that it knows."""
        definitions = self.world.definitions.of(member)
        if self.queue is None:
            queues = definitions.queues_of(self.name or "")
        else:
            queues = [self.queue] if definitions.group(self.queue) is None else []
        topics = {queue: definitions.settings(queue).topic for queue in queues}
        return serving(self.world.names.messages, queues, topics)

    def rebalance(self) -> None:
        world = self.world
        self.assignment = {}
        if not self.members:
            return
        self.generation += 1
        world.stats["rebalances"] += 1
        # The new owner reads records again that were not committed, so their markers may be written twice.
        for source in world.sources:
            readers = [member for member in self.members if source.topic in member.serving.topics]
            if readers:
                self.assignment[source] = world.rng.choice(readers)
        for member in self.members:
            delay_ms = world.rng.randint(50, 1_500) if world.hit(world.faults.late_news) else world.rng.randint(1, 10)
            sources = [source for source, owner in self.assignment.items() if owner is member]
            member.later(delay_ms if self.generation > 1 else 0, member.assigned, self.generation, sources)

    def join(self, member: Consumer) -> None:
        self.members.append(member)
        self.rebalance()

    def leave(self, member: Consumer) -> None:
        if member in self.members:
            self.members.remove(member)
            self.rebalance()

    def commit(self, source: Source, committed: Committed, generation: int, member: Consumer) -> Commit:
        if generation != self.generation or self.assignment.get(source) is not member:
            return Commit.REFUSED
        self._commits += 1
        self.set_offset(self._commits, source, committed)
        return Commit.DONE

    def commit_in(
        self, transaction: Transaction, source: Source, committed: Committed, generation: int, member: Consumer
    ) -> Commit:
        """Accept an offset that takes effect when its transaction is committed."""
        if generation != self.generation or self.assignment.get(source) is not member:
            return Commit.REFUSED
        self._commits += 1
        self.pending.add(transaction, self._commits, source, committed)
        return Commit.DONE

    def set_offset(self, number: int, source: Source, committed: Committed) -> None:
        if number > self._last.get(source, 0):
            self._last[source] = number
            self.committed[source] = committed

    def offset(self, source: Source) -> int:
        committed = self.committed.get(source)
        return 0 if committed is None else committed.offset

    def lose_offsets(self) -> None:
        """Lose all offsets, as if expired, deleted or reset: reading begins at the start of the topic."""
        self.committed.clear()
        self.rebalance()
