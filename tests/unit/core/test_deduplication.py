"""Deduplication ids in the lease book: which messages are duplicates, the rows of ids, and the order of messages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from marq.core.storage import deduplication, rows
from marq.settings.queue import QueueSettings
from marq.wire.markers import Batch, Delay, Payload, Source, Tick
from marq.wire.names import (
    deduplicating_partition,
    markers_partition,
    schedule_topic,
    source_partition,
    synthetic_topic,
)
from tests.unit.core.batches import DRAWN, LETTERS, QUEUE, cancel, payload
from tests.unit.core.logs import T0, Log

WINDOW_MS = 10_000
SETTINGS = QueueSettings(deduplication_window_ms=WINDOW_MS)


def new_log(*batches: Batch) -> Log:
    return Log(*batches, settings=SETTINGS)


def headers(own_id: str | None, key: bytes | None = None) -> Sequence[tuple[str, bytes | None]]:
    found: list[tuple[str, bytes | None]] = [("tenant", b"acme")]
    if key is not None:
        found.append(("marq-ordering-key", key))
    if own_id is not None:
        found.append(("marq-deduplication-id", own_id.encode()))
    return found


def sent(
    number: int,
    *ids: str | None,
    source: Source = DRAWN,
    key: bytes | None = None,
    queue: str = QUEUE,
    from_offset: int | None = None,
    delay_ms: int = 0,
) -> Delay:
    """A send of some messages with these ids, whose numbers begin with ``number``."""
    payloads: list[Payload] = [payload(headers=headers(own_id, key)) for own_id in ids]
    numbers = range(number, number + len(ids))
    return Delay(queue, 1, source, numbers, [delay_ms] * len(ids), True, from_offset, payloads)


def opened(log: Log) -> list[int]:
    return sorted(offset for _, offset, _ in log.book.open_leases())


def id_rows(log: Log) -> list[bytes]:
    return [key for key in log.table if key[:1] == b"d"]


def tick(log: Log, at: int) -> None:
    """Let another tracker write a TICK: before that, the clock may be set back."""
    log.fold(Tick(at, 0), at=at)


# --- which messages are duplicates ------------------------------------------------------------------------------------


def test_no_queue_key_and_id_are_mistaken_for_others() -> None:
    digests = {
        deduplication.digest_of(queue, headers(own_id, key))
        for queue, key, own_id in [("ab", b"c", "d"), ("a", b"bc", "d"), ("a", b"b", "cd"), ("abc", None, "d")]
    }

    assert len(digests) == 4


@pytest.mark.parametrize("source", [LETTERS, Source(schedule_topic("s", "1"), 0)])
def test_redriven_dead_letters_and_messages_of_schedules_are_never_duplicates(source: Source) -> None:
    log = new_log(sent(0, "a"))
    log.fold(sent(1, "a", "a", source=source, from_offset=1))

    assert len(opened(log)) == 3
    assert log.book.counts[QUEUE].deduplicated == 0
    assert len(log.book.accepted_ids) == 1


def test_a_message_without_an_id_costs_no_look_at_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deduplication.AcceptedIds, "accept", None)
    log = new_log(sent(0, None, None))

    assert opened(log) == [0, 1]


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_delay_leaves_one_row_for_all_its_ids_until_they_expire() -> None:
    log = new_log(sent(0, "a", "b", "c"))
    log.write()

    [key] = id_rows(log)
    assert rows.parse_deduplication_key(key) == (QUEUE, 0)
    assert len(log.table[key]) == 8 + 3 * 16

    log.fold(sent(10, "d"), at=T0 + WINDOW_MS)
    log.write()
    assert len(id_rows(log)) == 2
    tick(log, T0 + WINDOW_MS)
    log.write()

    assert [rows.parse_deduplication_key(key) for key in id_rows(log)] == [(QUEUE, 1)]
    assert len(log.book.accepted_ids) == 1


def test_ids_that_expire_before_their_row_is_written_leave_none() -> None:
    log = new_log(sent(0, "a"))
    log.fold(sent(1, "b"), at=T0 + WINDOW_MS)
    tick(log, T0 + 3 * WINDOW_MS)

    changes = log.write()

    assert [key for key in changes if key[:1] == b"d"] == []


def test_many_ids_that_expire_together_are_removed_in_several_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deduplication, "EXPIRED_AT_WRITE", 3)
    log = new_log()
    for number in range(7):
        log.fold(sent(number, str(number)))
    log.write()
    assert len(id_rows(log)) == 7

    tick(log, T0 + WINDOW_MS)
    left = []
    for _ in range(3):
        log.write()
        left.append((len(id_rows(log)), len(log.book.accepted_ids)))

    assert left == [(4, 4), (1, 1), (0, 0)]


def test_an_id_that_was_accepted_again_outlives_its_former_record() -> None:
    log = new_log(sent(0, "first"))
    log.settings = QueueSettings(deduplication_window_ms=10)
    log.fold(sent(1, "a"))
    log.settings = SETTINGS
    # The record of `first` still keeps that of `a` from being removed.
    log.fold(sent(2, "a"), at=T0 + 10)
    log.restart()

    tick(log, T0 + WINDOW_MS)
    log.fold(sent(3, "x"), at=T0 + WINDOW_MS)
    log.fold(sent(4, "a"), at=T0 + WINDOW_MS + 1)

    assert 4 not in opened(log)


def test_an_id_outlives_a_jump_of_the_brokers_clock() -> None:
    log = new_log(Tick(9, 0), sent(0, "a"))
    # Nothing is removed while the next TICK may still set the clock back.
    log.fold(sent(1, "b"), at=T0 + 3_600_000)
    log.write()
    log.fold(Tick(9, 1_000), at=T0 + 3_601_000)
    assert log.book.clock.now_ms == T0 + 1_000

    log.fold(sent(2, "a"), at=T0 + 3_602_000)

    assert opened(log) == [0, 1]


def test_rows_of_ids_count_as_pending() -> None:
    log = new_log()
    before = log.book.pending_rows
    log.fold(sent(0, "a"), cancel([0]))

    assert log.book.pending_rows >= before + 2
    log.write()
    assert log.book.pending_rows == 0


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [False, True])
def test_messages_of_several_senders_that_are_due_together_come_in_the_order_of_the_log(restart: bool) -> None:
    log = new_log()
    sources = [Source(synthetic_topic(number), 2) for number in (9, 3, 7)]
    for number in range(30):
        log.fold(sent(number, f"id-{number}", source=sources[number % 3]))
    if restart:
        log.restart()

    assert [fire.offset for fire in log.book.due(T0)] == list(range(30))


# --- placement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_sender_reaches_each_markers_partition_through_its_own_source(count: int) -> None:
    topic = synthetic_topic(12_345)
    wanted = range(count)

    assert [markers_partition(topic, source_partition(topic, partition, count), count) for partition in wanted] == [
        *wanted
    ]


def test_the_partition_of_an_id_is_as_the_protocol_says() -> None:
    # The first 8 bytes of the SHA-256 of b"emails\0order-17".
    assert deduplicating_partition("emails", b"order-17", 2**64) == 3_799_881_882_046_869_433
