"""Dead letters that are redriven or deleted: each exactly once, and recorded in notes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.core.redeliver_or_dead_letter import Destination
from marq.core.storage import rows
from marq.core.storage.settled_dead_letters import CHUNK_OFFSETS, Places
from marq.dead_letters.log import Stored
from marq.wire.dead_letter_notes import MAX_OFFSETS, MAX_RUNS, NOTE_KEY, Disposition, Note, decode, encoded, is_note
from marq.wire.markers import Batch, Cause, Fact, Kind, Source
from tests.unit.core.batches import HOLDER, LETTERS, OTHER, QUEUE, discard, redrive
from tests.unit.core.logs import T0, Log


def delivered(offsets: list[int]) -> Batch:
    count = len(offsets)
    return Fact(Kind.DELIVERED, QUEUE, 99, LETTERS, offsets, [1] * count, [Cause.DUE] * count)


def notes(log: Log) -> list[tuple[list[int], Disposition, int]]:
    return [(list(note.offsets), note.became, note.holder) for note in log.book.settled_dead_letters.take_notes()]


def test_a_redriven_dead_letter_is_delivered_at_once_as_a_first_attempt() -> None:
    log = Log(redrive([3, 9], queue="other"))

    found = [(fire.offset, fire.destination, fire.attempt, fire.lease.queue) for fire in log.book.due(T0)]

    assert found == [(3, Destination.QUEUE, 1, "other"), (9, Destination.QUEUE, 1, "other")]
    assert log.book.counts["other"].redriven == 2
    assert notes(log) == [([3, 9], Disposition.REDRIVEN, OTHER)]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("first", [redrive([3, 9]), discard([3, 9])])
@pytest.mark.parametrize("again", [redrive([2, 3, 9], holder=HOLDER), discard([2, 3, 9], holder=HOLDER)])
def test_a_dead_letter_is_settled_once_despite_further_requests(first: Batch, again: Batch, restart: bool) -> None:
    log = Log(first)
    if log.book.due(T0):
        log.fold(delivered([3, 9]))
    notes(log)
    if restart:
        log.restart()

    log.fold(again)

    assert {offset for _, offset, _ in log.book.open_leases()} <= {2}
    answered = {became: offsets for offsets, became, holder in notes(log) if holder == HOLDER}
    assert answered.pop(Disposition.BEFORE) == [3, 9]
    assert list(answered.values()) == [[2]]


def test_a_deleted_dead_letter_leaves_no_message() -> None:
    log = Log(discard([3]))
    log.write()

    assert len(log.book) == 0
    assert log.book.next_due_ms is None
    assert log.book.counts[QUEUE].deleted == 1
    assert notes(log) == [([3], Disposition.DELETED, OTHER)]


def test_notes_are_given_once() -> None:
    log = Log(discard([3]))
    assert log.book.settled_dead_letters.has_notes

    notes(log)

    assert notes(log) == []
    assert not log.book.settled_dead_letters.has_notes


def test_thousands_of_scattered_letters_in_any_order_are_never_forgotten() -> None:
    log = Log()
    offsets = list(range(0, 200_000, 10))
    random.Random(1).shuffle(offsets)
    written = 0
    for start in range(0, len(offsets), 500):
        log.fold(discard(sorted(offsets[start : start + 500])))
        before = dict(log.table)
        log.write()
        written += sum(len(row) for key, row in log.table.items() if before.get(key) is not row)
    log.restart()

    log.fold(redrive(sorted(offsets)))

    assert len(log.book) == 0
    # Forty flushes, each of which touches every row: the worst case.
    assert written < 40 * 2 * 200_000 // CHUNK_OFFSETS * (CHUNK_OFFSETS // 8)
    assert len([key for key in log.table if key[:1] == b"k"]) == -(-200_000 // CHUNK_OFFSETS)


@given(st.sets(st.integers(0, 5 * CHUNK_OFFSETS), max_size=50), st.sets(st.integers(0, 5 * CHUNK_OFFSETS)))
def test_places_are_a_set(added: set[int], asked: set[int]) -> None:
    places = Places()
    numbers = {places.add(offset) for offset in added}
    again = Places()
    for number in numbers:
        again.put(number, places.chunk(number))

    assert {offset for offset in added | asked if offset in again} == added


def test_a_row_that_is_not_a_chunk_is_refused() -> None:
    log = Log()
    log.table[rows.places_key(LETTERS, 0)] = b"\0"

    with pytest.raises(ValueError, match="a chunk of 1 bytes"):
        log.restart()


# --- notes ------------------------------------------------------------------------------------------------------------

_notes = st.builds(
    Note,
    st.just(LETTERS),
    st.sets(st.integers(0, 2**40), min_size=1, max_size=30).map(sorted),
    st.sampled_from(Disposition),
    st.text(max_size=20),
    st.integers(0, 2**64 - 1),
)


@given(_notes)
def test_a_note_is_read_as_it_was_written(note: Note) -> None:
    [(value, headers)] = encoded(note)

    assert decode(LETTERS, value) == note
    assert is_note(Stored(0, 7, 0, NOTE_KEY, value, headers))
    assert not is_note(Stored(0, 7, 0, b"emails", value, headers))
    assert not is_note(Stored(0, 7, 0, None, value, headers))


def test_a_long_note_is_several_records() -> None:
    offsets = [*range(0, 4 * MAX_RUNS, 2), *range(10**6, 10**6 + MAX_OFFSETS)]
    records = list(encoded(Note(Source("t", 0), offsets, Disposition.DELETED, "q", 1)))

    found = [decode(LETTERS, value) for value, _ in records]

    assert [offset for note in found if note for offset in note.offsets] == offsets
    assert max(len(value) for value, _ in records) < 100_000


@given(st.binary() | st.none())
def test_any_bytes_are_a_note_or_none(value: bytes | None) -> None:
    assert decode(LETTERS, value) is None or value


@pytest.mark.parametrize(
    "value",
    [
        b'{"offsets": [[0, 100000000000]], "became": "deleted", "queue": "q", "by": "1"}',
        b'{"offsets": [[-1, 3]], "became": "deleted", "queue": "q", "by": "1"}',
        b'{"offsets": [[1]], "became": "deleted", "queue": "q", "by": "1"}',
        b'{"offsets": [], "became": "eaten", "queue": "q", "by": "1"}',
        b'{"offsets": [], "became": "deleted", "queue": "q", "by": "x"}',
        b"[]",
        b"7",
        b'{"offsets": [[0, 1e400]], "became": "deleted", "queue": "q", "by": "1"}',
    ],
)
def test_a_foreign_note_says_nothing(value: bytes) -> None:
    assert decode(LETTERS, value) is None


def test_a_note_settles_only_dead_letters_before_it() -> None:
    assert Note(LETTERS, [3, 6, 7, 8], Disposition.DELETED, "q", 1).settled_before(7) == [3, 6]


def test_a_notes_key_is_not_a_queues_name() -> None:
    assert NOTE_KEY == b""
