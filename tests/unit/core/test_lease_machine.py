"""Any sequence of markers, with a restart from the written rows at any moment: the book is the log's plain fold."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from marq.core import due_messages
from marq.core.leases import LeaseBook
from marq.core.redeliver_or_dead_letter import DueAction
from marq.core.storage import rows
from marq.core.tracker import Tracker
from marq.settings.backoff import Backoff
from marq.settings.queue import QueueSettings
from marq.wire.marker_codec import decode, encode
from marq.wire.markers import (
    BACKOFF,
    Ack,
    Acquire,
    Batch,
    Cancel,
    Delay,
    Discard,
    Dispatch,
    Outcome,
    Payload,
    Reject,
    Release,
    Renew,
    Reschedule,
    Source,
    Tick,
)
from proof.fold import Ending, Event, Fold, ending
from proof.history import holder_name, log_name, marker, name_of
from tests.simulation.oracle import difference, table_difference
from tests.unit.core.batches import DRAWN, LETTERS

BACKOFF_RULE = Backoff(10, 2.0, 100)
_MAX_STALE_HINTS, _MAX_FIRING = due_messages.MAX_STALE_HINTS, due_messages.MAX_FIRING

_records = st.sampled_from([Source("marq.messages", 0), Source("marq.messages", 1)])
_sources = st.one_of(_records, st.just(DRAWN), st.just(LETTERS))
_holders = st.sampled_from([1, 2])
_held_kinds = st.sampled_from([Ack, Renew, Dispatch])
_offsets = st.sets(st.integers(0, 12), min_size=1, max_size=5).map(sorted)
_delays = st.sampled_from([BACKOFF, 0, 5, 50])
_times = st.sampled_from([-50, 0, 5, 50])
#: A record belongs to one queue, by its key.
_queues = {True: "even", False: "odd"}


class PlainFold(Fold):
    """Remembers what is asked: by whom, of which message, whether it is to be moved, and whether that came in time."""

    def __init__(self, limits: Callable[[str], Sequence[int]]) -> None:
        super().__init__(lambda queue: [BACKOFF_RULE], limits)
        self.asked: list[tuple[str, str, bool, bool]] = []

    def ask(self, key: str, event: Event, *, in_time: bool) -> None:
        self.asked.append((event["holder"], key, event["kind"] == "RESCHEDULE", in_time))


class LeaseMachine(RuleBasedStateMachine):
    """The book folds what the codec made of each batch, the plain fold the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = QueueSettings(max_attempts=2, backoff=BACKOFF_RULE)
        self.book = LeaseBook(self.setting)
        # The book folds each marker at once, so it goes by the settings of that moment.
        self.plain = PlainFold(lambda queue: [self.settings.max_attempts])
        self.namer = Tracker(self.setting, 9)
        self.table: dict[bytes, bytes] = {}
        self.time_ms = self.monotonic_ms = 100_000
        self.offset = -1
        self.fired: list[DueAction] = []

    def setting(self, queue: str) -> QueueSettings:
        return self.settings

    @initialize(hints=st.sampled_from([0, 3, _MAX_STALE_HINTS]), firing=st.sampled_from([1, 3, _MAX_FIRING]))
    def limit(self, hints: int, firing: int) -> None:
        due_messages.MAX_STALE_HINTS, due_messages.MAX_FIRING = hints, firing

    def teardown(self) -> None:
        due_messages.MAX_STALE_HINTS, due_messages.MAX_FIRING = _MAX_STALE_HINTS, _MAX_FIRING

    def fold(self, batch: Batch) -> None:
        # Offsets of a log have gaps: control records of transactions.
        self.offset += random.Random(self.offset).randint(1, 2)
        self.book.fold(decode(encode(batch)), self.time_ms, self.offset)
        self.plain.fold(marker("marq.markers/0", self.offset, self.time_ms, batch))

    def own(self, offsets: list[int], even: bool) -> list[int]:
        return [offset for offset in offsets if (offset % 2 == 0) == even]

    @rule(
        source=_records, holder=_holders, offsets=_offsets, even=st.booleans(), back=st.integers(0, 3), data=st.data()
    )
    def acquire(
        self, source: Source, holder: int, offsets: list[int], even: bool, back: int, data: st.DataObject
    ) -> None:
        own = self.own(offsets, even)
        if own:
            attempts = data.draw(st.lists(st.integers(1, 3), min_size=len(own), max_size=len(own)))
            each = zip(own, attempts, strict=True)
            payloads = [Payload(0, attempt, None, (), b"%d" % offset) for offset, attempt in each]
            dues = data.draw(
                st.none() | st.lists(st.just(-1) | _times.map(self.absolute), min_size=len(own), max_size=len(own))
            )
            self.fold(Acquire(_queues[even], holder, source, own, 100, max(0, own[0] - back), payloads, dues))

    def absolute(self, time_ms: int) -> int:
        return max(0, self.time_ms + time_ms)

    def times(self, data: st.DataObject, relative: bool, count: int) -> list[int]:
        drawn = data.draw(st.lists(_times, min_size=count, max_size=count))
        return [max(0, time_ms) if relative else self.absolute(time_ms) for time_ms in drawn]

    @rule(
        offsets=_offsets, even=st.booleans(), relative=st.booleans(), back=st.none() | st.integers(0, 3), data=st.data()
    )
    def delay(self, offsets: list[int], even: bool, relative: bool, back: int | None, data: st.DataObject) -> None:
        own = self.own(offsets, even)
        if own:
            payloads = [Payload(0, 1, None, (), b"%d" % offset) for offset in own]
            from_offset = None if back is None else max(0, own[0] - back)
            times = self.times(data, relative, len(own))
            self.fold(Delay(_queues[even], 1, DRAWN, own, times, relative, from_offset, payloads))

    @rule(offsets=_offsets, even=st.booleans(), redriven=st.booleans())
    def settle(self, offsets: list[int], even: bool, redriven: bool) -> None:
        payloads = [Payload(0, 1, None, (), b"%d" % offset) for offset in offsets]
        times = [0] * len(offsets)
        self.fold(
            Delay(_queues[even], 1, LETTERS, offsets, times, True, offsets[0], payloads)
            if redriven
            else Discard(_queues[even], 1, LETTERS, offsets)
        )

    @rule(
        source=_sources, holder=_holders, offsets=_offsets, even=st.booleans(), relative=st.booleans(), data=st.data()
    )
    def reschedule(
        self, source: Source, holder: int, offsets: list[int], even: bool, relative: bool, data: st.DataObject
    ) -> None:
        own = self.own(offsets, even)
        if own:
            times = self.times(data, relative, len(own))
            self.fold(Reschedule(_queues[even], holder + 100, source, own, times, relative))

    @rule(source=_sources, holder=_holders, offsets=_offsets, even=st.booleans())
    def cancel(self, source: Source, holder: int, offsets: list[int], even: bool) -> None:
        own = self.own(offsets, even)
        if own:
            self.fold(Cancel(_queues[even], holder + 200, source, own))

    @rule()
    def answer(self) -> None:
        """Each question once: as soon as its message is not on its way, but not where a fact is the answer."""
        on_its_way = {name_of(fire.source, fire.offset) for fire in self.fired}
        expected: dict[tuple[str, str], Outcome] = {}
        waiting = []
        for holder, key, moves, in_time in self.plain.asked:
            if moves and in_time and key in on_its_way:
                waiting.append((holder, key, moves, in_time))
            elif moves or not in_time:
                expected[holder, key] = Outcome.DONE if in_time and key in self.plain.open else Outcome.TOO_LATE
        self.plain.asked = waiting

        found = {
            (holder_name(batch.holder), f"{log_name(batch.source)}/{offset}"): outcome
            for batch in self.book.take_answers()
            for offset, outcome in zip(batch.offsets, batch.outcomes, strict=True)
        }

        assert found == expected

    @rule(source=_sources, holder=_holders, offsets=_offsets, even=st.booleans(), kind=_held_kinds)
    def acknowledge_renew_or_spend(
        self, source: Source, holder: int, offsets: list[int], even: bool, kind: type[Any]
    ) -> None:
        own = self.own(offsets, even)
        if own:
            batch = Ack(_queues[even], holder, source, own)
            self.fold(batch if kind is Ack else kind(_queues[even], holder, source, own, 100))

    @rule(source=_sources, holder=_holders, offsets=_offsets, even=st.booleans(), delay=_delays, counted=st.booleans())
    def release(self, source: Source, holder: int, offsets: list[int], even: bool, delay: int, counted: bool) -> None:
        own = self.own(offsets, even)
        if own:
            errors = [f"error {offset % 3}" for offset in own]
            self.fold(Release(_queues[even], holder, source, own, [delay] * len(own), counted, errors))

    @rule(source=_sources, holder=_holders, offsets=_offsets, even=st.booleans())
    def reject(self, source: Source, holder: int, offsets: list[int], even: bool) -> None:
        own = self.own(offsets, even)
        if own:
            self.fold(Reject(_queues[even], holder, source, own, ["no good"] * len(own)))

    @rule(step_ms=st.integers(-20, 60))
    def pass_time(self, step_ms: int) -> None:
        self.time_ms += step_ms
        self.monotonic_ms += max(0, step_ms)

    @rule(jump_ms=st.sampled_from([-20_000, -5_001, 5_000, 5_001, 20_000]))
    def set_the_brokers_clock(self, jump_ms: int) -> None:
        self.time_ms += jump_ms

    @rule(max_attempts=st.integers(1, 3))
    def change_the_limit(self, max_attempts: int) -> None:
        self.settings = QueueSettings(max_attempts=max_attempts, backoff=BACKOFF_RULE)

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

    @rule(monotonic_ms=st.integers(0, 10**6))
    def tick_of_another(self, monotonic_ms: int) -> None:
        self.fold(Tick(10, monotonic_ms))

    @rule()
    def tick_and_fire(self) -> None:
        self.fold(Tick(9, self.monotonic_ms))
        on_its_way = {name_of(fire.source, fire.offset) for fire in self.fired}
        due = {
            key: ending(standing, self.settings.max_attempts)
            for key, standing in self.plain.open.items()
            if standing.due_ms <= self.plain.now_ms and key not in on_its_way
        }

        fires = self.book.due(self.book.clock.now_ms)

        found = {
            name_of(each.source, each.offset): Ending(each.fact_kind.name, each.attempt, each.cause.name)
            for each in fires
        }
        assert found.items() <= due.items()
        assert len(fires) == len(found) == min(len(due), max(0, due_messages.MAX_FIRING - len(self.fired)))
        assert [each.lease.due_ms for each in fires] == sorted(self.plain.open[key].due_ms for key in due)[: len(fires)]
        order = [(each.lease.due_ms, each.lease.since_ms, each.source) for each in fires]
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
        self.book.restore(self.table.items())
        self.fired = []
        self.plain.asked = []

    @rule()
    def forget_what_is_on_its_way(self) -> None:
        self.book.forget_firing()
        self.fired = []

    @invariant()
    def is_the_plain_fold(self) -> None:
        assert difference(self.plain, self.book) == ""

    @invariant()
    def keeps_the_payload_of_each_open_message(self) -> None:
        for source, offset, _ in self.book.open_leases():
            payload = self.book.fresh_payload(source, offset) or rows.decode_payload(
                self.table[rows.row_key(source, offset)]
            )
            assert payload.value == b"%d" % offset

    @invariant()
    def knows_when_the_next_is_due(self) -> None:
        on_its_way = {name_of(fire.source, fire.offset) for fire in self.fired}
        waiting = [standing.due_ms for key, standing in self.plain.open.items() if key not in on_its_way]
        found = self.book.next_due_ms
        if waiting:
            assert found is not None
            assert found <= min(waiting)
        else:
            assert found is None


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
