"""The markers partitions that a worker owns."""

from __future__ import annotations

import asyncio

from faust.types import TP
from mode import Service

from marq_worker.owner.owner_context import Copier, OwnerContext
from marq_worker.owner.ownership import Ownership
from marq_worker.owner.source_reader import SourceReader
from marq_worker.tables.standby import Standby


class TrackerOwners(Service):
    """The markers partitions that this worker owns."""

    def __init__(self, topic: str) -> None:
        super().__init__()
        self.topic = topic
        self.context: OwnerContext | None = None
        self.standby: Standby | None = None
        self.owned: dict[int, Ownership] = {}
        #: Owners released in the current rebalance, with their state: most partitions are assigned here again.
        self._let_go: dict[int, Ownership] = {}
        self._readers: list[SourceReader] = []

    def read_by(self, reader: SourceReader) -> Copier:
        """Return the function with which the owners copy payloads; its reader stops with them."""
        self._readers.append(reader)
        return reader.copy

    def assigned(self, partitions: set[TP]) -> None:
        """Start owners of the assigned partitions; :meth:`revoked` has released the former ones."""
        assert self.context is not None, "the topics are looked at before the consumer starts"
        for tp in partitions:
            if tp.topic == self.topic and tp.partition not in self.owned:
                owner = self._let_go.pop(tp.partition, None) or Ownership(tp.partition, self.context)
                self.owned[tp.partition] = owner
                owner.start()
        self._let_go.clear()
        if self.standby is not None:
            self.standby.follow_all_but(self.owned)

    async def revoked(self, partitions: set[TP]) -> None:
        """Release partitions until :meth:`assigned` tells which are still ours."""
        if self.standby is not None:
            await self.standby.pause()
        gone = [
            self.owned.pop(tp.partition) for tp in partitions if tp.topic == self.topic and tp.partition in self.owned
        ]
        if gone:
            written = await asyncio.gather(*(owner.stop() for owner in gone))
            self._let_go = {
                owner.partition: owner for owner, completely in zip(gone, written, strict=True) if completely
            }

    def keeps_placements(self) -> bool:
        """Return whether this worker maintains the placements of queues: the owner of partition 0 does."""
        first = self.owned.get(0)
        return first is not None and first.state == "owner"

    def wake(self) -> None:
        for owner in self.owned.values():
            owner.wake()

    async def on_stop(self) -> None:
        await self.revoked({TP(self.topic, partition) for partition in self.owned})
        await asyncio.gather(*(reader.stop() for reader in self._readers))
