"""Reads given stretches of topics, once and without a consumer group: for whoever looks at an installation."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from marq.connection import client_options, started, stop_consumer
from marq.core.errors import BrokerUnavailable
from marq.core.markers import Source
from marq.fetching import fetch_records
from marq.log_ranges import log_ranges
from marq.records import Records
from marq.rights import refused
from marq.settings import ClientSettings

#: Records that are fetched at a time.
MAX_RECORDS = 10_000
READ_WAIT_S = 1.0
FETCH_WAIT_MS = 100
STOP_CLIENT_S = 2.0

Ranges = Mapping[Source, range]


class LogView:
    """One reader; ``committed``: it does not see what was written in transactions that are open or were aborted.

    Errors of all calls: BrokerUnavailable, and Forbidden where the right to read a topic is missing.
    """

    def __init__(self, settings: ClientSettings, *, committed: bool) -> None:
        self._settings = settings
        self._committed = committed
        self._limit_s = settings.request_timeout_ms / 1000
        self._consumer: AIOKafkaConsumer | None = None

    async def __aenter__(self) -> Self:
        async def close(consumer: AIOKafkaConsumer) -> None:
            await stop_consumer(consumer, 0)

        self._consumer = await started(self._make, self._settings, close)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_consumer(consumer, STOP_CLIENT_S)

    async def ranges(self, topic: str) -> dict[Source, range]:
        """Return which offsets each partition of a topic has now."""
        try:
            async with asyncio.timeout(self._limit_s):
                found = await log_ranges(self._running(), topic)
        except (KafkaError, TimeoutError) as error:
            raise self._failed([topic], error) from error
        return {Source(topic, number): span for number, span in found.items()}

    async def offsets_at(self, sources: Iterable[Source], time_ms: int) -> dict[Source, int | None]:
        """Return the first offset with that timestamp or a later one, None where there is none."""
        wanted = {TopicPartition(*source): time_ms for source in sources}
        try:
            async with asyncio.timeout(self._limit_s):
                found = await self._running().offsets_for_times(wanted)
        except (KafkaError, TimeoutError) as error:
            raise self._failed({each.topic for each in wanted}, error) from error
        return {Source(*each): None if at is None else at.offset for each, at in found.items()}

    async def read(self, ranges: Ranges) -> AsyncIterator[dict[Source, Records]]:
        """Read all that stands in these ranges, some records at a time.

        Raises:
            BrokerUnavailable: nothing more could be read for as long as a request may take.
        """
        left = {source: span for source, span in ranges.items() if span}
        if not left:
            return
        consumer, partitions = self._running(), {source: TopicPartition(*source) for source in left}
        consumer.assign(list(partitions.values()))
        for source, span in left.items():
            consumer.seek(partitions[source], span.start)
        before: dict[Source, int] = {}
        until_s = time.monotonic() + self._limit_s
        while left:
            try:
                fetched = await fetch_records(consumer, READ_WAIT_S, MAX_RECORDS)
                async with asyncio.timeout(self._limit_s):
                    # Where only a transaction's own records are left, the position tells it, and no record.
                    positions = {source: await consumer.position(partitions[source]) for source in left}
            except (KafkaError, TimeoutError) as error:
                raise self._failed({source.topic for source in left}, error) from error
            wanted = {source: _before(read, left[source].stop) for source, read in fetched.items() if source in left}
            if found := {source: read for source, read in wanted.items() if len(read)}:
                yield found
            if positions != before:
                before, until_s = positions, time.monotonic() + self._limit_s
            elif time.monotonic() > until_s:
                raise self._stuck(left, positions)
            done = [source for source, span in left.items() if positions[source] >= span.stop]
            for source in done:
                del left[source]
            if done and left:
                consumer.pause(*[partitions[source] for source in done])

    def _stuck(self, left: Ranges, positions: Mapping[Source, int]) -> BrokerUnavailable:
        where = ", ".join(f"{s.topic}/{s.partition} at {positions[s]} of {span.stop}" for s, span in left.items())
        return BrokerUnavailable(
            f"nothing more could be read for {self._limit_s:g} s, of {where}: the broker is slow, or a transaction is"
            " open there; try again"
        )

    def _running(self) -> AIOKafkaConsumer:
        assert self._consumer is not None
        return self._consumer

    def _make(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            **client_options(self._settings),
            isolation_level="read_committed" if self._committed else "read_uncommitted",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            fetch_max_wait_ms=FETCH_WAIT_MS,
        )

    def _failed(self, topics: Iterable[str], error: BaseException) -> Exception:
        names = sorted(topics)
        return refused(self._settings, error, "Read", names[0]) or BrokerUnavailable(
            f"topic {', '.join(names)} at {self._settings.bootstrap_servers}: it could not be read"
            f" ({str(error) or type(error).__name__})"
        )


def _before(read: Records, end: int) -> Records:
    return read if read.offsets[-1] < end else read[: bisect_left(read.offsets, end)]
