"""The planner of schedules: the owner of a markers partition writes one message for each scheduled time.

A schedule has one undelivered message at a time: a DELAY whose number is the time, in the source of its definition
(:meth:`marq.settings.schedule_definitions.Schedule.source`). It is a row like any other, so it outlives its writer and
can be listed, rescheduled and cancelled. The next one is written in the transaction that delivers it or ends it as
cancelled. No time is skipped or repeated:

* Only the owner plans, through the producer that fences all former owners, and only after it has read everything that
  was written before. So it never repeats a time.
* ``from_offset`` is 0: every time up to the last one written counts as seen, no matter which owner repeats it.
* A message of a former definition is withdrawn (a fact CANCELLED, with its own cause) in the same transaction as the
  first message of the new one, and only while it is not firing. The new one continues from the withdrawn time, and
  after the last time that was delivered or cancelled, which may be in the future. All definitions of a schedule have
  the same owner, so nothing can happen in between.
* A withdrawn source is forgotten, along with its seen times, so that a definition can be restored. The last one of them
  is in the header ``marq-previous-time`` of the new definition's first message.

Each message also has the last times that were delivered before it, for people: they go from one message to the next in
the header ``marq-previous-runs``, and start over with a changed definition, whose messages have other ids.

The next time is after the last one written and after the log's clock. If no workers were running or the queue was
paused for a while, only the message that was already written is delivered late. With ``catch_up``, the next time is the
one after the last one written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from marq.core.lease_book import LeaseBook
from marq.core.redeliver_or_dead_letter import DueAction
from marq.core.storage.rows import State
from marq.core.tracker import Tracker
from marq.settings.schedule_definitions import Schedule, ScheduleLayers, home_partition
from marq.wire.markers import ANY_QUEUE, Batch, Cause, Delay, Fact, Kind, Payload, Source, payload_bytes
from marq.wire.names import HEADER_ROOM_BYTES, PREVIOUS_HEADER, RUNS_HEADER, schedule_name
from marq.wire.record_headers import previous_runs_s, previous_time_s

#: Maximum number of missed messages that a schedule writes at a time, and their bytes.
MAX_MISSED = 100
MAX_MISSED_BYTES = 200_000
#: Times in a message that were delivered before it.
MAX_RUNS = 10

#: Returns the next time of a schedule after the given one, in seconds since the epoch; None if there is none.
NextTime = Callable[[Schedule, int], int | None]

#: Returns the payload of an open message by queue, source and number; None if it is not known.
FindPayload = Callable[[str, Source, int], Payload | None]


@dataclass(slots=True)
class _Former:
    """The times of a schedule's withdrawn definition, from which the new one continues."""

    #: The first time that was neither delivered nor cancelled; None if all were.
    first_s: int | None = None
    #: The last time before it that was delivered or cancelled, even if that time is in the future.
    last_s: int | None = None
    #: Whether one of its messages is being sent.
    is_sending: bool = False


_NO_FORMER = _Former()


class Planner:
    """Plans the schedules of one markers partition; ``limit_bytes`` is the record size limit of the messages topic."""

    def __init__(
        self,
        partition: int,
        partitions: int,
        layers: Callable[[], ScheduleLayers],
        next_time: NextTime,
        limit_bytes: int,
    ) -> None:
        self._partition = partition
        self._partitions = partitions
        self._layers = layers
        self._next_time = next_time
        self._limit_bytes = limit_bytes
        #: The input of the last plan: nothing else changes a plan.
        self._planned_for: tuple[int, int] | None = None

    def schedules(self) -> list[Schedule]:
        """Return the schedules whose home is this partition, sorted by name."""
        return [
            schedule
            for name, schedule in sorted(self._layers().current.items())
            if home_partition(name, self._partitions) == self._partition
        ]

    def problem(self, schedule: Schedule) -> str:
        """Return why a schedule with times has no messages, or ""."""
        size, room = payload_bytes(_largest(schedule, 0)), self._limit_bytes - HEADER_ROOM_BYTES
        return f"its messages are too large: {size} bytes, and there is room for {room}" if size > room else ""

    def source(self, schedule: Schedule) -> Source:
        return schedule.source(self._partitions)

    def has_to_plan(self, tracker: Tracker) -> bool:
        """Return whether anything has changed since the last plan, and all earlier markers are read."""
        return tracker.caught_up and self._planned_for != (tracker.book.scheduled_changes, self._layers().version)

    def plan(self, tracker: Tracker, monotonic_ms: int, payload: FindPayload) -> list[Batch]:
        """Return the markers to write now, in one transaction; all earlier ones must have been read back."""
        book = tracker.book
        if not tracker.caught_up:
            self._planned_for = None
            return []
        if not self.has_to_plan(tracker):
            return []
        self._planned_for = (book.scheduled_changes, self._layers().version)
        now_s, current = _now_s(book, monotonic_ms), self._current()
        plan: list[Batch] = []
        formers: dict[str, _Former] = {}
        for source in sorted(book.scheduled - current.keys()):
            # A schedule has one former definition at most: plans withdraw all others.
            facts, formers[schedule_name(source.topic)] = _withdraw(book, tracker.holder, source, payload)
            plan += facts
        for source, schedule in current.items():
            former = formers.get(schedule.name, _NO_FORMER)
            if not (former.is_sending or book.open_in(ANY_QUEUE, source)):
                plan += self._delays(book, tracker.holder, schedule, now_s, former)
        return plan

    def follow(
        self, tracker: Tracker, fires: Sequence[DueAction], monotonic_ms: int, payload: FindPayload
    ) -> list[Delay]:
        """Return the next messages of schedules, to be written in one transaction with ``fires``.

        If they were written later, the next owner might have to write them. It would not know how late these messages
        were, so it would skip all times since then.
        """
        book = tracker.book
        if not book.scheduled:
            return []
        fired: dict[Source, list[DueAction]] = {}
        for fire in fires:
            if fire.source in book.scheduled:
                fired.setdefault(fire.source, []).append(fire)
        if not fired:
            return []
        now_s, current = _now_s(book, monotonic_ms), self._current()
        plan: list[Delay] = []
        for source, ended in fired.items():
            if source in current and len(ended) == len(book.open_in(ANY_QUEUE, source)):
                runs_s = _runs_s(ended, payload)
                plan += self._delays(book, tracker.holder, current[source], now_s, _NO_FORMER, runs_s)
        return plan

    def _current(self) -> dict[Source, Schedule]:
        return {self.source(schedule): schedule for schedule in self.schedules() if schedule.enabled}

    def _delays(
        self,
        book: LeaseBook,
        holder: int,
        schedule: Schedule,
        now_s: int,
        former: _Former,
        runs_s: Sequence[int] = (),
    ) -> list[Delay]:
        source = self.source(schedule)
        written = book.last_number(source)
        last = former.last_s if written is None else written
        after = now_s if former.first_s is None else min(now_s, former.first_s - 1)
        if last is not None:
            after = last if schedule.catch_up and written is not None else max(after, last)
        if self.problem(schedule):
            return []
        times: list[int] = []
        most = self._most_missed(schedule, now_s) if schedule.catch_up else 1
        while len(times) < most and (time_s := self._next_time(schedule, after)) is not None:
            times.append(time_s)
            if time_s > now_s:
                break
            after = time_s
        if not times:
            return []
        payloads = [
            _payload(schedule, time_s, previous_s, [*reversed(times[:index]), *runs_s])
            for index, (time_s, previous_s) in enumerate(zip(times, [last, *times], strict=False))
        ]
        return [Delay(schedule.queue, holder, source, times, [time_s * 1000 for time_s in times], False, 0, payloads)]

    def _most_missed(self, schedule: Schedule, now_s: int) -> int:
        """Return how many messages fit into one marker; the markers topic accepts more than the messages topic."""
        # The broker would refuse a larger marker of every new owner, and the partition would redeliver nothing.
        room = min(MAX_MISSED_BYTES, self._limit_bytes)
        return max(1, min(MAX_MISSED, room // payload_bytes(_largest(schedule, now_s))))


def _withdraw(book: LeaseBook, holder: int, source: Source, payload: FindPayload) -> tuple[list[Fact], _Former]:
    opened = book.open_in(ANY_QUEUE, source)
    queue = next((lease.queue for lease in opened.values()), schedule_name(source.topic))
    if not book.hold_back(queue, source):
        return [], _Former(is_sending=True)
    first_s = min([number for number, lease in opened.items() if lease.state is not State.CANCELLED], default=None)
    last_s = book.last_number(source) if first_s is None else previous_time_s(payload(queue, source, first_s))
    numbers = sorted(opened) or [book.last_number(source) or 0]
    count = len(numbers)
    fact = Fact(Kind.CANCELLED, queue, holder, source, numbers, [1] * count, [Cause.WITHDRAWN] * count)
    return [fact], _Former(first_s, last_s)


def _now_s(book: LeaseBook, monotonic_ms: int) -> int:
    """Return the log's time by the owner's clock since its own TICK; jumps of the broker's clock have no effect."""
    return (book.clock.anchor_now_ms + monotonic_ms - book.clock.anchor_monotonic_ms) // 1000


def _runs_s(ended: Sequence[DueAction], payload: FindPayload) -> list[int]:
    """Return the times of a schedule that have been delivered with these messages, its last ones; the latest first."""
    first = min(ended, key=lambda fire: fire.offset)
    delivered = sorted((fire.offset for fire in ended if fire.fact_kind is not Kind.CANCELLED), reverse=True)
    return [*delivered, *previous_runs_s(payload(first.lease.queue, first.source, first.offset))]


def _largest(schedule: Schedule, time_s: int) -> Payload:
    """Return the largest message of a schedule with times like this one."""
    return _payload(schedule, time_s, time_s, [time_s] * MAX_RUNS)


def _payload(schedule: Schedule, time_s: int, previous_s: int | None, runs_s: Sequence[int]) -> Payload:
    headers = list(schedule.payload_headers)
    if previous_s is not None:
        headers.append((PREVIOUS_HEADER, b"%d" % previous_s))
    if runs_s:
        headers.append((RUNS_HEADER, b",".join(b"%d" % run_s for run_s in runs_s[:MAX_RUNS])))
    return Payload(time_s * 1000, 1, schedule.queue.encode(), headers, schedule.value.encode())
