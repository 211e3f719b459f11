"""Messages of queues with ordering: the tracker leaves their deliveries to consumers, and tells which are open."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from marq.core import lease_book
from marq.core.deliveries.redelivery_records import redelivery
from marq.core.redeliver_or_dead_letter import Destination
from marq.core.storage.rows import State
from marq.wire.marker_codec import decode, encode
from marq.wire.markers import (
    BLOCKED_MS,
    LAST,
    Resumed,
    Source,
)
from marq.wire.names import ERROR_HEADER
from marq.wire.ordered_holders import follows, ordered_holder
from tests.unit.core.batches import (
    FORMER,
    LATER,
    LEASE_MS,
    QUEUE,
    acquire,
    ordered,
    payload,
    release,
    resume,
)
from tests.unit.core.logs import T0, Log

#: The clock when the marker under test comes, and when everything is due.
T1, FAR_MS = T0 + 400, T0 + 10**9


def answer(log: Log) -> list[Resumed]:
    """Return the batches of one answer, as they are after the wire."""
    batches = [decode(encode(batch)) for batch in log.book.take_answers()]
    assert all(isinstance(batch, Resumed) for batch in batches)
    return [batch for batch in batches if isinstance(batch, Resumed)]


def said(parts: Sequence[Resumed]) -> dict[int, list[object]]:
    """Return state, attempt, wait and error of each message in an answer."""
    return {
        offset: columns
        for part in parts
        for offset, *columns in zip(part.offsets, part.states, part.attempts, part.waits_ms, part.errors, strict=True)
    }


# --- deliveries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 100])
def test_a_message_that_gets_a_place_loses_the_due_time_that_it_had(count: int) -> None:
    """Few messages wait in the due index by their seconds, many share a hint."""
    offsets = range(count)
    log = Log(acquire(offsets), ordered(offsets))

    assert log.book.due(FAR_MS) == []
    assert log.book.next_due_ms is None
    assert set(log.states().values()) == {State.LEASED_IN_ORDER}


@pytest.mark.parametrize("attempt", [0, 1, 2**32 - 2, 2**32 - 1])
@pytest.mark.parametrize("delay_ms", [None, 5, BLOCKED_MS])
@pytest.mark.parametrize("counted", [False, True])
def test_every_answer_can_be_written_whatever_attempt_a_producer_has_given_its_record(
    attempt: int, delay_ms: int | None, counted: bool
) -> None:
    """Else one record would stop its markers partition for good."""
    log = Log(ordered([1], attempt=attempt))
    if delay_ms is not None:
        log.fold(release([1], delay_ms, holder=FORMER, counted=counted))

    log.fold(resume([1]))

    counts = delay_ms is not None and counted
    assert [list(part.attempts) for part in answer(log)] == [[min(attempt + counts, 2**32 - 1)]]


# --- fencing ----------------------------------------------------------------------------------------------------------


def test_holders_are_ordered_by_the_places_of_their_resumes() -> None:
    assert follows(LATER, FORMER)
    assert not follows(FORMER, LATER)
    assert follows(FORMER, ordered_holder(10, 9))
    assert follows(ordered_holder(10, 9), FORMER)
    assert ordered_holder(0, 0) == 1
    assert ordered_holder(3, 2**64 - 1) == 4 * 2**16 - 1


@pytest.mark.parametrize("released", [False, True])
def test_a_late_acquire_of_a_former_holder_takes_nothing_from_its_successor(released: bool) -> None:
    log = Log(ordered([1, 2], holder=LATER, attempt=2))
    if released:
        log.fold(release([1, 2], 700, holder=LATER, error="why"))
    before = log.leases()

    log.fold(ordered([1, 2, 3], from_offset=0), at=T1)

    after = log.leases()
    assert {offset: after[offset] for offset in before} == before
    assert after[3].holder == FORMER
    counts = log.book.counts[QUEUE]
    assert (counts.acquired, counts.reacquired, counts.redelivered) == (3, 2, 0)


def test_a_late_acquire_of_an_earlier_attempt_does_not_set_the_attempt_back() -> None:
    # As in seed 1776 of the simulation: the first ACQUIRE timed out, and reached the log after the one of the retry.
    log = Log(ordered([1, 2, 3]), release([1, 2], 0, holder=FORMER), ordered([1], attempt=2, from_offset=1))
    before = log.leases()

    log.fold(ordered([1], from_offset=1), at=T1)

    assert log.leases() == before
    assert log.book.counts[QUEUE].reacquired == 1


# --- the last attempt -------------------------------------------------------------------------------------------------


def test_the_dead_letter_of_a_last_release_says_its_error() -> None:
    log = Log(ordered([1]), release([1], LAST, holder=FORMER, error="why"))

    (fire,) = log.book.due(T0)
    letter = redelivery(fire, payload(), T0, own_topic=False)

    assert (letter.destination, dict(letter.headers)[ERROR_HEADER]) == (Destination.DEAD_LETTERS, b"why")


# --- RESUME -----------------------------------------------------------------------------------------------------------


def test_a_wait_of_months_is_cut() -> None:
    log = Log(ordered([1]), release([1], 2**40, holder=FORMER), resume([1]))

    assert said(answer(log))[1][2] == 2**32 - 2


def test_a_repeated_question_is_answered_once_with_its_last_place() -> None:
    log = Log(ordered([1]), resume([1]), resume([1]), resume([1], onwards=False))

    found = [(part.asked_at, list(part.acquired)) for part in answer(log)]

    assert found == [(2, [(1, 2)]), (3, [])]


def test_a_large_answer_comes_in_parts() -> None:
    count = 3_000
    log = Log(ordered(range(count)), release(range(count), 5, holder=FORMER, error="x" * 100), resume([0]))

    parts = answer(log)

    assert len(parts) > 5
    assert [part.left for part in parts] == list(reversed(range(len(parts))))
    assert {part.asked_at for part in parts} == {2}
    assert [list(part.acquired) for part in parts] == [[(0, count)], *[[]] * (len(parts) - 1)]
    assert list(said(parts)) == list(range(count))
    assert max(len(encode(part)) for part in parts) <= lease_book._BATCH_BYTES + 200


def test_messages_that_are_far_apart_come_in_parts() -> None:
    """A batch writes the distances of its offsets in 32 bits."""
    far = 2**33
    log = Log(ordered([1, 5]), ordered([far, far + 1]), resume([0]))

    assert [list(part.offsets) for part in answer(log)] == [[0, 1, 5], [far, far + 1]]


# --- messages before the first record ---------------------------------------------------------------------------------


def test_messages_of_a_deleted_topic_are_redelivered_when_the_topic_that_replaces_it_is_read() -> None:
    """No consumer asks about them again, so they would stay in their lines for good."""
    former, now, other = [
        Source(name, 3) for name in ("orders@aaaaaaaaaaaa", "orders@bbbbbbbbbbbb", "bills@aaaaaaaaaaaa")
    ]
    log = Log(ordered([7, 8], source=former), ordered([1], source=other), ordered([2], source=now))

    log.fold(resume([0], source=now), at=T1)

    states = {(source, offset): lease.state for source, offset, lease in log.book.open_leases()}
    assert states == {
        (former, 7): State.LEASED,
        (former, 8): State.LEASED,
        (other, 1): State.LEASED_IN_ORDER,
        (now, 2): State.LEASED_IN_ORDER,
    }
    due = log.book.due(T0 + LEASE_MS)
    assert {(fire.source, fire.offset, fire.destination) for fire in due} == {
        (former, 7, Destination.QUEUE),
        (former, 8, Destination.QUEUE),
    }


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_late_acquire_does_not_take_back_an_attempt_that_counts() -> None:
    """Found by seed 34634: the first of two writes of an ACQUIRE arrived after the message had been released."""
    late = dataclasses.replace(ordered([1, 2]), counted=False)
    log = Log(late, release([1], holder=FORMER), late)

    counted = {offset: lease.counted for offset, lease in log.leases().items()}

    assert counted == {1: True, 2: False}
