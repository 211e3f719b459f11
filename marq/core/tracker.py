"""What the owner of one markers partition does, as a pure state machine: it reads records, asks for TICKs, fires.

The shell (agents/tracker.py) and the simulator drive the same object. The order of a shell's life is

1. take over the partition's transactional producer, which fences a former owner,
2. read the table's changelog to its end (before 1, rows of the former owner could come after what was read, and a row
   whose ACK is folded together with its ACQUIRE would then never be deleted),
3. write a TICK and read the markers from ``book.applied`` + 1 on,
4. after its own TICK has been read back: write the answers to RESCHEDULEs and CANCELs that were read (before, a fact of
   the former owner may follow: the message that was moved has left then),
5. and fire what is due by the clock of that TICK. All markers before it have been folded by then, so an ACK or RENEW
   that was in the log in time is never overlooked, however late it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from marq.core.errors import CorruptMarker, UnknownVersion
from marq.core.fires import Fire
from marq.core.handling_times import HandlingTimes, samples
from marq.core.leases import LeaseBook
from marq.core.marker_codec import decode
from marq.core.markers import Ack, Answer, Fact, Kind, Source, Tick
from marq.core.notes import Note
from marq.core.quarantines import Quarantine
from marq.core.queue import QueueSettings
from marq.core.rows import Lease

#: The least time between two TICKs of a partition.
TICK_INTERVAL_MS = 50
#: Markers in one fact batch.
MAX_FACT_MARKERS = 1_000


@dataclass(slots=True)
class Tracker:
    """The owner of a markers partition for one assignment; ``holder`` is its random id."""

    settings: Callable[[str], QueueSettings]
    holder: int
    tick_interval_ms: int = TICK_INTERVAL_MS
    book: LeaseBook = field(init=False)
    #: Returns the operator's order to pass over a record of a newer version, by its offset and content.
    ordered: Callable[[int, bytes], Quarantine | None] = lambda _offset, _value: None
    #: Records that could not be decoded since the shell last looked: (offset, value, why).
    unreadable: list[tuple[int, bytes | None, str]] = field(default_factory=list)
    #: By how many ms the broker's clock was last found to have jumped.
    jump_ms: int = 0
    #: Of the messages whose ACKs were read; of several trackers, if they share it.
    handling: HandlingTimes = field(default_factory=HandlingTimes)
    _sampled_ms: int = -1
    _tick_clock_ms: int | None = None
    _tick_sent_at_ms: int | None = None
    _awaiting_tick: bool = False
    _seen_clock_ms: int = 0
    _seen_at_ms: int = 0

    def __post_init__(self) -> None:
        self.book = LeaseBook(self.settings)

    def read(self, value: bytes | None, append_time_ms: int, offset: int) -> None:
        """Fold one record of the markers topic; one at or below ``book.applied`` has been folded before.

        Raises:
            UnknownVersion: the partition must stop here until a newer owner has it, or an operator orders the record
                into quarantine; nothing was folded.
        """
        if offset <= self.book.applied:
            return
        try:
            batch = decode(value)
        except UnknownVersion as error:
            # Asked only for what can't be read: an order must never remove a marker that counts.
            order = self.ordered(offset, value or b"")
            if order is None:
                raise
            self._pass_over(value, append_time_ms, offset, f"{error}; {order}")
            return
        except CorruptMarker as error:
            self._pass_over(value, append_time_ms, offset, str(error))
            return
        ended: list[tuple[Lease, int]] = []
        # One ACK of each ms: many small ones come together, and would cost more than their folding.
        if isinstance(batch, Ack) and append_time_ms != self._sampled_ms:
            self._sampled_ms = append_time_ms
            ended += samples(batch, self.book.open_in(batch.source))
        jump_ms = self.book.fold(batch, append_time_ms, offset)
        for lease, messages in ended:
            self.handling.note(lease.queue, self.book.clock.now_ms - lease.since_ms, messages)
        if isinstance(batch, Tick) and batch.holder == self.holder:
            self.jump_ms = jump_ms or self.jump_ms
            if batch.monotonic_ms != self._tick_sent_at_ms:
                # Written before take_over_again: facts of a transaction whose outcome was unknown may follow it.
                return
            self._awaiting_tick = False
            if self._tick_clock_ms is None:
                self.book.forget_firing()
            self._tick_clock_ms = self.book.clock.now_ms

    def _pass_over(self, value: bytes | None, append_time_ms: int, offset: int, why: str) -> None:
        self.unreadable.append((offset, value, why))
        self.book.skip(append_time_ms, offset)

    def saw(self, monotonic_ms: int) -> None:
        """Note when the last records were read: the clock goes on from there at the owner's own pace."""
        now_ms = self.book.clock.now_ms
        if now_ms > self.estimate_ms(monotonic_ms) or now_ms < self._seen_clock_ms:
            self._seen_clock_ms, self._seen_at_ms = now_ms, monotonic_ms

    def estimate_ms(self, monotonic_ms: int) -> int:
        """What the log's clock may be by now: only for deciding when to write a TICK, never for firing."""
        return self._seen_clock_ms + monotonic_ms - self._seen_at_ms

    def tick_in_ms(self, monotonic_ms: int) -> int | None:
        """In how many ms a TICK is to be written: 0 for now, None while one is on its way or nothing will be due."""
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
        """For how many ms the owner's own TICK has been on its way; 0 when none is."""
        if not self._awaiting_tick or self._tick_sent_at_ms is None:
            return 0
        return monotonic_ms - self._tick_sent_at_ms

    def tick(self, monotonic_ms: int) -> Tick:
        """Return the TICK to write now."""
        self._awaiting_tick = True
        self._tick_sent_at_ms = monotonic_ms
        return Tick(self.holder, monotonic_ms)

    def take_over_again(self) -> None:
        """After a failed transaction and a new fencing: what was on its way is unknown until a new TICK is read."""
        self._awaiting_tick = False
        self._tick_sent_at_ms = None
        self._tick_clock_ms = None

    def due(self) -> list[Fire]:
        """Return what to send now: due by the clock of the last own TICK that was read back."""
        if self._tick_clock_ms is None or self._awaiting_tick:
            return []
        return self.book.due(self._tick_clock_ms)

    @property
    def caught_up(self) -> bool:
        """Whether all is known that was written before this owner began, or began again."""
        return self._tick_clock_ms is not None

    def answers(self) -> list[Answer]:
        """Return what to write before anything is fired; given once."""
        return [] if self._tick_clock_ms is None else self.book.take_answers()

    def notes(self) -> list[Note]:
        """Return what became of dead letters, to be written in one transaction with the rows; given once."""
        return self.book.settlements.take_notes()

    def facts(self, fires: list[Fire]) -> list[Fact]:
        """Return the markers that tell of these copies, to be written in one transaction with them."""
        groups: dict[tuple[Kind, str, Source], list[Fire]] = {}
        for fire in fires:
            groups.setdefault((fire.fact_kind, fire.lease.queue, fire.source), []).append(fire)
        return [
            _fact(kind, queue, self.holder, source, group[start : start + MAX_FACT_MARKERS])
            for (kind, queue, source), members in groups.items()
            for group in [sorted(members, key=lambda fire: fire.offset)]
            for start in range(0, len(group), MAX_FACT_MARKERS)
        ]


def _fact(kind: Kind, queue: str, holder: int, source: Source, fires: list[Fire]) -> Fact:
    return Fact(
        kind,
        queue,
        holder,
        source,
        [fire.offset for fire in fires],
        [fire.attempt for fire in fires],
        [fire.cause for fire in fires],
    )
