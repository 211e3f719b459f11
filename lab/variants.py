"""Changed versions of Marq for whole processes: the next version, and one with planted defects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from marq.consumer.writer import OutcomeWriter
from marq.core import due_messages
from marq.core.lease_book import LeaseBook
from marq.core.redeliver_or_dead_letter import Destination, DueAction
from marq.leases.held import Ended, LeasedBatch
from marq.wire import marker_codec
from marq.wire.markers import Batch, Cause

#: A marker version that this Marq does not know: version 1 under another number.
NEWER = 2
#: How much too early a planted defect fires.
EARLY_MS = 700


def install_newer() -> None:
    """Make this process one of the next version: it writes markers of version 2, and also reads those of version 1."""
    former = marker_codec._decode

    def decode(data: bytes) -> Batch:
        return former(bytes([NEWER]) + data[1:] if data[:1] == b"\1" else data)

    marker_codec._decode = decode
    marker_codec.VERSION = NEWER


def readable(value: bytes) -> bytes:
    """Return a marker of either version as one that this version can read."""
    return b"\1" + value[1:] if value[:1] == bytes([NEWER]) else value


def install_planted() -> None:
    """Plant defects for the test of the checker: redeliver early, and deliver cancelled messages."""
    due, resolve = LeaseBook.due, due_messages.resolve_due

    def due_early(book: LeaseBook, now_ms: int) -> list[DueAction]:
        return due(book, now_ms + EARLY_MS)

    def resolve_disobediently(*arguments: Any) -> DueAction:
        action = resolve(*arguments)
        return replace(action, destination=Destination.QUEUE) if action.cause is Cause.CANCELLED else action

    LeaseBook.due = due_early  # type: ignore[method-assign]
    due_messages.resolve_due = resolve_disobediently


def install_hasty() -> None:
    """Plant a defect for the test of the checker: deliver the next message of a key before the ack is durable."""
    ack = LeasedBatch.ack

    def ack_and_go_on(batch: LeasedBatch, offset: int) -> None:
        ack(batch, offset)
        if batch.in_order and isinstance(batch.keeper, OutcomeWriter):
            batch.keeper._listener.settled([Ended(batch, [offset], [], [])])

    LeasedBatch.ack = ack_and_go_on  # type: ignore[method-assign]
