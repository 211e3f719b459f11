"""The dead letters of an installation: looked at, counted, sent back to queues, deleted.

A dead letter is never moved. A redrive is a marker that names its place and carries its message; the tracker takes each
place once and for ever, delivers the message, and notes beside the dead letters what it did (:mod:`marq.core.notes`).
So whoever is interrupted simply begins again: what was redriven is left out, and what is asked for twice, also by two
at the same time, happens once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, Unpack

from marq.cluster import Cluster, Writer, cluster_of
from marq.codecs import Codec, check_codec
from marq.connection import to_its_end
from marq.core import dead_letters
from marq.core.errors import ConfigError, MarqError, UnknownQueue
from marq.core.markers import Delay, Discard, Source
from marq.core.names import check_queue_name, closest_name
from marq.dead_letter import DeadLetter, time_of
from marq.letter_filter import Filters, LetterFilter, Snapshot
from marq.letter_log import LetterLog, Stored, letter_log
from marq.letter_survey import Survey, letters_at
from marq.settings import ClientOptions, ClientSettings, whole_number
from marq.settling import Account, Asking, Choice
from marq.topics import Topics
from marq.words import missing
from marq.writer import FRAME_BYTES

_MAX_RATE = 1_000_000
_MAX_LIMIT = 2**62
_STOP_S = 5.0

T = TypeVar("T")
P = TypeVar("P")


class Count(NamedTuple):
    """How many dead letters of a queue have the same reason."""

    queue: str
    reason: str
    letters: int


class Kind(NamedTuple):
    """Dead letters of a queue that died of the same kind of error: how many, and when the first and the last died."""

    queue: str
    kind: str
    letters: int
    first_died: datetime
    last_died: datetime


@dataclass(frozen=True, slots=True)
class Redriven:
    """How far a redrive is.

    ``chosen`` are the dead letters that were meant when it began; ``asked`` those of which the request is durable, so
    that they are redriven even if nobody waits for it; ``redriven`` those that this call sent back, and
    ``already_settled`` those that somebody else had redriven or deleted meanwhile.
    """

    chosen: int
    asked: int = 0
    redriven: int = 0
    already_settled: int = 0


@dataclass(frozen=True, slots=True)
class Deleted:
    """How far a deletion is; as :class:`Redriven`, with ``deleted`` for those that this call deleted."""

    chosen: int
    asked: int = 0
    deleted: int = 0
    already_settled: int = 0


class DeadLetters:
    """Looks at dead letters, sends them back to queues, deletes them.

    Args:
        bootstrap_servers: ``host:port``, several separated by commas; else MARQ_BOOTSTRAP_SERVERS.
        codec: what makes values of bytes; without it values are bytes.
        options: see :class:`marq.settings.ClientOptions`.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] | None = None,
        *,
        codec: Codec | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._begin(ClientSettings.read(bootstrap_servers, options, owner="DeadLetters"), check_codec(codec))

    @classmethod
    def of(cls, settings: ClientSettings) -> Self:
        """Return one for somebody who has its settings already."""
        letters = cls.__new__(cls)
        letters._begin(settings, None)
        return letters

    def _begin(self, settings: ClientSettings, codec: Codec | None) -> None:
        self._settings = settings
        self._codec = codec
        self._cluster: Cluster = cluster_of(settings)
        self._limit_s = settings.request_timeout_ms / 1000
        self._topics: Topics | None = None
        self._writer: Writer | None = None
        self._lock: asyncio.Lock | None = None

    async def start(self) -> None:
        """Connect, and make the topics that are missing; does nothing when started.

        Raises:
            BrokerUnavailable: no broker answered within the connect timeout, or it refused.
            ConfigError: a topic's setting is wrong.
        """
        async with self._changing():
            if self._topics is None:
                self._topics = await self._cluster.topics()

    async def stop(self) -> None:
        """Close; does nothing when stopped."""
        async with self._changing():
            writer, self._writer, self._topics = self._writer, None, None
            if writer is not None:
                await to_its_end(writer.stop(_STOP_S))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # --- looking ------------------------------------------------------------------------------------------------------

    async def peek(
        self, queue: str | None = None, *, limit: int | None = None, **filters: Unpack[Filters]
    ) -> AsyncIterator[DeadLetter]:
        """Return dead letters, of one queue or of all, in the order of each partition; nothing is changed.

        Args:
            limit: so many, those that died first.
            filters: see :class:`marq.letter_filter.Filters`.

        Raises:
            ConfigError: a name or a filter can't be used, or the right to read is missing.
            BrokerUnavailable: the topic could not be read.
        """
        limit = _limit(limit)
        fits = self._fitting("peek", queue, filters)
        async with self._reading() as log:
            survey = await self._survey(log, fits)
            async for records in letters_at(log, survey.spots(limit), self._limit_s):
                for record in records:
                    yield self._letter(record)

    async def count(self, queue: str | None = None, **filters: Unpack[Filters]) -> list[Count]:
        """Return how many dead letters there are, by queue and reason, the most frequent first; raises as :meth:`peek`.

        Texts of reasons that are many and all different are counted together.
        """
        fits = self._fitting("count", queue, filters)
        async with self._reading() as log:
            survey = await self._survey(log, fits)
        counts = [Count(*group, letters) for group, letters in survey.counts().items()]
        return sorted(counts, key=lambda count: (-count.letters, count))

    async def kinds(self, queue: str | None = None, **filters: Unpack[Filters]) -> list[Kind]:
        """Return what dead letters died of, by queue and kind of error, the most frequent first.

        A kind is the first line of the last error, or of the reason where there is none, with ``N`` in the place of
        numbers and the like. The filter ``kind`` means the letters of one. Raises as :meth:`peek`.
        """
        fits = self._fitting("kinds", queue, filters)
        async with self._reading() as log:
            survey = Survey(self._settings.names.dead_letters, fits, dead_letters.kind_of)
            await survey.make(log, self._limit_s)
        kinds = [
            Kind(group.queue, group.reason, letters, time_of(first_ms), time_of(last_ms))
            for group, (letters, first_ms, last_ms) in survey.spans().items()
        ]
        return sorted(kinds, key=lambda kind: (-kind.letters, kind))

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

        When it returns, each of them is sent back or was settled before, for good. It may be cancelled at any time, and
        called again: what was asked for before is left out. New dead letters that come meanwhile are left alone.

        Args:
            queue: whose dead letters; None for those of all queues.
            to: the queue to send them to, instead of the one in which they died.
            allow_unknown: send them even if the queue ``to`` is unknown, as a mistyped name would be (default False).
            limit: so many at the most, those that died first.
            rate: messages per second at the most.
            dry_run: only say how many are meant.
            progress: is called now and then with how far it is.
            filters: see :class:`marq.letter_filter.Filters`.

        Raises:
            UnknownQueue: ``to`` has no definition, no consumer and no messages, and ``allow_unknown`` is False.
            ConfigError: a name or a filter can't be used, or a right is missing.
            BrokerUnavailable: it is not known how far it came, as when no worker runs: call it again.
        """
        if to is not None:
            check_queue_name(to)
            if to != queue and not allow_unknown:
                await self.check_known(to)
        choice = Choice(_limit(limit), _rate(rate), dry_run)
        fits = self._fitting("redrive", queue, filters)
        limit_bytes = self._started().markers_limit_bytes - FRAME_BYTES

        async def requests(log: LetterLog, survey: Survey, holder: int) -> AsyncIterator[list[Delay]]:
            async for records in letters_at(log, survey.spots(choice.limit), self._limit_s):
                for piece in _pieces(records, choice.turn):
                    groups: dict[tuple[int, str], list[Stored]] = {}
                    for record in piece:
                        target = to or dead_letters.queue_of(record) or ""
                        groups.setdefault((record.partition, target), []).append(record)
                    yield [
                        batch
                        for (partition, target), letters in groups.items()
                        for batch in dead_letters.redrive(target, holder, self._source(partition), letters, limit_bytes)
                    ]

        return await self._settle(fits, choice, requests, Redriven, progress)

    async def delete(
        self,
        queue: str | None,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        progress: Callable[[Deleted], None] | None = None,
        **filters: Unpack[Filters],
    ) -> Deleted:
        """Delete dead letters: they are listed, counted and redriven no more; arguments and errors as :meth:`redrive`.

        Their records stay in the topic as long as its retention keeps them.
        """
        choice = Choice(_limit(limit), None, dry_run)
        fits = self._fitting("delete", queue, filters)

        async def requests(log: LetterLog, survey: Survey, holder: int) -> AsyncIterator[list[Discard]]:
            groups = survey.groups
            for piece in _pieces(list(survey.spots(choice.limit)), choice.turn):
                found: dict[tuple[int, str], list[int]] = {}
                for spot in piece:
                    found.setdefault((spot.partition, groups[spot.group].queue), []).append(spot.offset)
                yield [
                    batch
                    for (partition, name), offsets in found.items()
                    for batch in dead_letters.discard(name, holder, self._source(partition), offsets)
                ]

        return await self._settle(fits, choice, requests, Deleted, progress)

    async def _settle(
        self,
        fits: Callable[[str, Stored], bool],
        choice: Choice,
        requests: Callable[[LetterLog, Survey, int], AsyncIterator[Sequence[Delay | Discard]]],
        result: Callable[[int, int, int, int], T],
        progress: Callable[[T], None] | None,
    ) -> T:
        topics, holder = self._started(), secrets.randbits(63) | 1
        async with self._reading() as log:
            survey = await self._survey(log, fits)
            chosen = sum(1 for _ in survey.spots(choice.limit))
            account = Account(self._settings.names.dead_letters, chosen, result, progress)
            if choice.dry_run or not chosen:
                return account.told
            writer = await self._writing(topics)
            async with self._reading() as notes:
                notes.seek({partition: offsets.stop for partition, offsets in survey.ranges.items()})
                asking = Asking(
                    self._cluster, writer, topics.markers_partitions, notes, account, holder, choice, self._limit_s
                )
                async for batches in requests(log, survey, holder):
                    await asking.ask(batches)
                await asking.finish()
        return account.told

    async def check_known(self, queue: str) -> None:
        """Check that a queue is known: by a definition, a consumer, messages or dead letters.

        Raises:
            UnknownQueue: it is unknown.
            BrokerUnavailable: a topic could not be read.
        """
        check_queue_name(queue)
        self._started()
        known = await self._cluster.known_queues(queue)
        if queue not in known:
            known |= {each.queue for each in await self.count()}
        if queue not in known:
            suggestion = closest_name(queue, known)
            raise UnknownQueue(queue, suggestion, "To send messages there anyway, pass allow_unknown=True")

    # --- parts --------------------------------------------------------------------------------------------------------

    def _fitting(self, call: str, queue: str | None, filters: Mapping[str, Any]) -> Callable[[str, Stored], bool]:
        if queue is not None:
            check_queue_name(queue)
        found = LetterFilter.read(call, filters, round(self._cluster.wall_s() * 1000))
        return lambda name, record: (queue is None or name == queue) and found.fits(record)

    async def _survey(self, log: LetterLog, fits: Callable[[str, Stored], bool]) -> Survey:
        survey = Survey(self._settings.names.dead_letters, fits)
        await survey.make(log, self._limit_s)
        return survey

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[LetterLog]:
        self._started()
        log = letter_log(self._settings)
        await log.start()
        try:
            yield log
        finally:
            await to_its_end(log.stop())

    async def _writing(self, topics: Topics) -> Writer:
        async with self._changing():
            if self._writer is None:
                writer = self._cluster.writer(topics)
                await writer.start()
                self._writer = writer
            return self._writer

    def _source(self, partition: int) -> Source:
        return Source(self._settings.names.dead_letters, partition)

    def _letter(self, record: Stored) -> DeadLetter:
        queue = dead_letters.queue_of(record)
        assert queue is not None, "a survey finds dead letters only"
        return DeadLetter(record, queue, self._settings.names.dead_letters, self._codec)

    def _started(self) -> Topics:
        if self._topics is None:
            raise MarqError("the dead letters are not started: use `async with` or await start()")
        return self._topics

    def _changing(self) -> asyncio.Lock:
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    def __getattr__(self, name: str) -> Any:
        raise missing("DeadLetters", name)


def _pieces(items: Sequence[P], most: int) -> Iterator[Sequence[P]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]


def _limit(value: object) -> int | None:
    return None if value is None else whole_number("limit", value, most=_MAX_LIMIT)


def _rate(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_RATE:
        raise ConfigError(f"rate={value!r}: expected messages per second, more than 0 and at most {_MAX_RATE}")
    return float(value)
