"""The dead-letter topic as a log, read from any offset without a consumer group."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from marq.client.backends import backend_of
from marq.client.lifecycle import to_its_end
from marq.kafka.log_reader import LogReader
from marq.kafka.records import Records
from marq.settings.client import ClientSettings
from marq.wire.markers import Headers, Source


class Stored(NamedTuple):
    """A record and its position."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class DeadLetterLog(Protocol):
    """A reader of committed records. All calls may raise BrokerUnavailable and Forbidden."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...

    async def ranges(self) -> dict[int, range]:
        """Return the existing offsets of each partition."""

    def records(self, ranges: Mapping[int, range]) -> AsyncIterator[Sequence[Stored]]:
        """Read a range of each partition, some records at a time."""

    def seek(self, positions: Mapping[int, int]) -> None:
        """Read only these partitions, from these offsets on."""

    async def read(self) -> Sequence[Stored]:
        """Return the next records, or none after a while without any."""


class KafkaDeadLetterLog:
    """The dead-letter topic."""

    def __init__(self, settings: ClientSettings) -> None:
        self._topic = settings.names.dead_letters
        self._reader = LogReader(settings, committed=True)

    async def start(self) -> None:
        await self._reader.start()

    async def stop(self) -> None:
        await self._reader.stop()

    async def ranges(self) -> dict[int, range]:
        return {source.partition: span for source, span in (await self._reader.ranges(self._topic)).items()}

    async def records(self, ranges: Mapping[int, range]) -> AsyncIterator[Sequence[Stored]]:
        wanted = {Source(self._topic, partition): span for partition, span in ranges.items()}
        async for fetched in self._reader.read(wanted):
            yield _stored(fetched)

    def seek(self, positions: Mapping[int, int]) -> None:
        self._reader.seek({Source(self._topic, partition): offset for partition, offset in positions.items()})

    async def read(self) -> Sequence[Stored]:
        return _stored(await self._reader.poll())


def _stored(fetched: Mapping[Source, Records]) -> list[Stored]:
    return [Stored(source.partition, *row) for source, records in fetched.items() for row in records]


def dead_letter_log(settings: ClientSettings) -> DeadLetterLog:
    """Return a reader of the dead letters at the settings' address."""
    backend = backend_of(settings)
    log: DeadLetterLog = KafkaDeadLetterLog(settings) if backend is None else backend.dead_letter_log(settings)
    return log


@asynccontextmanager
async def open_dead_letter_log(settings: ClientSettings) -> AsyncIterator[DeadLetterLog]:
    """Return a context with a started reader of the dead letters."""
    log = dead_letter_log(settings)
    await log.start()
    try:
        yield log
    finally:
        await to_its_end(log.stop())
