"""Any sequence of markers, with a restart from the written rows at any moment: the book is the log's plain fold."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lab.proof.decisions import DueEnding, ending
from lab.proof.fold import IN_ORDER, Fold, Key, Standing
from lab.proof.history import Event, holder_name, log_name, marker, name_of
from marq.core import lease_book
from marq.core.lease_book import LeaseBook
from marq.core.redeliver_or_dead_letter import Destination, DueAction
from marq.core.storage import rows
from marq.core.storage.rows import State
from marq.core.tracker import Tracker
from marq.settings.backoff import Backoff
from marq.settings.queue import QueueSettings
from marq.wire.marker_codec import decode, encode
from marq.wire.markers import (
    ANY_QUEUE,
    BACKOFF,
    BLOCKED_MS,
    DUE_AT_ONCE,
    LAST,
    NOW,
    Ack,
    Acquire,
    Batch,
    Cancel,
    Delay,
    Discard,
    Dispatch,
    Kind,
    Payload,
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
)
from marq.wire.names import DEDUPLICATION_ID_HEADER, ORDERING_KEY_HEADER, WITHOUT_RECORDS, synthetic_topic
from marq.wire.ordered_holders import ordered_holder
from tests.simulation.oracle import difference, table_difference
from tests.unit.core.batches import DRAWN, LETTERS

BACKOFF_RULE = Backoff(10, 2.0, 100)
#: How long deduplication ids are remembered: times of the machine advance by less, and by more.
WINDOW_MS = 60
_MAX_STALE_HINTS, _MAX_FIRING = lease_book.MAX_STALE_HINTS, lease_book.MAX_FIRING

#: Where a message goes with each fact.
_DESTINATIONS = {
    Kind.REDELIVERED: Destination.QUEUE,
    Kind.DELIVERED: Destination.QUEUE,
    Kind.DEAD_LETTERED: Destination.DEAD_LETTERS,
    Kind.CANCELLED: Destination.NOWHERE,
    Kind.ABANDONED: Destination.NOWHERE,
}
#: The longest time that the format allows.
_LONGEST_MS = 2**63 - 1

_records = st.sampled_from([Source("marq.messages", 0), Source("marq.messages", 1)])
#: Two senders of delayed messages.
_senders = st.sampled_from([DRAWN, Source(synthetic_topic(6), 2)])
_sources = st.one_of(_records, _senders, st.just(LETTERS))
#: The second and third are as late as each other.
_holders = st.sampled_from([1, ordered_holder(5, 1), ordered_holder(5, 2), ordered_holder(9, 1)])
_ids = st.sampled_from(["", "", "x", "y"])
_keys = st.sampled_from(["", "", "k"])
#: Also shorter than the rest of a lease.
_leases = st.sampled_from([1, 100, 200])
_flags = st.tuples(st.booleans(), st.booleans())
_offsets = st.sets(st.integers(0, 12), min_size=1, max_size=5).map(sorted)
_delays = st.sampled_from([LAST, BACKOFF, 0, 5, 50, BLOCKED_MS, _LONGEST_MS])
_times = st.sampled_from([-50, 0, 5, 50, _LONGEST_MS])
#: Both may have a message at each place.
_queues = st.sampled_from(["a", "b"])
#: Of an ACK, RESCHEDULE or CANCEL.
_any_queues = st.one_of(_queues, st.just(ANY_QUEUE))


def payload(queue: str, offset: int, attempt: int = 1, own_id: str = "", key: str = "") -> Payload:
    named = {DEDUPLICATION_ID_HEADER: own_id, ORDERING_KEY_HEADER: key}
    headers = tuple((name, value.encode()) for name, value in named.items() if value)
    return Payload(0, attempt, None, headers, f"{queue} {offset}".encode())


class PlainFold(Fold):
    """Remembers what is asked: by whom and of which queue, the message, whether to move it, and whether in time."""

    def __init__(self, settings: Callable[[], QueueSettings]) -> None:
        names = ("max_attempts", "deduplication_window_ms")
        backoff = {"backoff": astuple(BACKOFF_RULE)}
        super().__init__(lambda queue: [{name: getattr(settings(), name) for name in names} | backoff])
        self.asked: list[tuple[tuple[str, str], Key, bool, bool]] = []

    def ask(self, key: Key, event: Event, *, in_time: bool) -> None:
        self.asked.append(((event["holder"], event["queue"]), key, event["kind"] == "RESCHEDULE", in_time))


class LeaseMachine(RuleBasedStateMachine):
    """The book folds what the codec made of each batch, the plain fold the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = QueueSettings(max_attempts=2, backoff=BACKOFF_RULE, deduplication_window_ms=WINDOW_MS)
        self.book = LeaseBook(self.setting)
        # The book folds each marker at once, so it goes by the settings of that moment.
        self.plain = PlainFold(lambda: self.settings)
        self.namer = Tracker(self.setting, 9)
        self.table: dict[bytes, bytes] = {}
        self.time_ms = self.monotonic_ms = 100_000
        self.other_monotonic_ms = 0
        self.offset = -1
        self.fired: list[DueAction] = []
        #: RESUMEs without an answer, and their places in the log.
        self.resumes: list[tuple[Resume, int]] = []

    def setting(self, queue: str) -> QueueSettings:
        return self.settings

    @initialize(hints=st.sampled_from([0, 3, _MAX_STALE_HINTS]), firing=st.sampled_from([1, 3, _MAX_FIRING]))
    def limit(self, hints: int, firing: int) -> None:
        lease_book.MAX_STALE_HINTS, lease_book.MAX_FIRING = hints, firing

    def teardown(self) -> None:
        lease_book.MAX_STALE_HINTS, lease_book.MAX_FIRING = _MAX_STALE_HINTS, _MAX_FIRING

    def fold(self, batch: Batch) -> None:
        # Offsets of a log have gaps: control records of transactions.
        self.offset += random.Random(self.offset).randint(1, 2)
        self.book.fold(decode(encode(batch)), self.time_ms, self.offset)
        self.plain.fold(marker("marq.markers/0", self.offset, self.time_ms, batch))

    @rule(
        queue=_queues,
        source=_records,
        holder=_holders,
        offsets=_offsets,
        back=st.integers(0, 3),
        in_order=st.booleans(),
        counted=st.booleans(),
        others_holder=st.none() | _holders,
        data=st.data(),
    )
    def acquire(
        self,
        queue: str,
        source: Source,
        holder: int,
        offsets: list[int],
        back: int,
        in_order: bool,
        counted: bool,
        others_holder: int | None,
        data: st.DataObject,
    ) -> None:
        """Acquire records of a queue, and perhaps those of the other queue at the same places."""
        count = len(offsets)
        attempts = data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
        due = st.sampled_from([NOW, DUE_AT_ONCE]) | _times.map(self.absolute)
        dues = data.draw(st.none() | st.lists(due, min_size=count, max_size=count))
        other = {} if others_holder is None else {"b" if queue == "a" else "a": others_holder}
        for name, its_holder in {queue: holder, **other}.items():
            payloads = [payload(name, offset, attempt) for offset, attempt in zip(offsets, attempts, strict=True)]
            first = max(0, offsets[0] - back)
            self.fold(Acquire(name, its_holder, source, offsets, 100, first, payloads, dues, in_order, counted))

    @rule(queue=_queues, source=_records, offsets=_offsets, onwards=st.booleans())
    def resume(self, queue: str, source: Source, offsets: list[int], onwards: bool) -> None:
        question = Resume(queue, self.offset + 10, source, offsets, onwards)
        self.fold(question)
        self.resumes.append((question, self.offset))

    def absolute(self, time_ms: int) -> int:
        return min(max(0, self.time_ms + time_ms), _LONGEST_MS)

    def times(self, data: st.DataObject, relative: bool, count: int) -> list[int]:
        drawn = data.draw(st.lists(_times, min_size=count, max_size=count))
        return [max(0, time_ms) if relative else self.absolute(time_ms) for time_ms in drawn]

    @rule(
        queue=_queues,
        source=_senders,
        offsets=_offsets,
        relative=st.booleans(),
        back=st.none() | st.integers(0, 3),
        data=st.data(),
    )
    def delay(
        self, queue: str, source: Source, offsets: list[int], relative: bool, back: int | None, data: st.DataObject
    ) -> None:
        payloads = [payload(queue, offset, own_id=data.draw(_ids), key=data.draw(_keys)) for offset in offsets]
        from_offset = None if back is None else max(0, offsets[0] - back)
        times = self.times(data, relative, len(offsets))
        self.fold(Delay(queue, 1, source, offsets, times, relative, from_offset, payloads))

    @rule(queue=_queues, offsets=_offsets, redriven=st.booleans())
    def settle(self, queue: str, offsets: list[int], redriven: bool) -> None:
        payloads = [payload(queue, offset) for offset in offsets]
        times = [0] * len(offsets)
        self.fold(
            Delay(queue, 1, LETTERS, offsets, times, True, offsets[0], payloads)
            if redriven
            else Discard(queue, 1, LETTERS, offsets)
        )

    @rule(
        queue=_any_queues,
        source=_sources,
        holder=_holders,
        offsets=_offsets,
        relative=st.booleans(),
        data=st.data(),
    )
    def reschedule(
        self, queue: str, source: Source, holder: int, offsets: list[int], relative: bool, data: st.DataObject
    ) -> None:
        times = self.times(data, relative, len(offsets))
        self.fold(Reschedule(queue, holder + 100, source, offsets, times, relative))

    @rule(queue=_any_queues, source=_sources, holder=_holders, offsets=_offsets)
    def cancel(self, queue: str, source: Source, holder: int, offsets: list[int]) -> None:
        self.fold(Cancel(queue, holder + 200, source, offsets))

    @rule(queue=_queues, source=_records | st.none(), end=_offsets, back_ms=_times, flags=_flags)
    def purge(self, queue: str, source: Source | None, end: list[int], back_ms: int, flags: tuple[bool, bool]) -> None:
        """Purge a source up to an offset, or messages without records up to a time."""
        place, before = (Source(WITHOUT_RECORDS, 0), self.absolute(back_ms) - 1) if source is None else (source, end[0])
        self.fold(Purge(queue, 1, place, [before], *flags))

    @rule()
    def answer(self) -> None:
        """Each question once: as soon as its message is not on its way, but not where a fact is the answer.

        Of a question about the messages of several queues, one that was in time counts.
        """
        on_its_way = self.on_its_way()
        expected: dict[tuple[tuple[str, str], str], RequestOutcome] = {}
        waiting = []
        for asker, key, moves, in_time in self.plain.asked:
            if moves and in_time and key in on_its_way:
                waiting.append((asker, key, moves, in_time))
            elif moves or not in_time:
                outcome = RequestOutcome.DONE if in_time and key in self.plain.open else RequestOutcome.TOO_LATE
                question = asker, key[1]
                expected[question] = min(outcome, expected.get(question, outcome))
        self.plain.asked = waiting
        answers = self.book.take_answers()

        found = {
            ((holder_name(batch.holder), batch.queue), f"{log_name(batch.source)}/{offset}"): outcome
            for batch in answers
            if not isinstance(batch, Resumed)
            for offset, outcome in zip(batch.offsets, batch.outcomes, strict=True)
        }

        assert found == expected
        resumed = [self.told(answer) for answer in answers if isinstance(answer, Resumed)]
        assert resumed == [self.known(*resume) for resume in self.resumes]
        self.resumes = []

    def told(self, batch: Resumed) -> tuple[Any, ...]:
        read = decode(encode(batch))
        assert isinstance(read, Resumed)
        assert read.left == 0
        first = read.offsets[0]
        known = {offset for start, end in read.acquired for offset in range(start, end) if offset >= first}
        rows = zip(read.offsets, read.states, read.attempts, read.waits_ms, read.errors, strict=True)
        return (batch.queue, batch.holder, batch.source, batch.asked_at), known, list(rows)

    def known(self, question: Resume, asked_at: int) -> tuple[Any, ...]:
        """Return what the plain fold says to a question."""
        queue, source, offsets = question.queue, question.source, question.offsets
        stands = {offset: self.plain.open.get((queue, name_of(source, offset))) for offset in range(13)}
        own = {offset: stand for offset, stand in stands.items() if stand is not None}
        known: set[int] = set()
        if question.onwards:
            offsets = [offsets[0], *[offset for offset in sorted(own) if offset > offsets[0]]]
            acquired = self.plain.acquired.get((queue, log_name(source)), b"")
            known = {offset for offset, yes in enumerate(acquired) if yes and offset >= offsets[0]}
        asked = (queue, question.holder, source, asked_at)
        return asked, known, [(offset, *self.row(own.get(offset))) for offset in offsets]

    def row(self, standing: Standing | None) -> tuple[int, int, int, str]:
        if standing is None:
            return 0, 0, 0, ""
        state = rows.State[standing.state]
        was_released = state in (rows.State.RELEASED, rows.State.WAITING_IN_ORDER)
        attempt = standing.attempt + (was_released and standing.counted)
        attempt -= state is rows.State.LEASED_IN_ORDER and not standing.counted
        wait_ms = min(max(0, standing.due_ms - self.plain.now_ms), 2**32 - 1)
        return state, attempt, wait_ms, standing.text

    @rule(queue=_any_queues, source=_sources, holder=_holders, offsets=_offsets)
    def acknowledge(self, queue: str, source: Source, holder: int, offsets: list[int]) -> None:
        self.fold(Ack(queue, holder, source, offsets))

    @precondition(lambda self: self.plain.open)
    @rule(kind=st.sampled_from([Ack, Ack, Cancel, Reschedule]), data=st.data())
    def name_no_queue(self, kind: type[Any], data: st.DataObject) -> None:
        """Acknowledge, cancel or move the open messages of a place, which random offsets rarely meet."""
        key = data.draw(st.sampled_from(sorted(self.plain.open)))
        topic, partition, offset = key[1].rsplit("/", 2)
        source, holder = Source(topic, int(partition)), int(self.plain.open[key].holder or "1", 16)
        times = [self.times(data, True, 1), True] if kind is Reschedule else []
        self.fold(kind(ANY_QUEUE, holder, source, [int(offset)], *times))

    @rule(queue=_queues, source=_sources, holder=_holders, offsets=_offsets, lease_ms=_leases, flags=_flags)
    def renew(
        self, queue: str, source: Source, holder: int, offsets: list[int], lease_ms: int, flags: tuple[bool, bool]
    ) -> None:
        self.fold(Renew(queue, holder, source, offsets, lease_ms, *flags))

    @rule(queue=_queues, source=_sources, holder=_holders, offsets=_offsets, lease_ms=_leases)
    def dispatch(self, queue: str, source: Source, holder: int, offsets: list[int], lease_ms: int) -> None:
        self.fold(Dispatch(queue, holder, source, offsets, lease_ms))

    @rule(queue=_queues, source=_sources, holder=_holders, offsets=_offsets, counted=st.booleans(), data=st.data())
    def release(
        self, queue: str, source: Source, holder: int, offsets: list[int], counted: bool, data: st.DataObject
    ) -> None:
        delays = [data.draw(_delays) for _ in offsets]
        errors = [f"error {offset % 3}" for offset in offsets]
        self.fold(Release(queue, holder, source, offsets, delays, counted, errors))

    @rule(queue=_queues, source=_sources, holder=_holders, offsets=_offsets)
    def reject(self, queue: str, source: Source, holder: int, offsets: list[int]) -> None:
        self.fold(Reject(queue, holder, source, offsets, ["no good"] * len(offsets)))

    @rule(step_ms=st.integers(-20, 60))
    def pass_time(self, step_ms: int) -> None:
        self.time_ms += step_ms
        self.monotonic_ms += max(0, step_ms)

    @rule(jump_ms=st.sampled_from([-20_000, -5_001, 5_000, 5_001, 20_000]))
    def set_the_brokers_clock(self, jump_ms: int) -> None:
        self.time_ms += jump_ms

    @rule(max_attempts=st.integers(1, 3), window_ms=st.sampled_from([10, WINDOW_MS]))
    def change_the_settings(self, max_attempts: int, window_ms: int) -> None:
        self.settings = replace(self.settings, max_attempts=max_attempts, deduplication_window_ms=window_ms)

    @rule()
    def append_garbage(self) -> None:
        self.offset += 1
        self.book.skip(self.time_ms, self.offset)
        self.plain.fold(marker("marq.markers/0", self.offset, self.time_ms, None, b"???"))

    @rule()
    def append_a_control_record(self) -> None:
        self.offset += 1
        self.book.passed(self.offset + 1)
        self.plain.applied = self.offset

    def on_its_way(self) -> set[Key]:
        return {(fire.lease.queue, name_of(fire.source, fire.offset)) for fire in self.fired}

    @rule(passed_ms=st.integers(0, 10**6))
    def tick_of_another(self, passed_ms: int) -> None:
        self.other_monotonic_ms += passed_ms
        self.fold(Tick(10, self.other_monotonic_ms))

    @rule()
    def tick_and_fire(self) -> None:
        self.fold(Tick(9, self.monotonic_ms))
        on_its_way = self.on_its_way()
        due = {
            key: ending(standing, self.settings.max_attempts)
            for key, standing in self.plain.open.items()
            if standing.due_ms <= self.plain.now_ms and key not in on_its_way and standing.state not in IN_ORDER
        }

        fires = self.book.due(self.book.clock.now_ms)

        found = {
            (fire.lease.queue, name_of(fire.source, fire.offset)): DueEnding(
                fire.fact_kind.name, fire.attempt, fire.cause.name
            )
            for fire in fires
        }
        assert found.items() <= due.items()
        assert all(fire.destination is _DESTINATIONS[fire.fact_kind] for fire in fires)
        assert len(fires) == len(found) == min(len(due), max(0, lease_book.MAX_FIRING - len(self.fired)))
        assert [fire.lease.due_ms for fire in fires] == sorted(self.plain.open[key].due_ms for key in due)[: len(fires)]
        places = [fire.lease.holder if fire.lease.state is State.DELAYED else 0 for fire in fires]
        order = [
            (fire.lease.due_ms, fire.lease.since_ms, place, fire.source)
            for fire, place in zip(fires, places, strict=True)
        ]
        assert order == sorted(order)
        self.fired += fires

    @rule(share=st.integers(0, 3))
    def commit_transaction(self, share: int) -> None:
        """Commit a transaction with some of the redeliveries, or all: they go out in several transactions."""
        count = len(self.fired) if share == 0 else min(share, len(self.fired))
        fires, self.fired = self.fired[:count], self.fired[count:]
        for fact in self.namer.facts(fires):
            self.fold(fact)

    @rule()
    def write(self) -> None:
        for key, row in self.book.take_changes().items():
            if row is None:
                # A deletion of what is not there would be harmless, but says that the book keeps wrong accounts.
                assert key in self.table
                del self.table[key]
            else:
                self.table[key] = row
        assert table_difference(self.plain, self.table) == ""

    @rule()
    def write_and_restart(self) -> None:
        self.write()
        self.book = LeaseBook(self.setting)
        self.book.restore(sorted(self.table.items()))
        self.fired = []
        self.plain.asked, self.resumes = [], []

    @rule()
    def forget_what_is_on_its_way(self) -> None:
        self.book.forget_firing()
        self.fired = []

    @invariant()
    def is_the_plain_fold(self) -> None:
        assert difference(self.plain, self.book) == ""

    @invariant()
    def keeps_the_payload_of_each_open_message(self) -> None:
        for source, offset, lease in self.book.open_leases():
            kept = self.book.fresh_payload(lease.queue, source, offset) or rows.decode_payload(
                self.table[rows.row_key(lease.queue, source, offset)]
            )
            assert kept.value == payload(lease.queue, offset).value

    @invariant()
    def knows_when_rows_must_be_written(self) -> None:
        rows_to_write = self.book.pending_rows
        assert not self.book.has_more_rows(rows_to_write)
        assert self.book.has_more_rows(rows_to_write - 1)

    @invariant()
    def knows_when_the_next_is_due(self) -> None:
        on_its_way = self.on_its_way()
        waiting = [
            standing.due_ms
            for key, standing in self.plain.open.items()
            if key not in on_its_way and standing.state not in IN_ORDER
        ]
        found = self.book.next_due_ms
        if waiting:
            assert found is not None
            assert found <= min(waiting)
        else:
            assert found is None


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
