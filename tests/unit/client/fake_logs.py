"""Logs in memory, in place of a log reader and an inspector of a queue's places."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from typing import Self

from marq.kafka.records import Records
from marq.wire.markers import Source
from tests.unit.client.fakes import FakeRecord


class FakeLogs:
    """Records by source, and the places up to which a queue has read them."""

    def __init__(self) -> None:
        self.log: dict[Source, list[FakeRecord]] = {}
        self.place: dict[Source, int] = {}

    def sent(self, queue: str, source: Source, offsets: Iterable[int], timestamp_ms: int = 1_000) -> None:
        records = [FakeRecord(offset, queue.encode(), timestamp=timestamp_ms) for offset in offsets]
        self.log.setdefault(source, []).extend(records)

    async def places(self, queues: Collection[str]) -> dict[str, dict[Source, int]]:
        return dict.fromkeys(queues, self.place)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def ranges(self, topic: str) -> dict[Source, range]:
        return {
            source: range(records[0].offset, records[-1].offset + 1) if records else range(0)
            for source, records in self.log.items()
            if source.topic == topic
        }

    async def offsets_at(self, sources: Iterable[Source], time_ms: int) -> dict[Source, int | None]:
        later = {source: [each.offset for each in self.log[source] if each.timestamp >= time_ms] for source in sources}
        return {source: min(offsets, default=None) for source, offsets in later.items()}

    async def read(self, ranges: Mapping[Source, range]) -> AsyncIterator[dict[Source, Records]]:
        for source, span in ranges.items():
            if wanted := [record for record in self.log[source] if record.offset in span]:
                yield {source: Records.of(wanted)}
