"""The owner of one markers partition: the shell around :class:`marq.core.tracker.Tracker`.

One task per owned partition. Its life is the order that the core's tracker demands: fence, recover, TICK, read, fire.
All that it writes (agents/writing.py) goes through one transactional producer, so that a paused former owner can write
nothing more:

* the changed rows of the lease table, as changelog records, with the applied offset among them;
* copies of due messages and the facts that tell of them;
* TICKs, and records that could not be decoded (to the quarantine topic).

A transaction whose outcome is unknown is followed by a new fencing. Its rows are written once more (a row is a value,
not a change), and its copies are sent again only if their facts are not in the log before the next own TICK.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aiokafka.errors import (
    BrokerResponseError,
    InvalidProducerEpoch,
    KafkaError,
    MessageSizeTooLargeError,
    ProducerFenced,
    RecordListTooLargeError,
)
from faust import Event

from agents.fetched import Fetched
from agents.lateness import RecentLateness
from agents.schedules import Scheduling
from agents.standing import Standing
from agents.surroundings import Surroundings
from agents.writing import TRANSACTION_SECONDS, Due, Writing
from marq.core import copies
from marq.core.errors import UnknownVersion
from marq.core.fires import Fire
from marq.core.markers import Batch, Payload, Source, Tick
from marq.core.restoration import ROWS_AT_ONCE
from marq.core.rows import Counts
from marq.core.tracker import Tracker
from tables.leases import LocalTableError

log = logging.getLogger("marq.tracker")

#: Batches that wait for an owner; past that the agent waits, and Faust stops fetching.
MAX_INBOX_BATCHES = 16
#: Rows, and bytes of markers, folded and not yet written: of all partitions of a worker, which share this evenly. A row
#: that waits takes up to a kilobyte, with its marker, and once more while it is on its way.
MAX_PENDING_ROWS = 50_000
MAX_PENDING_BYTES = 64 << 20
#: Copies in one transaction, whose fixed cost is large on a busy machine; and after how many bytes there is another.
MAX_COPIES = 2_000
MAX_COPIES_BYTES = 4 << 20
#: Of these the payloads are looked up at once.
_LOOKED_UP = 250
#: How long a TICK may take from its clock to the log: well below marq.core.clock.MAX_DRIFT_MS.
TICK_SECONDS = 3.0
#: After which an own TICK that was written and not read back is looked for.
TICK_READ_SECONDS = 5.0
#: Seconds between two attempts to take a partition over: doubled from the first to the second.
RETRY_SECONDS = (0.2, 5.0)
#: How long a revoked owner may take to write what it has folded; what it can't, the next owner folds again.
FLUSH_ON_STOP_SECONDS = 2.0
_MEND = "Nothing is read until somebody decides: see docs/operations.md, 'Starting anew, recreating topics'"


class PositionLost(Exception):
    """The markers topic no longer has the records after the applied offset."""


@dataclass
class Ownership:
    """One markers partition, from its assignment to this worker until it is revoked."""

    partition: int
    around: Surroundings
    #: "recovering", "owner", "waiting" (for the broker, or because another worker took over) or "stopped".
    state: str = "recovering"
    #: Why the partition stands still, for people; empty when it does not.
    alarm: str = ""
    #: Offset and content of the record of a newer version that stops the partition.
    stopped_before: tuple[int, bytes] | None = None
    recovered_records: int = 0
    transactions: int = 0
    #: Due messages whose copies were sent.
    fired: int = 0
    #: Rows of the table that were taken over.
    restored: int = 0
    #: Marker records that were folded, and that were read again at or below the applied offset and skipped.
    folded: int = 0
    skipped: int = 0
    quarantined: int = 0
    lateness: RecentLateness = field(default_factory=RecentLateness)
    #: The counters of its queues when the table had been recovered; None: that has not been done yet.
    counted_before: Mapping[str, Counts] | None = None
    #: How long the last takeover took.
    takeover_seconds: float = 0.0
    tracker: Tracker = field(init=False)
    _inbox: deque[tuple[Event, Fetched]] = field(default_factory=deque)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    scheduling: Scheduling = field(init=False)
    _writing: Writing = field(init=False)
    _task: asyncio.Task[None] | None = None
    _position: int | None = None
    _furthest: int = 0
    #: Whether the broker or the disk has refused what was last tried, until rows are written again.
    _refused: bool = False
    _unacked: list[Event] = field(default_factory=list)
    #: Of markers that were folded and not yet written.
    _pending_bytes: int = 0
    _flushed_at: float = 0.0
    _noted_jump_ms: int = 0
    _sought_ms: int = 0
    _stopping: bool = False

    def __post_init__(self) -> None:
        self.tracker = self._new_tracker()
        self.scheduling = Scheduling(self.partition, self.around)
        self._writing = Writing(self.partition, self.around)

    def _new_tracker(self) -> Tracker:
        return Tracker(
            self.around.settings,
            secrets.randbits(63) | 1,
            handling=self.around.handling,
            ordered=lambda offset, value: self.around.quarantine(self.partition, offset, value),
        )

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._position is not None:
            # Assigned again after a rebalance: the book is kept if nobody else had the partition meanwhile, which
            # fencing will show. What was written last may not have been read, so nothing fires before a TICK.
            self.tracker.take_over_again()
            self.state, self._stopping = "recovering", False
        self._task = asyncio.create_task(self._live(), name=f"owner of markers partition {self.partition}")

    async def stop(self) -> bool:
        """Write what has been folded if that is quickly done, and let go; return whether all of it was written."""
        task, self._task = self._task, None
        self._stopping = True
        self._arrived.set()
        finished = True
        if task is not None:
            # A transaction that is under way is finished first: after one that was cut short nothing can be written.
            _, unfinished = await asyncio.wait([task], timeout=FLUSH_ON_STOP_SECONDS if self.state == "owner" else 0)
            finished = not unfinished
            task.cancel()
            await asyncio.wait([task])
        written = False
        if self.state == "owner" and finished:
            try:
                async with asyncio.timeout(FLUSH_ON_STOP_SECONDS):
                    await self._write(changes=True)
                written = True
            except (KafkaError, TimeoutError) as error:
                log.info("partition %s: left to the next owner to fold again: %r", self.partition, error)
        self.state = "stopped"
        await self._writing.stop()
        self._unacked.clear()
        self._drop_inbox()
        return written

    async def deliver(self, event: Event) -> None:
        """Take a fetched batch; waits while the owner is busy."""
        while len(self._inbox) >= MAX_INBOX_BATCHES and self.state == "owner":
            self._room.clear()
            await self._room.wait()
        # Whoever is not able to read now must not hold up the other partitions: what is dropped leaves a gap, and the
        # owner goes back to where it began.
        if self.state != "stopped" and len(self._inbox) < MAX_INBOX_BATCHES:
            self._inbox.append((event, event.value))
            self._arrived.set()

    def wake(self) -> None:
        """Look at what has changed beside the markers."""
        self._arrived.set()

    async def _live(self) -> None:
        attempt = 0
        while True:
            try:
                await self._take_over()
                attempt = 0
                await self._work()
                return
            except UnknownVersion as error:
                await self._halt(self._told_of_newer(error))
                await self._wait_for_quarantine()
                continue
            except PositionLost as error:
                await self._halt(str(error))
                return
            except (ProducerFenced, InvalidProducerEpoch):
                # Another worker owns the partition now, or this one fenced itself by starting anew. Whoever is
                # assigned goes on from the table; a worker that is not will be told by its consumer.
                log.warning("markers partition %s was taken over by another producer", self.partition)
                self._forget()
            except (KafkaError, OSError, TimeoutError) as error:
                log.warning("markers partition %s: %r; taking it over again", self.partition, error)
                # Neither a broker that says no nor a full disk is mended by a restart.
                self._refused = isinstance(error, BrokerResponseError | LocalTableError)
                self.tracker.take_over_again()
            except Exception as error:
                # A defect: unsaid, the partition would stand still for ever and look healthy.
                log.exception("markers partition %s", self.partition)
                self.state = "waiting"
                await self._halt(f"a defect of marq: {error!r}; the worker's log has the details")
                return
            self.state = "waiting"
            self._room.set()
            await self._writing.stop()
            await asyncio.sleep(min(RETRY_SECONDS[0] * 2**attempt, RETRY_SECONDS[1]))
            attempt += 1

    async def _halt(self, alarm: str) -> None:
        log.critical("markers partition %s stopped: %s", self.partition, alarm)
        try:
            if self.state == "owner":
                await self._write(changes=True)
        except (KafkaError, TimeoutError) as error:
            log.warning("markers partition %s: not written before it stopped: %r", self.partition, error)
        self.state, self.alarm = "stopped", alarm
        self._drop_inbox()
        self.around.pause(self.partition)
        await self._writing.stop()

    def _told_of_newer(self, error: UnknownVersion) -> str:
        assert self.stopped_before is not None
        offset, _ = self.stopped_before
        return (
            f"record {self.around.names.markers}/{self.partition}/{offset} has {error}. If a newer Marq wrote it,"
            f" upgrade the workers. If not, put it into quarantine: faust -A app quarantine {self.partition} {offset}"
        )

    async def _wait_for_quarantine(self) -> None:
        """Wait until an operator quarantines the record that this owner can't read, then continue from that record.

        Nothing was folded from that record on, so taking over again reads it again. The tracker then finds the order
        and passes over the record, in one transaction with its rows and the quarantine record.
        """
        assert self.stopped_before is not None
        while (order := self.around.quarantine(self.partition, *self.stopped_before)) is None:
            self._arrived.clear()
            await self._arrived.wait()
        offset, _ = self.stopped_before
        place = copies.record_id(Source(self.around.names.markers, self.partition), offset)
        log.warning("record %s is %s; its partition continues", place, order)
        self.tracker.take_over_again()
        self.state, self.alarm, self.stopped_before = "recovering", "", None
        self.around.resume(self.partition)

    def _forget(self) -> None:
        """Begin again from the table: what was folded and not written will be read again."""
        self.tracker = self._new_tracker()
        self._position = self.counted_before = None
        # The new tracker knows of no jump, which is none to report.
        self._noted_jump_ms = 0
        self._writing.forget()
        self._pending_bytes = 0
        self._unacked.clear()
        self._drop_inbox()

    def _drop_inbox(self) -> None:
        self._inbox.clear()
        # Whoever waits for room holds up the batches of all partitions.
        self._room.set()

    async def _take_over(self) -> None:
        began = time.monotonic()
        # 1. Fence: from here on a former owner can write nothing, and what it had not committed is aborted.
        alone = await self._writing.fence()
        if self._position is not None and not alone:
            # Somebody else had the partition meanwhile, so the table has moved on: what is pending here would undo it.
            log.warning("markers partition %s had another owner meanwhile", self.partition)
            self._forget()
        if self._position is None:
            await self._recover()
        elif self.state == "recovering":
            await self._read_on(self._position, await self.around.log_range(self.partition))
        self.state = "owner"
        self._flushed_at = time.monotonic()
        self.takeover_seconds = self._flushed_at - began

    async def _recover(self) -> None:
        # 2. The table, up to the end of its changelog; read earlier, it could miss rows of the former owner.
        self.state = "recovering"
        # Where the markers end is asked meanwhile: later the request would wait behind the consumer's fetch. The table
        # knows of nothing behind that, for the former owner could write nothing more when it was asked.
        looking = asyncio.create_task(self.around.log_range(self.partition))
        try:
            self.recovered_records = await self._writing.recover_table()
            for _ in self.tracker.book.restoring(self.around.table.rows(self.partition)):
                self.restored += ROWS_AT_ONCE
                await asyncio.sleep(0)
            log_range = await looking
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        self._position = self.tracker.book.applied + 1
        self.counted_before = {queue: replace(counts) for queue, counts in self.tracker.book.counts.items()}
        log.info(
            "owner of markers partition %s: %s changelog records, %s open messages, applied offset %s",
            self.partition,
            self.recovered_records,
            len(self.tracker.book),
            self.tracker.book.applied,
        )
        # 3. The markers after it. Faust reads from its committed offset, which is never after this one unless the
        #    changelog was lost.
        await self._read_on(self._position, log_range)

    async def _read_on(self, position: int, log_range: tuple[int, int]) -> None:
        self._check_log(position, *log_range)
        await self.around.seek(self.partition, position)

    def _check_log(self, position: int, start: int, end: int) -> None:
        place = f"the tracker has to read {self.around.names.markers}/{self.partition} from offset {position}"
        if start > position:
            raise PositionLost(
                f"{place}, but its retention has removed everything before {start}: what those markers said is lost, "
                f"and messages may be delivered again or not at all. {_MEND}"
            )
        if end < position:
            raise PositionLost(
                f"{place}, but it ends at {end}: it was deleted and made anew, or lost records. What the table knows "
                f"belongs to the former topic. {_MEND}"
            )

    # --- whether it gets on -------------------------------------------------------------------------------------------

    @property
    def position(self) -> int | None:
        """The next record that is to be read; None: not known yet."""
        return self._position

    def payload(self, source: Source, number: int) -> Payload | None:
        """Return an open message; None when it is none any more."""
        return self._writing.open_payload(self.tracker, source, number)

    def standing(self) -> Standing | None:
        """Return how far this owner is; None when it is not for a restart to get it further."""
        if self.state == "stopped" or (self.state == "waiting" and self._refused):
            return None
        replayed = self.around.table.replayed[self.partition]
        return Standing((self._furthest, self.fired, replayed, self.restored), self._position, self._owes())

    def _owes(self) -> str:
        if self.state != "owner":
            return f"it is {self.state}, and no owner"
        now_ms = _monotonic_ms()
        if self.tracker.awaited_ms(now_ms):
            return "its own TICK has not come back"
        if self.tracker.tick_in_ms(now_ms) == 0:
            return "a TICK is due and not written"
        if self._inbox:
            return "markers that were fetched are not folded"
        return "what was folded is not written" if self._flush_in() <= 0 else ""

    # --- read ---------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while not self._stopping:
            await self._wait()
            while self._inbox:
                event, fetched = self._inbox.popleft()
                self._room.set()
                await self._read(event, fetched)
                if self._is_full():
                    break
            now_ms = _monotonic_ms()
            self.tracker.saw(now_ms)
            self._note_jump()
            await self._answer()
            await self._schedule()
            for due in self._shares(self.tracker.due()):
                await self._fire(due)
            await self._tick()
            await self._read_again_without_tick()
            if self._flush_in() <= 0:
                await self._write(changes=True)

    async def _answer(self) -> None:
        """Say what became of RESCHEDULEs and CANCELs, before what they moved to now is delivered."""
        self._writing.answers += self.tracker.answers()
        if self._writing.answers:
            await self._write()

    async def _schedule(self) -> None:
        """Say what schedules want, before anything fires: what they do not want any more is then not delivered."""
        plan = self.scheduling.plan(self.tracker, _monotonic_ms())
        if plan:
            await self._write(plan=plan)
            self.scheduling.written(self._writing.marked)

    async def _tick(self) -> None:
        now_ms = _monotonic_ms()
        if self.tracker.tick_in_ms(now_ms) == 0:
            # In a transaction of its own, and given up soon: a TICK that reached the log late would look as if the
            # broker's clock had jumped, and leases would end early. One that is given up is aborted, and never read.
            await self._write(tick=self.tracker.tick(now_ms), limit_seconds=TICK_SECONDS)

    async def _read_again_without_tick(self) -> None:
        """Go back to the position when the own TICK does not come: a delivery may have been lost on its way."""
        now_ms, position = _monotonic_ms(), self._position
        limit_ms = int(TICK_READ_SECONDS * 1000)
        if position is None or min(self.tracker.awaited_ms(now_ms), now_ms - self._sought_ms) < limit_ms:
            return
        log.warning("markers partition %s: reading again from %s: its TICK has not come", self.partition, position)
        self._sought_ms = now_ms
        await self.around.seek(self.partition, position)

    def _note_jump(self) -> None:
        if self.tracker.jump_ms != self._noted_jump_ms:
            self._noted_jump_ms = self.tracker.jump_ms
            log.critical(
                "markers partition %s: the broker's clock jumped by %s ms; the worker's own clock counts. Messages "
                "that were acquired right after the jump may be redelivered late by as much",
                self.partition,
                self.tracker.jump_ms,
            )

    async def _wait(self) -> None:
        tick_in_ms = self.tracker.tick_in_ms(_monotonic_ms())
        waits = [self._flush_in()]
        if tick_in_ms is not None:
            waits.append(tick_in_ms / 1000)
        if self.tracker.awaited_ms(_monotonic_ms()):
            waits.append(TICK_READ_SECONDS)
        if self._inbox or self._stopping or self.scheduling.has_to_plan(self.tracker):
            return
        self._arrived.clear()
        timeout = min(waits)
        try:
            async with asyncio.timeout(None if timeout == float("inf") else max(timeout, 0)):
                await self._arrived.wait()
        except TimeoutError:
            return

    def _flush_in(self) -> float:
        """Seconds until the folded markers are to be written; infinite when there are none."""
        book = self.tracker.book
        if not (book.changed or self._writing.pending or self._unacked):
            return float("inf")
        if self._is_full():
            return 0.0
        if book.settlements.has_notes:
            # Somebody waits for them.
            return 0.0
        return self._flushed_at + self.around.flush_seconds - time.monotonic()

    def _is_full(self) -> bool:
        """Whether what was folded is to be written before more is read."""
        sharers = max(1, self.around.owned())
        return self._pending_bytes > MAX_PENDING_BYTES // sharers or (
            self.tracker.book.pending_rows > MAX_PENDING_ROWS // sharers
        )

    async def _read(self, event: Event, fetched: Fetched) -> None:
        position = self._position
        assert position is not None
        if fetched.start > position:
            # Records were passed over (a rebalance dropped a batch that was on its way): read them again.
            self._check_log(position, *await self.around.log_range(self.partition))
            log.info("partition %s: going back from %s to %s", self.partition, fetched.start, position)
            self._drop_inbox()
            await self.around.seek(self.partition, position)
            return
        for record in fetched.records:
            if record.offset <= self.tracker.book.applied:
                self.skipped += 1
                continue
            try:
                self.tracker.read(record.value, record.timestamp, record.offset)
            except UnknownVersion:
                self.stopped_before = record.offset, record.value or b""
                raise
            self.folded += 1
            self._pending_bytes += len(record.value or b"")
        self._position = max(position, fetched.end)
        self._furthest = max(self._furthest, self._position)
        self.tracker.book.passed(self._position)
        self._unacked.append(event)

    # --- write --------------------------------------------------------------------------------------------------------

    def _shares(self, fires: Sequence[Fire]) -> Iterator[list[Due]]:
        """Look up the messages of what is due, and return what to send in each transaction."""
        share: list[Due] = []
        room = MAX_COPIES_BYTES
        for start in range(0, len(fires), _LOOKED_UP):
            some = fires[start : start + _LOOKED_UP]
            share += zip(some, payloads := self._writing.payloads(self.tracker, some), strict=True)
            room -= sum(len(payload.value or b"") for payload in payloads)
            if room <= 0 or len(share) >= MAX_COPIES:
                yield share
                share, room = [], MAX_COPIES_BYTES
        if share:
            yield share

    async def _fire(self, due: list[Due]) -> None:
        await self.around.heard()
        self._note_lateness([fire for fire, _ in due])
        limit = self.around.max_message_bytes
        due = [(copies.fitting(fire, payload, limit), payload) for fire, payload in due]
        plan = self.scheduling.follow(self.tracker, [fire for fire, _ in due], _monotonic_ms())
        try:
            await self._write(due=due, plan=plan)
            if plan:
                self.scheduling.written(self._writing.marked)
        except (MessageSizeTooLargeError, RecordListTooLargeError):
            # The broker refuses a copy for its size, so nothing of this transaction was written.
            await self._fire_apart(due)
        except (ProducerFenced, InvalidProducerEpoch):
            raise
        except (KafkaError, TimeoutError) as error:
            self._writing.close_own_topics([fire for fire, _ in due], error)
            raise

    async def _fire_apart(self, due: Sequence[Due]) -> None:
        for fire, payload in due:
            await self.around.heard()
            try:
                await self._write(due=[(fire, payload)])
            except (MessageSizeTooLargeError, RecordListTooLargeError):
                log.error(
                    "queue %s, record %s: the broker refuses its copy for its size; it becomes a dead letter",
                    fire.lease.queue,
                    copies.record_id(fire.source, fire.offset),
                )
                await self._write(due=[(copies.too_large(fire), payload)])

    def lateness_ms(self) -> list[int]:
        """How late messages were sent lately, the least first."""
        return self.lateness.rising(_monotonic_ms())

    def _note_lateness(self, fires: list[Fire]) -> None:
        monotonic_ms = _monotonic_ms()
        now_ms = self.tracker.estimate_ms(monotonic_ms)
        wanted_ms = self.tracker.book.wanted_ms
        lateness_ms = [max(0, now_ms - wanted_ms(fire.lease)) for fire in fires]
        self.lateness.note(monotonic_ms, lateness_ms)
        self.around.lateness.note(lateness_ms)

    async def _write(
        self,
        *,
        due: Sequence[Due] = (),
        tick: Tick | None = None,
        plan: Sequence[Batch] = (),
        changes: bool = False,
        limit_seconds: float = TRANSACTION_SECONDS,
    ) -> None:
        """Write, in one transaction, copies with their facts, a TICK, other markers, and the rows that changed."""
        unacked = len(self._unacked)
        written = await self._writing.commit(self.tracker, due, tick, changes, limit_seconds, plan)
        self.transactions += 1
        self.fired += len(due)
        if changes:
            self._refused = False
            self._writing.write_table(written)
            self._pending_bytes = 0
            self._flushed_at = time.monotonic()
            self._tell_of_invalid_times()
            self.quarantined += len(self.tracker.unreadable)
            self.tracker.unreadable.clear()
            # Only now: the rows are in the changelog, so these markers need not be read again.
            for event in self._unacked[:unacked]:
                event.ack()
            del self._unacked[:unacked]

    def _tell_of_invalid_times(self) -> None:
        # One line for each queue and flush, because a faulty sender affects thousands of messages.
        for queue, (count, first) in self.tracker.book.invalid_times.take().items():
            log.warning(
                "queue=%s messages=%s first=%s: marq-deliver-at can't be read as a time, so they are delivered at once",
                queue,
                count,
                first,
            )


def _monotonic_ms() -> int:
    return int(time.monotonic() * 1000)
