"""The dead letters of an installation in memory, as a reader of them sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from marq.letter_log import Stored
from marq.settings import ClientSettings
from marq.testing.memory import memory_at
from marq.testing.topics import Topic


class MemoryLetterLog:
    """One reader."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._topic: Topic
        self._positions: dict[int, int] = {}
        self._more = asyncio.Event()

    async def start(self) -> None:
        memory = memory_at(self._settings.bootstrap_servers)
        self._topic = memory.installation(self._settings).dead_letters
        self._topic.listen(self._more.set)

    async def stop(self) -> None:
        self._topic.ignore(self._more.set)

    async def ranges(self) -> dict[int, range]:
        return {partition: range(len(log)) for partition, log in enumerate(self._topic.logs)}

    def seek(self, positions: Mapping[int, int]) -> None:
        self._positions = dict(positions)

    async def read(self) -> Sequence[Stored]:
        while True:
            self._more.clear()
            found = []
            for partition, position in self._positions.items():
                log = self._topic.logs[partition][position:]
                found += [Stored(partition, r.offset, r.timestamp, r.key, r.value, r.headers) for r in log]
                self._positions[partition] = position + len(log)
            if found:
                return found
            await self._more.wait()

    async def positions(self) -> dict[int, int]:
        return dict(self._positions)


def memory_letter_log(settings: ClientSettings) -> MemoryLetterLog:
    """Return a reader of the dead letters at the settings' address."""
    return MemoryLetterLog(settings)
