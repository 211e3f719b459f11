"""The lease book: hard cases, firing, and rows. test_transitions.py and test_lease_machine.py have the transitions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from marq.core import due_messages
from marq.core.lease_book import LeaseBook
from marq.core.redeliver_or_dead_letter import Destination
from marq.core.storage import rows
from marq.core.storage.rows import EventCounts
from marq.settings.backoff import Backoff
from marq.settings.queue import QueueSettings
from marq.wire.marker_codec import decode, encode
from marq.wire.markers import ANY_QUEUE, BACKOFF, MAX_TIME_MS, Ack, Acquire, Batch, Cause, Kind, Payload, Source
from tests.unit.core.batches import (
    HOLDER,
    LEASE_MS,
    OTHER,
    QUEUE,
    SOURCE,
    ack,
    acquire,
    fact,
    payload,
    reject,
    release,
    renew,
    spend,
)

SETTINGS = QueueSettings(max_attempts=3, backoff=Backoff(100, 2.0, 1_000, jitter=False))
#: The clock when the message of the tables below was acquired, and when the marker under test comes.
T0, T1 = 1_000_000, 1_000_400


def book(settings: QueueSettings = SETTINGS) -> LeaseBook:
    return LeaseBook(lambda queue: settings)


class Log:
    """Feeds a book, through the codec, with rising offsets."""

    def __init__(self, settings: QueueSettings = SETTINGS) -> None:
        self.settings = settings
        self.book = book(settings)
        self.table: dict[bytes, bytes] = {}

    def fold(self, *batches: Batch, at: int = T0) -> None:
        for batch in batches:
            self.book.fold(decode(encode(batch)), at, self.book.applied + 1)

    def write(self) -> dict[bytes, bytes | None]:
        """Write the changed rows into the table, as a shell does; return them."""
        changes = self.book.take_changes()
        for key, row in changes.items():
            if row is None:
                del self.table[key]
            else:
                self.table[key] = row
        return changes

    def restart(self) -> None:
        self.book = book(self.settings)
        self.book.restore(sorted(self.table.items()))


def rows_of_messages(table: Mapping[bytes, object]) -> list[bytes]:
    return [key for key in table if key[:1] in (b"r", b"s")]


# --- hard cases -------------------------------------------------------------------------------------------------------


def test_messages_of_a_topic_that_was_created_again_have_nothing_in_common_with_the_former_ones() -> None:
    former, now = Source("orders@aaaaaaaaaaaa", 0), Source("orders@bbbbbbbbbbbb", 0)
    log = Log()
    log.fold(acquire([0, 1, 2], source=former), Ack(QUEUE, HOLDER, former, [0, 1]))

    log.fold(acquire([0, 1], source=now), Ack(QUEUE, HOLDER, former, [0, 1, 2]))

    assert [(source, offset) for source, offset, _ in log.book.open_leases()] == [(now, 0), (now, 1)]


@pytest.mark.parametrize("restart", [False, True])
def test_a_topic_that_was_created_again_is_told_once(restart: bool) -> None:
    former, now = Source("orders@aaaaaaaaaaaa", 0), Source("orders@bbbbbbbbbbbb", 0)
    log = Log()
    log.fold(acquire([0], source=Source("orders", 0)), acquire([0], source=former), acquire([0]))
    assert log.book.take_recreated() == []
    if restart:
        log.write()
        log.restart()

    log.fold(acquire([0], source=now), acquire([1], source=now), acquire([2], source=former))

    assert log.book.take_recreated() == [(QUEUE, now)]
    assert log.book.take_recreated() == []


def test_a_record_whose_marker_was_lost_is_opened_although_later_ones_are_known() -> None:
    log = Log()
    log.fold(acquire([10, 11], from_offset=10), ack([10, 11]))

    log.fold(acquire([5, 6, 10], holder=OTHER, from_offset=5))

    assert {offset for _, offset, _ in log.book.open_leases()} == {5, 6}


def test_each_message_of_a_release_has_its_own_delay_and_error() -> None:
    log = Log()
    log.fold(acquire([1, 2]))
    batch = dataclasses.replace(release([1, 2]), delays_ms=[10, BACKOFF], errors=["one", ""])

    log.fold(batch, at=T1)

    found = {offset: (lease.due_ms, lease.text) for _, offset, lease in log.book.open_leases()}
    assert found == {1: (T1 + 10, "one"), 2: (T1 + 100, "")}


def test_the_longest_delay_of_a_release_is_in_the_far_future() -> None:
    log = Log()
    log.fold(acquire([1]), release([1], 2**63 - 1))

    log.write()
    log.restart()

    [(_, _, lease)] = log.book.open_leases()
    assert lease.due_ms == MAX_TIME_MS


def test_a_record_that_was_folded_is_not_folded_again() -> None:
    log = Log()
    log.fold(acquire([1]))

    with pytest.raises(AssertionError, match="folded after"):
        log.book.fold(ack([1]), T0, 0)


# --- firing -----------------------------------------------------------------------------------------------------------


def test_an_ack_between_copy_and_fact_closes_the_message_and_the_copy_is_counted() -> None:
    log = Log()
    log.fold(acquire([1]))
    log.book.due(T0 + LEASE_MS)

    log.fold(ack([1]), fact([1]))

    assert len(log.book) == 0
    assert log.book.counts[QUEUE] == EventCounts(acquired=1, acked=1, expired=1, redelivered=1)
    log.book.forget_firing()
    assert log.book.due(T0 + 9 * LEASE_MS) == []


@pytest.mark.parametrize(
    ("marker", "attempt", "destination", "next_attempt", "cause"),
    [
        (None, 1, Destination.QUEUE, 2, Cause.EXPIRED),
        (None, 2, Destination.QUEUE, 3, Cause.EXPIRED),
        (None, 3, Destination.DEAD_LETTERS, 3, Cause.EXPIRED),
        (None, 9, Destination.DEAD_LETTERS, 9, Cause.EXPIRED),
        (release([5]), 2, Destination.QUEUE, 3, Cause.RELEASED),
        (release([5]), 3, Destination.DEAD_LETTERS, 3, Cause.RELEASED),
        (release([5], counted=False), 3, Destination.QUEUE, 3, Cause.RELEASED),
        (reject([5]), 1, Destination.DEAD_LETTERS, 1, Cause.REJECTED),
        (reject([5]), 3, Destination.DEAD_LETTERS, 3, Cause.REJECTED),
    ],
)
def test_a_due_message_goes_where_its_state_and_attempt_say(
    marker: Batch | None, attempt: int, destination: Destination, next_attempt: int, cause: Cause
) -> None:
    log = Log()
    log.fold(acquire([5], attempt=attempt))
    if marker is not None:
        log.fold(marker)

    (fire,) = log.book.due(T0 + LEASE_MS)

    assert (fire.destination, fire.attempt, fire.cause) == (destination, next_attempt, cause)
    expected = Kind.REDELIVERED if destination is Destination.QUEUE else Kind.DEAD_LETTERED
    assert fire.fact_kind is expected


@pytest.mark.parametrize(
    ("attempt", "counted", "delay_ms", "due_ms"),
    [
        (3, True, BACKOFF, T0),
        (3, True, 700, T0),
        (9, True, 700, T0),
        (2, True, BACKOFF, T0 + 200),
        (2, True, 700, T0 + 700),
        (3, False, BACKOFF, T0 + 400),
        (3, False, 700, T0 + 700),
    ],
)
@pytest.mark.parametrize("dead_letter", [True, False])
def test_a_release_that_uses_up_the_last_attempt_is_due_at_once(
    attempt: int, counted: bool, delay_ms: int, due_ms: int, dead_letter: bool
) -> None:
    log = Log(dataclasses.replace(SETTINGS, dead_letter=dead_letter))
    log.fold(acquire([5], attempt=attempt), release([5], delay_ms, counted=counted))

    assert [lease.due_ms for _, _, lease in log.book.open_leases()] == [due_ms]
    log.write()
    log.restart()
    assert log.book.next_due_ms == due_ms


def test_a_limit_that_is_raised_between_the_last_release_and_its_due_time_delivers_the_message_at_once() -> None:
    settings = [SETTINGS]
    book = LeaseBook(lambda queue: settings[-1])
    book.fold(acquire([5], attempt=3), T0, 0)
    book.fold(release([5]), T0, 1)
    settings.append(dataclasses.replace(SETTINGS, max_attempts=9))

    (fire,) = book.due(T0)

    assert (fire.destination, fire.attempt) == (Destination.QUEUE, 4)


def test_a_limit_that_is_lowered_moves_no_message_that_already_waits_for_its_backoff() -> None:
    settings = [SETTINGS]
    book = LeaseBook(lambda queue: settings[-1])
    book.fold(acquire([5], attempt=1), T0, 0)
    book.fold(release([5], 700), T0, 1)
    settings.append(dataclasses.replace(SETTINGS, max_attempts=1))

    assert book.due(T0 + 699) == []
    (fire,) = book.due(T0 + 700)

    assert (fire.destination, fire.attempt) == (Destination.DEAD_LETTERS, 1)


def test_a_queue_without_dead_letters_drops_a_message_and_says_so() -> None:
    log = Log(QueueSettings(max_attempts=1, dead_letter=False))
    log.fold(acquire([5]))

    (fire,) = log.book.due(T0 + LEASE_MS)

    assert fire.destination is Destination.NOWHERE
    assert fire.fact_kind is Kind.DEAD_LETTERED


def test_the_index_of_due_moments_does_not_grow_with_what_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due_messages, "MAX_STALE_HINTS", 100)
    log = Log()

    for start in range(0, 20_000, 100):
        log.fold(acquire(range(start, start + 100)), ack(range(start, start + 100)))
    log.fold(acquire([20_000]))

    assert log.book._due.size < 300
    assert [fire.offset for fire in log.book.due(T0 + LEASE_MS)] == [20_000]


@pytest.mark.parametrize("restart", [False, True])
def test_what_was_spent_and_not_finished_is_in_flight_then_abandoned_and_counted(restart: bool) -> None:
    log = Log()
    log.fold(acquire([5]), spend([5]))
    assert log.book.gauges()[QUEUE].in_flight == 1
    if restart:
        log.write()
        log.restart()

    assert log.book.due(T0 + LEASE_MS - 1) == []
    (fire,) = log.book.due(T0 + LEASE_MS)
    assert (fire.destination, fire.fact_kind, fire.cause) == (Destination.NOWHERE, Kind.ABANDONED, Cause.EXPIRED)

    log.fold(fact([5], Kind.ABANDONED, Cause.EXPIRED))

    assert len(log.book) == 0
    assert log.book.counts[QUEUE] == EventCounts(acquired=1, renewed=1, abandoned=1, expired=1)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_the_applied_row_comes_last() -> None:
    log = Log()
    log.fold(acquire([1]))

    assert list(log.write())[-1] == rows.APPLIED_KEY


def test_changes_are_given_once() -> None:
    log = Log()
    log.fold(acquire([1]))
    assert log.book.changed
    log.write()

    assert not log.book.changed
    assert list(log.book.take_changes()) == [rows.APPLIED_KEY]


def test_a_renewal_of_a_written_message_does_not_write_its_payload_again() -> None:
    log = Log()
    log.fold(Acquire(QUEUE, HOLDER, SOURCE, [1], LEASE_MS, 1, [payload(value=b"x" * 10_000)]))
    log.write()
    log.fold(renew([1]), at=T1)

    changes = log.write()

    (key,) = rows_of_messages(changes)
    assert key[:1] == b"s"
    assert len(changes[key] or b"") < 100


def test_a_payload_is_to_be_had_from_the_book_until_its_row_is_written() -> None:
    log = Log()
    original = Payload(5, 2, b"key", (("tenant", b"acme"),), b"value")
    log.fold(Acquire(QUEUE, HOLDER, SOURCE, [3, 9], LEASE_MS, 0, [payload(), original]))

    assert log.book.fresh_payload(QUEUE, SOURCE, 9) == original
    log.write()

    assert log.book.fresh_payload(QUEUE, SOURCE, 9) is None
    assert rows.decode_payload(log.table[rows.row_key(QUEUE, SOURCE, 9)]) == original


def test_pending_rows_are_counted_for_their_limit() -> None:
    log = Log()
    assert log.book.pending_rows == 0
    log.fold(acquire([1, 2, 3]))
    assert log.book.pending_rows == 3
    log.write()
    assert log.book.pending_rows == 0

    log.fold(ack([1]), renew([2]))

    assert log.book.pending_rows == 2


def test_a_row_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown key"):
        book().restore([(b"zzz", b"")])


def test_gauges_say_what_is_open_and_since_when() -> None:
    log = Log()
    log.fold(acquire([1, 2, 3, 4]))
    log.fold(acquire([5]), release([2, 3], 10), reject([4]), at=T1)

    gauge = log.book.gauges()[QUEUE]

    assert (gauge.in_flight, gauge.released, gauge.rejected, gauge.oldest_ms) == (2, 2, 1, T0)


def test_an_ack_of_several_queues_counts_each_message_for_the_queue_that_it_is_of() -> None:
    log = Log()
    log.fold(acquire([1, 4]), acquire([2, 3], queue="reports"))

    log.fold(Ack(ANY_QUEUE, OTHER, SOURCE, [1, 2, 3]), Ack(ANY_QUEUE, OTHER, SOURCE, [3, 9]))

    assert [offset for _, offset, _ in log.book.open_leases()] == [4]
    assert {queue: (counts.acked, counts.late) for queue, counts in log.book.counts.items()} == {
        QUEUE: (1, 0),
        "reports": (2, 0),
    }


def test_an_ack_without_a_queue_leaves_the_message_of_another_queues_consumer_at_its_place_open() -> None:
    for first, second in ((QUEUE, "reports"), ("reports", QUEUE)):
        log = Log()
        log.fold(acquire([1, 2], queue=first), acquire([1, 3], holder=OTHER, queue=second))

        log.fold(Ack(ANY_QUEUE, HOLDER, SOURCE, [1, 2, 3]))

        assert [(lease.queue, offset) for _, offset, lease in log.book.open_leases()] == [(second, 1)]
        assert (log.book.counts[first].acked, log.book.counts[second].acked) == (2, 1)


def test_a_delivery_time_that_can_not_be_read_is_counted_once_for_each_message() -> None:
    log = Log()
    payloads = [
        payload(headers=[("marq-deliver-at", b"tomorrow")]),
        payload(headers=[("marq-deliver-at", b"5")]),
        payload(),
        payload(headers=[("marq-deliver-at", b"")]),
        payload(attempt=2, headers=[("marq-deliver-at", b"tomorrow"), ("marq-attempt", b"2")]),
    ]
    batch = Acquire(QUEUE, HOLDER, SOURCE, range(5), LEASE_MS, 0, payloads)

    # Written twice, as after a commit that failed.
    log.fold(batch, batch)

    assert log.book.counts[QUEUE].invalid_deliver_at == 2
    assert log.book.invalid_times.take() == {QUEUE: (2, f"{SOURCE.topic}/{SOURCE.partition}/0")}
    assert log.book.invalid_times.take() == {}


def test_an_attempt_that_no_user_code_has_started_does_not_count() -> None:
    log = Log()
    log.fold(dataclasses.replace(acquire([1, 2]), counted=False))
    log.fold(dataclasses.replace(renew([2]), started=True))

    fires = {fire.offset: (fire.destination, fire.attempt, fire.cause) for fire in log.book.due(T0 + LEASE_MS)}

    assert fires == {1: (Destination.QUEUE, 1, Cause.EXPIRED), 2: (Destination.QUEUE, 2, Cause.EXPIRED)}


def test_a_last_attempt_that_no_user_code_has_started_is_not_the_last() -> None:
    log = Log()
    log.fold(dataclasses.replace(acquire([1, 2], attempt=3), counted=False))
    log.fold(dataclasses.replace(renew([2]), started=True))

    fires = {fire.offset: (fire.destination, fire.attempt) for fire in log.book.due(T0 + LEASE_MS)}

    assert fires == {1: (Destination.QUEUE, 3), 2: (Destination.DEAD_LETTERS, 3)}


def test_a_renewal_by_another_holder_starts_nothing() -> None:
    log = Log()
    log.fold(dataclasses.replace(acquire([1]), counted=False))
    log.fold(dataclasses.replace(renew([1], holder=OTHER), started=True))

    [fire] = log.book.due(T0 + LEASE_MS)

    assert fire.attempt == 1


def test_a_start_is_kept_in_the_table() -> None:
    log = Log()
    log.fold(dataclasses.replace(acquire([1]), counted=False))
    log.write()
    log.fold(dataclasses.replace(renew([1]), started=True))
    log.write()

    restored = book()
    restored.restore(sorted(log.table.items()))

    [(_, _, lease)] = restored.open_leases()
    assert lease.counted


@pytest.mark.parametrize("started", [False, True])
def test_a_renew_that_comes_after_a_longer_one_does_not_shorten_the_lease(started: bool) -> None:
    log = Log()
    log.fold(acquire([1]), renew([1], lease_ms=2 * LEASE_MS))
    log.fold(dataclasses.replace(renew([1], lease_ms=1), started=started))

    assert log.book.due(T0 + LEASE_MS) == []
    assert [due.offset for due in log.book.due(T0 + 2 * LEASE_MS)] == [1]


def test_a_dispatch_does_not_shorten_a_lease() -> None:
    log = Log()
    log.fold(acquire([1]), dataclasses.replace(spend([1]), lease_ms=1))

    assert log.book.due(T0 + LEASE_MS - 1) == []


@pytest.mark.parametrize("lease_ms", [1, 3 * LEASE_MS])
def test_a_lease_ends_exactly_when_a_renew_says_so(lease_ms: int) -> None:
    log = Log()
    log.fold(acquire([1]), renew([1], lease_ms=2 * LEASE_MS))
    log.fold(dataclasses.replace(renew([1], lease_ms=lease_ms), exactly=True))

    assert log.book.due(T0 + lease_ms - 1) == []
    assert [due.offset for due in log.book.due(T0 + lease_ms)] == [1]
