"""The planner of schedules: the owner of a markers partition writes one message for each scheduled time.

A schedule has one undelivered message at a time: a DELAY whose number is the time, in the source of its definition
(:meth:`marq.settings.schedule_definitions.Schedule.source`). It is a row like any other, so it outlives its writer and
can be listed, rescheduled and cancelled. The next one is written in the transaction that delivers it or ends it as
cancelled. No time is skipped or repeated:

* Only the owner plans, through the producer that fences all former owners, and only after it has read everything that
  was written before. So it never repeats a time.
* ``from_offset`` is 0: every time up to the last one written counts as seen, no matter which owner repeats it.
* A message of a former definition is withdrawn (a fact CANCELLED, with its own cause) in the same transaction as the
  first message of the new one, and only while it is not firing. The new one continues from the withdrawn time. All
  definitions of a schedule have the same owner, so nothing can happen in between.
* A withdrawn source is forgotten, along with its seen times, so a definition that is restored starts afresh.

The next time is after the last one written and after the log's clock. If no workers were running for a while, only the
message that was already written is delivered late. With ``catch_up``, the next time is the one after the last one
written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from marq.core.lease_book import LeaseBook
from marq.core.redeliver_or_dead_letter import DueAction
from marq.core.tracker import Tracker
from marq.settings.schedule_definitions import Schedule, ScheduleLayers, home_partition
from marq.wire.markers import ANY_QUEUE, Batch, Cause, Delay, Fact, Kind, Payload, Source, payload_bytes
from marq.wire.names import HEADER_ROOM_BYTES, PREVIOUS_HEADER, schedule_name

#: Maximum number of missed messages that a schedule writes at a time, and their bytes.
MAX_MISSED = 100
MAX_MISSED_BYTES = 200_000

#: Returns the next time of a schedule after the given one, in seconds since the epoch; None if there is none.
NextTime = Callable[[Schedule, int], int | None]


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
        size, room = payload_bytes(_payload(schedule, 0, 0)), self._limit_bytes - HEADER_ROOM_BYTES
        return f"its messages are too large: {size} bytes, and there is room for {room}" if size > room else ""

    def source(self, schedule: Schedule) -> Source:
        return schedule.source(self._partitions)

    def has_to_plan(self, tracker: Tracker) -> bool:
        """Return whether anything has changed since the last plan, and all earlier markers are read."""
        return tracker.caught_up and self._planned_for != (tracker.book.scheduled_changes, self._layers().version)

    def plan(self, tracker: Tracker, monotonic_ms: int) -> list[Batch]:
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
        #: The first withdrawn time of each schedule; None while one of its messages is being sent.
        freed: dict[str, int | None] = {}
        for source in sorted(book.scheduled - current.keys()):
            self._withdraw(book, tracker.holder, source, plan, freed)
        for source, schedule in current.items():
            if book.open_in(ANY_QUEUE, source):
                continue
            first = freed.get(schedule.name, now_s + 1)
            if first is not None:
                plan += self._delays(book, tracker.holder, schedule, now_s, first - 1)
        return plan

    def follow(self, tracker: Tracker, fires: Sequence[DueAction], monotonic_ms: int) -> list[Delay]:
        """Return the next messages of schedules, to be written in one transaction with ``fires``.

        If they were written later, the next owner might have to write them. It would not know how late these messages
        were, so it would skip all times since then.
        """
        book = tracker.book
        if not book.scheduled:
            return []
        fired: dict[Source, list[int]] = {}
        for fire in fires:
            if fire.source in book.scheduled:
                fired.setdefault(fire.source, []).append(fire.offset)
        if not fired:
            return []
        now_s, current = _now_s(book, monotonic_ms), self._current()
        plan: list[Delay] = []
        for source, numbers in fired.items():
            if source in current and len(numbers) == len(book.open_in(ANY_QUEUE, source)):
                plan += self._delays(book, tracker.holder, current[source], now_s, now_s)
        return plan

    def _current(self) -> dict[Source, Schedule]:
        return {self.source(each): each for each in self.schedules() if each.enabled}

    def _withdraw(
        self, book: LeaseBook, holder: int, source: Source, plan: list[Batch], freed: dict[str, int | None]
    ) -> None:
        name, opened = schedule_name(source.topic), book.open_in(ANY_QUEUE, source)
        queue = next((lease.queue for lease in opened.values()), name)
        if not book.hold_back(queue, source):
            freed[name] = None
            return
        if opened and freed.get(name, 0) is not None:
            freed[name] = min(freed.get(name) or min(opened), *opened)
        numbers = sorted(opened) or [book.last_number(source) or 0]
        count = len(numbers)
        plan.append(Fact(Kind.CANCELLED, queue, holder, source, numbers, [1] * count, [Cause.WITHDRAWN] * count))

    def _delays(self, book: LeaseBook, holder: int, schedule: Schedule, now_s: int, freed_s: int) -> list[Delay]:
        source = self.source(schedule)
        last = book.last_number(source)
        after = min(now_s, freed_s)
        if last is not None:
            after = last if schedule.catch_up else max(after, last)
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
        payloads = [_payload(schedule, *each) for each in zip(times, [last, *times], strict=False)]
        return [Delay(schedule.queue, holder, source, times, [time_s * 1000 for time_s in times], False, 0, payloads)]

    def _most_missed(self, schedule: Schedule, now_s: int) -> int:
        """Return how many messages fit into one marker; the markers topic accepts more than the messages topic."""
        # The broker would refuse a larger marker of every new owner, and the partition would redeliver nothing.
        room = min(MAX_MISSED_BYTES, self._limit_bytes)
        return max(1, min(MAX_MISSED, room // payload_bytes(_payload(schedule, now_s, now_s))))


def _now_s(book: LeaseBook, monotonic_ms: int) -> int:
    """Return the log's time by the owner's clock since its own TICK; jumps of the broker's clock have no effect."""
    return (book.clock.anchor_now_ms + monotonic_ms - book.clock.anchor_monotonic_ms) // 1000


def _payload(schedule: Schedule, time_s: int, previous_s: int | None) -> Payload:
    headers = list(schedule.payload_headers)
    if previous_s is not None:
        headers.append((PREVIOUS_HEADER, b"%d" % previous_s))
    return Payload(time_s * 1000, 1, schedule.queue.encode(), headers, schedule.value.encode())
