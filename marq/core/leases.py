"""The lease book: a fold over the markers of one partition.

The states and rules are in :mod:`marq.core.transitions`. The book applies them to a batch as a whole, because messages
that were acquired together share a lease. :class:`marq.core.storage.table_image.TableImage` stores its state, and
:class:`DueMessages` decides what happens when leases expire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from marq.core.due_messages import DueMessages
from marq.core.redeliver_or_dead_letter import release_delay_ms
from marq.core.replies import PendingReplies
from marq.core.storage.invalid_times import InvalidTimes
from marq.core.storage.open_messages import NO_MESSAGES, OpenMessages
from marq.core.storage.rows import LeaseRow, State, row_key
from marq.core.transitions import END, ENDED, HOLDER_ONLY, NEW, TRANSITIONS, Absent, Marker, Moves
from marq.settings.queue import QueueSettings
from marq.wire.markers import (
    FACTS,
    MIXED_QUEUES,
    NOW,
    Ack,
    Acquire,
    Answer,
    Batch,
    Cancel,
    Cause,
    Delay,
    Discard,
    Dispatch,
    Fact,
    Reject,
    Release,
    Renew,
    Reschedule,
    Tick,
    group_by_due,
    runs_by_due,
)
from marq.wire.names import is_scheduled, is_synthetic

#: The count of each fact, as a field of Counts.
_FACT_COUNTS = {kind: kind.name.lower() for kind in FACTS}

# Looked up for every batch.
_ACQUIRE, _ACQUIRE_EARLY = TRANSITIONS[Marker.ACQUIRE], TRANSITIONS[Marker.ACQUIRE_EARLY]
_ACK, _FACT = TRANSITIONS[Marker.ACK], TRANSITIONS[Marker.FACT]

_Selective = Renew | Dispatch | Release | Reject | Reschedule | Cancel
_Moved = list[tuple[LeaseRow, list[int], State]]


class LeaseBook(DueMessages):
    """The open messages of one markers partition, as its markers left them."""

    def __init__(self, settings: Callable[[str], QueueSettings]) -> None:
        super().__init__(settings)
        self._replies = PendingReplies()
        self.invalid_times = InvalidTimes()

    def fold(self, batch: Batch, append_time_ms: int, offset: int) -> int:
        """Fold the record at ``offset``; return the jump of the broker's clock that a TICK found, in ms, or 0."""
        assert offset > self.applied, f"record {offset} folded after {self.applied}"
        self.skip(append_time_ms, offset)
        if isinstance(batch, Tick):
            return self.clock.tick(append_time_ms, batch.holder, batch.monotonic_ms)
        _FOLDS[type(batch)](self, batch)
        return 0

    def skip(self, append_time_ms: int, offset: int) -> None:
        """Advance the clock and the position past a record without markers."""
        self.applied = offset
        self.clock.advance(append_time_ms)
        self._changed = True

    def passed(self, end: int) -> None:
        """Advance the position to ``end``: only Kafka's control records are left before it."""
        self.applied = max(self.applied, end - 1)

    def _fold_acquire(self, batch: Acquire) -> None:
        source, offsets = batch.source, batch.offsets
        opened, marks = self._of(source), self._marks_of(batch.queue, source)
        if offsets[0] >= marks.end:
            self._acquire(opened, batch, NEW, offsets)
        else:
            states: dict[State | Absent, list[int]] = {}
            for offset in offsets:
                lease = opened.leases.get(offset)
                state = lease.state if lease is not None else ENDED if offset in marks else NEW
                states.setdefault(state, []).append(offset)
            for state, group in states.items():
                self._acquire(opened, batch, state, group)
        marks.add(batch.from_offset, offsets[-1] + 1)

    def _acquire(self, opened: OpenMessages, batch: Acquire, state: State | Absent, offsets: Sequence[int]) -> None:
        """Acquire messages that are all in the same state."""
        counts, now_ms = self._count(batch.queue), self.clock.now_ms
        for attempt, due_ms, group in group_by_due(batch, offsets):
            early = due_ms != NOW
            to = (_ACQUIRE_EARLY if early else _ACQUIRE).get(state)
            if not isinstance(to, State):
                continue
            holder, due_ms = (0, due_ms) if early else (batch.holder, now_ms + batch.lease_ms)
            lease = LeaseRow(batch.queue, holder, attempt, due_ms, now_ms, to)
            if isinstance(state, State):
                self._replace(opened, group, lease)
                continue
            opened.leases.update(dict.fromkeys(group, lease))
            self._due.push(opened, group, lease)
            self._opened(opened, batch, group)
            if early:
                counts.delayed += len(group)
            else:
                counts.acquired += len(group)
        if state is NEW:
            counts.invalid_deliver_at += self.invalid_times.note(batch, offsets)
        else:
            counts.reacquired += len(offsets)

    def _fold_delay(self, batch: Delay) -> None:
        source, offsets = batch.source, batch.offsets
        opened, counts = self._of(source), self._count(batch.queue)
        new = [offset for offset in offsets if offset not in opened.leases]
        if batch.from_offset is not None and not is_synthetic(source.topic):
            new = self.settlements.settle(batch, new)
            counts.redriven += len(new)
        elif batch.from_offset is not None:
            marks = self._marks_of("", source)
            new = [offset for offset in new if offset not in marks]
            marks.add(batch.from_offset, offsets[-1] + 1)
            if is_scheduled(source.topic):
                self._note_schedule(source)
        counts.reacquired += len(offsets) - len(new)
        counts.delayed += len(new)
        now_ms, state = self.clock.now_ms, State(TRANSITIONS[Marker.DELAY][NEW])
        base_ms = now_ms if batch.relative else 0
        leases, push = opened.leases, self._due.push
        # Each message may have a lease of its own.
        for attempt, time_ms, run in runs_by_due(batch, new):
            lease = LeaseRow(batch.queue, 0, attempt, base_ms + time_ms, now_ms, state)
            for offset in run:
                leases[offset] = lease
            push(opened, run, lease)
        self._opened(opened, batch, new)

    def _opened(self, opened: OpenMessages, batch: Acquire | Delay, offsets: Sequence[int]) -> None:
        opened.fresh.update(dict.fromkeys(offsets, batch))
        self._open_count += len(offsets)
        self._drop_stale_hints()

    def _fold_discard(self, batch: Discard) -> None:
        opened = self._known_of(batch.source)
        new = [offset for offset in batch.offsets if offset not in opened.leases]
        self._count(batch.queue).discarded += len(self.settlements.settle(batch, new))

    def _fold_renew(self, batch: Renew | Dispatch) -> None:
        opened, due_ms = self._known_of(batch.source), self.clock.now_ms + batch.lease_ms
        moved, _ = self._moves(opened, batch, Marker.DISPATCH if isinstance(batch, Dispatch) else Marker.RENEW)
        for lease, offsets, to in moved:
            self._count(lease.queue).renewed += len(offsets)
            renewed = LeaseRow(lease.queue, lease.holder, lease.attempt, due_ms, lease.since_ms, to)
            self._replace(opened, offsets, renewed)

    def _fold_release(self, batch: Release) -> None:
        opened, now_ms, counted = self._known_of(batch.source), self.clock.now_ms, batch.counted
        moved, late = self._moves(opened, batch, Marker.RELEASE if counted else Marker.RELEASE_UNCOUNTED)
        index = dict(zip(batch.offsets, zip(batch.delays_ms, batch.errors, strict=True), strict=True))
        for lease, offsets, to in moved:
            self._count(lease.queue).released += len(offsets)
            settings = self._settings(lease.queue)
            groups: dict[tuple[int, str], list[int]] = {}
            for offset in offsets:
                delay_ms, error = index[offset]
                seed = row_key(batch.source, offset)
                delay_ms = release_delay_ms(lease.attempt, counted, delay_ms, settings, seed)
                groups.setdefault((now_ms + delay_ms, error), []).append(offset)
            for (due_ms, error), group in groups.items():
                released = LeaseRow(lease.queue, 0, lease.attempt, due_ms, lease.since_ms, to, counted, error)
                self._replace(opened, group, released)
        if late:
            self._count(batch.queue).late += len(late)

    def _fold_reject(self, batch: Reject) -> None:
        opened, now_ms = self._known_of(batch.source), self.clock.now_ms
        moved, late = self._moves(opened, batch, Marker.REJECT)
        index = dict(zip(batch.offsets, batch.reasons, strict=True))
        for lease, offsets, to in moved:
            self._count(lease.queue).rejected += len(offsets)
            for offset in offsets:
                rejected = LeaseRow(lease.queue, 0, lease.attempt, now_ms, lease.since_ms, to, text=index[offset])
                self._replace(opened, [offset], rejected)
        if late:
            self._count(batch.queue).late += len(late)

    def _fold_reschedule(self, batch: Reschedule) -> None:
        opened, base_ms = self._known_of(batch.source), self.clock.now_ms if batch.relative else 0
        moved, late = self._moves(opened, batch, Marker.RESCHEDULE)
        index = dict(zip(batch.offsets, batch.times_ms, strict=True))
        for lease, offsets, to in moved:
            groups: dict[int, list[int]] = {}
            for offset in offsets:
                groups.setdefault(base_ms + index[offset], []).append(offset)
            for due_ms, group in groups.items():
                later = LeaseRow(lease.queue, 0, lease.attempt, due_ms, lease.since_ms, to, lease.counted, lease.text)
                self._replace(opened, group, later)
                self._replies.ask(batch, group, later)
        self._replies.ask(batch, late, None)

    def _fold_cancel(self, batch: Cancel) -> None:
        opened, now_ms = self._known_of(batch.source), self.clock.now_ms
        moved, late = self._moves(opened, batch, Marker.CANCEL)
        for lease, offsets, to in moved:
            if lease.state is not to:
                final = LeaseRow(lease.queue, 0, lease.attempt, now_ms, lease.since_ms, to, lease.counted, lease.text)
                self._replace(opened, offsets, final)
        self._replies.ask(batch, late, None)

    def _moves(self, opened: OpenMessages, batch: _Selective, marker: Marker) -> tuple[_Moved, list[int]]:
        """Return the messages that a marker moves, by lease, with their new states; and all others."""
        groups: dict[LeaseRow | None, list[int]] = {}
        for lease, run in groupby(batch.offsets, opened.leases.get):
            groups.setdefault(lease, []).extend(run)
        moved: _Moved = []
        others: list[int] = []
        for lease, offsets in groups.items():
            to = TRANSITIONS[marker].get(ENDED if lease is None else lease.state)
            if lease is None or not isinstance(to, State) or (marker in HOLDER_ONLY and lease.holder != batch.holder):
                others += offsets
            else:
                moved.append((lease, offsets, to))
        return moved, others

    def _replace(self, opened: OpenMessages, offsets: Sequence[int], lease: LeaseRow) -> None:
        opened.replace(offsets, lease)
        self._due.push(opened, offsets, lease)
        self._drop_stale_hints()

    def _fold_ack(self, batch: Ack) -> None:
        opened = self._known_of(batch.source)
        if batch.queue == MIXED_QUEUES:
            queues = [lease.queue for lease in map(opened.leases.get, batch.offsets) if lease is not None]
            for queue, count in Counter(queues).items():
                self._count(queue).acked += count
            self._close(opened, batch.offsets, _ACK)
            return
        closed = self._close(opened, batch.offsets, _ACK)
        counts = self._count(batch.queue)
        counts.acked += closed
        counts.late += len(batch.offsets) - closed

    def _fold_fact(self, batch: Fact) -> None:
        opened = self._known_of(batch.source)
        before = len(opened.firing)
        opened.firing.difference_update(batch.offsets)
        self._firing_count -= before - len(opened.firing)
        closed = self._close(opened, batch.offsets, _FACT)
        counts = self._count(batch.queue)
        if is_scheduled(batch.source.topic) and Cause.WITHDRAWN in batch.causes:
            self._forget_schedule(batch.source)
            counts.cancelled += closed
            return
        counts.expired += batch.causes.count(Cause.EXPIRED)
        # Counted although an ACK may have closed the message meanwhile: the redelivery is in the queue.
        name = _FACT_COUNTS[batch.kind]
        setattr(counts, name, getattr(counts, name) + len(batch.offsets))

    def _close(self, opened: OpenMessages, offsets: Sequence[int], ends: Moves) -> int:
        """Close the messages that a marker ends; return how many were open."""
        # A look at each lease would cost as much as closing it.
        if ends is not END:
            offsets = [o for o in offsets if o in opened.leases and ends.get(opened.leases[o].state) is ENDED]
        closed = opened.close(offsets)
        self._open_count -= closed
        if closed and is_scheduled(opened.source.topic):
            self.scheduled_changes += 1
        return closed

    def take_answers(self) -> list[Answer]:
        """Return the answers to RESCHEDULEs and CANCELs; write them before the next redeliveries."""
        return self._replies.take(lambda source: self._sources.get(source, NO_MESSAGES))


_FOLDS: dict[type, Callable[[LeaseBook, Any], None]] = {
    Acquire: LeaseBook._fold_acquire,
    Renew: LeaseBook._fold_renew,
    Dispatch: LeaseBook._fold_renew,
    Ack: LeaseBook._fold_ack,
    Release: LeaseBook._fold_release,
    Reject: LeaseBook._fold_reject,
    Delay: LeaseBook._fold_delay,
    Reschedule: LeaseBook._fold_reschedule,
    Cancel: LeaseBook._fold_cancel,
    Discard: LeaseBook._fold_discard,
    Answer: lambda book, batch: None,
    Fact: LeaseBook._fold_fact,
}
