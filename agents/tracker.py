"""The tracker agent: hands each fetched batch of markers to the owner of its partition."""

from __future__ import annotations

import faust
from faust.types import StreamT

from marq_worker.owner.tracker_owners import TrackerOwners


def attach(app: faust.App, topic: faust.TopicT, owners: TrackerOwners) -> None:
    @app.agent(topic, name="tracker")
    async def track(markers: StreamT[object]) -> None:
        """Consume markers: give each fetched batch to the owner of its partition."""
        async for event in markers.noack().events():  # type: ignore[attr-defined]  # only Stream has it
            owner = owners.owned.get(event.message.partition)
            if owner is not None:
                await owner.deliver(event)
