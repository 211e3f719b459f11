"""The owner of one markers partition as a pure state machine: it reads records, requests TICKs, and fires due messages.

The engine (marq/owner/engine.py) drives it, and the shell (marq_worker/owner/ownership.py) performs the effects. An
owner

1. takes over the partition's transactional producer, which fences the former owner,
2. reads the table's changelog to its end. Before step 1, the former owner could still append rows, and a row whose ACK
   is folded together with its ACQUIRE would never be deleted,
3. writes a TICK and reads the markers from ``book.applied`` + 1 on,
4. after it has read its own TICK back, answers the RESCHEDULEs, CANCELs and RESUMEs that it has read. Before that, a
   fact of the former owner may follow and end the message,
5. and fires the messages that are due by the clock of that TICK. By then it has folded all earlier markers, so it
   overlooks no ACK or RENEW that reached the log in time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from marq.core.lease_book import LeaseBook
from marq.core.redeliver_or_dead_letter import DueAction
from marq.core.storage.handling_times import SAMPLES, HandlingTimes, samples, waits
from marq.core.storage.rows import LeaseRow
from marq.settings.queue import QueueSettings
from marq.wire.dead_letter_notes import Note
from marq.wire.errors import CorruptMarker, UnknownVersion
from marq.wire.marker_codec import decode
from marq.wire.markers import (
    ANY_QUEUE,
    Ack,
    Acquire,
    Answer,
    Fact,
    Kind,
    MixedAcquire,
    Resumed,
    Source,
    Tick,
    offset_runs,
)
from marq.wire.quarantines import Quarantine

#: The least time between two TICKs of a partition.
TICK_INTERVAL_MS = 50
#: If a source has more queues than this, only one message of an ACK without a queue is sampled.
MANY_QUEUES = 100
#: Markers in one fact batch.
MAX_FACT_MARKERS = 1_000


@dataclass(slots=True)
class Tracker:
    """The owner of a markers partition for one assignment; ``holder`` is its random id."""

    settings: Callable[[str], QueueSettings]
    holder: int
    tick_interval_ms: int = TICK_INTERVAL_MS
    book: LeaseBook = field(init=False)
    #: Returns the operator's request to skip a record of a newer version, by its offset and content.
    ordered: Callable[[int, bytes], Quarantine | None] = lambda _offset, _value: None
    #: Records that could not be decoded and are not in quarantine yet: (offset, value, error).
    unreadable: list[tuple[int, bytes | None, str]] = field(default_factory=list)
    #: The last jump of the broker's clock, in ms.
    jump_ms: int = 0
    #: Times from ACQUIRE to ACK; several trackers may share them.
    handling: HandlingTimes = field(default_factory=HandlingTimes)
    #: Times until ACQUIRE, likewise.
    waiting: HandlingTimes = field(default_factory=HandlingTimes)
    _sampled_ms: int = -1
    _waits_sampled_ms: int = -1
    _tick_clock_ms: int | None = None
    _tick_sent_at_ms: int | None = None
    _awaiting_tick: bool = False
    _seen_clock_ms: int = 0
    _seen_at_ms: int = 0

    def __post_init__(self) -> None:
        self.book = LeaseBook(self.settings)

    def read(self, value: bytes | None, append_time_ms: int, offset: int) -> None:
        """Fold one record of the markers topic; skip one at or below ``book.applied``, which was folded before.

        Raises UnknownVersion, without folding anything, if the partition must stop here until a newer owner takes it
        over, or an operator orders the record into quarantine.
        """
        if offset <= self.book.applied:
            return
        try:
            batch = decode(value)
        except UnknownVersion as error:
            # Only for unreadable records: a request must never remove a valid marker.
            order = self.ordered(offset, value or b"")
            if order is None:
                raise
            self._pass_over(value, append_time_ms, offset, f"{error}; {order}")
            return
        except CorruptMarker as error:
            self._pass_over(value, append_time_ms, offset, str(error))
            return
        ended: list[tuple[LeaseRow, int]] = []
        # One ACK per ms: sampling many small ones would cost more than folding them.
        if isinstance(batch, Ack) and append_time_ms != self._sampled_ms:
            self._sampled_ms = append_time_ms
            # Each sample of an ACK without a queue is looked up in all queues.
            many = batch.queue == ANY_QUEUE and self.book.queues_in(batch.source) > MANY_QUEUES
            ended += samples(batch, self.book.open_in(batch.queue, batch.source), 1 if many else SAMPLES)
        jump_ms = self.book.fold(batch, append_time_ms, offset)
        for lease, messages in ended:
            self.handling.note(lease.queue, self.book.clock.now_ms - lease.since_ms, messages)
        if isinstance(batch, Acquire | MixedAcquire) and append_time_ms != self._waits_sampled_ms:
            self._waits_sampled_ms = append_time_ms
            for queue, waited_ms, messages in waits(batch, self.book.clock.now_ms):
                self.waiting.note(queue, waited_ms, messages)
        if isinstance(batch, Tick) and batch.holder == self.holder:
            self.jump_ms = jump_ms or self.jump_ms
            if batch.monotonic_ms != self._tick_sent_at_ms:
                # Written before take_over_again: facts of a transaction with an unknown outcome may follow it.
                return
            self._awaiting_tick = False
            if self._tick_clock_ms is None:
                self.book.forget_firing()
            self._tick_clock_ms = self.book.clock.now_ms

    def _pass_over(self, value: bytes | None, append_time_ms: int, offset: int, why: str) -> None:
        self.unreadable.append((offset, value, why))
        self.book.skip(append_time_ms, offset)

    def saw(self, monotonic_ms: int) -> None:
        """Note when the last records were read; the estimated clock advances from there."""
        now_ms = self.book.clock.now_ms
        if now_ms > self.estimate_ms(monotonic_ms) or now_ms < self._seen_clock_ms:
            self._seen_clock_ms, self._seen_at_ms = now_ms, monotonic_ms

    def estimate_ms(self, monotonic_ms: int) -> int:
        """Return an estimate of the log's clock, only for deciding when to write a TICK, never for firing."""
        return self._seen_clock_ms + monotonic_ms - self._seen_at_ms

    def tick_in_ms(self, monotonic_ms: int) -> int | None:
        """Return the ms until the next TICK must be written; None while one is pending or nothing will be due."""
        if self._awaiting_tick:
            return None
        if self._tick_sent_at_ms is None:
            return 0
        due_ms = self.book.next_due_ms
        if due_ms is None:
            return None
        pause_ms = self._tick_sent_at_ms + self.tick_interval_ms - monotonic_ms
        return max(0, due_ms - self.estimate_ms(monotonic_ms), pause_ms)

    def awaited_ms(self, monotonic_ms: int) -> int:
        """Return for how many ms the owner has waited for its own TICK, or 0."""
        if not self._awaiting_tick or self._tick_sent_at_ms is None:
            return 0
        return monotonic_ms - self._tick_sent_at_ms

    def tick(self, monotonic_ms: int) -> Tick:
        """Return the TICK to write now."""
        self._awaiting_tick, self.book.resumed = True, False
        self._tick_sent_at_ms = monotonic_ms
        return Tick(self.holder, monotonic_ms)

    def take_over_again(self) -> None:
        """Wait for a new TICK after a failed transaction and a new fencing: the transaction's outcome is unknown."""
        self._awaiting_tick = False
        self._tick_sent_at_ms = None
        self._tick_clock_ms = None

    def due(self) -> list[DueAction]:
        """Return the actions for messages that are due by the clock of the last own TICK."""
        if self._tick_clock_ms is None or self._awaiting_tick:
            return []
        self.book.look_for_resumed()
        if self.book.resumed:
            return []
        return self.book.due(self._tick_clock_ms)

    @property
    def caught_up(self) -> bool:
        """Whether this owner has read everything that was written before its last takeover."""
        return self._tick_clock_ms is not None

    def answers(self) -> list[Answer | Resumed]:
        """Return the answers to write before anything is fired, each once."""
        return [] if self._tick_clock_ms is None else self.book.take_answers()

    def notes(self) -> list[Note]:
        """Return notes about dead letters, each once; write them in one transaction with the rows."""
        return self.book.settled_dead_letters.take_notes()

    def facts(self, fires: list[DueAction]) -> list[Fact]:
        """Return the facts of these redeliveries; write both in one transaction."""
        groups: dict[tuple[Kind, str, Source], list[DueAction]] = {}
        for fire in fires:
            groups.setdefault((fire.fact_kind, fire.lease.queue, fire.source), []).append(fire)
        facts: list[Fact] = []
        for (kind, queue, source), group in groups.items():
            rows = sorted([(fire.offset, fire.attempt, fire.cause) for fire in group])
            for run in offset_runs([offset for offset, _, _ in rows], MAX_FACT_MARKERS):
                offsets, attempts, causes = zip(*rows[run], strict=True)
                facts.append(Fact(kind, queue, self.holder, source, offsets, attempts, causes))
        return facts
