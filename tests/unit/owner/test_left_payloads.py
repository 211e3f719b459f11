"""Payloads that ACQUIREs left in the records of their messages, and how an owner gets them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from marq.core.redeliver_or_dead_letter import Destination
from marq.core.storage.rows import decode_payload, row_key
from marq.core.storage.table_image import Place
from marq.owner.engine import OwnerTransaction
from marq.wire.large_messages import left_out
from marq.wire.markers import (
    Ack,
    Acquire,
    Batch,
    Cancel,
    Cause,
    Fact,
    Kind,
    LeftPayloads,
    Payload,
    Reject,
    Release,
    Renew,
)
from tests.unit.owner.test_engine import LEASE_MS, MESSAGES, Life

SENT_MS = 77
FLUSH_MS = 1_000


def acquire(*offsets: int, lease_ms: int = LEASE_MS) -> Acquire:
    return Acquire("q", 9, MESSAGES, offsets, lease_ms, offsets[0], LeftPayloads([SENT_MS] * len(offsets)))


def place(offset: int) -> Place:
    return Place("q", MESSAGES, offset)


def record(value: bytes) -> Payload:
    return Payload(SENT_MS, 1, b"q", (), value)


def flush(life: Life) -> None:
    life.engine.committed(life.engine.rows(), life.now_ms)


def dues(life: Life) -> list[OwnerTransaction]:
    """Write and read until nothing is left; return the writes with redeliveries."""
    writes = []
    while (write := life.engine.next_write(life.now_ms)) is not None:
        life.append(*write.markers)
        life.engine.committed(write, life.now_ms, len(life.log) - 1)
        writes += [write] if write.due else []
    return writes


@pytest.fixture
def life() -> Life:
    life = Life()
    life.turn()
    return life


@pytest.mark.parametrize("flushed", [False, True], ids=["its row is not written yet", "its row is written"])
def test_a_message_is_redelivered_with_the_payload_of_its_record(life: Life, *, flushed: bool) -> None:
    life.append(acquire(4, 5))
    if flushed:
        flush(life)
    life.now_ms += LEASE_MS

    assert dues(life) == []
    assert life.engine.missing() == {
        place(4): record(b"")._replace(key=None, value=None, left=True),
        place(5): record(b"")._replace(key=None, value=None, left=True),
    }
    life.engine.supply({place(5): record(b"five")})
    [write] = dues(life)

    [(fire, payload)] = write.due
    expected = (5, Destination.QUEUE, Cause.EXPIRED, record(b"five"))
    assert (fire.offset, fire.destination, fire.cause, payload) == expected
    assert [*life.engine.missing()] == [place(4)]


def test_markers_are_read_while_a_payload_is_missing(life: Life) -> None:
    """A message that is acknowledged meanwhile is not redelivered."""
    life.append(acquire(4))
    life.now_ms += LEASE_MS
    assert dues(life) == []
    assert not life.engine.unsent

    life.append(Ack("q", 9, MESSAGES, [4]))

    assert life.engine.missing() == {}
    life.engine.supply({place(4): record(b"four")})
    assert dues(life) == []
    assert len(life.engine.tracker.book) == 0


def test_a_renewed_message_waits_for_its_new_lease_although_its_payload_came(life: Life) -> None:
    life.append(acquire(4))
    life.now_ms += LEASE_MS
    assert dues(life) == []

    life.append(Renew("q", 9, MESSAGES, [4], 5 * LEASE_MS))
    life.engine.supply({place(4): record(b"four")})

    assert dues(life) == []
    life.now_ms += 5 * LEASE_MS
    [write] = dues(life)
    assert [payload.value for _, payload in write.due] == [b"four"]


@pytest.mark.parametrize(
    "ends",
    [[], [Release("q", 9, MESSAGES, [4], [0], True, ["boom"])], [Reject("q", 9, MESSAGES, [4], ["bad"])]],
    ids=["expired", "released", "rejected"],
)
def test_a_message_whose_record_is_gone_becomes_a_dead_letter_that_says_so(life: Life, ends: Sequence[Batch]) -> None:
    life.append(acquire(4), *ends)
    life.now_ms += LEASE_MS
    assert dues(life) == []
    assert [*life.engine.missing()] == [place(4)]

    assert life.engine.supply({place(4): None}) == [place(4)]
    # Due messages and those that have outlived a flush are copied separately.
    assert life.engine.supply({place(4): None}) == []
    [write] = dues(life)

    [(fire, payload)] = write.due
    assert (fire.destination, fire.cause, fire.attempt) == (Destination.DEAD_LETTERS, Cause.GONE, 1)
    assert payload.value is None
    assert left_out(payload) == "t.messages/2/4 was removed before the tracker could copy it"
    [fact] = [batch for batch in write.markers if isinstance(batch, Fact)]
    assert (fact.kind, fact.causes) == (Kind.DEAD_LETTERED, (Cause.GONE,))
    assert life.engine.tracker.book.counts["q"].gone == 1


@pytest.mark.parametrize(("late_ms", "destination"), [(0, Destination.NOWHERE), (1, Destination.QUEUE)])
def test_the_header_in_a_record_counts_when_its_payload_was_copied(
    life: Life, late_ms: int, destination: Destination
) -> None:
    life.append(acquire(4))
    life.now_ms += LEASE_MS
    assert dues(life) == []
    headers = (("marq-expires-at", b"%d" % (life.engine.tracker.book.clock.now_ms + late_ms)),)

    life.engine.supply({place(4): record(b"four")._replace(headers=headers)})
    [write] = dues(life)

    [(fire, _)] = write.due
    assert fire.destination is destination
    [fact] = [batch for batch in write.markers if isinstance(batch, Fact)]
    expired = destination is Destination.NOWHERE
    kind, cause = (Kind.CANCELLED, Cause.MESSAGE_EXPIRED) if expired else (Kind.REDELIVERED, Cause.EXPIRED)
    assert (fact.kind, [*fact.causes]) == (kind, [cause])
    counts = life.engine.tracker.book.counts["q"]
    assert (counts.messages_expired, counts.cancelled, counts.redelivered) == (expired, 0, not expired)


def test_what_needs_no_record_needs_no_payload(life: Life) -> None:
    """A cancelled message ends with its fact alone."""
    life.append(acquire(4), Release("q", 9, MESSAGES, [4], [60_000], True, [""]), Cancel("q", 3, MESSAGES, [4]))

    [write] = dues(life)

    assert [fire.destination for fire, _ in write.due] == [Destination.NOWHERE]
    assert life.engine.missing() == {}


def test_a_lease_that_outlives_a_flush_gets_its_payload(life: Life) -> None:
    life.append(acquire(4, 5, lease_ms=60_000))
    flush(life)
    key = row_key("q", MESSAGES, 4)
    assert decode_payload(life.stored[key]) == Payload(SENT_MS, 1, None, (), None, left=True)
    assert life.engine.outliving(life.now_ms) == {}

    # No marker advances the log's clock.
    life.now_ms += FLUSH_MS
    assert [*life.engine.outliving(life.now_ms)] == [place(4), place(5)]
    life.append(Renew("q", 9, MESSAGES, [4], 60_000))
    flush(life)
    assert b"s" + key[1:] in life.stored
    life.engine.supply({place(4): record(b"four")})
    life.append(Ack("q", 9, MESSAGES, [5]))
    flush(life)

    assert decode_payload(life.stored[key]) == record(b"four")
    # This row would be older than the lease in the new `r` row.
    assert b"s" + key[1:] not in life.stored
    assert row_key("q", MESSAGES, 5) not in life.stored
    assert life.engine.outliving(life.now_ms) == {}


@pytest.mark.parametrize("copied", [False, True], ids=["before the copy", "after it"])
def test_another_owner_knows_which_payloads_are_left(life: Life, *, copied: bool) -> None:
    life.append(acquire(4, lease_ms=2 * FLUSH_MS))
    flush(life)
    if copied:
        life.engine.supply({place(4): record(b"four")})
        flush(life)
    life.engine.forget()
    life.take_over(2)
    life.append()
    life.now_ms += 2 * FLUSH_MS

    writes = dues(life)

    assert [*life.engine.missing()] == ([] if copied else [place(4)])
    assert [payload.value for write in writes for _, payload in write.due] == ([b"four"] if copied else [])


def test_a_copy_counts_towards_the_bytes_that_wait_for_a_flush(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marq.owner.engine.MAX_PENDING_BYTES", 1_000)
    life.append(acquire(4))
    flush(life)
    assert not life.engine.is_full

    life.engine.supply({place(4): record(b"x" * 2_000)})

    assert life.engine.is_full


def test_a_payload_that_does_not_fit_into_a_row_is_left_out(life: Life) -> None:
    """A row that the changelog refuses would hold up all others."""
    life.append(acquire(4))
    life.now_ms += LEASE_MS
    assert dues(life) == []

    life.engine.supply({place(4): record(b"x" * 1_060_000)})
    [write] = dues(life)

    [(fire, payload)] = write.due
    assert (fire.destination, fire.cause, payload.value) == (Destination.DEAD_LETTERS, Cause.TOO_LARGE, None)


def test_no_marker_is_read_while_decided_messages_wait(life: Life) -> None:
    """One of them could end a message that is about to be sent."""
    life.append(acquire(*range(3_000)))
    life.now_ms += LEASE_MS

    assert dues(life) == []

    assert not life.engine.unsent
    life.append(Ack("q", 9, MESSAGES, [2_500]))
    life.engine.supply({place(offset): record(b"v") for offset in range(3_000)})
    sent = [fire.offset for write in dues(life) for fire, _ in write.due]
    assert sent == [offset for offset in range(3_000) if offset != 2_500]


def test_a_source_with_many_due_messages_does_not_hold_up_others(life: Life) -> None:
    life.append(acquire(*range(5_000)))
    other = Place("q", MESSAGES._replace(partition=3), 1)
    life.append(Acquire("q", 9, other.source, [1], LEASE_MS, 1, LeftPayloads([SENT_MS])))
    life.now_ms += LEASE_MS
    assert dues(life) == []

    missing = life.engine.missing()

    assert other in missing
    assert len(missing) == 1_001
