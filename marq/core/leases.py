"""The lease book: who holds which message, until when, and what to do when nobody does.

The book of one markers partition is a fold over its markers. A message is *open* from its ACQUIRE or DELAY until an ACK
or a fact of the tracker (REDELIVERED, DEAD_LETTERED, DELIVERED, CANCELLED) ends it. A message that was delivered is in
one of three states::

                       RENEW (holder)
                      +-----+
                      |     v
    ---- ACQUIRE ---> LEASED ----- RELEASE (holder) ---> RELEASED --+
                      ^  |  |                                        |
           ACQUIRE ---+  |  +------ REJECT (holder) ---> REJECTED --+
           (takes over)  |                                |         |
                         +-- ACK (anyone), or a fact -----+---------+---> closed

A delayed message is DELAYED before that: a lease that nobody holds. RESCHEDULE gives whatever waits (DELAYED, RELEASED)
another time, and CANCEL makes it CANCELLED.

Every state has a due time. When it has come and no marker has ended the message, the tracker sends a copy: a LEASED
or RELEASED message goes back to its queue with the next attempt, or to the dead letters after the last one; a REJECTED
message goes to the dead letters; a DELAYED one is delivered for the first time; of a CANCELLED one only the fact is
written. The copy is a new record with an identity of its own, so whatever a former holder still says about the old
record reaches a closed message and is ignored: the identity fences.

Rules that are easy to get wrong, and what they are there for:

* An ACQUIRE of a record that the queue acquired before and that is not open is ignored. The record is finished; a
  consumer read it a second time because its commit had failed. Opening it again would deliver it for ever.
* An ACQUIRE of a LEASED record takes it over: the former holder crashed between its marker and its commit. One of a
  RELEASED or REJECTED record is ignored: what its holder decided stands.
* RENEW, RELEASE and REJECT count only from the holder. ACK counts from anyone: the work is done.
* :meth:`LeaseBook.due` moves nothing: a message stays open until the fact is read back. What is on its way is only
  remembered (*firing*), so that it is not sent twice, and forgotten with the owner.
* A dead letter that was redriven (a DELAY of its place) or deleted (DISCARD) is settled for ever, whoever asks again.
* A RESCHEDULE is answered when it is certain that it came in time: not while the message is on its way. A CANCEL that
  came in time is answered by its fact.
* A RELEASE that counts and uses up the last attempt is due at once: the message becomes a dead letter.
  ``max_attempts`` counts as it is when the RELEASE is folded, and again when the message is due.
* A row is due by the clock of the owner's own TICK (:mod:`marq.core.clock`), never by a wall clock.
* Of a queue that is paused nothing goes to the queue. What is due waits, without a TICK for it, and is due again in the
  moment in which the settings say otherwise; dead letters and cancellations go on.

The book keeps an index of the open messages in memory; payloads stay in the ACQUIRE they came in until the rows are
written, and are then the table's. :meth:`LeaseBook.take_changes` gives the rows to write since the last call: a
message that was acquired and acknowledged in between leaves none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from marq.core import rows
from marq.core.clock import LogClock
from marq.core.fires import Fire, is_delivery, release_delay_ms, what_is_due
from marq.core.gauges import Gauge, gauges_of
from marq.core.invalid_times import InvalidTimes
from marq.core.markers import (
    NOW,
    SEVERAL,
    Ack,
    Acquire,
    Answer,
    Batch,
    Cancel,
    Cause,
    Delay,
    Discard,
    Fact,
    Kind,
    Payload,
    Reject,
    Release,
    Renew,
    Reschedule,
    Source,
    Spend,
    Tick,
    alike,
    payload_of,
)
from marq.core.marks import Marks
from marq.core.names import is_drawn, is_scheduled
from marq.core.open_messages import DueIndex, OpenMessages
from marq.core.questions import Questions
from marq.core.queue import QueueSettings
from marq.core.restoration import Restoration
from marq.core.rows import HELD, WAITING, Counts, Lease, State
from marq.core.settlements import Settlements

#: Offsets of closed messages that the due index may hold on to before it is built anew.
MAX_STALE_HINTS = 200_000

#: Copies of one partition that are sent and not yet confirmed by their facts.
MAX_FIRING = 10_000


class LeaseBook:
    """The open messages of one markers partition."""

    def __init__(self, settings: Callable[[str], QueueSettings]) -> None:
        self.clock = LogClock()
        #: The offset of the last record folded; a record at or below it must not be folded again.
        self.applied = -1
        self.counts: dict[str, Counts] = {}
        self._settings = settings
        self._sources: dict[Source, OpenMessages] = {}
        #: Those of which rows may have changed since the last take_changes.
        self._touched: dict[Source, OpenMessages] = {}
        self.marks: dict[tuple[str, Source], Marks] = {}  # what each queue has acquired of each source
        #: Of dead letters: which are redriven or deleted.
        self.settlements = Settlements()
        self._due = DueIndex()
        self._open_count = 0
        self._firing_count = 0
        self._questions = Questions()
        self._touched_counts: set[str] = set()
        self._touched_marks: set[tuple[str, Source]] = set()
        self._changed = False
        self.invalid_times = InvalidTimes()
        #: Sources of schedules, and how often anything was said of one of their messages.
        self.scheduled: set[Source] = set()
        self.scheduled_changes = 0

    # --- fold ---------------------------------------------------------------------------------------------------------

    def fold(self, batch: Batch, append_time_ms: int, offset: int) -> int:
        """Fold the record at ``offset``; return by how many ms a TICK found the broker's clock to have jumped, or 0."""
        assert offset > self.applied, f"record {offset} folded after {self.applied}"
        self.skip(append_time_ms, offset)
        if isinstance(batch, Tick):
            return self.clock.tick(append_time_ms, batch.holder, batch.monotonic_ms)
        _FOLDS[type(batch)](self, batch)
        return 0

    def skip(self, append_time_ms: int, offset: int) -> None:
        """Pass a record that holds no markers: it moves the clock and the position."""
        self.applied = offset
        self.clock.advance(append_time_ms)
        self._changed = True

    def passed(self, end: int) -> None:
        """Note that no record before ``end`` is left to fold: what else stands there is Kafka's own."""
        self.applied = max(self.applied, end - 1)

    def _of(self, source: Source) -> OpenMessages:
        """Return the open messages of a source whose rows may change now."""
        opened = self._sources.get(source)
        if opened is None:
            return _NONE
        self._touched[source] = opened
        return opened

    def _new_of(self, source: Source) -> OpenMessages:
        opened = self._of(source)
        if opened is _NONE:
            opened = self._sources[source] = self._touched[source] = OpenMessages(source)
        return opened

    def _fold_acquire(self, batch: Acquire) -> None:
        source, offsets = batch.source, batch.offsets
        opened = self._new_of(source)
        mark = (batch.queue, source)
        marks = self.marks.setdefault(mark, Marks())
        if offsets[0] >= marks.end:
            self._open(opened, batch, offsets)
        else:
            again = [offset for offset in offsets if offset in opened.leases]
            unseen = [offset for offset in offsets if offset not in marks and offset not in opened.leases]
            self._count(batch.queue).reacquired += len(offsets) - len(unseen)
            self._open(opened, batch, unseen)
            self._take_over(opened, batch, again)
        # An offset that was marked and is not open is finished: it stays so.
        marks.add(batch.from_offset, offsets[-1] + 1)
        self._touched_marks.add(mark)

    def _fold_delay(self, batch: Delay) -> None:
        source, offsets = batch.source, batch.offsets
        opened = self._new_of(source)
        unseen = [offset for offset in offsets if offset not in opened.leases]
        if batch.from_offset is not None and not is_drawn(source.topic):
            unseen = self.settlements.settle(batch, unseen)
            self._count(batch.queue).redriven += len(unseen)
        elif batch.from_offset is not None:
            mark = ("", source)
            marks = self.marks.setdefault(mark, Marks())
            unseen = [offset for offset in unseen if offset not in marks]
            marks.add(batch.from_offset, offsets[-1] + 1)
            self._touched_marks.add(mark)
            if is_scheduled(source.topic):
                self.scheduled.add(source)
                self.scheduled_changes += 1
        self._count(batch.queue).reacquired += len(offsets) - len(unseen)
        self._delay(opened, batch, unseen)

    def _delay(self, opened: OpenMessages, batch: Delay, offsets: Sequence[int]) -> None:
        """Open delayed messages, of which each may have a time of its own."""
        if not offsets:
            return
        times, attempts, numbers = batch.times_ms, batch.attempts, batch.offsets
        every = len(offsets) == len(numbers)
        indexes = range(len(numbers)) if every else [bisect_left(numbers, offset) for offset in offsets]
        now_ms = self.clock.now_ms
        base_ms = now_ms if batch.relative else 0
        leases, push = opened.leases, self._due.push
        lease, last, run = _NO_LEASE, (NOW, 0), list[int]()
        for index in indexes:
            alike = (times[index], 1 if attempts is None else attempts[index])
            if alike != last:
                if run:
                    push(opened, run, lease)
                lease = Lease(batch.queue, 0, alike[1], base_ms + alike[0], now_ms, State.DELAYED)
                last, run = alike, []
            offset = numbers[index]
            leases[offset] = lease
            run.append(offset)
        opened.fresh.update(dict.fromkeys(offsets, batch))
        self._count(batch.queue).delayed += len(offsets)
        self._open_count += len(offsets)
        self._push(opened, run, lease)

    def _fold_discard(self, batch: Discard) -> None:
        opened = self._of(batch.source)
        unseen = [offset for offset in batch.offsets if offset not in opened.leases]
        self._count(batch.queue).discarded += len(self.settlements.settle(batch, unseen))

    def _open(self, opened: OpenMessages, batch: Acquire, offsets: Sequence[int]) -> None:
        if not offsets:
            return
        counts = self._count(batch.queue)
        for attempt, due_ms, group in alike(batch, offsets):
            lease = self._new_lease(batch, attempt, due_ms)
            if due_ms == NOW:
                counts.acquired += len(group)
            else:
                counts.delayed += len(group)
            opened.leases.update(dict.fromkeys(group, lease))
            opened.fresh.update(dict.fromkeys(group, batch))
            self._push(opened, group, lease)
        self._open_count += len(offsets)
        counts.invalid_deliver_at += self.invalid_times.note(batch, offsets)

    def _new_lease(self, batch: Acquire, attempt: int, due_ms: int) -> Lease:
        now_ms = self.clock.now_ms
        if due_ms == NOW:
            return Lease(batch.queue, batch.holder, attempt, now_ms + batch.lease_ms, now_ms)
        return Lease(batch.queue, 0, attempt, due_ms, now_ms, State.DELAYED)

    def _due_ms(self, batch: Reschedule, time_ms: int) -> int:
        return self.clock.now_ms + time_ms if batch.relative else time_ms

    def _take_over(self, opened: OpenMessages, batch: Acquire, offsets: Sequence[int]) -> None:
        for attempt, due_ms, group in alike(batch, offsets):
            lease = self._new_lease(batch, attempt, due_ms)
            taken = [offset for offset in group if opened.leases[offset].state is State.LEASED]
            self._replace(opened, taken, lease)

    def _fold_renew(self, batch: Renew | Spend) -> None:
        opened = self._of(batch.source)
        due_ms = self.clock.now_ms + batch.lease_ms
        groups: dict[Lease, list[int]] = {}
        for offset, lease in self._held(opened, batch):
            groups.setdefault(lease, []).append(offset)
        for lease, offsets in groups.items():
            spent = isinstance(batch, Spend) or lease.state is State.SPENT
            state = State.SPENT if spent else State.LEASED
            renewed = Lease(lease.queue, lease.holder, lease.attempt, due_ms, lease.since_ms, state)
            self._replace(opened, offsets, renewed)
            self._count(lease.queue).renewed += len(offsets)

    def _fold_release(self, batch: Release) -> None:
        opened = self._of(batch.source)
        now_ms = self.clock.now_ms
        index = dict(zip(batch.offsets, zip(batch.delays_ms, batch.errors, strict=True), strict=True))
        groups: dict[tuple[Lease, int, str], list[int]] = {}
        for offset, lease in self._held(opened, batch):
            delay_ms, error = index[offset]
            settings, seed = self._settings(lease.queue), rows.row_key(batch.source, offset)
            delay_ms = release_delay_ms(lease.attempt, batch.counted, delay_ms, settings, seed)
            groups.setdefault((lease, now_ms + delay_ms, error), []).append(offset)
        for (lease, due_ms, error), offsets in groups.items():
            self._count(lease.queue).released += len(offsets)
            released = Lease(
                lease.queue, 0, lease.attempt, due_ms, lease.since_ms, State.RELEASED, batch.counted, error
            )
            self._replace(opened, offsets, released)

    def _fold_reject(self, batch: Reject) -> None:
        opened = self._of(batch.source)
        index = dict(zip(batch.offsets, batch.reasons, strict=True))
        for offset, lease in self._held(opened, batch):
            self._count(lease.queue).rejected += 1
            now_ms, text = self.clock.now_ms, index[offset]
            rejected = Lease(lease.queue, 0, lease.attempt, now_ms, lease.since_ms, State.REJECTED, text=text)
            self._replace(opened, [offset], rejected)

    def _fold_reschedule(self, batch: Reschedule) -> None:
        opened = self._of(batch.source)
        groups: dict[tuple[Lease, int], list[int]] = {}
        for offset, time_ms in zip(batch.offsets, batch.times_ms, strict=True):
            lease = opened.leases.get(offset)
            if lease is not None and lease.state in WAITING:
                groups.setdefault((lease, self._due_ms(batch, time_ms)), []).append(offset)
            else:
                self._questions.ask(batch, [offset], None)
        for (lease, due_ms), offsets in groups.items():
            moved = replace(lease, due_ms=due_ms)
            self._replace(opened, offsets, moved)
            self._questions.ask(batch, offsets, moved)

    def _fold_cancel(self, batch: Cancel) -> None:
        opened = self._of(batch.source)
        groups: dict[Lease, list[int]] = {}
        for offset in batch.offsets:
            lease = opened.leases.get(offset)
            if lease is not None and lease.state in WAITING:
                groups.setdefault(lease, []).append(offset)
            elif lease is None or lease.state is not State.CANCELLED:
                self._questions.ask(batch, [offset], None)
        for lease, offsets in groups.items():
            cancelled = replace(lease, due_ms=self.clock.now_ms, state=State.CANCELLED)
            self._replace(opened, offsets, cancelled)

    def _held(self, opened: OpenMessages, batch: Renew | Spend | Release | Reject) -> Iterator[tuple[int, Lease]]:
        """The messages of the batch that its holder does hold."""
        # What was spent comes back only where its holder says that nobody has seen it.
        states = (State.LEASED,) if isinstance(batch, Release) and batch.counted else HELD
        for offset in batch.offsets:
            lease = opened.leases.get(offset)
            if lease is not None and lease.holder == batch.holder and lease.state in states:
                yield offset, lease
            elif not isinstance(batch, Renew | Spend):
                self._count(batch.queue).late += 1

    def _replace(self, opened: OpenMessages, offsets: Sequence[int], lease: Lease) -> None:
        if not offsets:
            return
        opened.leases.update(dict.fromkeys(offsets, lease))
        opened.changed.update(offsets)
        self._push(opened, offsets, lease)

    def _fold_ack(self, batch: Ack) -> None:
        opened = self._of(batch.source)
        if batch.queue == SEVERAL:
            known = [lease.queue for lease in map(opened.leases.get, batch.offsets) if lease is not None]
            for queue, count in Counter(known).items():
                self._count(queue).acked += count
            self._close(opened, batch.offsets)
            return
        closed = self._close(opened, batch.offsets)
        counts = self._count(batch.queue)
        counts.acked += closed
        counts.late += len(batch.offsets) - closed

    def _fold_fact(self, batch: Fact) -> None:
        opened = self._of(batch.source)
        before = len(opened.firing)
        opened.firing.difference_update(batch.offsets)
        self._firing_count -= before - len(opened.firing)
        closed = self._close(opened, batch.offsets)
        counts = self._count(batch.queue)
        if is_scheduled(batch.source.topic) and Cause.WITHDRAWN in batch.causes:
            self._forget_marks(batch.source)
            counts.cancelled += closed
            return
        counts.expired += batch.causes.count(Cause.EXPIRED)
        # Counted although an ACK may have closed the message meanwhile: the copy is out there.
        if batch.kind is Kind.REDELIVERED:
            counts.redelivered += len(batch.offsets)
        elif batch.kind is Kind.DEAD_LETTERED:
            counts.dead += len(batch.offsets)
        elif batch.kind is Kind.DELIVERED:
            counts.delivered += len(batch.offsets)
        elif batch.kind is Kind.CANCELLED:
            counts.cancelled += len(batch.offsets)
        else:
            counts.abandoned += len(batch.offsets)

    def _close(self, opened: OpenMessages, offsets: Sequence[int]) -> int:
        pop_lease, pop_fresh = opened.leases.pop, opened.fresh.pop
        ended, closed = opened.ended, 0
        for offset in offsets:
            if pop_lease(offset, None) is not None:
                closed += 1
                if pop_fresh(offset, None) is None:
                    ended.append(offset)
        self._open_count -= closed
        if closed and is_scheduled(opened.source.topic):
            self.scheduled_changes += 1
        return closed

    def _forget_marks(self, source: Source) -> None:
        self.marks.pop(("", source), None)
        self._touched_marks.add(("", source))
        self.scheduled.discard(source)
        self.scheduled_changes += 1

    def _count(self, queue: str) -> Counts:
        self._touched_counts.add(queue)
        return self.counts.setdefault(queue, Counts())

    # --- due ----------------------------------------------------------------------------------------------------------

    def _push(self, opened: OpenMessages, offsets: Sequence[int], lease: Lease) -> None:
        self._due.push(opened, offsets, lease)
        if self._due.size > 2 * self._open_count + MAX_STALE_HINTS:
            # Hints of closed messages would otherwise stay until their leases would have run out.
            for _ in self._hint_anew():
                pass

    def _hint_anew(self) -> Iterator[None]:
        return self._due.rebuild(lambda: iter(self._sources.values()))

    @property
    def next_due_ms(self) -> int | None:
        """When the next message may be due by the clock, or None; early at worst, never late."""
        self._due.resume(self._settings, self.clock.now_ms)
        return self._due.next_due_ms()

    def due(self, now_ms: int) -> list[Fire]:
        """Return what to send now and remember it as on its way; at most :data:`MAX_FIRING` at a time.

        ``now_ms`` is the clock at a TICK of the owner's own. Earliest first, and in the order of the log for messages
        that were acquired together.
        """
        self._due.resume(self._settings, self.clock.now_ms)
        fires: list[Fire] = []
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
            fires += [what_is_due(opened.source, offset, lease, settings) for offset in waiting]
        return fires

    def wanted_ms(self, lease: Lease) -> int:
        """Return from when on a message was to be sent: when it was due, or when its queue was resumed after that."""
        return self._due.wanted_ms(lease)

    def unfire(self, fires: Iterable[Fire]) -> None:
        """Forget that these are on their way: their transaction is known to have been aborted."""
        for fire in fires:
            opened = self._sources.get(fire.source, _NONE)
            if fire.offset in opened.firing:
                opened.firing.discard(fire.offset)
                self._firing_count -= 1
                self._hint_at(opened, fire.offset)

    def forget_firing(self) -> None:
        """Forget all that is on its way: every committed fact has been folded, so what is open was not sent."""
        for opened in self._sources.values():
            if opened.firing:
                fired = sorted(opened.firing)
                opened.firing.clear()
                for offset in fired:
                    self._hint_at(opened, offset)
        self._firing_count = 0

    def _hint_at(self, opened: OpenMessages, offset: int) -> None:
        lease = opened.leases.get(offset)
        if lease is not None:
            self._push(opened, [offset], lease)

    def fresh_payload(self, source: Source, offset: int) -> Payload | None:
        """Return the payload of an open message whose row is not in the table yet, else None."""
        batch = self._sources.get(source, _NONE).fresh.get(offset)
        return None if batch is None else payload_of(batch, offset)

    def take_answers(self) -> list[Answer]:
        """Return the answers to what was asked; to be written before anything else is fired."""
        return self._questions.take(lambda source: self._sources.get(source, _NONE))

    # --- schedules ----------------------------------------------------------------------------------------------------

    def open_in(self, source: Source) -> Mapping[int, Lease]:
        """The open messages of a source, by their numbers."""
        return self._sources.get(source, _NONE).leases

    def last_number(self, source: Source) -> int | None:
        """Return the last number of a source that was ever delayed, None when there was none."""
        marks = self.marks.get(("", source))
        return None if marks is None else marks.end - 1

    def hold_back(self, source: Source) -> bool:
        """Fire nothing of a source any more until a fact tells of it; False: something is on its way."""
        opened = self._sources.get(source, _NONE)
        held = opened.hold_back()
        self._firing_count += len(opened.firing) if held else 0
        return held

    # --- rows ---------------------------------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """Whether records were folded since the last take_changes."""
        return self._changed

    @property
    def pending_rows(self) -> int:
        """How many rows take_changes would write at most: what to bound between two calls."""
        return sum([opened.pending_rows for opened in self._touched.values()])

    def take_changes(self) -> dict[bytes, bytes | None]:
        """Return the rows to write (None: delete) so that the table holds the fold up to ``applied``.

        The caller must write them, or hold on to them and write them under the next ones: they are not given twice.
        """
        changes: dict[bytes, bytes | None] = {}
        for source, opened in self._touched.items():
            opened.take_rows(changes)
            if not (opened.leases or opened.firing) and is_drawn(source.topic):
                # Whoever drew it may never come back.
                del self._sources[source]
        self._touched.clear()
        for queue, source in self._touched_marks:
            marks = self.marks.get((queue, source))
            changes[rows.mark_key(queue, source)] = None if marks is None else rows.encode_marks(marks.intervals)
        changes.update(self.settlements.take_rows())
        for queue in self._touched_counts:
            changes[rows.counts_key(queue)] = rows.encode_counts(self.counts[queue])
        self._touched_marks.clear()
        self._touched_counts.clear()
        self._changed = False
        # Last, so that a reader of the changelog that stops early never believes more than it has read.
        changes[rows.APPLIED_KEY] = rows.encode_applied(self.applied, self.clock)
        return changes

    def restore(self, table: Iterable[tuple[bytes, bytes]]) -> None:
        """Take over the rows of a table: the book is then as it was at its ``applied`` offset."""
        for _ in self.restoring(table):
            pass

    def restoring(self, table: Iterable[tuple[bytes, bytes]]) -> Iterator[None]:
        """Do as :meth:`restore`, and stop after each few thousand rows, so that others can work in between."""
        found = Restoration()
        yield from found.read(table)
        self.applied, self.clock, self.counts, self.marks = found.applied, found.clock, found.counts, found.marks
        self.settlements = found.settlements
        self.scheduled = {source for queue, source in self.marks if not queue and is_scheduled(source.topic)}
        for source, leases in found.leases.items():
            self._sources[source] = OpenMessages(source, leases, restated=found.restated.get(source, set()))
            self._open_count += len(leases)
        yield from self._hint_anew()

    # --- statistics ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._open_count

    def open_leases(self) -> Iterator[tuple[Source, int, Lease]]:
        """Each open message, in no particular order."""
        for source, opened in self._sources.items():
            for offset, lease in opened.leases.items():
                yield source, offset, lease

    def leases_by_source(self) -> Iterator[tuple[Source, list[tuple[int, Lease]]]]:
        """All open messages, as they are when each source's turn comes."""
        for source, opened in list(self._sources.items()):
            yield source, list(opened.leases.items())

    def gauges(self) -> dict[str, Gauge]:
        """Return, for each queue, how many of its messages are open and since when."""
        return gauges_of(opened.leases.values() for opened in self._sources.values())

    def leases(self) -> Iterator[list[Lease]]:
        """Return the leases of all open messages, one for each, as they are when each source's turn comes."""
        for opened in list(self._sources.values()):
            yield list(opened.leases.values())


#: Stands in for a source that has no open messages; never written to.
_NONE = OpenMessages(Source("", 0))
#: Of no message.
_NO_LEASE = Lease("", 0, 0, 0, 0)

_FOLDS: dict[type, Callable[[LeaseBook, Any], None]] = {
    Acquire: LeaseBook._fold_acquire,
    Renew: LeaseBook._fold_renew,
    Spend: LeaseBook._fold_renew,
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
