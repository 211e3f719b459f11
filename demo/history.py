"""Reads the topics of a run: what is committed in them, from the beginning."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, TopicPartition

from demo.account import DeadLetter
from demo.errors import DemoError
from demo.plan import read_number
from demo.trails import Key, Trails
from marq.connection import client_options, stop_consumer
from marq.core.marker_codec import decode
from marq.core.names import ATTEMPT_HEADER, ORIGIN_HEADER, REASON_HEADER
from marq.settings import ClientSettings

_FETCH_MS = 200
STOP_SECONDS = 1.0
#: A position of a topic: the next offset of each partition.
Position = Mapping[int, int]


class TopicReader:
    """All partitions of a topic, without a group; ``committed`` leaves out what transactions have taken back."""

    def __init__(self, settings: ClientSettings, topic: str, *, committed: bool = True) -> None:
        self._topic = topic
        self._consumer = AIOKafkaConsumer(
            topic,
            **client_options(settings),
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed" if committed else "read_uncommitted",
            max_partition_fetch_bytes=4 << 20,
        )
        self._partitions: list[TopicPartition] = []

    async def __aenter__(self) -> Self:
        await self._consumer.start()
        self._partitions = sorted(self._consumer.assignment())
        if not self._partitions:
            await stop_consumer(self._consumer, STOP_SECONDS)
            raise DemoError(f"topic {self._topic} is gone")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await stop_consumer(self._consumer, STOP_SECONDS)

    async def end(self) -> Position:
        ends = await self._consumer.end_offsets(self._partitions)
        return {tp.partition: offset for tp, offset in ends.items()}

    async def new(self, wait_ms: int = 0) -> Sequence[Any]:
        """Return some records that were not returned yet."""
        fetched = await self._consumer.getmany(timeout_ms=wait_ms)
        return [record for records in fetched.values() for record in records]

    async def to_end(self) -> AsyncIterator[Any]:
        """Each record up to what is now the end."""
        end = await self.end()
        while True:
            for record in await self.new(_FETCH_MS):
                yield record
            # The position moves on past records that are not shown: those of transactions, and aborted ones.
            positions = {tp.partition: await self._consumer.position(tp) for tp in self._partitions}
            if all(positions[partition] >= offset for partition, offset in end.items()):
                return


class History:
    """The markers, folded as far as they have been read, with a look at moments that matter."""

    def __init__(self, reader: TopicReader) -> None:
        self._reader = reader
        self._moments: dict[str, Position] = {}
        self._passed: set[tuple[str, int]] = set()
        self.trails = Trails()
        #: For each moment: how many messages each holder held then, and how many rows were open in each partition.
        self.held: dict[str, dict[int, int]] = {}
        self.open_rows: dict[str, dict[int, int]] = {}

    def mark(self, moment: str, position: Position) -> None:
        """Look at the fold when it comes to this position."""
        self._moments[moment] = position
        self.held[moment], self.open_rows[moment] = {}, {}

    async def read(self) -> Trails:
        """Go on to the end."""
        async for record in self._reader.to_end():
            self._look(record.partition, record.offset)
            self.trails.fold(record.partition, decode(record.value), record.timestamp)
        for partition in await self._reader.end():
            self._look(partition)
        return self.trails

    def _look(self, partition: int, offset: int | None = None) -> None:
        for moment, position in self._moments.items():
            if (moment, partition) in self._passed or (offset is not None and offset < position[partition]):
                continue
            self._passed.add((moment, partition))
            for holder, count in self.trails.held(partition).items():
                held = self.held[moment]
                held[holder] = held.get(holder, 0) + count
            self.open_rows[moment][partition] = self.trails.open_rows(partition)


async def read_dead_letters(reader: TopicReader) -> list[DeadLetter]:
    return [dead_letter(record) async for record in reader.to_end()]


def dead_letter(record: Any) -> DeadLetter:
    """Return what a record of the dead-letters topic says."""
    headers = {name: (value or b"").decode("utf-8", "replace") for name, value in record.headers}
    _, partition, offset = headers[ORIGIN_HEADER].rsplit("/", 2)
    return DeadLetter(
        number=read_number(record.value),
        attempt=int(headers[ATTEMPT_HEADER]),
        key=(int(partition), int(offset)),
        reason=headers[REASON_HEADER],
        at_ms=record.timestamp,
    )


async def find_aborted(settings: ClientSettings, suspects: Collection[Key]) -> set[Key]:
    """Return which of these records of the messages topic belong to transactions that were aborted."""
    if not suspects:
        return set()
    committed: set[Key] = set()
    async with TopicReader(settings, settings.names.messages) as reader:
        async for record in reader.to_end():
            committed.add((record.partition, record.offset))
    return set(suspects) - committed
