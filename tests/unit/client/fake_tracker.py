"""A tracker of messages of a queue with ordering, which answers each RESUME as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from marq.consumer.tracker_queries import TrackerQueries
from marq.kafka.log_reader import MarkersReader
from marq.kafka.marker_writer import MarkerRecord
from marq.wire.marker_codec import decode, encode
from marq.wire.markers import Resume, Resumed
from tests.unit.client.fakes import Clock, FakeRecord, Times

KEY = "marq-ordering-key"


class Tracker:
    """Answers each RESUME."""

    def __init__(self) -> None:
        self.asked: list[Resume] = []
        #: State, attempt and wait in ms of each open message; each is acquired.
        self.open_messages: dict[int, tuple[int, int, int]] = {}
        self.error = ""
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def write(self, records: Collection[MarkerRecord], limit_s: float) -> None:
        for _, value in records:
            batch = decode(value)
            assert isinstance(batch, Resume)
            self.asked.append(batch)
            offsets = sorted({batch.offsets[0], *self.open_messages}) if batch.onwards else batch.offsets
            acquired = [(min(self.open_messages), max(self.open_messages) + 1)] if self.open_messages else []
            rows = [self.open_messages.get(offset, (0, 0, 0)) for offset in offsets]
            states, attempts, waits = zip(*rows, strict=True)
            answer = Resumed(
                batch.queue, batch.holder, batch.source, offsets, 7, 0, acquired if batch.onwards else (),
                states, attempts, waits, [self.error] * len(rows),
            )  # fmt: skip
            self._answers.put_nowait(encode(answer))

    async def open(self, partitions: Collection[int]) -> MarkersReader:
        return self  # type: ignore[return-value]

    async def read(self) -> list[bytes]:
        return [await self._answers.get()]

    async def stop(self, limit_s: float) -> None:
        return


class Brokers(Times):
    """The clocks of a process, and its readers of markers."""

    def __init__(self, clock: Clock, open_reader: Callable[[Collection[int]], Awaitable[MarkersReader]]) -> None:
        super().__init__(clock)
        self.markers_reader = open_reader


def queries(
    tracker: Tracker,
    clock: Clock,
    open_reader: Callable[[Collection[int]], Awaitable[MarkersReader]] | None = None,
) -> TrackerQueries:
    return TrackerQueries(Brokers(clock, open_reader or tracker.open), tracker, 4)


def record(offset: int, key: str, size: int = 1) -> FakeRecord:
    return FakeRecord(offset, value=b"v" * size, headers=((KEY, key.encode()),))
