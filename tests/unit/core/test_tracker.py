"""The tracker: it fires only by the clock of a TICK of its own that it has read back."""

from __future__ import annotations

import pytest

from marq.core import tracker as tracker_module
from marq.core.redeliver_or_dead_letter import DueAction
from marq.core.storage.rows import State
from marq.core.tracker import TICK_INTERVAL_MS, Tracker
from marq.settings.backoff import Backoff
from marq.settings.queue import QueueSettings
from marq.wire.errors import UnknownVersion
from marq.wire.marker_codec import encode
from marq.wire.markers import Batch, Cause, Fact, Kind, RequestOutcome, Resumed, Source, Tick
from marq.wire.quarantines import Quarantine, digest
from tests.unit.core.batches import (
    DRAWN,
    FORMER,
    LEASE_MS,
    NEWER,
    QUEUE,
    SOURCE,
    ack,
    acquire,
    delay,
    ordered,
    reject,
    release,
    renew,
    reschedule,
    resume,
)

ME = 42
T0 = 1_000_000


class Partition:
    """A markers partition and its owner; monotonic time is the log's less T0."""

    def __init__(self, *batches: Batch | bytes | None) -> None:
        self.settings = QueueSettings(max_attempts=2, backoff=Backoff(jitter=False))
        self.tracker = Tracker(lambda queue: self.settings, ME)
        self.log: list[tuple[bytes | None, int]] = []
        self.position = 0
        for batch in batches:
            self.append(batch, T0)

    def append(self, batch: Batch | bytes | None, at: int) -> None:
        self.log.append((batch if batch is None or isinstance(batch, bytes) else encode(batch), at))

    def read(self, count: int | None = None) -> None:
        end = len(self.log) if count is None else self.position + count
        for offset in range(self.position, end):
            value, at = self.log[offset]
            self.tracker.read(value, at, offset)
        self.position = end

    def tick(self, at: int) -> None:
        """Write a TICK and read everything up to it."""
        self.append(self.tracker.tick(at - T0), at)
        self.read()
        self.tracker.saw(at - T0)


def offsets(fires: list[DueAction]) -> list[int]:
    return [fire.offset for fire in fires]


def test_nothing_fires_before_an_own_tick_has_been_read() -> None:
    partition = Partition(acquire([1]))
    partition.append(acquire([2]), T0 + 10 * LEASE_MS)
    partition.read()

    assert partition.tracker.due() == []
    partition.append(partition.tracker.tick(5), T0 + 10 * LEASE_MS)
    assert partition.tracker.due() == []
    partition.read()

    assert offsets(partition.tracker.due()) == [1]


def test_requests_are_answered_after_an_own_tick_has_been_read() -> None:
    """The former owner had sent a copy when the message was moved: its fact stands behind the RESCHEDULE."""
    partition = Partition(delay([1, 2], [0, 0]), reschedule([1, 2], 1_000))
    partition.read()

    assert partition.tracker.answers() == []
    partition.append(Fact(Kind.DELIVERED, QUEUE, ME + 1, DRAWN, [1], [1], [Cause.DUE]), T0)
    partition.tick(T0)

    (answer,) = partition.tracker.answers()
    assert (answer.offsets, answer.outcomes) == ([1, 2], [RequestOutcome.TOO_LATE, RequestOutcome.DONE])


def test_a_resume_is_answered_after_an_own_tick_has_been_read() -> None:
    """The former owner may have ended a message, with a fact behind the RESUME."""
    partition = Partition(ordered([1, 2]), resume([1]))
    partition.read()

    assert partition.tracker.answers() == []
    partition.append(Fact(Kind.DEAD_LETTERED, QUEUE, ME + 1, SOURCE, [1], [1], [Cause.REJECTED]), T0)
    partition.tick(T0)

    (answer,) = partition.tracker.answers()
    assert isinstance(answer, Resumed)
    assert (answer.offsets, answer.states) == ([1, 2], [0, State.LEASED_IN_ORDER])
    assert partition.tracker.answers() == []


def test_messages_that_keep_their_places_want_no_tick() -> None:
    partition = Partition(ordered([1, 2]), release([2], 5, holder=FORMER))
    partition.tick(T0)

    assert partition.tracker.tick_in_ms(100_000) is None
    partition.tick(T0 + 100 * LEASE_MS)
    assert partition.tracker.due() == []


def test_a_tick_of_another_tracker_fires_nothing() -> None:
    partition = Partition(acquire([1]))
    partition.append(Tick(ME + 1, 5), T0 + 10 * LEASE_MS)
    partition.read()

    assert partition.tracker.due() == []


def test_an_ack_that_is_in_the_log_before_the_tick_is_never_overlooked() -> None:
    partition = Partition()
    partition.tick(T0)
    partition.append(acquire([1, 2]), T0)
    partition.append(ack([1]), T0 + 10)
    partition.append(renew([2]), T0 + 20)
    partition.append(partition.tracker.tick(5), T0 + LEASE_MS)

    partition.read(2)
    assert partition.tracker.due() == []
    partition.read()

    assert partition.tracker.due() == []


def test_what_becomes_due_by_a_later_record_waits_for_the_next_tick() -> None:
    partition = Partition(acquire([1]))
    partition.tick(T0 + 10)
    partition.append(acquire([2]), T0 + 5 * LEASE_MS)
    partition.read()

    assert partition.tracker.due() == []
    partition.tick(T0 + 5 * LEASE_MS)

    assert offsets(partition.tracker.due()) == [1]


def test_the_first_tick_is_wanted_at_once_and_no_other_while_it_is_on_its_way() -> None:
    tracker = Partition().tracker

    assert tracker.tick_in_ms(0) == 0
    tracker.tick(0)

    assert tracker.tick_in_ms(10_000) is None


def test_without_anything_to_come_no_tick_is_wanted() -> None:
    partition = Partition()
    partition.tick(T0)

    assert partition.tracker.tick_in_ms(100_000) is None


def test_a_tick_is_wanted_when_a_row_seems_due_but_not_too_often() -> None:
    partition = Partition(acquire([1]))
    partition.tick(T0)

    assert partition.tracker.tick_in_ms(0) == LEASE_MS
    assert partition.tracker.tick_in_ms(LEASE_MS - 1) == 1
    assert partition.tracker.tick_in_ms(LEASE_MS) == 0
    partition.append(acquire([2], lease_ms=1), T0)
    partition.read()

    assert partition.tracker.tick_in_ms(10) == TICK_INTERVAL_MS - 10


def test_the_estimate_goes_on_at_the_trackers_own_pace() -> None:
    tracker = Partition().tracker
    tracker.book.clock.advance(T0)
    tracker.saw(500)

    assert tracker.estimate_ms(800) == T0 + 300
    tracker.saw(800)
    assert tracker.estimate_ms(800) == T0 + 300
    tracker.book.clock.advance(T0 + 1_000)
    tracker.saw(900)

    assert tracker.estimate_ms(900) == T0 + 1_000


def test_a_clock_that_was_set_back_sets_the_estimate_back() -> None:
    partition = Partition()
    partition.tick(T0)
    partition.append(partition.tracker.tick(50), T0 + 3_600_000)
    partition.read()
    partition.tracker.saw(50)

    assert partition.tracker.jump_ms == 3_600_000 - 50
    assert partition.tracker.estimate_ms(50) == T0 + 50


def test_after_a_fresh_fencing_an_old_tick_does_not_count() -> None:
    """The simulation's seed 658: a message was sent twice.

    A TICK is written before the facts of a transaction whose outcome is unknown. The owner fences again, reads the TICK
    but not yet the facts, and must not take the messages for unsent.
    """
    partition = Partition(acquire([1]))
    partition.tick(T0 + LEASE_MS)
    tracker = partition.tracker
    fires = tracker.due()
    assert offsets(fires) == [1]
    partition.append(tracker.tick(LEASE_MS + 100), T0 + LEASE_MS + 100)
    for fact in tracker.facts(fires):
        partition.append(fact, T0 + LEASE_MS + 101)

    tracker.take_over_again()
    partition.read(1)

    assert tracker.due() == []
    assert tracker.tick_in_ms(LEASE_MS + 200) == 0
    partition.tick(T0 + LEASE_MS + 200)
    assert tracker.due() == []
    assert len(tracker.book) == 0


def test_after_a_failed_transaction_what_was_not_sent_fires_again() -> None:
    partition = Partition(acquire([1]))
    partition.tick(T0 + LEASE_MS)
    assert offsets(partition.tracker.due()) == [1]

    partition.tracker.take_over_again()
    assert partition.tracker.due() == []
    partition.tick(T0 + LEASE_MS + 100)

    assert offsets(partition.tracker.due()) == [1]


def test_a_later_tick_does_not_make_it_forget_what_is_on_its_way() -> None:
    partition = Partition(acquire([1]))
    partition.tick(T0 + LEASE_MS)
    assert offsets(partition.tracker.due()) == [1]

    partition.tick(T0 + 2 * LEASE_MS)

    assert partition.tracker.due() == []


def test_an_unreadable_record_is_kept_for_quarantine_and_reading_goes_on() -> None:
    partition = Partition(b"garbage", None, acquire([1]))

    partition.read()

    assert [(offset, value) for offset, value, _ in partition.tracker.unreadable] == [(0, b"garbage"), (1, None)]
    assert len(partition.tracker.book) == 1


def test_a_record_of_a_newer_version_stops_the_partition_before_it() -> None:
    partition = Partition(acquire([1]))
    partition.append(NEWER, T0 + 5)

    with pytest.raises(UnknownVersion):
        partition.read()

    assert partition.tracker.book.applied == 0
    assert partition.tracker.unreadable == []
    assert partition.tracker.book.clock.now_ms == T0


def test_a_record_of_a_newer_version_that_is_ordered_into_quarantine_is_passed_over_and_kept() -> None:
    partition = Partition(NEWER)
    partition.append(acquire([1]), T0 + 5)
    order = Quarantine(0, 0, digest(NEWER), "ann@host", "now", "not ours")
    partition.tracker.ordered = lambda offset, value: order if offset == 0 and order.fits(value) else None

    partition.read()

    [(offset, value, why)] = partition.tracker.unreadable
    assert (offset, value) == (0, NEWER)
    assert "marker version 2" in why
    assert "quarantined by ann@host" in why
    assert why.endswith(": not ours")
    assert (partition.tracker.book.applied, len(partition.tracker.book)) == (1, 1)


def test_an_order_of_quarantine_never_removes_a_marker_that_can_be_read() -> None:
    """A newer worker reads what an older one stopped at: passing over it would lose what it says."""
    partition = Partition(acquire([1]))
    partition.tracker.ordered = lambda offset, value: Quarantine(0, offset, digest(value), "ann@host", "now")

    partition.read()

    assert partition.tracker.unreadable == []
    assert len(partition.tracker.book) == 1


def test_a_record_that_was_applied_before_is_passed_over() -> None:
    partition = Partition(acquire([1]), ack([1]), b"garbage")
    partition.read()
    counts = partition.tracker.book.counts[QUEUE]
    partition.position = 0

    partition.read()

    assert partition.tracker.book.counts[QUEUE] == counts
    assert len(partition.tracker.book) == 0
    assert len(partition.tracker.unreadable) == 1


def test_facts_are_grouped_and_tell_of_every_copy() -> None:
    partition = Partition()
    other = Source("marq.messages", 4)
    partition.append(acquire([1, 2, 3]), T0)
    partition.append(acquire([1], source=other), T0)
    partition.append(acquire([9], queue="reports", attempt=2), T0)
    partition.append(release([2]), T0)
    partition.append(reject([3]), T0)
    partition.tick(T0 + LEASE_MS)

    fires = partition.tracker.due()
    facts = partition.tracker.facts(fires)

    told = {
        (fact.kind, fact.queue, fact.source, offset, attempt, cause)
        for fact in facts
        for offset, attempt, cause in zip(fact.offsets, fact.attempts, fact.causes, strict=True)
    }
    assert told == {
        (fire.fact_kind, fire.lease.queue, fire.source, fire.offset, fire.attempt, fire.cause) for fire in fires
    }
    assert len(fires) == 5
    assert all(fact.holder == ME and list(fact.offsets) == sorted(fact.offsets) for fact in facts)
    assert {(fact.kind, fact.queue, fact.source) for fact in facts} == {
        (Kind.REDELIVERED, QUEUE, SOURCE),
        (Kind.REDELIVERED, QUEUE, other),
        (Kind.DEAD_LETTERED, QUEUE, SOURCE),
        (Kind.DEAD_LETTERED, "reports", SOURCE),
    }


def test_facts_of_messages_that_are_far_apart_can_be_written() -> None:
    """A message that was delayed for long may become due together with one that is billions of records after it."""
    partition = Partition()
    for offset in (1, 2**40):
        partition.append(acquire([offset]), T0)
    partition.tick(T0 + LEASE_MS)

    facts: list[Fact] = partition.tracker.facts(partition.tracker.due())

    assert [list(fact.offsets) for fact in facts if encode(fact)] == [[1], [2**40]]


def test_facts_are_split_at_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_module, "MAX_FACT_MARKERS", 2)
    partition = Partition(acquire([1, 2, 3, 4, 5]))
    partition.tick(T0 + LEASE_MS)

    facts: list[Fact] = partition.tracker.facts(partition.tracker.due())

    assert [list(fact.offsets) for fact in facts] == [[1, 2], [3, 4], [5]]
    for fact in facts:
        partition.append(fact, T0 + LEASE_MS)
    partition.read()
    assert len(partition.tracker.book) == 0
