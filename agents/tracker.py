"""The tracker agent: hands each fetched batch of markers to the owner of its partition."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import faust
from faust.types import TP, StreamT

from agents.ownership import Ownership, Surroundings


@dataclass
class TrackerOwners:
    """The markers partitions that this worker owns."""

    topic: str
    around: Surroundings | None = None
    owned: dict[int, Ownership] = field(default_factory=dict)

    def assigned(self, partitions: set[TP]) -> None:
        """Begin to own what has been assigned; what was owned before has been let go by :meth:`revoked`."""
        assert self.around is not None, "the topics are looked at before the consumer starts"
        for tp in partitions:
            if tp.topic == self.topic and tp.partition not in self.owned:
                owner = self.owned[tp.partition] = Ownership(tp.partition, self.around)
                owner.start()

    async def revoked(self, partitions: set[TP]) -> None:
        """Let go of partitions: even one that is assigned again at once is recovered anew, which is quickly done."""
        gone = [
            self.owned.pop(tp.partition) for tp in partitions if tp.topic == self.topic and tp.partition in self.owned
        ]
        if gone:
            await asyncio.gather(*(owner.stop() for owner in gone))

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
