"""Purges queues as marq/admin/purge.py does: publishes ends, waits until consumers know, and writes PURGEs.

It may be killed after any step, and another purge then does all steps again.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from marq.settings.definitions import purge_key
from marq.settings.skipped_records import SkippedRecords
from marq.wire.markers import MAX_TIME_MS, Purge, Source
from marq.wire.names import WITHOUT_RECORDS
from tests.simulation.actor import Actor
from tests.simulation.consumer import Consumer

if TYPE_CHECKING:
    from tests.simulation.world import World

#: A time that no record is later than.
UNTIL_MS = MAX_TIME_MS


class Purger(Actor):
    """Purges one queue after another."""

    def __init__(self, world: World, lots: Random) -> None:
        super().__init__(world, "purger")
        self._lots = lots
        self._left = lots.randint(1, 3)
        self.later(lots.randint(200, 2_000), self._begin, lots.choice(world.queues))

    @property
    def done(self) -> bool:
        return not self._left

    def _begin(self, queue: str) -> None:
        world = self.world
        ends = {source: len(log.records) for source, log in world.messages.items()}
        former = world.definitions.versions[-1].purge(queue)
        self._publish(queue, SkippedRecords(UNTIL_MS, ends).after(former, ends))
        in_flight = self._lots.random() < 0.4
        delayed = self._lots.random() < 0.5
        holder = self._lots.getrandbits(63) | 1
        places = [
            *ends.items(),
            *[(Source(WITHOUT_RECORDS, number), MAX_TIME_MS) for number in range(len(world.markers))],
        ]
        batches = [Purge(queue, holder, source, [end], in_flight, delayed) for source, end in places if end]
        self.later(10, self._mark, world.definitions.newest, batches, ends)

    def _publish(self, queue: str, purge: SkippedRecords) -> None:
        self.world.definitions.publish({purge_key(queue): purge.document()})

    def _mark(self, version: int, batches: list[Purge], ends: dict[Source, int]) -> None:
        world = self.world
        if any(isinstance(actor, Consumer) and actor.purges_known < version for actor in world.living()):
            self.later(20, self._mark, version, batches, ends)
            return
        queue = batches[0].queue if batches else world.queues[0]
        if batches and self._lots.random() < 0.2:
            # Killed after some of its markers.
            for batch in batches[: self._lots.randrange(len(batches))]:
                world.append_marker(world.markers_of(batch.source), batch)
            self.later(self._lots.randint(50, 500), self._begin, queue)
            return
        for batch in batches:
            world.append_marker(world.markers_of(batch.source), batch)
        world.stats["purges"] += 1
        if batches and batches[0].in_flight:
            former = world.definitions.versions[-1].purge(queue)
            self._publish(queue, SkippedRecords(UNTIL_MS, ends, in_flight=ends).after(former, ends))
        self._left -= 1
        if self._left:
            self.later(self._lots.randint(100, 1_500), self._begin, self._lots.choice(world.queues))
