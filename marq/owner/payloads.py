"""Finds the payloads of open messages: in the lease book, in unwritten rows, or in the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from marq.core.lease_book import LeaseBook
from marq.core.storage import rows
from marq.wire.markers import Payload, Source

#: How many payloads are looked up together: at first (all of them may be large), and at most.
FIRST_LOOKED_UP, LOOKED_UP = 4, 250


class Table(Protocol):
    """The rows of one markers partition on the owner's disk."""

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the rows of these keys, None for each missing row."""

    def write(self, changes: Mapping[bytes, bytes | None], position: int) -> None:
        """Write rows that the changelog has up to ``position``; after an exception they are written again."""


def find_payloads(
    book: LeaseBook, pending: Mapping[bytes, bytes | None], table: Table, messages: Sequence[tuple[str, Source, int]]
) -> list[Payload | None]:
    """Return the payloads of messages, None for each that is not open; the table is asked once for all of them."""
    payloads = [book.fresh_payload(*message) for message in messages]
    stored: dict[int, bytes] = {}
    for index, payload in enumerate(payloads):
        if payload is None:
            key = rows.row_key(*messages[index])
            if row := pending.get(key):
                payloads[index] = rows.decode_payload(row)
            else:
                stored[index] = key
    if stored:
        for index, encoded in zip(stored, table.get(list(stored.values())), strict=True):
            payloads[index] = None if encoded is None else rows.decode_payload(encoded)
    return payloads


def find_payloads_in_turn(
    book: LeaseBook, pending: Mapping[bytes, bytes | None], table: Table, messages: Sequence[tuple[str, Source, int]]
) -> Iterator[Payload | None]:
    """Yield the payloads of messages, each None if it is not open.

    Look up few of them at first, then twice as many each time: a caller that stops because they are large leaves few
    that were looked up in vain.
    """
    start, count = 0, FIRST_LOOKED_UP
    while start < len(messages):
        yield from find_payloads(book, pending, table, messages[start : start + count])
        start, count = start + count, min(2 * count, LOOKED_UP)
