"""The owner of one markers partition on Kafka: a task that carries out marq/owner/engine.py.

It writes everything through one transactional producer (marq_worker/owner/partition_writer.py), which fences a former
owner.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping
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

from marq.client.uptime import uptime_ms
from marq.core.deliveries.schedule_planner import Planner
from marq.core.lease_book import InvalidTimes
from marq.core.redeliver_or_dead_letter import Destination
from marq.core.storage.rows import EventCounts
from marq.core.storage.table_image import ROWS_AT_ONCE, Place
from marq.core.tracker import Tracker
from marq.kafka.repeated_warnings import RepeatedWarning
from marq.owner.engine import OwnerEngine, OwnerTransaction, PositionLost, Step
from marq.settings.cron import Times
from marq.wire.errors import MarqError, UnknownVersion
from marq.wire.markers import Cause, Payload, Source
from marq.wire.record_headers import record_id
from marq_worker.owner.owner_context import Copier, OwnerContext
from marq_worker.owner.partition_writer import PartitionWriter
from marq_worker.owner.retry_pauses import RetryPauses
from marq_worker.progress import ProgressReport, RecentLateness
from marq_worker.tables.leases import ChangelogLost, LocalTableError, PartitionRows
from marq_worker.transport.inbox import Fetched, Inbox

log = logging.getLogger("marq.tracker")

#: How long a revoked owner may take to write folded markers; the next owner folds the rest again.
FLUSH_ON_STOP_SECONDS = 2.0

#: Pause after payloads could not be copied from their records.
COPY_PAUSE_SECONDS = 1.0


def newer_version_alarm(source: Source, offset: int, error: UnknownVersion) -> str:
    return (
        f"record {record_id(source, offset)} has {error}. If a newer Marq wrote it, upgrade the workers. If not, put it"
        f" into quarantine: marq quarantine {source.partition} {offset}"
    )


def log_jump(partition: int, jump_ms: int) -> None:
    log.critical(
        "markers partition %s: the broker's clock jumped by %s ms; the worker uses its own clock. Messages that were "
        "acquired right after the jump may be redelivered late by that much",
        partition,
        jump_ms,
    )


def log_refused(write: OwnerTransaction) -> None:
    """Log which message the broker rejected as too large; if there are several, it is not known yet which one."""
    if len(write.due) == 1:
        fire, _ = write.due[0]
        log.error(
            "queue %s, record %s: the broker rejects its redelivery as too large; it becomes a dead letter",
            fire.lease.queue,
            record_id(fire.source, fire.offset),
        )


def log_recreated(recreated: Iterable[tuple[str, Source]]) -> None:
    for queue, source in recreated:
        log.warning(
            "queue %s: topic %s was deleted and created again: the records of partition %s are new messages; unfinished"
            " messages of the former topic are redelivered from their markers",
            queue, *source.log,
        )  # fmt: skip


def log_invalid_times(times: InvalidTimes) -> None:
    """Write one line per queue and flush, because a faulty sender affects thousands of messages."""
    for queue, (count, first) in times.take().items():
        log.warning(
            "queue=%s messages=%s first=%s: marq-deliver-at is not a valid time, so it is ignored",
            queue,
            count,
            first,
        )


def log_removed(removed: Iterable[Place]) -> None:
    """Write one line per queue and partition, because retention may have removed thousands of records."""
    by_source: dict[tuple[str, Source], list[int]] = {}
    for place in removed:
        by_source.setdefault((place.queue, place.source), []).append(place.offset)
    for (queue, source), offsets in by_source.items():
        log.error(
            "queue %s, record %s was removed before its payload was copied: messages=%s last=%s. If their leases"
            " expire, they become dead letters without their values. Keep records for longer than an outage of all"
            " workers",
            queue, record_id(source.log, offsets[0]), len(offsets), offsets[-1],
        )  # fmt: skip


def log_expired(write: OwnerTransaction) -> None:
    """Write one line per queue and transaction about messages that have expired."""
    expired: dict[tuple[str, Destination], list[str]] = {}
    for fire, _ in write.due:
        if fire.cause is Cause.MESSAGE_EXPIRED:
            place = record_id(fire.source.log, fire.offset)
            expired.setdefault((fire.lease.queue, fire.destination), []).append(place)
    for (queue, destination), places in expired.items():
        end = "dropped" if destination is Destination.NOWHERE else "dead-lettered"
        log.info("messages expired, %s: queue=%s messages=%s first=%s", end, queue, len(places), places[0])


@dataclass
class Ownership:
    """One markers partition, from its assignment to this worker until it is revoked."""

    partition: int
    context: OwnerContext
    #: "recovering", "owner", "waiting" (for the broker, or because another worker took over) or "stopped".
    state: str = "recovering"
    #: Why the partition is stopped; empty if it is not.
    alarm: str = ""
    recovered_records: int = 0
    transactions: int = 0
    fired: int = 0
    restored: int = 0
    quarantined: int = 0
    lateness: RecentLateness = field(default_factory=RecentLateness)
    #: Counters of the queues right after the recovery; None before it.
    counted_before: Mapping[str, EventCounts] | None = None
    takeover_seconds: float = 0.0
    engine: OwnerEngine = field(init=False)
    times: Times = field(default_factory=Times)
    _source: Source = field(init=False)
    _inbox: Inbox = field(default_factory=Inbox)
    _writer: PartitionWriter = field(init=False)
    _pauses: RetryPauses = field(default_factory=RetryPauses)
    _failed: RepeatedWarning = field(
        default_factory=lambda: RepeatedWarning("markers partition %s: %r; taking it over again")
    )
    _not_copied: RepeatedWarning = field(
        default_factory=lambda: RepeatedWarning(
            "markers partition %s: payloads of %s messages not copied from their records, trying again: %s"
        )
    )
    _task: asyncio.Task[None] | None = None
    _furthest: int = 0
    #: True if the broker or the disk refused the last attempt; reset by the next write of rows.
    _refused: bool = False
    #: Folded batches whose rows are not in the changelog yet.
    _unacked: deque[tuple[Event, Fetched]] = field(default_factory=deque)
    #: Tasks that copy payloads: of due messages, and of those whose leases have outlived a flush.
    _copying: dict[Copier, asyncio.Task[None]] = field(default_factory=dict)
    #: When the owner last looked for leases that have outlived a flush.
    _looked_ms: int = 0
    _noted_jump_ms: int = 0
    _stopping: bool = False

    def __post_init__(self) -> None:
        context = self.context
        limit_bytes = context.max_message_bytes
        self._source = Source(context.names.markers, self.partition)
        self._writer = PartitionWriter(self.partition, context)
        self.engine = OwnerEngine(
            self._source,
            self._new_tracker,
            Planner(self.partition, context.markers_partitions, context.schedules, self.times, limit_bytes),
            PartitionRows(context.table, self.partition),
            self._acknowledge,
            limit_bytes,
            flush_ms=int(context.flush_seconds * 1000),
            sharers=context.owned,
        )

    @property
    def tracker(self) -> Tracker:
        return self.engine.tracker

    @property
    def position(self) -> int | None:
        """The next offset to read; None if it is not known yet."""
        return self.engine.position

    def _new_tracker(self) -> Tracker:
        return Tracker(
            self.context.settings,
            secrets.randbits(63) | 1,
            handling=self.context.handling,
            waiting=self.context.waiting,
            ordered=lambda offset, value: self.context.quarantine(self.partition, offset, value),
        )

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        # After a rebalance the lease book is kept if no other worker had the partition meanwhile.
        self.state, self._stopping = "recovering", False
        self._task = asyncio.create_task(self._live(), name=f"owner of markers partition {self.partition}")

    async def stop(self) -> bool:
        """Write folded markers if that is quick, then release the partition; return whether all were written."""
        task, self._task = self._task, None
        self._stopping = True
        self.wake()
        finished = True
        if task is not None:
            # Let a running transaction finish: after an interrupted one, nothing more can be written.
            _, unfinished = await asyncio.wait([task], timeout=FLUSH_ON_STOP_SECONDS if self.state == "owner" else 0)
            finished = not unfinished
            task.cancel()
            await asyncio.wait([task])
        self._stop_copying()
        written = False
        if self.state == "owner" and finished:
            try:
                async with asyncio.timeout(FLUSH_ON_STOP_SECONDS):
                    await self.perform(self.engine.rows())
                written = True
            except (KafkaError, OSError) as error:
                log.info("partition %s: the next owner applies it again: %r", self.partition, error)
        self.state = "stopped"
        self.engine.let_go()
        await self._writer.stop()
        self._unacked.clear()
        self._inbox.drop()
        return written

    async def deliver(self, event: Event) -> None:
        """Take a fetched batch; wait while the owner is busy."""
        # An owner that can't read now must not hold up the other partitions.
        await self._inbox.wait_for_room(lambda: self.state == "owner")
        if self.state != "stopped":
            self._inbox.put(event)

    def wake(self) -> None:
        self._inbox.wake()

    async def _live(self) -> None:
        self._pauses = RetryPauses()
        while True:
            try:
                await self._take_over()
                self._pauses.took_over()
                await self._work()
                return
            except UnknownVersion as error:
                assert self.engine.stopped_before is not None
                offset, value = self.engine.stopped_before
                await self._halt(newer_version_alarm(self._source, offset, error))
                await self._wait_for_quarantine(offset, value)
                continue
            except PositionLost as error:
                await self._halt(str(error))
                return
            except (ProducerFenced, InvalidProducerEpoch):
                # Another worker owns the partition, or this one fenced itself with a new producer. The worker that is
                # assigned the partition continues from the table.
                log.warning("markers partition %s was taken over by another producer", self.partition)
                self._forget()
                self._pauses.fenced()
            except (KafkaError, OSError, TimeoutError) as error:
                self._failed.write(time.monotonic(), self.partition, error)
                # A restart fixes neither a broker rejection nor a full disk.
                self._refused = isinstance(error, BrokerResponseError | LocalTableError)
            except Exception as error:
                # Without an alarm, the partition would stay stopped but look healthy.
                log.exception("markers partition %s", self.partition)
                self.state = "waiting"
                await self._halt(f"a defect of marq: {error!r}; the worker's log has the details")
                return
            self.state = "waiting"
            self._inbox.let_in()
            await self._writer.stop()
            await asyncio.sleep(self._pauses.next_s())

    async def _halt(self, alarm: str) -> None:
        log.critical("markers partition %s stopped: %s", self.partition, alarm)
        try:
            if self.state == "owner":
                await self.perform(self.engine.rows())
        except (KafkaError, OSError) as error:
            log.warning("markers partition %s: not written before the partition stopped: %r", self.partition, error)
        self.state, self.alarm = "stopped", alarm
        self._inbox.drop()
        self.context.pause(self.partition)
        await self._writer.stop()

    async def _wait_for_quarantine(self, offset: int, value: bytes) -> None:
        """Wait until an operator quarantines the record that this owner can't read, then continue from it.

        No marker from that record on has been folded, so the next takeover reads it again. The tracker then skips it,
        in one transaction with its rows and the quarantine record.
        """
        while (order := self.context.quarantine(self.partition, offset, value)) is None:
            await self._inbox.wait()
        log.warning("record %s is %s; its partition continues", record_id(self._source, offset), order)
        self.state, self.alarm = "recovering", ""
        self.context.resume(self.partition)

    def _forget(self) -> None:
        self.engine.forget()
        self._begin_again()

    def _begin_again(self) -> None:
        self.counted_before = None
        # A new tracker starts with jump 0, which is not a change to report.
        self._noted_jump_ms = 0
        self._unacked.clear()
        self._inbox.drop()

    async def _take_over(self) -> None:
        began = time.monotonic()
        if self.position is not None and self.partition in self.context.table.damaged:
            # The payloads of the lease book are only in the local table: recover both from the changelog.
            self._forget()
        log_range: asyncio.Task[tuple[int, int]] | None = None
        try:
            for step in self.engine.take_over():
                if step is Step.FENCE:
                    await self._fence()
                    continue
                if log_range is None:
                    # Start the request now: later it would wait behind the consumer's fetch. The range covers
                    # everything that the table knows, because the former owner is already fenced.
                    log_range = asyncio.create_task(self.context.log_range(self.partition))
                if step is Step.RECOVER:
                    await self._recover()
                else:
                    position = self.engine.begin(*await log_range, uptime_ms())
                    # Faust's committed offset is never after this position, unless the changelog was lost.
                    await self.context.seek(self.partition, position)
        finally:
            if log_range is not None:
                log_range.cancel()
                await asyncio.gather(log_range, return_exceptions=True)
        self.state = "owner"
        self.takeover_seconds = time.monotonic() - began

    async def _fence(self) -> None:
        known = self.position is not None
        if not self.engine.fenced(await self._writer.fence(), uptime_ms()):
            if known:  # else the owner was fenced, which is logged already
                log.warning("markers partition %s: another owner was active, or a transaction was open", self.partition)
            self._begin_again()

    async def _recover(self) -> None:
        self.state = "recovering"
        self.recovered_records = await self._writer.recover_table()
        for _ in self.engine.restoring(self.context.table.rows(self.partition)):
            self.restored += ROWS_AT_ONCE
            await asyncio.sleep(0)
        book = self.tracker.book
        self.counted_before = {queue: replace(counts) for queue, counts in book.counts.items()}
        log.info(
            "owner of markers partition %s: %s changelog records, %s open messages, applied offset %s",
            *(self.partition, self.recovered_records, len(book), book.applied),
        )

    # --- progress -----------------------------------------------------------------------------------------------------

    def standing(self) -> ProgressReport | None:
        """Return the progress of this owner; None if a restart would not help it."""
        if self.state == "stopped" or (self.state == "waiting" and self._refused):
            return None
        replayed = self.context.table.replayed[self.partition]
        return ProgressReport((self._furthest, self.fired, replayed, self.restored), self.position, self._owes())

    def _owes(self) -> str:
        if self.state != "owner":
            return f"it is {self.state}, and no owner"
        now_ms = uptime_ms()
        if self.tracker.awaited_ms(now_ms):
            return "its own TICK has not arrived"
        if self.tracker.tick_in_ms(now_ms) == 0:
            return "a TICK is due and not written"
        if self._inbox:
            return "markers that were fetched are not folded"
        return "folded markers are not written" if self.engine.flush_in_ms(now_ms) == 0 else ""

    # --- read ---------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while not self._stopping:
            wait_ms = self.engine.wait_ms(uptime_ms())
            if len(self.tracker.book) and self.context.copier not in self._copying:
                copy_in_ms = self._copy_in_ms()
                wait_ms = copy_in_ms if wait_ms is None else min(copy_in_ms, wait_ms)
            if not (self._inbox or self._stopping or wait_ms == 0):
                await self._inbox.wait(wait_ms)
            # Markers could end messages whose redeliveries are already decided.
            while self._inbox and not self.engine.unsent:
                await self._read(*self._inbox.take())
                if self.engine.is_full:
                    break
            self.tracker.saw(uptime_ms())
            self._note_jump()
            if (write := self.engine.next_write(uptime_ms())) is not None:
                await self.context.turn(self, write)
            if self.engine.has_to_read_again(uptime_ms()):
                position = self.partition, self.position
                log.warning("markers partition %s: reading again from %s: its TICK has not arrived", *position)
                await self._seek_back()
            if self.engine.flush_in_ms(uptime_ms()) == 0:
                await self.perform(self.engine.rows())
            self._copy()

    def _note_jump(self) -> None:
        if self.tracker.jump_ms != self._noted_jump_ms:
            self._noted_jump_ms = self.tracker.jump_ms
            log_jump(self.partition, self.tracker.jump_ms)

    async def _read(self, event: Event, fetched: Fetched) -> None:
        if not self.engine.read(fetched.records, fetched.start, fetched.end):
            # A rebalance dropped an earlier batch.
            self.engine.check_log(*await self.context.log_range(self.partition))
            log.info("partition %s: going back from %s to %s", self.partition, fetched.start, self.position)
            self._inbox.drop()
            await self._seek_back()
            return
        self._furthest = max(self._furthest, self.position or 0)
        self._unacked.append((event, fetched))

    async def _seek_back(self) -> None:
        assert self.position is not None
        await self.context.seek(self.partition, self.position)

    # --- copy ---------------------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        """Start to copy payloads that are only in the records of their messages."""
        if self.context.due_copier not in self._copying and (left := self.engine.missing()):
            self._start_copy(self.context.due_copier, left)
        if self.context.copier not in self._copying and self._copy_in_ms() == 0:
            self._looked_ms = uptime_ms()
            if left := self.engine.outliving(self._looked_ms):
                self._start_copy(self.context.copier, left)

    def _copy_in_ms(self) -> int:
        """Return the time until to look for leases that have outlived a flush."""
        return max(0, self._looked_ms + max(50, int(self.context.flush_seconds * 1000)) - uptime_ms())

    def _start_copy(self, copier: Copier, left: Mapping[Place, Payload]) -> None:
        name = f"copies payloads of markers partition {self.partition}"
        self._copying[copier] = asyncio.create_task(self._copied(copier, left), name=name)

    async def _copied(self, copier: Copier, left: Mapping[Place, Payload]) -> None:
        copied: Mapping[Place, Payload | None] = {}
        try:
            copied = await copier(left)
            log_removed(self.engine.supply(copied))
        except (MarqError, KafkaError, OSError, TimeoutError) as error:
            self._not_copied.write(time.monotonic(), self.partition, len(left), error)
        except Exception:
            # Copies of other messages may succeed.
            log.exception("markers partition %s", self.partition)
        if copied:
            self._looked_ms = 0
        else:
            await asyncio.sleep(COPY_PAUSE_SECONDS)
        self._copying.pop(copier, None)
        self.wake()

    def _stop_copying(self) -> None:
        copying, self._copying = self._copying, {}
        for task in copying.values():
            task.cancel()

    # --- write --------------------------------------------------------------------------------------------------------

    async def perform(self, write: OwnerTransaction) -> None:
        """Carry out a write and tell the engine the outcome."""
        if write.tick is not None:
            # The write had to wait for its turn. With its old time, a TICK would look like a jump of the broker's
            # clock.
            tick = self.tracker.tick(uptime_ms())
            write = replace(write, tick=tick, markers=[*write.markers[:-1], tick])
        lateness_ms: list[int] = []
        if write.due:
            await self.context.heard()
            lateness_ms = self._lateness_of(write)
        try:
            marked, position = await self._writer.commit(write)
        except (MessageSizeTooLargeError, RecordListTooLargeError):
            if not self.engine.refused_for_size(write):
                raise
            log_refused(write)
            if not self.engine.renewed(await self._writer.renew()):
                raise ProducerFenced from None
            return
        except TimeoutError:
            self.engine.timed_out(write)
            raise
        except ChangelogLost:
            # The next takeover begins a new changelog, and reads the markers from the start.
            self._forget()
            raise
        self.transactions += 1
        self.fired += len(write.due)
        if lateness_ms:
            self.lateness.note(uptime_ms(), lateness_ms)
            self.context.lateness.note(lateness_ms)
        self.engine.committed(write, uptime_ms(), marked, position)
        log_expired(write)
        self.quarantined += len(write.quarantine)
        if write.rows is not None:
            self._refused = False
            self._pauses.wrote()
            log_invalid_times(self.tracker.book.invalid_times)
            log_recreated(self.tracker.book.take_recreated())

    def _acknowledge(self, applied: int) -> None:
        while self._unacked and self._unacked[0][1].end <= applied + 1:
            self._unacked.popleft()[0].ack()

    def lateness_ms(self) -> list[int]:
        """Return how late recent messages were sent, in ascending order."""
        return self.lateness.rising(uptime_ms())

    def _lateness_of(self, write: OwnerTransaction) -> list[int]:
        now_ms, wanted_ms = self.tracker.estimate_ms(uptime_ms()), self.tracker.book.wanted_ms
        return [max(0, now_ms - wanted_ms(fire.lease)) for fire, _ in write.due]
