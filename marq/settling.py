"""Asks trackers to settle dead letters, and learns from their notes what came of it.

What is asked is a marker, which is durable when it is written: from then on it happens, whoever waits for it. At most
:data:`MAX_UNANSWERED` letters are asked for and not answered at a time, so that a tracker that is away does not find a
mountain of work, and whoever cancels the call leaves little behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from marq.cluster import Cluster
from marq.core.errors import BrokerUnavailable
from marq.core.marker_codec import encode
from marq.core.markers import Delay, Discard, Source
from marq.core.names import markers_partition
from marq.core.notes import Became, decode, is_note
from marq.letter_log import LetterLog
from marq.writer import MarkerRecord, MarkerWriter

#: Letters that are asked for at once: between two turns a call looks at notes, at its rate, and tells how far it is.
TURN_LETTERS = 1_000
#: Letters that were asked for and of which no note has come: past that a call waits.
MAX_UNANSWERED = 10_000
#: With a rate, the letters of so many seconds are asked for at once.
_TURN_S = 0.05

T = TypeVar("T")


class Choice(NamedTuple):
    """How many letters at the most, how many a second, and whether only to say how many."""

    limit: int | None
    rate: float | None
    dry_run: bool

    @property
    def turn(self) -> int:
        """How many letters to ask for at once."""
        return TURN_LETTERS if self.rate is None else max(1, min(TURN_LETTERS, int(self.rate * _TURN_S)))


class Account(Generic[T]):
    """How far a call is; ``result`` makes what users see of: chosen, asked, done, settled before."""

    def __init__(
        self, topic: str, chosen: int, result: Callable[[int, int, int, int], T], progress: Callable[[T], None] | None
    ) -> None:
        self._topic = topic
        self._chosen = chosen
        self._result = result
        self._progress = progress
        self._asked = self._done = self._before = 0
        self._unanswered: set[tuple[int, int]] = set()

    @property
    def unanswered(self) -> int:
        return len(self._unanswered)

    @property
    def told(self) -> T:
        return self._result(self._chosen, self._asked, self._done, self._before)

    def ask(self, batches: Sequence[Delay | Discard]) -> None:
        """Note that these are being asked for: their notes may come before the writer knows that they are written."""
        places = {(batch.source.partition, offset) for batch in batches for offset in batch.offsets}
        self._unanswered |= places

    def asked(self, letters: int) -> None:
        self._asked += letters
        self._tell()

    def answer(self, partition: int, value: bytes | None, holder: int) -> None:
        """Take a note, if it answers the holder."""
        note = decode(Source(self._topic, partition), value)
        if note is None or note.holder != holder:
            return
        answered = self._unanswered & {(partition, offset) for offset in note.offsets}
        self._unanswered -= answered
        if note.became is Became.BEFORE:
            self._before += len(answered)
        else:
            self._done += len(answered)
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.told)


class Asking:
    """Writes what is asked, at a rate, and reads notes meanwhile; ``limit_s`` is how long it waits for the next one."""

    def __init__(
        self,
        cluster: Cluster,
        writer: MarkerWriter,
        markers_partitions: int,
        notes: LetterLog,
        account: Account[T],
        holder: int,
        choice: Choice,
        limit_s: float,
    ) -> None:
        self._cluster = cluster
        self._writer = writer
        self._partitions = markers_partitions
        self._notes = notes
        self._account: Account[T] = account
        self._holder = holder
        self._rate = choice.rate
        self._limit_s = limit_s
        self._next_s = cluster.now_s()

    async def ask(self, batches: Sequence[Delay | Discard]) -> None:
        """Write these when it is their turn; durable on return.

        Raises:
            BrokerUnavailable: not known to be written, or no tracker answers.
        """
        letters = sum(len(batch.offsets) for batch in batches)
        await self._pace(letters)
        self._account.ask(batches)
        records = [MarkerRecord(markers_partition(*batch.source, self._partitions), encode(batch)) for batch in batches]
        await self._writer.write(records, self._limit_s)
        self._account.asked(letters)
        await self._listen(MAX_UNANSWERED)

    async def finish(self) -> None:
        """Return when all is answered.

        Raises:
            BrokerUnavailable: no tracker answers.
        """
        await self._listen(0)

    async def _pace(self, letters: int) -> None:
        """Wait until so many may be asked for, listening."""
        if self._rate is None:
            return
        while (wait_s := self._next_s - self._cluster.now_s()) > 0:
            try:
                await self._cluster.within(wait_s, self._hear())
            except TimeoutError:
                break
        self._next_s = max(self._next_s, self._cluster.now_s()) + letters / self._rate

    async def _listen(self, unanswered: int) -> None:
        until_s = self._cluster.now_s() + self._limit_s
        while (before := self._account.unanswered) > unanswered:
            left_s = until_s - self._cluster.now_s()
            with suppress(TimeoutError):
                await self._cluster.within(max(left_s, 0.001), self._hear())
            if self._account.unanswered < before:
                until_s = self._cluster.now_s() + self._limit_s
            elif self._cluster.now_s() >= until_s:
                raise BrokerUnavailable(
                    f"{before} dead letters were asked for, and no worker has answered within {self._limit_s:g} s: is"
                    " one running (faust -A app worker)? What was asked for will be done when one is; the same call"
                    " again leaves it out, or does it once"
                )

    async def _hear(self) -> None:
        for record in await self._notes.read():
            if is_note(record.headers):
                self._account.answer(record.partition, record.value, self._holder)
