"""The life of a schedule: its owner, the owner's log, and restarts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marq.core.deliveries.schedule_planner import Planner
from marq.core.lease_book import LeaseBook
from marq.core.storage import rows
from marq.core.tracker import Tracker
from marq.settings.queue import QueueSettings
from marq.settings.schedule_definitions import Schedule, ScheduleLayers, home_partition
from marq.wire.marker_codec import encode
from marq.wire.markers import Batch, Cancel, Kind, Payload, Reschedule, Source
from marq.wire.record_headers import previous_runs_s

T0_S = 1_700_000_000
PARTITIONS = 4


def every(seconds: int) -> Callable[[Schedule, int], int | None]:
    """Each multiple of this many seconds; the cron expression says them, when it is a number."""

    def next_time(schedule: Schedule, after_s: int) -> int | None:
        step = int(schedule.cron.split()[0].removeprefix("*/")) if schedule.cron.startswith("*/") else seconds
        return (after_s // step + 1) * step

    return next_time


class Life:
    """An owner of the home partition of the schedule "s", and its log; each restart restores what was written."""

    def __init__(self, next_time: Callable[[Schedule, int], int | None] | None = None) -> None:
        self.layers = ScheduleLayers()
        self.now_ms = T0_S * 1000
        self.offset = -1
        self.table: dict[bytes, bytes] = {}
        self.log: list[Batch] = []
        self.delivered: list[int] = []
        self.next_time = next_time or every(60)
        self.holder = 0
        self.limit_bytes = 1_000_000
        self.paused = False
        self.restart()

    def define(self, *, work: bool = True, **document: Any) -> None:
        """Define the schedule, and let its owner do what follows unless the test does."""
        self.layers.fold("schedule", "s", {"queue": "reports", "cron": "*/60 * * * *", **document})
        if work:
            self.work()

    def remove(self) -> None:
        self.layers.fold("schedule", "s", None)
        self.work()

    def cancel(self) -> None:
        """Append a CANCEL of the message that waits."""
        [(source, number, _)] = self.book.open_leases()
        self.append(Cancel("reports", 77, source, [number]))

    def deliver_now(self) -> None:
        """Append a RESCHEDULE of the message that waits, to now."""
        [(source, number, _)] = self.book.open_leases()
        self.append(Reschedule("reports", 77, source, [number], [0], True))

    def sleep(self, time_s: int) -> None:
        """Let time pass without an owner; the next one begins."""
        self.now_ms = time_s * 1000
        self.restart()

    def restart(self, caught_up: bool = True) -> None:
        self.holder += 1
        self.tracker = Tracker(lambda queue: QueueSettings(paused=self.paused), self.holder, tick_interval_ms=0)
        self.tracker.book.restore(self.table.items())
        self.planner = Planner(
            home_partition("s", PARTITIONS), PARTITIONS, lambda: self.layers, self.next_time, self.limit_bytes
        )
        if caught_up:
            self.work()

    @property
    def book(self) -> LeaseBook:
        return self.tracker.book

    def payload(self, queue: str, source: Source, number: int) -> Payload | None:
        row = self.table.get(rows.row_key(queue, source, number))
        return None if row is None else rows.decode_payload(row)

    def append(self, batch: Batch) -> None:
        self.offset += 1
        self.log.append(batch)
        self.tracker.read(encode(batch), self.now_ms, self.offset)
        assert not self.tracker.unreadable
        for key, row in self.book.take_changes().items():
            self.table.pop(key, None)
            if row is not None:
                self.table[key] = row

    def work(self) -> list[Batch]:
        """Do what an owner does now, until nothing is left; return what was planned."""
        planned: list[Batch] = []
        while True:
            self.tracker.saw(self.now_ms)
            plan = self.planner.plan(self.tracker, self.now_ms, self.payload)
            planned += plan
            fires = self.tracker.due()
            self.delivered += [fire.offset for fire in fires if fire.fact_kind is Kind.DELIVERED]
            tick = (
                [] if plan or fires or self.tracker.tick_in_ms(self.now_ms) != 0 else [self.tracker.tick(self.now_ms)]
            )
            following = self.planner.follow(self.tracker, fires, self.now_ms, self.payload)
            planned += following
            batches = [*plan, *self.tracker.facts(fires), *following, *tick]
            if not batches:
                return planned
            for batch in batches:
                self.append(batch)

    def until(self, time_s: int) -> None:
        """Let time pass, with work whenever something is due."""
        self.work()
        while (due_ms := self.book.next_due_ms) is not None and due_ms <= time_s * 1000:
            self.now_ms = max(self.now_ms, due_ms)
            self.work()
        self.now_ms = time_s * 1000
        self.work()

    @property
    def runs(self) -> list[int]:
        """The last runs that the next message names."""
        source, number, lease = min(self.book.open_leases(), key=lambda opened: opened[1])
        return previous_runs_s(self.payload(lease.queue, source, number))

    @property
    def waiting(self) -> list[int]:
        return sorted(number for _, number, _ in self.book.open_leases())


def times(first: int, count: int, step: int = 60) -> list[int]:
    start = (T0_S // step + 1) * step
    return [start + step * index for index in range(first, first + count)]


def at(number: int) -> int:
    return times(number, 1)[0]
