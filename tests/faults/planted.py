"""Defects that are planted into consumers and workers: the checker must find them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

from marq.consumer import priorities, turns
from marq.consumer.ordering import KeyQueues, PendingRetry
from marq.consumer.writer import OutcomeWriter
from marq.core import lease_book
from marq.core.lease_book import LeaseBook
from marq.core.redeliver_or_dead_letter import Destination, DueAction
from marq.kafka.marker_writer import KafkaMarkerWriter, MarkerRecord
from marq.leases.held import Ended, LeasedBatch
from marq.wire.marker_codec import decode
from marq.wire.markers import Acquire, Cause, MixedAcquire

#: How much too early a planted defect fires.
EARLY_MS = 700


def early_and_disobedient() -> None:
    """Redeliver early, and deliver cancelled messages."""
    due, resolve = LeaseBook.due, lease_book.resolve_due

    def due_early(book: LeaseBook, now_ms: int) -> list[DueAction]:
        return due(book, now_ms + EARLY_MS)

    def resolve_disobediently(*arguments: Any) -> DueAction:
        action = resolve(*arguments)
        return replace(action, destination=Destination.QUEUE) if action.cause is Cause.CANCELLED else action

    LeaseBook.due = due_early  # type: ignore[method-assign]
    lease_book.resolve_due = resolve_disobediently


def hasty() -> None:
    """Deliver the next message of a key before the ack is durable."""
    ack = LeasedBatch.ack

    def ack_and_go_on(batch: LeasedBatch, offset: int) -> None:
        ack(batch, offset)
        if batch.in_order and isinstance(batch.keeper, OutcomeWriter):
            batch.keeper._listener.settled([Ended(batch, [offset], [], [])])

    LeasedBatch.ack = ack_and_go_on  # type: ignore[method-assign]


def forgetful() -> None:
    """Do not count messages that a former reader of a partition still has."""

    def note_no_turn(keys: KeyQueues, retry: PendingRetry, *, leased: bool) -> None:
        keys._order.awaited.discard(retry.offset)
        keys.coming.pop(retry.offset, None)
        keys._order.park(retry.offset)

    KeyQueues._note_turn = note_no_turn  # type: ignore[method-assign]


def loyal() -> None:
    """Let the key that had its turn have the next one, too."""
    take_next = turns.Turns.take_next

    def take_next_of_the_same(self: turns.Turns[Any]) -> Any:
        taken = take_next(self)
        self._queue.rotate()
        return taken

    turns.Turns.take_next = take_next_of_the_same  # type: ignore[method-assign]


def greedy() -> None:
    """Begin messages of a lower priority only while none of a higher one waits."""
    priorities.FACTOR, priorities.MAX_HELD_BACK_S = 10**9, inf


def level() -> None:
    """Give all queues as many turns."""
    priorities.FACTOR = 1


def hurried() -> None:
    """Begin messages sooner than rates allow."""
    turns._begins_s = lambda *_: -inf


def careless() -> None:
    """Write no ACQUIREs."""
    write = KafkaMarkerWriter.write

    async def write_no_acquires(writer: KafkaMarkerWriter, records: Sequence[MarkerRecord], limit_s: float) -> None:
        if not any(isinstance(decode(value), Acquire | MixedAcquire) for _, value in records):
            await write(writer, records, limit_s)

    KafkaMarkerWriter.write = write_no_acquires  # type: ignore[method-assign]
