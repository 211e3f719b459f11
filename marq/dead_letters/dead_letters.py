"""Dead letters: peek, count, redrive, delete.

A dead letter is never moved. A redrive is a marker with its message and its position in the topic. The tracker accepts
each position once, delivers the message, and writes a note to the dead-letter topic
(:mod:`marq.wire.dead_letter_notes`). So you can repeat an interrupted call: redriven messages are skipped, and a
redrive requested twice, even by two clients at the same time, happens once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, NamedTuple, TypeVar, Unpack

from marq.backend.cluster import Cluster, Writer, cluster_of
from marq.client.codecs import Codec, V
from marq.client.dead_letter import DeadLetter, time_of
from marq.client.lifecycle import CodecClient, Lifecycle
from marq.core.deliveries import dead_letter_records
from marq.dead_letters.error_kinds import error_kind
from marq.dead_letters.filters import DeadLetterFilter, Filters
from marq.dead_letters.log import DeadLetterLog, Stored, open_dead_letter_log
from marq.dead_letters.redrive_requests import RedriveLimits, RedriveProgress, RedriveRequester
from marq.dead_letters.selection import Survey, dead_letters_at
from marq.dead_letters.snapshots import Snapshot
from marq.kafka.topics import Topics
from marq.settings.client import ClientSettings, whole_number
from marq.wire.errors import ConfigError, UnknownQueue
from marq.wire.markers import Delay, Discard, Source
from marq.wire.names import FRAME_BYTES, check_queue_name, closest_name

_MAX_RATE = 1_000_000
_MAX_LIMIT = 2**62
_STOP_S = 5.0

T = TypeVar("T")


class Count(NamedTuple):
    """The number of a queue's dead letters with the same reason."""

    queue: str
    reason: str
    dead_letters: int


class KindCount(NamedTuple):
    """A queue's dead letters with the same kind of error: how many, and when the first and the last failed."""

    queue: str
    kind: str
    dead_letters: int
    first_dead_lettered_at: datetime
    last_dead_lettered_at: datetime


@dataclass(frozen=True, slots=True)
class Redriven:
    """The progress of a redrive.

    ``chosen`` counts the dead letters that matched when the redrive began. ``requested`` counts those whose request is
    durable: they are redriven even if the call is cancelled. ``redriven`` counts those that this call sent back, and
    ``already_settled`` those that another call had already redriven or deleted.
    """

    chosen: int
    requested: int = 0
    redriven: int = 0
    already_settled: int = 0

    @property
    def done(self) -> int:
        """The number that this call has settled."""
        return self.redriven


@dataclass(frozen=True, slots=True)
class Deleted:
    """The progress of a deletion: like :class:`Redriven`, but ``deleted`` counts those that this call deleted."""

    chosen: int
    requested: int = 0
    deleted: int = 0
    already_settled: int = 0

    @property
    def done(self) -> int:
        """The number that this call has settled."""
        return self.deleted


class DeadLetters(CodecClient[Topics, V], Generic[V]):
    """Lists, counts, redrives and deletes dead letters.

    Args:
        bootstrap_servers: ``host:port``, several separated by commas (default MARQ_BOOTSTRAP_SERVERS).
        codec: decodes values (default: values are bytes).
        options: see :class:`marq.settings.client.ClientOptions`.
    """

    def _begin(self, settings: ClientSettings, codec: Codec[V] | None) -> None:
        Lifecycle.__init__(self, "the DeadLetters client")
        self._settings = settings
        self._codec = codec
        self._cluster: Cluster = cluster_of(settings)
        self._limit_s = settings.request_timeout_ms / 1000
        self._writer: Writer | None = None
        self._connecting: asyncio.Lock

    async def _open(self, opened: AsyncExitStack) -> Topics:
        self._connecting = asyncio.Lock()
        topics = await self._cluster.topics()
        opened.push_async_callback(self._close_writer)
        return topics

    async def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.stop(_STOP_S)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def peek(
        self, queue: str | None = None, *, limit: int | None = None, **filters: Unpack[Filters]
    ) -> AsyncIterator[DeadLetter[V]]:
        """Return dead letters of one queue or of all, in the order of each partition, without changing anything.

        Args:
            queue: the queue's name (default: all queues).
            limit: maximum number of dead letters, oldest first.
            filters: see :class:`marq.dead_letters.filters.Filters`.

        Raises:
            ConfigError: a name or a filter can't be used, or the permission to read is missing.
            BrokerUnavailable: the topic could not be read.
        """
        limit = _limit(limit)
        fits = self._fitting("peek", queue, filters)
        async with self._reading() as log:
            survey = await self._survey(log, fits)
            async for records in dead_letters_at(log, survey.spots(limit)):
                for record in records:
                    yield self._letter(record)

    async def count(self, queue: str | None = None, **filters: Unpack[Filters]) -> list[Count]:
        """Count dead letters by queue and reason, most frequent first; same errors as :meth:`peek`.

        After 100,000 different reasons, further ones are counted together.
        """
        fits = self._fitting("count", queue, filters)
        async with self._reading() as log:
            survey = await self._survey(log, fits)
        counts = [Count(*group, letters) for group, letters in survey.counts().items()]
        return sorted(counts, key=lambda count: (-count.dead_letters, count))

    async def kinds(self, queue: str | None = None, **filters: Unpack[Filters]) -> list[KindCount]:
        """Count dead letters by queue and kind of error, most frequent first; same errors as :meth:`peek`.

        A kind is the first line of the last error, or of the reason if there is no error, with ``N`` in place of
        numbers. Pass it to other calls as the filter ``kind``.
        """
        fits = self._fitting("kinds", queue, filters)
        async with self._reading() as log:
            survey = Survey(self._settings.names.dead_letters, fits, error_kind)
            await survey.make(log)
        kinds = [
            KindCount(*group, letters, time_of(oldest.dead_lettered_at_ms), time_of(newest.dead_lettered_at_ms))
            for group, (letters, oldest, newest) in survey.spans().items()
        ]
        return sorted(kinds, key=lambda kind: (-kind.dead_letters, kind))

    async def snapshot(self) -> Snapshot:
        """Return a snapshot of the dead letters that exist now, for ``as_of=`` of the other calls.

        Raises:
            BrokerUnavailable: the topic could not be read.
        """
        async with self._reading() as log:
            ranges = await log.ranges()
        return Snapshot(
            round(self._cluster.wall_s() * 1000), {partition: offsets.stop for partition, offsets in ranges.items()}
        )

    # --- settling -----------------------------------------------------------------------------------------------------

    async def redrive(
        self,
        queue: str | None,
        *,
        to: str | None = None,
        allow_unknown: bool = False,
        limit: int | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Callable[[Redriven], None] | None = None,
        **filters: Unpack[Filters],
    ) -> Redriven:
        """Send dead letters back to their queue, or to another one, as messages at their first attempt.

        When it returns, each one has been sent back, or had already been settled. You may cancel the call at any time
        and repeat it: redriven dead letters are skipped. Dead letters that arrive in the meantime are not affected.

        Args:
            queue: the queue's name; None for the dead letters of all queues.
            to: the queue to send them to (default: the queue in which they were dead-lettered).
            allow_unknown: send them even if the queue ``to`` is unknown, for example mistyped (default False).
            limit: maximum number of dead letters, oldest first.
            rate: maximum number of messages per second.
            dry_run: return the number, and change nothing.
            progress: called from time to time with the progress.
            filters: see :class:`marq.dead_letters.filters.Filters`.

        Raises:
            UnknownQueue: ``to`` has no definition, no consumer and no messages, and ``allow_unknown`` is False.
            ConfigError: a name or a filter can't be used, or a permission is missing.
            BrokerUnavailable: the progress is unknown, for example because no worker runs: call it again.
        """
        if to is not None:
            check_queue_name(to)
            if to != queue and not allow_unknown:
                await self.check_known(to)
        limits = RedriveLimits(_limit(limit), _rate(rate), dry_run)
        fits = self._fitting("redrive", queue, filters)
        limit_bytes = self._started().markers_limit_bytes - FRAME_BYTES

        async def requests(log: DeadLetterLog, survey: Survey, holder: int) -> AsyncIterator[list[Delay]]:
            async for records in dead_letters_at(log, survey.spots(limits.limit)):
                for piece in limits.pieces(records):
                    groups: dict[tuple[int, str], list[Stored]] = {}
                    for record in piece:
                        target = to or dead_letter_records.queue_of(record) or ""
                        groups.setdefault((record.partition, target), []).append(record)
                    yield [
                        batch
                        for (partition, target), letters in groups.items()
                        for batch in dead_letter_records.redrive(
                            target, holder, self._source(partition), letters, limit_bytes
                        )
                    ]

        return await self._settle(fits, limits, requests, Redriven, progress)

    async def delete(
        self,
        queue: str | None,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        progress: Callable[[Deleted], None] | None = None,
        **filters: Unpack[Filters],
    ) -> Deleted:
        """Delete dead letters: they are no longer listed, counted or redriven; otherwise like :meth:`redrive`.

        Their records stay in the topic as long as its retention keeps them.
        """
        limits = RedriveLimits(_limit(limit), None, dry_run)
        fits = self._fitting("delete", queue, filters)

        async def requests(log: DeadLetterLog, survey: Survey, holder: int) -> AsyncIterator[list[Discard]]:
            groups = survey.groups
            for piece in limits.pieces(survey.spots(limits.limit)):
                targets: dict[tuple[int, str], list[int]] = {}
                for spot in piece:
                    targets.setdefault((spot.partition, groups[spot.group].queue), []).append(spot.offset)
                yield [
                    batch
                    for (partition, name), offsets in targets.items()
                    for batch in dead_letter_records.discard(name, holder, self._source(partition), offsets)
                ]

        return await self._settle(fits, limits, requests, Deleted, progress)

    async def _settle(
        self,
        fits: Callable[[str, Stored], bool],
        limits: RedriveLimits,
        requests: Callable[[DeadLetterLog, Survey, int], AsyncIterator[Sequence[Delay | Discard]]],
        result: Callable[[int, int, int, int], T],
        progress: Callable[[T], None] | None,
    ) -> T:
        topics, holder = self._started(), secrets.randbits(63) | 1
        async with self._reading() as log:
            survey = await self._survey(log, fits)
            chosen = sum(1 for _ in survey.spots(limits.limit))
            counts = RedriveProgress(self._settings.names.dead_letters, chosen, result, progress)
            if limits.dry_run or not chosen:
                return counts.result
            writer = await self._writing(topics)
            async with self._reading() as notes:
                notes.seek({partition: offsets.stop for partition, offsets in survey.ranges.items()})
                requester = RedriveRequester(
                    self._cluster, writer, topics.markers_partitions, notes, counts, holder, limits, self._limit_s,
                    self._limit_s,
                )  # fmt: skip
                async for batches in requests(log, survey, holder):
                    await requester.ask(batches)
                await requester.finish()
        return counts.result

    async def check_known(self, queue: str) -> None:
        """Check that a queue has a definition, a consumer, messages or dead letters.

        Raises:
            UnknownQueue: the queue has none of these.
            BrokerUnavailable: a topic could not be read.
        """
        check_queue_name(queue)
        self._started()
        known = await self._cluster.known_queues(queue)
        if queue not in known:
            known |= {count.queue for count in await self.count()}
        if queue not in known:
            suggestion = closest_name(queue, known)
            raise UnknownQueue(queue, suggestion, "To send messages there anyway, pass allow_unknown=True")

    # --- parts --------------------------------------------------------------------------------------------------------

    def _fitting(self, call: str, queue: str | None, filters: Mapping[str, Any]) -> Callable[[str, Stored], bool]:
        if queue is not None:
            check_queue_name(queue)
        checked = DeadLetterFilter.read(call, filters, round(self._cluster.wall_s() * 1000))
        return lambda name, record: (queue is None or name == queue) and checked.fits(record)

    async def _survey(self, log: DeadLetterLog, fits: Callable[[str, Stored], bool]) -> Survey:
        survey = Survey(self._settings.names.dead_letters, fits)
        await survey.make(log)
        return survey

    def _reading(self) -> AbstractAsyncContextManager[DeadLetterLog]:
        self._started()
        return open_dead_letter_log(self._settings)

    async def _writing(self, topics: Topics) -> Writer:
        async with self._connecting:
            if self._writer is None:
                writer = self._cluster.writer(topics)
                await writer.start()
                self._writer = writer
            return self._writer

    def _source(self, partition: int) -> Source:
        return Source(self._settings.names.dead_letters, partition)

    def _letter(self, record: Stored) -> DeadLetter[V]:
        queue = dead_letter_records.queue_of(record)
        assert queue is not None, "a survey finds dead letters only"
        return DeadLetter(record, queue, self._settings.names.dead_letters, self._codec)


def _limit(value: object) -> int | None:
    return None if value is None else whole_number("limit", value, most=_MAX_LIMIT)


def _rate(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_RATE:
        raise ConfigError(f"rate={value!r}: expected messages per second, more than 0 and at most {_MAX_RATE}")
    return float(value)
