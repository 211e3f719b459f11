"""What an owner writes, and what becomes of that which is not known to be written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from marq.core.deliveries.redelivery_records import reason
from marq.core.deliveries.schedule_planner import Planner
from marq.core.redeliver_or_dead_letter import Destination
from marq.core.storage.rows import LeaseRow, encode_lease, encode_row, row_key
from marq.core.tracker import Tracker
from marq.owner import engine as module
from marq.owner.engine import OwnerEngine, OwnerTransaction, PositionLost, Step, find_payloads
from marq.settings.cron import Times
from marq.settings.queue import QueueSettings
from marq.settings.schedule_definitions import ScheduleLayers
from marq.wire.error_texts import with_traceback
from marq.wire.marker_codec import Columns, encode, encode_headers
from marq.wire.markers import Acquire, Batch, Cause, Payload, Reject, Source, Tick
from marq.wire.record_headers import record_id

MARKERS, MESSAGES = Source("t.markers", 0), Source("t.messages", 2)
LEASE_MS = 1_000


class Life:
    """An owner whose transactions stand in its log as soon as they are committed."""

    def __init__(self) -> None:
        self.stored: dict[bytes, bytes] = {}
        self.asked: list[list[bytes]] = []
        self.acknowledged = -1
        self.now_ms = 0
        self.log: list[SimpleNamespace] = []
        planner = Planner(0, 1, ScheduleLayers, Times(), 1_000_000)
        self.engine = OwnerEngine(
            MARKERS, lambda: Tracker(lambda _: QueueSettings(), 7), planner, self, self._acknowledge, 1_000_000
        )
        self.take_over(1)

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        self.asked.append(keys)
        return [self.stored.get(key) for key in keys]

    def write(self, changes: Mapping[bytes, bytes | None], position: int) -> None:
        for key, row in changes.items():
            self.stored.pop(key, None)
            if row is not None:
                self.stored[key] = row

    def _acknowledge(self, applied: int) -> None:
        self.acknowledged = applied

    def take_over(self, epoch: int) -> list[Step]:
        steps = []
        for step in self.engine.take_over():
            steps.append(step)
            if step is Step.FENCE:
                self.engine.fenced((1, epoch), self.now_ms)
            elif step is Step.RECOVER:
                list(self.engine.restoring(self.stored.items()))
            else:
                self.engine.begin(0, len(self.log), self.now_ms)
        return steps

    def append(self, *batches: Batch | bytes) -> None:
        for batch in batches:
            value = batch if isinstance(batch, bytes) else encode(batch)
            record = SimpleNamespace(offset=len(self.log), timestamp=1_000_000 + self.now_ms, value=value)
            self.log.append(record)
        position = self.engine.position or 0
        self.engine.read(self.log[position:], position, len(self.log))
        self.engine.tracker.saw(self.now_ms)

    def turn(self) -> None:
        """Write and read all there is to write."""
        while (write := self.engine.next_write(self.now_ms)) is not None:
            self.append(*write.markers)
            self.engine.committed(write, self.now_ms, len(self.log) - 1)

    def tick(self, after_ms: int = 0) -> None:
        """Let the owner write the TICK that is due, and read it back."""
        self.now_ms += after_ms
        tick = self.engine.next_write(self.now_ms)
        assert tick is not None
        self.append(*tick.markers)
        self.engine.committed(tick, self.now_ms)

    def writes(self) -> list[OwnerTransaction]:
        """Let the owner commit all that is due, and return it."""
        writes = []
        while (write := self.engine.next_write(self.now_ms)) is not None:
            writes.append(write)
            assert self.engine.unsent
            self.engine.committed(write, self.now_ms)
        return writes


def acquire(count: int, value: bytes = b"value") -> Acquire:
    return Acquire("q", 9, MESSAGES, range(count), LEASE_MS, 0, Columns(b"q", [0] * count, [value] * count))


def acquire_at(offset: int, value: bytes) -> Acquire:
    return Acquire("q", 9, MESSAGES, [offset], LEASE_MS, offset, Columns(b"q", [0], [value]))


def due(life: Life, batch: Acquire) -> None:
    """Let some messages become due, with the TICK that says so read back."""
    life.turn()
    life.append(batch)
    life.tick(after_ms=2 * LEASE_MS)


@pytest.fixture
def life() -> Life:
    return Life()


@pytest.mark.parametrize(
    ("value_bytes", "shares"),
    [(200, [2_000, 500]), (100_000, [42] * 59 + [22])],
    ids=["as many as a transaction may have", "as many bytes"],
)
def test_what_is_due_is_shared_out_to_transactions(life: Life, value_bytes: int, shares: list[int]) -> None:
    """Else those of large messages would take gigabytes."""
    due(life, acquire(2_500, b"x" * value_bytes))

    writes = life.writes()

    assert [len(write.due) for write in writes] == shares
    assert [fire.offset for write in writes for fire, _ in write.due] == list(range(2_500))
    assert not life.engine.unsent


@pytest.mark.parametrize("large", ["value", "header"])
def test_a_transaction_exceeds_its_bytes_by_one_message_at_most(life: Life, large: str) -> None:
    """A transaction that takes too long is aborted and built again, so the partition would stall."""
    content = b"x" * 900_000
    values, headers = (
        ([content] * 40, None) if large == "value" else ([b""] * 40, [encode_headers([("h", content)])] * 40)
    )
    payloads = Columns(b"q", [0] * 40, values, headers=headers)
    due(life, dataclasses.replace(acquire(40), payloads=payloads))
    life.engine.committed(life.engine.rows(), life.now_ms)

    writes = life.writes()

    assert [len(write.due) for write in writes] == [5] * 8
    assert [fire.offset for write in writes for fire, _ in write.due] == list(range(40))
    # Payloads that one transaction has no room for are looked up again for the next one.
    assert max(len(keys) for keys in life.asked) < 10


def test_large_messages_behind_many_small_ones_are_left_for_the_next_transaction(life: Life) -> None:
    sizes = [10] * 60 + [900_000] * 10
    due(life, dataclasses.replace(acquire(70), payloads=Columns(b"q", [0] * 70, [b"x" * size for size in sizes])))

    write = life.engine.next_write(life.now_ms)

    assert write is not None
    assert len(write.due) == 65
    assert life.engine.unsent


def test_of_a_transaction_that_is_refused_for_its_size_each_copy_goes_alone_and_one_becomes_a_dead_letter(
    life: Life,
) -> None:
    """Sent again and again, it would hold up all other queues of the partition."""
    due(life, acquire(2))
    engine, sent = life.engine, []

    while (write := engine.next_write(life.now_ms)) is not None:
        sent.append([(fire.offset, fire.destination) for fire, _ in write.due])
        if len(write.due) > 1 or sent[-1] == [(0, Destination.QUEUE)]:
            assert engine.refused_for_size(write)
        else:
            engine.committed(write, life.now_ms)

    queue, dead = Destination.QUEUE, Destination.DEAD_LETTERS
    assert sent == [[(0, queue), (1, queue)], [(0, queue)], [(0, dead)], [(1, queue)]]


def test_a_dead_letter_that_is_too_large_loses_its_value_and_is_not_retried_forever(life: Life) -> None:
    due(life, acquire(1))
    refused, values = [], []
    for _ in range(3):
        write = life.engine.next_write(life.now_ms)
        assert write is not None
        [(fire, payload)] = write.due
        values.append(payload.value)
        refused.append(life.engine.refused_for_size(write))

    assert refused == [True, True, False]
    assert values == [b"value", b"value", None]
    assert record_id(fire.source, fire.offset) in reason(fire, payload)


def test_a_dead_letter_that_is_too_large_loses_its_traceback_before_its_value(life: Life) -> None:
    life.turn()
    life.append(acquire(1))
    life.now_ms += LEASE_MS // 2
    life.append(Reject("q", 9, MESSAGES, [0], [with_traceback("boom", "Traceback: in bill")]))
    life.tick()
    first = life.engine.next_write(life.now_ms)
    assert first is not None

    assert life.engine.refused_for_size(first)

    second = life.engine.next_write(life.now_ms)
    assert second is not None
    [(fire, payload)] = second.due
    assert (fire.lease.text, fire.cause, payload.value) == ("boom", Cause.REJECTED, b"value")


def test_an_unreadable_record_that_is_too_large_for_quarantine_is_cut(life: Life) -> None:
    """A program can compress such a record; its partition must not stop for it."""
    life.append(b"x" * 3_000_000)
    life.append(acquire(1))

    refused = life.engine.refused_for_size(life.engine.rows())

    write = life.engine.rows()
    [(offset, value, why)] = write.quarantine
    assert (refused, offset, value) == (True, 0, b"x" * 1_000_000)
    assert "the first 1000000 of 3000000 bytes" in why
    assert write.rows
    assert not life.engine.refused_for_size(write)


def test_rows_of_a_transaction_that_failed_are_written_with_the_next(life: Life) -> None:
    life.append(acquire(1))
    failed = life.engine.rows()
    life.take_over(2)
    life.append(Tick(1, 1))
    written = life.engine.rows()
    life.engine.committed(written, life.now_ms)

    assert failed.rows is not None
    assert written.rows is not None
    assert failed.rows.keys() <= written.rows.keys()
    assert life.acknowledged == 1
    assert not life.engine.owes_rows


def test_an_owner_that_was_overtaken_begins_again_from_the_table(life: Life) -> None:
    """What it has pending would undo what the other one has written."""
    life.append(acquire(1))
    life.engine.rows()

    steps = life.take_over(4)

    assert steps == [Step.FENCE, Step.RECOVER, Step.SEEK]
    assert life.engine.pending == {}
    assert life.engine.position == 0


def test_an_owner_whose_transactions_take_too_long_writes_smaller_ones(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each one that is aborted it begins again from the table, and would write as much again, endlessly."""
    monkeypatch.setattr(module, "MAX_PENDING_BYTES", 64_000)
    size = len(encode(acquire(1, b"x" * 1_000)))
    life.log = [
        SimpleNamespace(offset=offset, timestamp=1_000_000, value=encode(acquire_at(offset, b"x" * 1_000)))
        for offset in range(300)
    ]
    engine, failed, committed = life.engine, 0, list[int]()

    for epoch in range(3, 300, 2):
        while engine.position is not None and engine.position < len(life.log) and not engine.is_full:
            engine.read([life.log[engine.position]], engine.position, engine.position + 1)
        write = engine.rows()
        if write.applied - life.acknowledged > 20_000 // size:
            engine.timed_out(write)
            failed += 1
            # The broker increments the epoch once more when it aborts the transaction.
            life.take_over(epoch)
            continue
        committed.append(write.applied - life.acknowledged)
        engine.committed(write, life.now_ms)
        engine.renewed((1, epoch))
        if life.acknowledged == len(life.log) - 1:
            break

    assert life.acknowledged == len(life.log) - 1
    assert failed <= len(committed) // module.COMMITS_TO_DOUBLE + 2


def test_limits_of_pending_rows_return_to_normal_after_an_outage(life: Life) -> None:
    limits = module.PendingLimits(lambda: 1)
    book, half = life.engine.tracker.book, module.MAX_PENDING_BYTES // 2
    for _ in range(100):
        limits.timed_out()
    assert limits.are_reached(book, half)

    for _ in range(8 * module.COMMITS_TO_DOUBLE):
        limits.committed()

    assert not limits.are_reached(book, half)


def test_an_owner_that_was_alone_goes_on_where_it_is(life: Life) -> None:
    life.append(acquire(1))

    assert life.take_over(2) == [Step.FENCE]
    assert life.engine.position == 1


def test_an_owner_that_let_go_seeks_its_position(life: Life) -> None:
    life.append(acquire(1))
    life.engine.let_go()

    assert life.take_over(2) == [Step.FENCE, Step.SEEK]


def test_a_restore_that_was_cut_off_is_begun_again(life: Life) -> None:
    life.append(acquire(3))
    life.engine.committed(life.engine.rows(), 0)
    life.engine.forget()

    next(life.engine.restoring(life.stored.items()), None)
    list(life.engine.restoring(life.stored.items()))

    assert len(life.engine.tracker.book) == 3


@pytest.mark.parametrize(("start", "end", "said"), [(1, 5, "retention"), (0, 0, "it ends at 0")])
def test_an_owner_whose_records_are_gone_stops(life: Life, start: int, end: int, said: str) -> None:
    engine = life.engine
    engine.position = 1 if end < 1 else 0

    with pytest.raises(PositionLost, match=said):
        engine.check_log(start, end)


def test_records_behind_a_gap_are_not_folded(life: Life) -> None:
    assert not life.engine.read([], 1, 2)
    assert life.engine.position == 0


def test_payloads_are_taken_from_what_is_not_written_and_else_from_the_table_in_one_look(life: Life) -> None:
    life.stored = {row_key("orders", MESSAGES, offset): row(offset) for offset in (5, 7)}
    pending = {row_key("orders", MESSAGES, 6): row(6)}

    payloads = find_payloads(
        life.engine.tracker.book, pending, life, [("orders", MESSAGES, offset) for offset in range(5, 9)]
    )

    assert [payload and payload.value for payload in payloads] == [b"5", b"6", b"7", None]
    assert len(life.asked) == 1


def row(offset: int) -> bytes:
    return encode_row(encode_lease(LeaseRow("orders", 1, 1, 0, 0)), Payload(0, 1, None, [], b"%d" % offset))
