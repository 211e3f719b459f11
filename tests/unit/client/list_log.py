"""The log of definitions in a list, whose faults and other writers the test decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping

from marq.kafka.records import Row
from marq.wire.markers import Source


class ListLog:
    """A log whose reader sees what was written when it is let."""

    def __init__(self) -> None:
        self.entries: list[Row] = []
        self.before_write: Callable[[], None] = lambda: None
        #: Before the writer reads its own record.
        self.after_write: Callable[[], None] = lambda: None
        self.errors: list[Exception] = []
        self.appended = asyncio.Event()
        self.writes = 0
        #: Where all topics end.
        self.ends: dict[Source, int] = {}
        self._read = 0

    def append(self, key: bytes, document: object) -> int:
        value = None if document is None else document if isinstance(document, bytes) else json.dumps(document).encode()
        self.entries.append(Row(len(self.entries), 0, key, value, ()))
        self.appended.set()
        return len(self.entries) - 1

    async def make(self) -> None:
        pass

    async def start(self) -> int:
        return len(self.entries)

    async def stop(self) -> None:
        pass

    async def end(self) -> int:
        return len(self.entries)

    async def read(self) -> tuple[list[Row], int]:
        if self.errors:
            raise self.errors.pop()
        if self._read == len(self.entries):
            self.appended.clear()
            await self.appended.wait()
            if self.errors:
                raise self.errors.pop()
        found, self._read = self.entries[self._read :], len(self.entries)
        return found, self._read

    async def write(self, records: Mapping[bytes, bytes | None]) -> dict[bytes, int]:
        self.writes += 1
        self.before_write()
        offsets = {key: self.append(key, value) for key, value in records.items()}
        self.after_write()
        return offsets

    def before_next_write(self, *records: tuple[bytes, object]) -> None:
        """Let another client write records just before the next write of this one."""

        def write() -> None:
            self.before_write = lambda: None
            for key, document in records:
                self.append(key, document)

        self.before_write = write

    def keys(self) -> list[bytes | None]:
        return [entry.key for entry in self.entries]

    async def ends_of(self, topic: str) -> dict[Source, int]:
        return self.ends

    def wall_s(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("no pause of these tests has an end")
