"""A consumer group: who reads which partitions, and the committed offsets.

A member hears of a rebalance late or not at all; until then it goes on reading what another member reads too. Its
commits are refused, for they carry an old generation.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from marq.core.markers import Source

if TYPE_CHECKING:
    from tests.simulation.consumer import Consumer
    from tests.simulation.world import World


class Commit(Enum):
    DONE = 1
    FAILED = 2
    REFUSED = 3


class Group:
    """The coordinator of one group, which serves ``queues``."""

    def __init__(self, world: World, queues: list[str]) -> None:
        self.world = world
        self.queues = queues
        self.keys = {queue.encode(): queue for queue in queues}
        self.eager = world.rng.random() < 0.5
        #: The default is False: a dead tracker's open transaction must not stall consumers.
        self.committed_reads = world.rng.random() < 0.25
        self.generation = 0
        self.offsets: dict[Source, int] = {}
        self.members: list[Consumer] = []
        self.assignment: dict[Source, Consumer] = {}

    def rebalance(self) -> None:
        world = self.world
        if not self.members:
            self.assignment = {}
            return
        self.generation += 1
        world.checker.stats["rebalances"] += 1
        # What was read and not committed is read by the new owner, and its marker may be written twice.
        self.assignment = {source: world.rng.choice(self.members) for source in world.messages}
        for member in self.members:
            delay_ms = world.rng.randint(50, 1_500) if world.hit(world.faults.late_news) else world.rng.randint(1, 10)
            member.later(delay_ms if self.generation > 1 else 0, member.hear, self.generation, self.sources_of(member))

    def sources_of(self, member: Consumer) -> list[Source]:
        return [source for source, owner in self.assignment.items() if owner is member]

    def join(self, member: Consumer) -> None:
        self.members.append(member)
        self.rebalance()

    def leave(self, member: Consumer) -> None:
        if member in self.members:
            self.members.remove(member)
            self.rebalance()

    def commit(self, source: Source, offset: int, generation: int, member: Consumer) -> Commit:
        if generation != self.generation or self.assignment.get(source) is not member:
            return Commit.REFUSED
        self.offsets[source] = offset
        return Commit.DONE
