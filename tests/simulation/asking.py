"""Reads the answers of trackers for a consumer, like :class:`marq.kafka.log_reader.KafkaMarkersReader`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from marq.wire.errors import BrokerUnavailable

if TYPE_CHECKING:
    from tests.simulation.consumer import Consumer

#: How long a read waits for the first record.
POLL_MS = 40
#: Maximum records per read.
MAX_RECORDS = 50


class MarkersReader:
    """Reads some markers partitions from their current ends, without records of open and aborted transactions."""

    def __init__(self, consumer: Consumer, partitions: Collection[int]) -> None:
        self._consumer = consumer
        self._logs = {number: consumer.world.markers[number] for number in sorted(partitions)}
        self._positions = {number: log.end(committed=True) for number, log in self._logs.items()}

    async def read(self) -> Sequence[bytes | None]:
        """Return the next markers, or nothing after a while."""
        world, loop = self._consumer.world, self._consumer.loop
        await loop.wait(world.rng.randint(0, 5))
        values = [value for number in self._logs for value in self._read(number)]
        if not values:
            await loop.wait(POLL_MS)
        return values

    def _read(self, number: int) -> Sequence[bytes | None]:
        world, log = self._consumer.world, self._logs[number]
        start = max(self._positions[number], log.start)
        end = log.end(committed=True)
        if start >= end:
            return []
        end = min(end, start + world.rng.randint(1, MAX_RECORDS))
        if world.hit(world.faults.late_read):
            end = world.rng.randint(start, end)
        self._positions[number] = end
        return [record.value for record in log.read(start, end, committed=True)]

    async def stop(self, limit_s: float) -> None:
        """Do nothing, because nothing is open."""


async def open_reader(consumer: Consumer, partitions: Collection[int]) -> MarkersReader:
    """Seek to the ends of some markers partitions, like :meth:`marq.backend.cluster.Cluster.markers_reader`."""
    world = consumer.world
    await consumer.loop.wait(world.rng.randint(0, 5))
    if world.hit(world.faults.marker_failed):
        raise BrokerUnavailable("no end offsets")
    return MarkersReader(consumer, partitions)
