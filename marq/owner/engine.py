"""The owner of one markers partition, as a pure state machine.

A shell performs its effects on Kafka (marq_worker/owner/ownership.py), in memory (marq/testing/owner.py), or with
simulated faults (tests/simulation/tracker.py), and reports the outcomes.

1. **Take over** (:meth:`OwnerEngine.take_over`): fence the former owner, recover the table, seek to the position.
2. **Read** markers (:meth:`OwnerEngine.read`) from there on, without a gap.
3. **Write** (:meth:`OwnerEngine.next_write`): answers, messages of schedules, redeliveries, a TICK; and about once a
   second the changed rows (:meth:`OwnerEngine.rows`). Each :class:`OwnerTransaction` is one transaction, one at a time.
4. Report each transaction as **committed** or **refused for its size**. After any other outcome take over again: until
   the owner reads its own TICK, only the log knows whether the redeliveries were sent.

Unconfirmed ``pending`` rows, ``answers`` and ``notes`` stay here and are written again. A row is a value, not a change,
so writing it twice does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Any, Protocol

from marq.core.deliveries.schedule_planner import Planner
from marq.core.lease_book import LeaseBook
from marq.core.redeliver_or_dead_letter import Destination, DueAction, dead_letter, fitting, unexpired
from marq.core.storage import rows
from marq.core.storage.table_image import Place
from marq.core.tracker import Tracker
from marq.settings.topic_configs import room_for_markers
from marq.wire import record_headers
from marq.wire.dead_letter_notes import Note
from marq.wire.error_texts import error_of, traceback_of
from marq.wire.errors import UnknownVersion
from marq.wire.large_messages import gone, left_out, size_bytes, without_value
from marq.wire.markers import Answer, Batch, Cause, Payload, Record, Resumed, Source, Tick

#: Limits for the redeliveries of one transaction, whose fixed cost is large on a busy machine.
MAX_COPIES = 2_000
MAX_COPIES_BYTES = 4 << 20
#: Approximate number of messages whose payloads are copied from their records at a time.
MAX_LEFT = 2_000
#: Bytes of a row besides its payload at most: names, an error and a traceback.
LEASE_BYTES = 8_192
#: Time after which an owner that has not read its own TICK reads again.
TICK_READ_MS = 5_000
_ADVICE = "Processing of this partition stays stopped: see docs/operations/recovery.md, 'Recreate topics'"
#: How many payloads are looked up together: at first (all of them may be large), and at most.
FIRST_LOOKED_UP, LOOKED_UP = 4, 250
#: Limits for folded but unwritten rows and marker bytes, shared evenly by the owners of a process. A pending row and
#: its marker take up to a kilobyte, and twice that while they are being written.
MAX_PENDING_ROWS = 50_000
MAX_PENDING_BYTES = 64 << 20
#: Maximum divisor of the limits, so that an owner soon becomes as fast as before an outage.
MAX_DIVISOR = 256
#: Number of transactions in a row that must end in time before the limits are doubled.
COMMITS_TO_DOUBLE = 10

#: A due message and its payload.
Due = tuple[DueAction, Payload]
#: A record that could not be decoded: its offset, value and error.
Unreadable = tuple[int, bytes | None, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerTransaction:
    """The content of an owner's transaction: all of it becomes visible together, or nothing does.

    Without its fact, the next owner would send a redelivery again. Without its redelivery, a fact would end a message
    for good. A row without the markers that it was folded from would outlive its message.
    """

    #: The log's clock, and the timestamp of the records.
    now_ms: int
    appended_ms: int
    #: Records for the markers partition, in this order; the first ``answers`` of them are answers.
    markers: Sequence[Batch]
    answers: int = 0
    #: Messages to send to their destinations; ``markers`` has their facts.
    due: Sequence[Due] = ()
    #: Whether ``markers`` has messages of schedules.
    planned: bool = False
    #: The TICK among ``markers``: abort its transaction if it takes too long (see marq.core.storage.log_clock).
    tick: Tick | None = None
    #: Rows for the changelog and then the table (None: delete), which hold the fold up to ``applied``.
    rows: Mapping[bytes, bytes | None] | None = None
    applied: int = -1
    #: Records for the dead-letter topic and the quarantine topic; only with rows.
    notes: Sequence[Note] = ()
    quarantine: Sequence[Unreadable] = ()


class PendingLimits:
    """How much an owner folds before it writes rows; ``sharers`` returns the number of owners in the process.

    All pending rows are written in one transaction, whose time is limited. On a slow broker, a full transaction would
    be aborted, folded and written again, endlessly. So a transaction that takes too long halves the limits. They are
    doubled only after several transactions in time, because a failed attempt costs the time limit and a recovery of the
    table.
    """

    def __init__(self, sharers: Callable[[], int]) -> None:
        self._sharers = sharers
        self._divisor = 1
        self._commits = 0

    def timed_out(self) -> None:
        self._divisor, self._commits = min(2 * self._divisor, MAX_DIVISOR), 0

    def committed(self) -> None:
        self._commits += 1
        if self._commits == COMMITS_TO_DOUBLE:
            self._divisor, self._commits = max(1, self._divisor // 2), 0

    def are_reached(self, book: LeaseBook, pending_bytes: int) -> bool:
        """Return whether rows must be written before more markers are folded."""
        shares = max(1, self._sharers()) * self._divisor
        return pending_bytes > MAX_PENDING_BYTES // shares or book.has_more_rows(MAX_PENDING_ROWS // shares)


class Table(Protocol):
    """The rows of one markers partition on the owner's disk."""

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the rows of these keys, None for each missing row."""

    def write(self, changes: Mapping[bytes, bytes | None], position: int) -> None:
        """Write rows that the changelog has up to ``position``; after an exception they are written again."""


def find_payloads(
    book: LeaseBook, pending: Mapping[bytes, bytes | None], table: Table, messages: Sequence[Place]
) -> list[Payload | None]:
    """Return the payloads of messages, None for each that is not open; the table is asked once for all of them."""
    payloads = [book.fresh_payload(*message) for message in messages]
    stored: dict[int, bytes] = {}
    for index, payload in enumerate(payloads):
        if payload is None:
            key = rows.row_key(*messages[index])
            if row := pending.get(key):
                payloads[index] = rows.decode_payload(row)
            else:
                stored[index] = key
    if stored:
        for index, encoded in zip(stored, table.get(list(stored.values())), strict=True):
            payloads[index] = None if encoded is None else rows.decode_payload(encoded)
    return payloads


def find_payloads_in_turn(
    book: LeaseBook, pending: Mapping[bytes, bytes | None], table: Table, messages: Sequence[Place]
) -> Iterator[Payload | None]:
    """Yield the payloads of messages, each None if it is not open.

    Look up few of them at first, then twice as many each time: a caller that stops because they are large leaves few
    that were looked up in vain.
    """
    start, count = 0, FIRST_LOOKED_UP
    while start < len(messages):
        yield from find_payloads(book, pending, table, messages[start : start + count])
        start, count = start + count, min(2 * count, LOOKED_UP)


class PositionLost(Exception):
    """The markers topic or the changelog no longer has records that the owner needs."""


class Step(Enum):
    """A step of a takeover, for a shell to carry out."""

    #: Take over the partition's transactional producer, and pass its epoch to :meth:`OwnerEngine.fenced`.
    FENCE = 1
    #: Read the changelog to its end into the table, and pass the rows to :meth:`OwnerEngine.restoring`.
    RECOVER = 2
    #: Pass the bounds of the markers to :meth:`OwnerEngine.begin`, and read from the position that it returns.
    SEEK = 3


class OwnerEngine:
    """The owner of one markers partition, from its assignment until its revocation.

    ``acknowledge`` is called with the last offset that no owner needs to read again. ``sharers`` returns the number of
    owners that share the limits of the process.
    """

    def __init__(
        self,
        source: Source,
        new_tracker: Callable[[], Tracker],
        planner: Planner,
        table: Table,
        acknowledge: Callable[[int], None],
        limit_bytes: int,
        *,
        flush_ms: int = 1_000,
        sharers: Callable[[], int] = lambda: 1,
    ) -> None:
        self.planner = planner
        self.tracker = new_tracker()
        #: The next offset to read; None until the table is recovered.
        self.position: int | None = None
        #: Offset and content of the record of a newer version before which the owner has stopped.
        self.stopped_before: tuple[int, bytes] | None = None
        #: Numbers of records folded, and of those skipped because they were folded before.
        self.folded = self.skipped = 0
        #: Unconfirmed rows; None deletes a row.
        self.pending: dict[bytes, bytes | None] = {}
        #: Unconfirmed answers to RESCHEDULEs, CANCELs and RESUMEs.
        self.answers: list[Answer | Resumed] = []
        #: Unconfirmed notes about dead letters.
        self.notes: list[Note] = []
        #: True while the shell delivers records from the position on.
        self._delivered = False
        self._source = source
        self._new_tracker = new_tracker
        self._table = table
        self._acknowledge = acknowledge
        self._limit_bytes = limit_bytes
        self._flush_ms = flush_ms
        self._limits = PendingLimits(sharers)
        #: Id and epoch of the current producer.
        self._epoch: tuple[int, int] | None = None
        #: Messages that are due by the last own TICK and not yet in a transaction.
        self._due: list[DueAction] = []
        #: Messages of a transaction that was refused for its size, last one first; each gets its own transaction.
        self._apart: list[Due] = []
        #: Due messages whose payloads are only in their records, by queue and source.
        self._missing: dict[tuple[str, Source], dict[int, None]] = {}
        #: True while a transaction with redeliveries has an unknown outcome.
        self._sending = False
        #: The last marker of the last plan; the next plan waits until it is read.
        self._planned_to = -1
        #: Bytes of markers folded since the last rows were written, and whether any are unacknowledged.
        self._pending_bytes = 0
        self._unacknowledged = False
        self._flushed_ms = self._sought_ms = 0

    # --- take over ----------------------------------------------------------------------------------------------------

    def take_over(self) -> Iterator[Step]:
        """Yield the steps of a takeover; perform each before asking for the next."""
        # From here on a former owner can write nothing, and its open transaction is aborted.
        yield Step.FENCE
        if self.position is None:
            # After the fencing: rows that the former owner commits later would be missed. A row whose ACK is folded
            # together with its ACQUIRE would then never be deleted.
            yield Step.RECOVER
        if not self._delivered:
            yield Step.SEEK

    def fenced(self, epoch: tuple[int, int], now_ms: int) -> bool:
        """Note the id and epoch of the producer; return False if another owner was active in between."""
        self._flushed_ms = now_ms
        former, self._epoch = self._epoch, epoch
        if former is not None and epoch != (former[0], former[1] + 1):
            # The table has changed: the pending rows would undo that.
            self.forget()
            return False
        # A transaction of unknown outcome may be in the log, with its redeliveries. So fire nothing before a new TICK
        # is read back, and with it everything written before.
        self.tracker.take_over_again()
        self._due, self._apart, self._sending = [], [], False
        return True

    def renewed(self, epoch: tuple[int, int]) -> bool:
        """Note a new producer after an aborted transaction; return False if another owner was active in between."""
        former, self._epoch = self._epoch, epoch
        return former is not None and epoch == (former[0], former[1] + 1)

    def forget(self) -> None:
        """Start again from the table; unwritten markers will be read again."""
        self.tracker = self._new_tracker()
        self.position, self._delivered = None, False
        self.pending, self.answers, self.notes = {}, [], []
        self._due, self._apart, self._sending = [], [], False
        self._missing = {}
        self._pending_bytes, self._unacknowledged = 0, False

    def let_go(self) -> None:
        """Note that the shell stopped delivering records, so that the next takeover seeks to the position."""
        self._delivered = False

    def restoring(self, table: Iterable[tuple[bytes, bytes]]) -> Iterator[None]:
        """Restore the rows of the table, yielding after every few thousand so that other tasks can run."""
        # An interrupted restore has left some rows.
        self.tracker = self._new_tracker()
        yield from self.tracker.book.restoring(table)

    def begin(self, start: int, end: int, now_ms: int) -> int:
        """Return the offset to read from in a log from ``start`` to ``end``; same errors as :meth:`check_log`."""
        if self.position is None:
            self.position = self.tracker.book.applied + 1
        self.stopped_before, self._flushed_ms = None, now_ms
        self.check_log(start, end)
        self._delivered = True
        return self.position

    def check_log(self, start: int, end: int) -> None:
        """Check that the log still has the next record to read.

        Raises PositionLost if it does not: an owner that continued could not know what it missed.
        """
        position, log = self.position or 0, f"{self._source.topic}/{self._source.partition}"
        task = f"the tracker has to read {log} from offset {position}"
        if start > position:
            raise PositionLost(
                f"{task}, but its retention has removed everything before {start}: those markers are lost, and their "
                f"messages may be delivered again or not at all. {_ADVICE}"
            )
        if end < position:
            raise PositionLost(
                f"{task}, but it ends at {end}: the topic was recreated, or lost records. The table belongs to the "
                f"former topic. {_ADVICE}"
            )

    # --- read ---------------------------------------------------------------------------------------------------------

    def read(self, records: Iterable[Record], start: int, end: int) -> bool:
        """Fold all records from ``start`` to before ``end``.

        Return False, and fold nothing, if records before ``start`` were skipped: check the log, and read again from the
        position.

        Raises UnknownVersion if the partition must stop before the record in ``stopped_before``.
        """
        position, tracker = self.position, self.tracker
        assert position is not None, "markers are read after the table"
        if start > position:
            return False
        book = tracker.book
        for record in records:
            offset = record.offset
            if offset <= book.applied:
                self.skipped += 1
                continue
            value = record.value
            try:
                tracker.read(value, record.timestamp, offset)
            except UnknownVersion:
                self.stopped_before = offset, value or b""
                self.let_go()
                raise
            self.folded += 1
            self._pending_bytes += len(value or b"")
        self.position = max(position, end)
        book.passed(self.position)
        self._unacknowledged = True
        return True

    def has_to_read_again(self, now_ms: int) -> bool:
        """Return whether to seek to the position again: its own TICK is missing, so records may have been lost."""
        if min(self.tracker.awaited_ms(now_ms), now_ms - self._sought_ms) < TICK_READ_MS:
            return False
        self._sought_ms = now_ms
        return True

    # --- write --------------------------------------------------------------------------------------------------------

    def next_write(self, now_ms: int) -> OwnerTransaction | None:
        """Return the next transaction without rows, or None.

        ``now_ms`` is the shell's monotonic clock, read for this call: a TICK carries it.
        """
        tracker = self.tracker
        self.answers += tracker.answers()
        if self.answers:
            # First: a message that was moved to now must not be sent before its client can know about the move.
            return self._write()
        plan = self._plan(now_ms)
        if plan:
            # Before redeliveries: messages of removed schedules are withdrawn in time.
            return self._write(markers=plan, planned=True)
        if due := self._next_due():
            self._sending = True
            fires = [fire for fire, _ in due]
            following = self.planner.follow(tracker, fires, now_ms, self.payload)
            return self._write(due=due, markers=[*tracker.facts(fires), *following], planned=bool(following))
        if tracker.tick_in_ms(now_ms) == 0:
            tick = tracker.tick(now_ms)
            return self._write(markers=[tick], tick=tick)
        return None

    def rows(self) -> OwnerTransaction:
        """Return the transaction with the changed rows."""
        tracker = self.tracker
        # The rows of a failed transaction stay pending, under newer ones: the book returns changes only once.
        self.pending.update(tracker.book.take_changes())
        self.notes += tracker.notes()
        return self._write(
            rows=self.pending, applied=tracker.book.applied, notes=list(self.notes), quarantine=list(tracker.unreadable)
        )

    def committed(self, write: OwnerTransaction, now_ms: int, marked: int = -1, position: int = -1) -> None:
        """Note that a transaction is committed.

        ``marked`` and ``position`` are the last offsets of its records in the markers partition and the changelog.
        """
        self._sending = False
        del self.answers[: write.answers]
        if write.planned:
            self._planned_to = marked
        if write.rows is None:
            return
        self.notes = []
        # Only now: a table ahead of its changelog would never bring the changelog up to date.
        self._table.write(write.rows, position)
        self.pending = {}
        self._limits.committed()
        self._pending_bytes, self._unacknowledged, self._flushed_ms = 0, False, now_ms
        del self.tracker.unreadable[: len(write.quarantine)]
        # Only now: the next owner must read markers that are not in the changelog.
        self._acknowledge(write.applied)

    def timed_out(self, write: OwnerTransaction) -> None:
        """Note that a transaction was not committed in time; the next ones with rows are smaller."""
        if write.rows is not None:
            self._limits.timed_out()

    def refused_for_size(self, write: OwnerTransaction) -> bool:
        """Note that the broker refused a record for its size; return False if a retry can't help.

        The error does not name the record, so each redelivery gets a transaction of its own. A message that is refused
        again becomes a dead letter, and a dead letter that is refused loses its value, because endless retries would
        block all others.
        """
        self._sending = False
        if len(write.due) > 1:
            self._apart += reversed(write.due)
            return True
        if not write.due:
            return self._cut_unreadable()
        fire, payload = write.due[0]
        if traceback_of(fire.lease.text):
            # The first thing to leave out: the message and its error matter more.
            lease = replace(fire.lease, text=error_of(fire.lease.text))
            self._apart.append((replace(fire, lease=lease), payload))
            return True
        if fire.cause is Cause.TOO_LARGE:
            if left_out(payload):
                return False
            place = record_headers.record_id(fire.source.log, fire.offset)
            payload = without_value(payload, place, "the dead-letter topic accepts less")
        self._apart.append((dead_letter(fire, Cause.TOO_LARGE), payload))
        return True

    def _cut_unreadable(self) -> bool:
        """Keep only the beginnings of unreadable records that are too large; return whether there are any."""
        limit, unreadable = self._limit_bytes, self.tracker.unreadable
        found = False
        for index, (offset, value, why) in enumerate(unreadable):
            if value is not None and len(value) > limit:
                unreadable[index] = offset, value[:limit], f"{why}; these are the first {limit} of {len(value)} bytes"
                found = True
        return found

    @property
    def unsent(self) -> bool:
        """Whether redeliveries are decided and unconfirmed, so that no marker may be read.

        A marker could end one of these messages, and its redelivery would be sent anyway.
        """
        return self._sending or bool(self._due or self._apart)

    # --- copy ---------------------------------------------------------------------------------------------------------

    def missing(self) -> dict[Place, Payload]:
        """Return due messages whose payloads must be copied from their records now, some of each source.

        :meth:`supply` takes the payloads by the same places.
        """
        share = -(-MAX_LEFT // max(1, len(self._missing)))
        places = [
            Place(queue, source, offset)
            for (queue, source), offsets in self._missing.items()
            for offset in islice(offsets, share)
        ]
        left = self.left_among(places)
        for place in places:
            if place not in left:
                self._supplied(place)
        return left

    def outliving(self, now_ms: int) -> dict[Place, Payload]:
        """Return messages whose leases have outlived a flush, and whose payloads are only in their records.

        ``now_ms`` is the shell's monotonic clock.
        """
        # Without markers, the log's own clock does not advance.
        before_ms = self.tracker.estimate_ms(now_ms) - self._flush_ms
        return self.left_among(self.tracker.book.left(MAX_LEFT, before_ms))

    def left_among(self, places: Sequence[Place]) -> dict[Place, Payload]:
        """Return those of the messages that are open, and whose payloads are only in their records."""
        book = self.tracker.book
        still_open = [place for place in places if place.offset in book.open_in(place.queue, place.source)]
        payloads = find_payloads(book, self.pending, self._table, still_open)
        return {place: payload for place, payload in zip(still_open, payloads, strict=True) if payload and payload.left}

    def supply(self, copied: Mapping[Place, Payload | None]) -> list[Place]:
        """Take payloads that were copied from their records; None for a record that was removed.

        Return the messages that can't be delivered again, because their records were removed.
        """
        removed: list[Place] = []
        for place, left in self.left_among([*copied]).items():
            payload, name = copied[place], record_headers.record_id(place.source.log, place.offset)
            if payload is None:
                payload = gone(name, left.timestamp_ms)
                removed.append(place)
            elif size_bytes(payload) > room_for_markers(self._limit_bytes) - LEASE_BYTES:
                payload = without_value(payload, name, "the worker's table accepts less")
            self.tracker.book.supply(place, payload)
            self._pending_bytes += size_bytes(payload)
        for place in copied:
            self._supplied(place)
        return removed

    def _supplied(self, place: Place) -> None:
        of_source = self._missing.get((place.queue, place.source), {})
        if place.offset in of_source:
            del of_source[place.offset]
            if not of_source:
                del self._missing[place.queue, place.source]
            self.tracker.book.remind(place)

    # --- when ---------------------------------------------------------------------------------------------------------

    def wait_ms(self, now_ms: int) -> int | None:
        """Return the time until something must be done without a new marker, None for never."""
        if self.unsent or self._has_to_plan():
            return 0
        tracker = self.tracker
        waits = [self.flush_in_ms(now_ms), tracker.tick_in_ms(now_ms)]
        if tracker.awaited_ms(now_ms):
            waits.append(TICK_READ_MS)
        return min([wait for wait in waits if wait is not None], default=None)

    def flush_in_ms(self, now_ms: int) -> int | None:
        """Return the time until the rows must be written, None without rows."""
        if not self.owes_rows:
            return None
        # A client waits for its note.
        if self.is_full or self.tracker.book.settled_dead_letters.has_notes:
            return 0
        return max(0, self._flushed_ms + self._flush_ms - now_ms)

    @property
    def owes_rows(self) -> bool:
        """Whether the effects of some markers are not known to be written."""
        return self._unacknowledged or self.tracker.book.changed or bool(self.pending)

    @property
    def is_full(self) -> bool:
        """Whether rows must be written before more markers are read."""
        return self._limits.are_reached(self.tracker.book, self._pending_bytes)

    # --- what to write ------------------------------------------------------------------------------------------------

    def payload(self, queue: str, source: Source, offset: int) -> Payload | None:
        """Return the payload of an open message, else None."""
        return find_payloads(self.tracker.book, self.pending, self._table, [Place(queue, source, offset)])[0]

    def _next_due(self) -> list[Due]:
        """Return due messages for one transaction."""
        if self._apart:
            return [self._apart.pop()]
        while True:
            self._due = self._due or self.tracker.due()
            due = self._with_payloads()
            # Otherwise markers would be read while decided messages wait.
            if due or not self._due:
                return due

    def _with_payloads(self) -> list[Due]:
        """Take the next due messages; put those back whose payloads are missing."""
        fires = self._due[:MAX_COPIES]
        places = [Place(fire.lease.queue, fire.source, fire.offset) for fire in fires]
        payloads = find_payloads_in_turn(self.tracker.book, self.pending, self._table, places)
        due, room, decided = list[Due](), MAX_COPIES_BYTES, 0
        now_ms = self.tracker.book.clock.now_ms
        for place, fire, payload in zip(places, fires, payloads, strict=True):
            assert payload is not None, f"no row for {record_headers.record_id(fire.source, fire.offset)}"
            decided += 1
            if payload.left and fire.destination is not Destination.NOWHERE:
                # Markers are read meanwhile, so it is decided again.
                self.tracker.book.put_back(fire)
                self._missing.setdefault((place.queue, place.source), {})[place.offset] = None
                continue
            fire = unexpired(fire, payload, now_ms, self.tracker.settings(fire.lease.queue))
            due.append((fitting(fire, payload, self._limit_bytes), payload))
            room -= size_bytes(payload)
            if room <= 0:
                # The others stay in `_due`: a transaction that takes too long would be aborted and built again.
                break
        self._due = self._due[decided:]
        return due

    def _has_to_plan(self) -> bool:
        return self.tracker.book.applied >= self._planned_to and self.planner.has_to_plan(self.tracker)

    def _plan(self, now_ms: int) -> list[Batch]:
        if self.tracker.book.applied < self._planned_to:
            return []
        return self.planner.plan(self.tracker, now_ms, self.payload)

    def _write(self, *, markers: Sequence[Batch] = (), **others: Any) -> OwnerTransaction:
        clock, answers = self.tracker.book.clock, self.answers
        return OwnerTransaction(
            now_ms=clock.now_ms,
            appended_ms=clock.appended_ms,
            markers=[*answers, *markers],
            answers=len(answers),
            **others,
        )
