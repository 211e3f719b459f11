"""The lease book: a fold over the markers of one partition, the messages that are due, and the answers to requests.

The states and rules are in :mod:`marq.core.transitions`. The book applies them to a batch as a whole, because messages
that were acquired together share a lease. :class:`marq.core.storage.table_image.TableImage` stores its state.

A message that was sent stays open until its fact is read back. Until then it is *firing*, so that it is not sent twice.
The owner forgets which messages are firing when it loses the partition. A paused queue gets no messages. They wait,
without TICKs, and are due again at the next TICK after their queue is resumed. Dead-lettering and cancellations
continue.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, repeat
from typing import Any, NamedTuple

from marq.core.redeliver_or_dead_letter import DueAction, is_delivery, release_delay_ms, resolve_due
from marq.core.storage.rows import IN_ORDER, OUT_OF_LINE, LeaseRow, State, row_key
from marq.core.storage.table_image import NO_MESSAGES, OpenMessages, Place, TableImage
from marq.core.transitions import END, ENDED, HOLDER_ONLY, NEW, TRANSITIONS, Absent, Marker, Moves
from marq.settings.queue import UNLIMITED_ATTEMPTS, QueueSettings
from marq.wire.error_texts import error_of, most_bytes
from marq.wire.markers import (
    ANY_QUEUE,
    BLOCKED_MS,
    BLOCKED_WAIT_MS,
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
    RequestOutcome,
    Reschedule,
    Resume,
    Resumed,
    Source,
    Tick,
    may_have,
    offset_runs,
    payload_of,
    spans,
)
from marq.wire.names import DEDUPLICATION_ID_HEADER, DELIVER_AT_HEADER, WITHOUT_RECORDS, is_scheduled, is_synthetic
from marq.wire.ordered_holders import follows
from marq.wire.record_headers import has_invalid_deliver_at, is_redelivery, record_id

#: Messages that are due in the same span of time wait together, and are sorted when it begins.
SPAN_MS = 1_000
#: At most this many messages with one lease wait in a span; more of them share a hint.
FEW = 16
#: Messages to process before yielding to other tasks: about 10 ms.
HINTS_AT_ONCE = 10_000
#: Offsets of closed messages that the due index may keep before it is rebuilt.
MAX_STALE_HINTS = 200_000
#: Maximum number of messages per partition that are firing at a time.
MAX_FIRING = 10_000
#: Bytes of a message without its error in an answer to a RESUME, and of a batch of the answer.
_MESSAGE_BYTES, _BATCH_BYTES = 20, 64 * 1024

#: The field of EventCounts for each fact.
_FACT_COUNTS = {kind: kind.name.lower() for kind in FACTS}

# Looked up for every batch.
_ACQUIRE, _ACQUIRE_EARLY = TRANSITIONS[Marker.ACQUIRE], TRANSITIONS[Marker.ACQUIRE_EARLY]
_ACQUIRE_IN_ORDER = TRANSITIONS[Marker.ACQUIRE_IN_ORDER]
_ACK, _FACT = TRANSITIONS[Marker.ACK], TRANSITIONS[Marker.FACT]
# Looked up for every hint.
_DELAYED = State.DELAYED

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


class LeaseBook(TableImage):
    """The open messages of one markers partition, as its markers left them."""

    def __init__(self, settings: Callable[[str], QueueSettings]) -> None:
        super().__init__()
        self._settings = settings
        self._due = DueIndex()
        self._firing_count = 0
        #: Whether messages are due again because their queue was resumed. The clock may be that of the last marker
        #: from before the resumption, so fire nothing before the next TICK: messages may have expired meanwhile.
        self.resumed = False
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
        return self._replies.take(self)

    # --- due messages -------------------------------------------------------------------------------------------------

    def _drop_stale_hints(self) -> None:
        # Hints of closed messages would otherwise stay until their leases expire.
        if self._due.size > 2 * self._open_count + MAX_STALE_HINTS:
            for _ in self._due.rebuild(self._each()):
                pass

    def restoring(self, table: Iterable[tuple[bytes, bytes]]) -> Iterator[None]:
        yield from super().restoring(table)
        yield from self._due.rebuild(self._each())

    @property
    def next_due_ms(self) -> int | None:
        """When the next message may be due by the clock, or None; early at worst, never late."""
        self.look_for_resumed()
        return self._due.next_due_ms()

    def look_for_resumed(self) -> None:
        """Make messages of resumed queues due again."""
        if self._due.resume(self._settings, self.clock.now_ms):
            self.resumed = True

    def due(self, now_ms: int) -> list[DueAction]:
        """Return the actions for due messages, at most :data:`MAX_FIRING`; they are firing from now on.

        ``now_ms`` is the clock at a TICK of the owner's own. Messages are in order of due time; those that were
        acquired together are in the order of the log.
        """
        self.look_for_resumed()
        fires: list[DueAction] = []
        while self._firing_count < MAX_FIRING and (hint := self._due.take(now_ms)) is not None:
            opened, lease = hint.opened, hint.lease
            waiting = opened.waiting(hint.offsets, lease)
            settings = self._settings(lease.queue)
            if settings.paused and is_delivery(lease, settings):
                self._due.hold(hint, waiting)
                continue
            room = MAX_FIRING - self._firing_count
            if len(waiting) > room:
                self._due.push_again(hint, waiting[room:])
                del waiting[room:]
            opened.firing.update(waiting)
            self._firing_count += len(waiting)
            fires += [resolve_due(opened.source, offset, lease, settings) for offset in waiting]
        return fires

    def put_back(self, fire: DueAction) -> None:
        """Note that a due message is not sent yet; it is due again after :meth:`remind`."""
        self._known_of(fire.lease.queue, fire.source).firing.discard(fire.offset)
        self._firing_count -= 1

    def remind(self, place: Place) -> None:
        """Make a message that was put back due again, if it is still open."""
        self._hint_at(self._known_of(place.queue, place.source), place.offset)

    def wanted_ms(self, lease: LeaseRow) -> int:
        """Return when a message was due, or when its queue was resumed if that was later."""
        return self._due.wanted_ms(lease)

    def forget_firing(self) -> None:
        """Note that nothing is firing: every committed fact has been folded, so open messages were not sent."""
        for opened in self._each():
            if opened.firing:
                fired = sorted(opened.firing)
                opened.firing.clear()
                for offset in fired:
                    self._hint_at(opened, offset)
        self._firing_count = 0

    def _hint_at(self, opened: OpenMessages, offset: int) -> None:
        lease = opened.leases.get(offset)
        if lease is not None:
            self._due.push(opened, [offset], lease)
            self._drop_stale_hints()

    def is_firing(self, queue: str, source: Source, offset: int) -> bool:
        """Return whether a message was sent and its fact is not read back yet."""
        return offset in self._sources.get(source, {}).get(queue, NO_MESSAGES).firing

    def hold_back(self, queue: str, source: Source) -> bool:
        """Treat all messages of a queue in a source as firing until a fact ends them; return False if some are."""
        opened = self._sources.get(source, {}).get(queue, NO_MESSAGES)
        if opened.firing:
            return False
        opened.firing.update(opened.leases)
        self._firing_count += len(opened.firing)
        return True


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


# --- due messages -----------------------------------------------------------------------------------------------------


class Hint(NamedTuple):
    """Messages that may be due at this time: those that no longer have exactly this lease are skipped.

    Hints are compared from left to right: messages that are due in the same millisecond are in the order in which they
    were acquired or delayed, even if they were rescheduled or the index was rebuilt. ``place`` is the offset of a
    delayed message in the log, so that messages of several senders keep that order. It is 0 for others.
    """

    due_ms: int
    since_ms: int
    place: int
    source: Source
    first: int
    sequence: int
    opened: OpenMessages
    offsets: Sequence[int]
    lease: LeaseRow


class _Span:
    """Messages that are due in one span of time, 16 bytes each: a million may wait for days."""

    __slots__ = ("offsets", "opened")

    def __init__(self) -> None:
        self.opened: list[OpenMessages] = []
        self.offsets = array("Q")


class DueIndex:
    """Hints at when messages may be due, the earliest first. A hint may be early or stale, but never late.

    Messages that were acquired together are due together: they share one hint, in a heap. Messages with individual
    times, such as delayed ones, wait in spans of a second and enter the heap one span at a time.
    """

    def __init__(self) -> None:
        self._heap: list[Hint] = []
        self._sequence = 0
        self._spans: dict[int, _Span] = {}
        #: The numbers of these spans, as a heap; earlier spans are in the heap of hints already.
        self._numbers: list[int] = []
        self._begun = -1
        #: The number of messages in all hints; a message counts once for each of its hints.
        self.size = 0
        #: The due messages of each paused queue.
        self._held: dict[str, list[Hint]] = {}
        #: When each queue was resumed.
        self._resumed_ms: dict[str, int] = {}

    def push(self, opened: OpenMessages, offsets: Sequence[int], lease: LeaseRow) -> None:
        """Add hints for messages that share a lease; those that keep their place are never due."""
        if lease.state in IN_ORDER:
            return
        count = len(offsets)
        number = lease.due_ms // SPAN_MS
        if number <= self._begun or count > FEW:
            self._push(opened, offsets, lease)
        else:
            span = self._spans.get(number)
            if span is None:
                span = self._spans[number] = _Span()
                heapq.heappush(self._numbers, number)
            for offset in offsets:
                span.opened.append(opened)
                span.offsets.append(offset)
        self.size += count

    def push_again(self, hint: Hint, offsets: Sequence[int]) -> None:
        """Add a hint again for some messages of a taken hint."""
        heapq.heappush(self._heap, hint._replace(first=offsets[0], offsets=offsets))
        self.size += len(offsets)

    def hold(self, hint: Hint, offsets: Sequence[int]) -> None:
        """Until their queue is resumed, keep some messages of a taken hint."""
        if offsets:
            self._held.setdefault(hint.lease.queue, []).append(hint._replace(first=offsets[0], offsets=offsets))
            self.size += len(offsets)

    def resume(self, settings: Callable[[str], QueueSettings], now_ms: int) -> bool:
        """Add hints again for the kept messages of queues that are no longer paused; return whether there are any."""
        resumed = [queue for queue in self._held if not settings(queue).paused]
        for queue in resumed:
            for hint in self._held.pop(queue):
                heapq.heappush(self._heap, hint)
            self._resumed_ms[queue] = now_ms
        return bool(resumed)

    def wanted_ms(self, lease: LeaseRow) -> int:
        """Return when a message was due, or when its queue was resumed if that was later."""
        return max(lease.due_ms, self._resumed_ms.get(lease.queue, lease.due_ms))

    def _push(self, opened: OpenMessages, offsets: Sequence[int], lease: LeaseRow) -> None:
        self._sequence += 1
        place = lease.holder if lease.state is _DELAYED else 0
        hint = Hint(
            lease.due_ms, lease.since_ms, place, opened.source, offsets[0], self._sequence, opened, offsets, lease
        )  # fmt: skip
        heapq.heappush(self._heap, hint)

    def next_due_ms(self) -> int | None:
        """Return when the next message may be due, or None."""
        while True:
            self._begin_spans(self._heap[0].due_ms if self._heap else None)
            if not self._heap:
                return None
            hint = self._heap[0]
            if hint.opened.waiting(hint.offsets, hint.lease):
                return hint.due_ms
            self._take()

    def take(self, now_ms: int) -> Hint | None:
        """Remove and return the first hint that is due."""
        self._begin_spans(now_ms)
        return self._take() if self._heap and self._heap[0].due_ms <= now_ms else None

    def _take(self) -> Hint:
        hint = heapq.heappop(self._heap)
        self.size -= len(hint.offsets)
        return hint

    def _begin_spans(self, until_ms: int | None) -> None:
        """Move the messages of all spans that begin by ``until_ms`` to the heap; None: those of the first span."""
        while self._numbers and (until_ms is None or self._numbers[0] * SPAN_MS <= until_ms):
            number = heapq.heappop(self._numbers)
            self._begun = max(self._begun, number)
            self._begin(number, self._spans.pop(number))
            if until_ms is None and self._heap:
                return

    def _begin(self, number: int, span: _Span) -> None:
        for opened, offset in zip(span.opened, span.offsets, strict=True):
            lease = opened.leases.get(offset)
            # A rescheduled message has another hint, and one that keeps its place by now needs none.
            if lease is not None and lease.due_ms // SPAN_MS == number and lease.state not in IN_ORDER:
                self._push(opened, (offset,), lease)
            else:
                self.size -= 1

    def rebuild(self, sources: Iterable[OpenMessages]) -> Iterator[None]:
        """Rebuild all hints from the open messages; yield every few thousand hints, so that other tasks can run."""
        self._heap, self._numbers, self._spans, self._held = [], [], {}, {}
        self._begun, self.size = -1, 0
        pushed = 0
        for opened in sources:
            for lease, offsets in groupby(opened.leases, opened.leases.__getitem__):
                self.push(opened, list(offsets), lease)
                pushed += 1
                if pushed % HINTS_AT_ONCE == 0:
                    yield


# --- answers to RESCHEDULEs, CANCELs and RESUMEs ----------------------------------------------------------------------


class _Question(NamedTuple):
    """A RESCHEDULE or CANCEL of one message; ``lease`` is the one it got from a RESCHEDULE, None if too late."""

    holder: int
    queue: str
    source: Source
    offset: int
    lease: LeaseRow | None


class PendingReplies:
    """The answers that a tracker owes: whether requests came in time, and which messages of a RESUME are open.

    A CANCEL that was in time needs no answer other than its fact. A RESCHEDULE of a firing message is answered once it
    is known whether the message was sent. Clients that ask again are answered again, so an answer that is lost with its
    owner only costs a moment.
    """

    def __init__(self) -> None:
        self._open: list[_Question] = []
        #: The RESUMEs and their places in the log; of a repeated one only the last.
        self._resumes: dict[tuple[object, ...], tuple[Resume, int]] = {}

    def ask(self, batch: Reschedule | Cancel, offsets: Sequence[int], lease: LeaseRow | None) -> None:
        """Note a question about some messages of a batch."""
        self._open += [_Question(batch.holder, batch.queue, batch.source, offset, lease) for offset in offsets]

    def ask_open(self, batch: Resume, asked_at: int) -> None:
        """Note a question about open messages; the offset of its record is ``asked_at``."""
        question = batch.holder, batch.queue, batch.source, tuple(batch.offsets), batch.onwards
        self._resumes[question] = batch, asked_at

    def take(self, book: LeaseBook) -> list[Answer | Resumed]:
        """Return the answers that can be given now."""
        resumes, self._resumes = self._resumes, {}
        resumed = [_resumed(batch, asked_at, book) for batch, asked_at in resumes.values()]
        return [*self._outcomes(book), *chain.from_iterable(resumed)]

    def _outcomes(self, book: LeaseBook) -> list[Answer]:
        if not self._open:
            return []
        groups: dict[tuple[str, int, Source], dict[int, RequestOutcome]] = {}
        unanswered: list[_Question] = []
        for question in self._open:
            holder, queue, source, offset, lease = question
            if lease is not None and book.is_firing(lease.queue, source, offset):
                unanswered.append(question)
                continue
            left = lease is None or offset not in book.open_in(lease.queue, source)
            outcomes = groups.setdefault((queue, holder, source), {})
            # Several queues may have a message at this place; it is enough if one of them was in time.
            outcomes[offset] = min(
                RequestOutcome.TOO_LATE if left else RequestOutcome.DONE, outcomes.get(offset, RequestOutcome.TOO_LATE)
            )
        self._open = unanswered
        return [
            Answer(*asked, offsets[run], [outcomes[offset] for offset in offsets[run]])
            for asked, outcomes in groups.items()
            for offsets in [sorted(outcomes)]
            for run in offset_runs(offsets)
        ]


def _resumed(batch: Resume, asked_at: int, book: LeaseBook) -> Iterator[Resumed]:
    queue, source, offsets, now_ms = batch.queue, batch.source, batch.offsets, book.clock.now_ms
    leases = book.open_in(queue, source)
    acquired: list[tuple[int, int]] = []
    if batch.onwards:
        begin = offsets[0]
        offsets = [begin, *sorted([offset for offset in leases if offset > begin])]
        ranges = book.acquired.get((queue, source))
        acquired = [] if ranges is None else ranges.within(begin, max(ranges.end, begin))
    rows = [leases.get(offset) for offset in offsets]
    # Without tracebacks: the asking consumer only needs the errors.
    texts = ["" if row is None else error_of(row.text) for row in rows]
    sizes = [_MESSAGE_BYTES + most_bytes(text) for text in texts]
    parts = list(_parts(offsets, sizes))
    for number, part in enumerate(parts, 1):
        some = rows[part]
        yield Resumed(
            queue,
            batch.holder,
            source,
            offsets[part],
            asked_at,
            len(parts) - number,
            acquired if number == 1 else (),
            [0 if row is None else row.state for row in some],
            [0 if row is None else _attempt(row) for row in some],
            [0 if row is None else _wait_ms(row.due_ms - now_ms) for row in some],
            texts[part],
        )


def _parts(offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[slice]:
    """Cut messages into runs that fit into a batch, by bytes and by the distance of their offsets."""
    for span in spans(sizes, _BATCH_BYTES):
        for run in offset_runs(offsets[span]):
            yield slice(span.start + run.start, span.start + run.stop)


def _wait_ms(left_ms: int) -> int:
    """Return the time until a lease or delay ends, as far as an answer can state it."""
    return BLOCKED_WAIT_MS if left_ms >= BLOCKED_MS // 2 else min(max(left_ms, 0), BLOCKED_WAIT_MS - 1)


def _attempt(lease: LeaseRow) -> int:
    """Return the attempt of a message's next delivery if it was released, else how many it has used up."""
    if lease.state is State.LEASED_IN_ORDER:
        return lease.attempt - (not lease.counted)
    after = lease.attempt + (lease.counted and lease.state in (State.RELEASED, State.WAITING_IN_ORDER))
    # A producer may have written the largest attempt. An answer that can't be encoded would stop every owner.
    return min(after, UNLIMITED_ATTEMPTS)


# --- times that can't be read -----------------------------------------------------------------------------------------


class InvalidTimes:
    """Counts messages whose ``marq-deliver-at`` can't be read as a time.

    It counts as absent, so they are delivered at once, or after the delay of their queue.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}

    def note(self, batch: Acquire, offsets: Sequence[int]) -> int:
        """Look at messages that are acquired for the first time; return how many have such a time."""
        if not may_have(batch.payloads, DELIVER_AT_HEADER):
            return 0
        invalid = [offset for offset in offsets if _is_invalid(batch, offset)]
        if invalid:
            count, first = self._found.get(batch.queue, (0, record_id(batch.source, invalid[0])))
            self._found[batch.queue] = count + len(invalid), first
        return len(invalid)

    def take(self) -> dict[str, tuple[int, str]]:
        """Return how many were found since the last call and the record id of the first one, by queue."""
        found, self._found = self._found, {}
        return found


def _is_invalid(batch: Acquire, offset: int) -> bool:
    headers = payload_of(batch, offset).headers
    # A redelivery keeps the header, and was counted when the first record was acquired.
    return has_invalid_deliver_at(headers) and not is_redelivery(headers)
