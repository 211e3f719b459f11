"""The lease book: a fold over the markers of one partition.

The states and rules are in :mod:`marq.core.transitions`. The book applies them to a batch as a whole, because messages
that were acquired together share a lease. :class:`marq.core.storage.table_image.TableImage` stores its state, and
:class:`DueMessages` decides what happens when leases expire.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, repeat
from typing import Any

from marq.core.due_messages import DueMessages
from marq.core.redeliver_or_dead_letter import release_delay_ms
from marq.core.request_answers import PendingReplies
from marq.core.storage.invalid_times import InvalidTimes
from marq.core.storage.rows import IN_ORDER, OUT_OF_LINE, LeaseRow, State, row_key
from marq.core.storage.table_image import OpenMessages
from marq.core.transitions import END, ENDED, HOLDER_ONLY, NEW, TRANSITIONS, Absent, Marker, Moves
from marq.settings.queue import QueueSettings
from marq.wire.markers import (
    ANY_QUEUE,
    DUE_AT_ONCE,
    FACTS,
    LAST,
    MAX_TIME_MS,
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
    Kind,
    MixedAcquire,
    Purge,
    Reject,
    Release,
    Renew,
    Reschedule,
    Resume,
    Resumed,
    Source,
    Tick,
    may_have,
)
from marq.wire.names import DEDUPLICATION_ID_HEADER, WITHOUT_RECORDS, is_scheduled, is_synthetic
from marq.wire.ordered_holders import follows

#: The field of EventCounts for each fact.
_FACT_COUNTS = {kind: kind.name.lower() for kind in FACTS}

# Looked up for every batch.
_ACQUIRE, _ACQUIRE_EARLY = TRANSITIONS[Marker.ACQUIRE], TRANSITIONS[Marker.ACQUIRE_EARLY]
_ACQUIRE_IN_ORDER = TRANSITIONS[Marker.ACQUIRE_IN_ORDER]
_ACK, _FACT = TRANSITIONS[Marker.ACK], TRANSITIONS[Marker.FACT]

_Selective = Renew | Dispatch | Release | Reject | Reschedule | Cancel
_Moved = list[tuple[OpenMessages, LeaseRow, list[int], State]]


def due_at(base_ms: int, after_ms: int) -> int:
    """Return a due time that fits into the row of a lease: markers may have any time or delay of 63 bits."""
    return min(base_ms + after_ms, MAX_TIME_MS)


def early_due_at(now_ms: int, due_ms: int) -> int:
    """Return the due time of a message whose ACQUIRE has one, at the log's clock ``now_ms``."""
    return due_at(0, now_ms if due_ms == DUE_AT_ONCE else due_ms)


def group_by_due(batch: Acquire, offsets: Sequence[int]) -> Iterable[tuple[int, int, Sequence[int]]]:
    """Group offsets of a batch by their attempts and times, which are nearly always 1 and :data:`NOW`."""
    attempts, times = batch.attempts, batch.dues_ms
    if not offsets:
        return ()
    if attempts is None and times is None:
        return ((1, NOW, offsets),)
    groups: dict[tuple[int, int], list[int]] = {}
    for offset in offsets:
        index = bisect_left(batch.offsets, offset)
        shared = (1 if attempts is None else attempts[index], NOW if times is None else times[index])
        groups.setdefault(shared, []).append(offset)
    return [(attempt, time_ms, group) for (attempt, time_ms), group in groups.items()]


def runs_by_due(batch: Delay, offsets: Sequence[int]) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Cut offsets of a batch into runs with the same attempt and time; each message may have its own time."""
    attempts = repeat(1) if batch.attempts is None else batch.attempts
    members: Iterable[tuple[int, int, int]] = zip(batch.offsets, attempts, batch.times_ms, strict=False)
    if len(offsets) < len(batch.offsets):
        wanted = set(offsets)
        members = [member for member in members if member[0] in wanted]
    last_attempt, last_ms, run = 0, 0, list[int]()
    for offset, attempt, time_ms in members:
        if time_ms == last_ms and attempt == last_attempt:
            run.append(offset)
            continue
        if run:
            yield last_attempt, last_ms, run
        last_attempt, last_ms, run = attempt, time_ms, [offset]
    if run:
        yield last_attempt, last_ms, run


class LeaseBook(DueMessages):
    """The open messages of one markers partition, as its markers left them."""

    def __init__(self, settings: Callable[[str], QueueSettings]) -> None:
        super().__init__(settings)
        self._replies = PendingReplies()
        self.invalid_times = InvalidTimes()
        #: When this book noticed that a queue's own topic was created again, by queue and topic.
        self.recreated: dict[tuple[str, str], int] = {}
        #: The sources of such topics, by queue, since the last :meth:`take_recreated`.
        self._recreated: set[tuple[str, Source]] = set()

    def fold(self, batch: Batch, append_time_ms: int, offset: int) -> int:
        """Fold the record at ``offset``; return the jump of the broker's clock that a TICK found, in ms, or 0."""
        assert offset > self.applied, f"record {offset} folded after {self.applied}"
        self.skip(append_time_ms, offset)
        if isinstance(batch, Tick):
            return self.clock.tick(append_time_ms, batch.holder, batch.monotonic_ms)
        _FOLDS[type(batch)](self, batch)
        # A PURGE or RESUME may concern all open messages, and a marker without a queue those of each.
        messages = self._open_count if isinstance(batch, Purge | Resume) else len(batch.offsets)
        any_queue = batch.queue == ANY_QUEUE and not isinstance(batch, MixedAcquire)
        queues = self.queues_in(batch.source) if any_queue else 1
        # A message that has ended may have a changed row as well.
        self._most_rows += 1 + 2 * messages * queues
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
        self._note_recreated(batch.queue, source)
        opened, acquired = self._of(batch.queue, source), self._acquired_of(batch.queue, source)
        if offsets[0] >= acquired.end:
            self._acquire(opened, batch, NEW, offsets)
        else:
            states: dict[State | Absent, list[int]] = {}
            for offset in offsets:
                lease = opened.leases.get(offset)
                state = lease.state if lease is not None else ENDED if offset in acquired else NEW
                states.setdefault(state, []).append(offset)
            for state, group in states.items():
                self._acquire(opened, batch, state, group)
        acquired.add(batch.from_offset, offsets[-1] + 1)

    def _fold_mixed_acquire(self, batch: MixedAcquire) -> None:
        for acquire in batch.acquires():
            self._fold_acquire(acquire)

    def _note_recreated(self, queue: str, source: Source) -> None:
        """Note that the topic of a source was created again, if this is the queue's first marker about the source."""
        if (queue, source) not in self.acquired and any(
            # One without an id is from before the brokers, or Marq, had them.
            former.log != former
            for former in self.former_incarnations(queue, source)
        ):
            self._recreated.add((queue, source))
            self.recreated[queue, source.log.topic] = self.clock.now_ms

    def _acquire(self, opened: OpenMessages, batch: Acquire, state: State | Absent, offsets: Sequence[int]) -> None:
        """Acquire messages that are all in the same state."""
        counts, now_ms = self._count(batch.queue), self.clock.now_ms
        taken, redelivered = offsets, 0
        if batch.in_order and state in IN_ORDER:
            taken = [offset for offset in offsets if follows(batch.holder, opened.leases[offset].holder)]
        elif batch.in_order and state is State.LEASED:
            taken = [offset for offset in offsets if opened.leases[offset].text != OUT_OF_LINE]
        for attempt, due_ms, group in group_by_due(batch, taken):
            if state in IN_ORDER and batch.in_order:
                group = self._not_overtaken(opened, batch.holder, attempt, group)
                if not group:
                    continue
            early = due_ms != NOW
            to = (_ACQUIRE_EARLY if early else _ACQUIRE_IN_ORDER if batch.in_order else _ACQUIRE).get(state)
            if not isinstance(to, State):
                continue
            holder = self.applied if early else batch.holder
            due_ms = early_due_at(now_ms, due_ms) if early else now_ms + batch.lease_ms
            lease = LeaseRow(batch.queue, holder, attempt, due_ms, now_ms, to, batch.counted or early)
            if isinstance(state, State):
                redelivered += self._count_redelivered(opened, group, lease)
                # An attempt that counts stays so: this ACQUIRE may have been written late.
                counted = [] if lease.counted else [o for o in group if _counts(opened.leases[o], attempt)]
                if counted:
                    again = LeaseRow(batch.queue, holder, attempt, due_ms, now_ms, to)
                    self._replace(opened, counted, again)
                    group = [offset for offset in group if opened.leases[offset] is not again]
                if group:
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
            counts.reacquired += len(offsets) - redelivered

    def _not_overtaken(self, opened: OpenMessages, holder: int, attempt: int, offsets: Sequence[int]) -> Sequence[int]:
        """Leave out messages that this holder has acquired for a later attempt; this ACQUIRE was written late."""
        leases = opened.leases
        return [offset for offset in offsets if leases[offset].holder != holder or leases[offset].attempt <= attempt]

    def _count_redelivered(self, opened: OpenMessages, offsets: Sequence[int], lease: LeaseRow) -> int:
        """Count the messages that a consumer acquires to deliver them again in their place; return how many."""
        if lease.state not in IN_ORDER:
            return 0
        former = [opened.leases[offset] for offset in offsets]
        released = [row for row in former if row.state is State.WAITING_IN_ORDER]
        expired = [row for row in former if row.state is lease.state and row.attempt < lease.attempt]
        counts, redelivered = self._count(lease.queue), len(released) + len(expired)
        counts.expired += len(expired)
        counts.redelivered += redelivered
        counts.acquired += redelivered
        return redelivered

    def _fold_delay(self, batch: Delay) -> None:
        source, offsets = batch.source, batch.offsets
        opened, counts = self._of(batch.queue, source), self._count(batch.queue)
        new = [offset for offset in offsets if offset not in opened.leases]
        if batch.from_offset is not None and not is_synthetic(source.topic):
            new = self.settled_dead_letters.settle(batch, new)
            counts.redriven += len(new)
        elif batch.from_offset is not None:
            acquired = self._acquired_of("", source)
            new = [offset for offset in new if offset not in acquired]
            acquired.add(batch.from_offset, offsets[-1] + 1)
            if is_scheduled(source.topic):
                self._note_schedule(source)
        counts.reacquired += len(offsets) - len(new)
        if new and may_have(batch.payloads, DEDUPLICATION_ID_HEADER) and _has_ids_that_count(source.topic):
            window_ms = self._settings(batch.queue).deduplication_window_ms
            accepted = self.accepted_ids.accept(batch, new, self.applied, self.clock, window_ms)
            counts.deduplicated += len(new) - len(accepted)
            new = accepted
        counts.delayed += len(new)
        now_ms, state = self.clock.now_ms, State(TRANSITIONS[Marker.DELAY][NEW])
        base_ms = now_ms if batch.relative else 0
        leases, push = opened.leases, self._due.push
        # Each message may have a lease of its own.
        for attempt, time_ms, run in runs_by_due(batch, new):
            lease = LeaseRow(batch.queue, self.applied, attempt, due_at(base_ms, time_ms), now_ms, state)
            for offset in run:
                leases[offset] = lease
            push(opened, run, lease)
        self._opened(opened, batch, new)

    def _opened(self, opened: OpenMessages, batch: Acquire | Delay, offsets: Sequence[int]) -> None:
        opened.fresh.update(dict.fromkeys(offsets, batch))
        self._open_count += len(offsets)
        self._drop_stale_hints()

    def _fold_discard(self, batch: Discard) -> None:
        opened = self._known_of(batch.queue, batch.source)
        new = [offset for offset in batch.offsets if offset not in opened.leases]
        self._count(batch.queue).deleted += len(self.settled_dead_letters.settle(batch, new))

    def _fold_renew(self, batch: Renew | Dispatch) -> None:
        due_ms = self.clock.now_ms + batch.lease_ms
        started = isinstance(batch, Renew) and batch.started
        exactly = isinstance(batch, Renew) and batch.exactly
        moved, _ = self._moves(batch, Marker.DISPATCH if isinstance(batch, Dispatch) else Marker.RENEW)
        for opened, lease, offsets, to in moved:
            self._count(lease.queue).renewed += len(offsets)
            counted = lease.counted or started
            # A longer RENEW may have been on its way when this one was sent.
            until_ms = due_ms if exactly else max(due_ms, lease.due_ms)
            renewed = LeaseRow(
                lease.queue, lease.holder, lease.attempt, until_ms, lease.since_ms, to, counted, lease.text
            )  # fmt: skip
            self._replace(opened, offsets, renewed)

    def _fold_release(self, batch: Release) -> None:
        now_ms, counted = self.clock.now_ms, batch.counted
        moved, late = self._moves(batch, Marker.RELEASE if counted else Marker.RELEASE_UNCOUNTED)
        index = dict(zip(batch.offsets, zip(batch.delays_ms, batch.errors, strict=True), strict=True))
        for opened, lease, offsets, to in moved:
            self._count(lease.queue).released += len(offsets)
            settings, last = self._settings(lease.queue), TRANSITIONS[Marker.RELEASE_LAST].get(lease.state, to)
            groups: dict[tuple[int, str, State | Absent], list[int]] = {}
            for offset in offsets:
                delay_ms, error = index[offset]
                into = last if delay_ms == LAST else to
                seed = row_key(batch.queue, batch.source.log, offset)
                delay_ms = release_delay_ms(lease.attempt, counted, delay_ms, settings, seed)
                groups.setdefault((due_at(now_ms, delay_ms), error, into), []).append(offset)
            for (due_ms, error, into), group in groups.items():
                assert isinstance(into, State)
                # Kept, so that a late ACQUIRE of a former holder does not take the message.
                holder = lease.holder if into in IN_ORDER else 0
                released = LeaseRow(
                    lease.queue, holder, lease.attempt, due_ms, lease.since_ms, into, counted, error
                )  # fmt: skip
                self._replace(opened, group, released)
        if late:
            self._count(batch.queue).late += len(late)

    def _fold_reject(self, batch: Reject) -> None:
        now_ms = self.clock.now_ms
        moved, late = self._moves(batch, Marker.REJECT)
        index = dict(zip(batch.offsets, batch.reasons, strict=True))
        for opened, lease, offsets, to in moved:
            self._count(lease.queue).rejected += len(offsets)
            for offset in offsets:
                rejected = LeaseRow(lease.queue, 0, lease.attempt, now_ms, lease.since_ms, to, text=index[offset])
                self._replace(opened, [offset], rejected)
        if late:
            self._count(batch.queue).late += len(late)

    def _fold_reschedule(self, batch: Reschedule) -> None:
        base_ms = self.clock.now_ms if batch.relative else 0
        moved, late = self._moves(batch, Marker.RESCHEDULE)
        index = dict(zip(batch.offsets, batch.times_ms, strict=True))
        for opened, lease, offsets, to in moved:
            groups: dict[int, list[int]] = {}
            for offset in offsets:
                groups.setdefault(due_at(base_ms, index[offset]), []).append(offset)
            for due_ms, group in groups.items():
                # A delayed message keeps its place in the log, so that it keeps its order.
                holder = 0 if to is State.RELEASED else lease.holder
                later = LeaseRow(
                    lease.queue, holder, lease.attempt, due_ms, lease.since_ms, to, lease.counted, lease.text
                )  # fmt: skip
                self._replace(opened, group, later)
                self._replies.ask(batch, group, later)
        self._replies.ask(batch, late, None)

    def _fold_cancel(self, batch: Cancel) -> None:
        now_ms = self.clock.now_ms
        moved, late = self._moves(batch, Marker.CANCEL)
        for opened, lease, offsets, to in moved:
            if lease.state is not to:
                final = LeaseRow(lease.queue, 0, lease.attempt, now_ms, lease.since_ms, to, lease.counted, lease.text)
                self._replace(opened, offsets, final)
        self._replies.ask(batch, late, None)

    def _fold_purge(self, batch: Purge) -> None:
        now_ms, state = self.clock.now_ms, State(TRANSITIONS[Marker.PURGE][State.CANCELLED])
        for opened, lease, offsets in self.purged(batch):
            final = LeaseRow(lease.queue, 0, lease.attempt, now_ms, lease.since_ms, state, lease.counted, lease.text)
            self._replace(opened, offsets, final)
        if batch.source.topic != WITHOUT_RECORDS:
            self._note_recreated(batch.queue, batch.source)
            # The group may have started after the first record, but no consumer acquires what is before its start.
            self._acquired_of(batch.queue, batch.source).add(0, batch.end)

    def purged(self, batch: Purge) -> Iterator[tuple[OpenMessages, LeaseRow, Sequence[int]]]:
        """Yield the open messages that a PURGE would end if it were folded now, by lease."""
        moves = TRANSITIONS[Marker.PURGE_IN_FLIGHT if batch.in_flight else Marker.PURGE]
        sources = [batch.source]
        if batch.source.topic == WITHOUT_RECORDS:
            opened_by_delays = [opened.source for opened in self._each() if opened.queue == batch.queue]
            # A schedule continues: its next time is not a message yet.
            sources = [
                s for s in opened_by_delays if (batch.queue, s) not in self.acquired and not is_scheduled(s.topic)
            ]
        for source in sources:
            opened, groups = self._known_of(batch.queue, source), dict[LeaseRow, list[int]]()
            for offset, lease in opened.leases.items():
                before = (offset if source == batch.source else lease.since_ms) < batch.end
                if before and lease.state is not State.CANCELLED and lease.state in moves:
                    groups.setdefault(lease, []).append(offset)
            yield from [
                (opened, lease, group) for lease, group in groups.items() if self._may_purge(batch, lease, source)
            ]

    def _may_purge(self, batch: Purge, lease: LeaseRow, source: Source) -> bool:
        """Return whether a PURGE ends messages in such a state, and not only after the end of a delay."""
        if lease.state is State.WAITING_IN_ORDER and not batch.in_flight:
            # Its consumer may be about to deliver it again.
            return lease.blocks(self.clock.now_ms)
        return lease.state is not State.DELAYED or batch.delayed or not lease.is_delayed(source, self.clock.now_ms)

    def _fold_resume(self, batch: Resume) -> None:
        if batch.onwards:
            self._release_before(self._known_of(batch.queue, batch.source), batch.offsets[0])
            # No consumer asks about the records of a deleted topic again.
            for former in self.former_incarnations(batch.queue, batch.source):
                self._release_before(self._known_of(batch.queue, former), None)
        self._replies.ask_open(batch, self.applied)

    def _release_before(self, opened: OpenMessages, begin: int | None) -> None:
        """Remove from their lines the messages whose records are gone: the tracker redelivers them.

        They are those before ``begin``, or all.
        """
        moves = TRANSITIONS[Marker.RESUME]
        groups: dict[LeaseRow, list[int]] = {}
        for offset, lease in opened.leases.items():
            if (begin is None or offset < begin) and lease.state in moves:
                groups.setdefault(lease, []).append(offset)
        for lease, offsets in groups.items():
            to = State(moves[lease.state])
            holder, counted, text = 0, lease.counted, lease.text
            if to is State.LEASED:
                # A handler may or may not have seen it, so its attempt does not count.
                holder, counted, text = lease.holder, False, OUT_OF_LINE
            # Out of its line, a blocking message is not shown to operators, so none would end its delay.
            due_ms = self.clock.now_ms if lease.blocks(self.clock.now_ms) else lease.due_ms
            again = LeaseRow(lease.queue, holder, lease.attempt, due_ms, lease.since_ms, to, counted, text)
            self._replace(opened, offsets, again)

    def _moves(self, batch: _Selective, marker: Marker) -> tuple[_Moved, list[int]]:
        """Return the messages that a marker moves, by lease, with their new states, and the places of all others."""
        moved: _Moved = []
        others = set(batch.offsets)
        for opened in self._all_of(batch.queue, batch.source):
            groups: dict[LeaseRow | None, list[int]] = {}
            for lease, run in groupby(batch.offsets, opened.leases.get):
                groups.setdefault(lease, []).extend(run)
            for lease, offsets in groups.items():
                to = TRANSITIONS[marker].get(ENDED if lease is None else lease.state)
                if lease is not None and isinstance(to, State) and self._may(marker, lease, batch.holder):
                    moved.append((opened, lease, offsets, to))
                    others.difference_update(offsets)
        return moved, sorted(others)

    def _may(self, marker: Marker, lease: LeaseRow, holder: int) -> bool:
        """Return whether a marker by this holder may move a message in this state."""
        if marker in (Marker.RESCHEDULE, Marker.CANCEL) and lease.state is State.WAITING_IN_ORDER:
            # Unless it blocks its line, its consumer may be about to deliver it again.
            return lease.blocks(self.clock.now_ms)
        return marker not in HOLDER_ONLY or lease.holder == holder

    def _replace(self, opened: OpenMessages, offsets: Sequence[int], lease: LeaseRow) -> None:
        opened.replace(offsets, lease)
        self._due.push(opened, offsets, lease)
        self._drop_stale_hints()

    def _fold_ack(self, batch: Ack) -> None:
        if batch.queue == ANY_QUEUE:
            for opened, offsets in self._acknowledged(batch):
                self._count(opened.queue).acked += self._close(opened, offsets, _ACK)
            return
        closed = self._close(self._known_of(batch.queue, batch.source), batch.offsets, _ACK)
        counts = self._count(batch.queue)
        counts.acked += closed
        counts.late += len(batch.offsets) - closed

    def _acknowledged(self, batch: Ack) -> list[tuple[OpenMessages, list[int]]]:
        """Return the messages that an ACK without a queue ends: where several share a place, only its holder's."""
        asked, seen, shared = set(batch.offsets), set[int](), set[int]()
        # There may be thousands of queues, few of them with messages in the batch.
        found = [
            (self._known_of(opened.queue, batch.source), offsets)
            for opened in self._in(batch.source)
            if opened.leases and (offsets := opened.leases.keys() & asked)
        ]
        for _, offsets in found:
            shared |= seen & offsets
            seen |= offsets
        return [
            (
                opened,
                [offset for offset in offsets if offset not in shared or opened.leases[offset].holder == batch.holder],
            )
            for opened, offsets in found
            if offsets
        ]

    def _fold_fact(self, batch: Fact) -> None:
        opened = self._known_of(batch.queue, batch.source)
        before = len(opened.firing)
        opened.firing.difference_update(batch.offsets)
        self._firing_count -= before - len(opened.firing)
        closed = self._close(opened, batch.offsets, _FACT)
        if is_scheduled(batch.source.topic) and Cause.WITHDRAWN in batch.causes:
            self._forget_schedule(batch.source)
            if closed:  # else the fact's queue is only the schedule's name
                self._count(batch.queue).cancelled += closed
            return
        counts = self._count(batch.queue)
        counts.expired += batch.causes.count(Cause.EXPIRED)
        counts.too_large += batch.causes.count(Cause.TOO_LARGE)
        counts.gone += batch.causes.count(Cause.GONE)
        expired = batch.causes.count(Cause.MESSAGE_EXPIRED)
        counts.messages_expired += expired
        if batch.kind is Kind.CANCELLED:
            # No client has cancelled them.
            counts.cancelled -= expired
        # Counted although an ACK may have closed the message meanwhile: the redelivery is in the queue.
        name = _FACT_COUNTS[batch.kind]
        setattr(counts, name, getattr(counts, name) + len(batch.offsets))

    def _close(self, opened: OpenMessages, offsets: Sequence[int], ends: Moves) -> int:
        """Close the messages that a marker ends; return how many were open."""
        # Checking each lease would cost as much as closing it.
        if ends is not END:
            offsets = [o for o in offsets if o in opened.leases and ends.get(opened.leases[o].state) is ENDED]
        closed = opened.close(offsets)
        self._open_count -= closed
        if closed and is_scheduled(opened.source.topic):
            self.scheduled_changes += 1
        return closed

    def take_recreated(self) -> list[tuple[str, Source]]:
        """Return queues with sources whose topics were created again, as far as they were not returned before."""
        recreated, self._recreated = sorted(self._recreated), set()
        return recreated

    def take_answers(self) -> list[Answer | Resumed]:
        """Return the answers to RESCHEDULEs, CANCELs and RESUMEs; write them before the next redeliveries."""
        return self._replies.take(self, self.clock.now_ms)


def _counts(lease: LeaseRow, attempt: int) -> bool:
    """Return whether this attempt of a message counts already."""
    return lease.counted and lease.attempt == attempt


def _has_ids_that_count(topic: str) -> bool:
    """Return whether the deduplication ids of a source count: those of dead letters were accepted before."""
    return is_synthetic(topic) and not is_scheduled(topic)


_FOLDS: dict[type, Callable[[LeaseBook, Any], None]] = {
    Acquire: LeaseBook._fold_acquire,
    MixedAcquire: LeaseBook._fold_mixed_acquire,
    Renew: LeaseBook._fold_renew,
    Dispatch: LeaseBook._fold_renew,
    Ack: LeaseBook._fold_ack,
    Release: LeaseBook._fold_release,
    Reject: LeaseBook._fold_reject,
    Delay: LeaseBook._fold_delay,
    Reschedule: LeaseBook._fold_reschedule,
    Cancel: LeaseBook._fold_cancel,
    Resume: LeaseBook._fold_resume,
    Purge: LeaseBook._fold_purge,
    Discard: LeaseBook._fold_discard,
    Answer: lambda book, batch: None,
    Resumed: lambda book, batch: None,
    Fact: LeaseBook._fold_fact,
}
