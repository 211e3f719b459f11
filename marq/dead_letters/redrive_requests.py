"""Requests to settle dead letters, and the trackers' notes that answer them.

A request is a marker. Once it is written it will be executed, even if the call is cancelled. At most
:data:`MAX_UNANSWERED` requests are open at a time, so that little is left to do after a cancelled call or an outage of
trackers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from marq.backend.cluster import Cluster
from marq.dead_letters.log import DeadLetterLog
from marq.kafka.marker_writer import MarkerRecord, MarkerWriter
from marq.wire.dead_letter_notes import Disposition, decode, is_note
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import Delay, Discard, Source

#: Maximum number of dead letters in one write; after each write a call reads notes and reports its progress.
TURN_LETTERS = 1_000
#: Maximum number of unanswered requests.
MAX_UNANSWERED = 10_000
#: With a rate, the dead letters of this many seconds are requested at once.
_TURN_S = 0.05

T = TypeVar("T")
P = TypeVar("P")


class RedriveLimits(NamedTuple):
    """The maximum number of dead letters, their rate per second, and whether to change nothing."""

    limit: int | None
    rate: float | None
    dry_run: bool

    @property
    def turn(self) -> int:
        """How many dead letters to request at once."""
        return TURN_LETTERS if self.rate is None else max(1, min(TURN_LETTERS, int(self.rate * _TURN_S)))

    def pieces(self, items: Iterable[P]) -> Iterator[list[P]]:
        """Divide dead letters into those of each turn."""
        rest = iter(items)
        while piece := [*islice(rest, self.turn)]:
            yield piece


class RedriveProgress(Generic[T]):
    """The progress of a call; ``make`` creates the result from chosen, requested, done and already settled."""

    def __init__(
        self, topic: str, chosen: int, make: Callable[[int, int, int, int], T], progress: Callable[[T], None] | None
    ) -> None:
        self._topic = topic
        self._chosen = chosen
        self._make = make
        self._progress = progress
        self._asked = self._done = self._before = 0
        self._unanswered: set[tuple[int, int]] = set()
        #: Whether no tracker has answered in time; all requests that were counted as asked are durable.
        self.stalled = False

    @property
    def unanswered(self) -> int:
        return len(self._unanswered)

    @property
    def result(self) -> T:
        return self._make(self._chosen, self._asked, self._done, self._before)

    def ask(self, batches: Sequence[Delay | Discard]) -> None:
        """Note requests before they are written: their notes may come before the write returns."""
        self._unanswered |= {(batch.source.partition, offset) for batch in batches for offset in batch.offsets}

    def asked(self, letters: int) -> None:
        self._asked += letters
        self._tell()

    def answer(self, partition: int, value: bytes | None, holder: int) -> None:
        """Count a note if it answers the holder's requests."""
        note = decode(Source(self._topic, partition), value)
        if note is None or note.holder != holder:
            return
        answered = self._unanswered & {(partition, offset) for offset in note.offsets}
        self._unanswered -= answered
        if note.became is Disposition.BEFORE:
            self._before += len(answered)
        else:
            self._done += len(answered)
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.result)


class RedriveRequester:
    """Writes requests at a rate and reads notes meanwhile.

    It waits up to ``limit_s`` for each write, and up to ``wait_s`` for the next note.
    """

    def __init__(
        self,
        cluster: Cluster,
        writer: MarkerWriter,
        markers_partitions: int,
        notes: DeadLetterLog,
        counts: RedriveProgress[T],
        holder: int,
        limits: RedriveLimits,
        limit_s: float,
        wait_s: float,
    ) -> None:
        self._cluster = cluster
        self._writer = writer
        self._partitions = markers_partitions
        self._notes = notes
        self._counts: RedriveProgress[T] = counts
        self._holder = holder
        self._rate = limits.rate
        self._limit_s = limit_s
        self._wait_s = wait_s
        self._next_s = cluster.now_s()

    async def ask(self, batches: Sequence[Delay | Discard]) -> None:
        """Write requests at the rate; durable on return.

        Raises:
            BrokerUnavailable: unknown whether they were written, or no tracker answers (``counts.stalled``).
        """
        letters = sum(len(batch.offsets) for batch in batches)
        await self._pace(letters)
        self._counts.ask(batches)
        records = [MarkerRecord.of(batch, self._partitions) for batch in batches]
        await self._writer.write(records, self._limit_s)
        self._counts.asked(letters)
        await self._listen(MAX_UNANSWERED)

    async def finish(self) -> None:
        """Return when all requests are answered; raise BrokerUnavailable if no tracker answers."""
        await self._listen(0)

    async def _pace(self, letters: int) -> None:
        """Read notes until the rate allows the next requests."""
        if self._rate is None:
            return
        while (wait_s := self._next_s - self._cluster.now_s()) > 0:
            try:
                await self._cluster.within(wait_s, self._read_notes())
            except TimeoutError:
                break
        self._next_s = max(self._next_s, self._cluster.now_s()) + letters / self._rate

    async def _listen(self, unanswered: int) -> None:
        until_s = self._cluster.now_s() + self._wait_s
        while (before := self._counts.unanswered) > unanswered:
            left_s = until_s - self._cluster.now_s()
            with suppress(TimeoutError):
                await self._cluster.within(max(left_s, 0.001), self._read_notes())
            if self._counts.unanswered < before:
                until_s = self._cluster.now_s() + self._wait_s
            elif self._cluster.now_s() >= until_s:
                self._counts.stalled = True
                raise BrokerUnavailable(
                    f"no worker has answered the requests for {before} dead letters within {self._wait_s:g} s: is one"
                    " running (marq worker)? A worker will execute them when it starts; if you repeat the call,"
                    " each dead letter is still settled once"
                )

    async def _read_notes(self) -> None:
        for record in await self._notes.read():
            if is_note(record):
                self._counts.answer(record.partition, record.value, self._holder)
