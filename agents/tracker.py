"""The tracker agent: hands each fetched batch of markers to the owner of its partition."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import faust
from faust.types import TP, StreamT

from agents.ownership import Ownership
from agents.surroundings import Surroundings
from tables.standby import Standby


@dataclass
class TrackerOwners:
    """The markers partitions that this worker owns."""

    topic: str
    around: Surroundings | None = None
    standby: Standby | None = None
    owned: dict[int, Ownership] = field(default_factory=dict)
    #: Let go in the rebalance that is under way, with all they know: nearly all are assigned here again.
    _let_go: dict[int, Ownership] = field(default_factory=dict)

    def assigned(self, partitions: set[TP]) -> None:
        """Begin to own what has been assigned; what was owned before has been let go by :meth:`revoked`."""
        assert self.around is not None, "the topics are looked at before the consumer starts"
        for tp in partitions:
            if tp.topic == self.topic and tp.partition not in self.owned:
                owner = self._let_go.pop(tp.partition, None) or Ownership(tp.partition, self.around)
                self.owned[tp.partition] = owner
                owner.start()
        self._let_go.clear()
        if self.standby is not None:
            self.standby.follow_all_but(self.owned)

    async def revoked(self, partitions: set[TP]) -> None:
        """Let go of partitions, until :meth:`assigned` says who has them now."""
        if self.standby is not None:
            await self.standby.stop()
        gone = [
            self.owned.pop(tp.partition) for tp in partitions if tp.topic == self.topic and tp.partition in self.owned
        ]
        if gone:
            written = await asyncio.gather(*(owner.stop() for owner in gone))
            self._let_go = {owner.partition: owner for owner, all_of_it in zip(gone, written, strict=True) if all_of_it}

    def keeps_placements(self) -> bool:
        """Whether it is for this worker to keep the placements of queues: for the owner of the first partition."""
        first = self.owned.get(0)
        return first is not None and first.state == "owner"

    def wake(self) -> None:
        """Let each owner look at what has changed beside the markers."""
        for owner in self.owned.values():
            owner.wake()

    async def stop(self) -> None:
        await self.revoked({TP(self.topic, partition) for partition in self.owned})


def attach(app: faust.App, topic: faust.TopicT, owners: TrackerOwners) -> None:
    """Attach the tracker to an application."""

    @app.agent(topic, name="tracker")
    async def track(markers: StreamT[object]) -> None:
        async for event in markers.noack().events():
            owner = owners.owned.get(event.message.partition)
            if owner is not None:
                await owner.deliver(event)
