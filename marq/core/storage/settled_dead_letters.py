"""Dead letters that are settled: redriven or deleted, each once and for good.

A dead letter stays in its log. Markers that name its place settle it: a DELAY with its message (a redrive), or a
DISCARD. The first one counts. Settled places are kept forever, so that a repeated request has no effect, even from
another process or a year later. An interrupted redrive can therefore simply be repeated.

Notes (:mod:`marq.wire.dead_letter_notes`) state the disposition of each named place. The owner writes them to the
dead-letter topic together with the rows, so readers of that topic know which dead letters are settled, and requesters
learn the outcome.
"""

from __future__ import annotations

from collections.abc import Iterable

from marq.core.storage import rows
from marq.wire.dead_letter_notes import Disposition, Note
from marq.wire.markers import Delay, Discard, Source

#: Offsets per row. A row is rewritten when an offset is added, and stays small even if they arrive in random order.
CHUNK_OFFSETS = 4_096


class Places:
    """Any number of offsets of one partition, a bit for each, in chunks."""

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: dict[int, bytearray] = {}

    def __contains__(self, offset: int) -> bool:
        number, rest = divmod(offset, CHUNK_OFFSETS)
        chunk = self._chunks.get(number)
        return chunk is not None and bool(chunk[rest >> 3] & (1 << (rest & 7)))

    def add(self, offset: int) -> int:
        """Add an offset and return the number of its chunk."""
        number, rest = divmod(offset, CHUNK_OFFSETS)
        chunk = self._chunks.get(number)
        if chunk is None:
            chunk = self._chunks[number] = bytearray(CHUNK_OFFSETS // 8)
        chunk[rest >> 3] |= 1 << (rest & 7)
        return number

    def chunk(self, number: int) -> bytes:
        return bytes(self._chunks[number])

    def put(self, number: int, chunk: bytes) -> None:
        """Restore a chunk that :meth:`chunk` returned. Raises ValueError if it is not a chunk."""
        if len(chunk) != CHUNK_OFFSETS // 8:
            raise ValueError(f"a chunk of {len(chunk)} bytes; expected {CHUNK_OFFSETS // 8}")
        self._chunks[number] = bytearray(chunk)


class Dispositions:
    """The dispositions of one markers partition, by the partitions of the dead letters."""

    def __init__(self) -> None:
        self._places: dict[Source, Places] = {}
        self._touched: set[tuple[Source, int]] = set()
        self._notes: dict[tuple[Source, int, str, Disposition], set[int]] = {}

    @property
    def has_notes(self) -> bool:
        return bool(self._notes)

    def settle(self, batch: Delay | Discard, unseen: Iterable[int]) -> list[int]:
        """Settle the places of a batch; return those of ``unseen`` that were not settled before."""
        places = self._places.setdefault(batch.source, Places())
        settled = [offset for offset in unseen if offset not in places]
        self._touched.update({(batch.source, places.add(offset)) for offset in batch.offsets})
        self._note(batch, settled, Disposition.REDRIVEN if isinstance(batch, Delay) else Disposition.DELETED)
        self._note(batch, set(batch.offsets).difference(settled), Disposition.BEFORE)
        return settled

    def _note(self, batch: Delay | Discard, offsets: Iterable[int], became: Disposition) -> None:
        if offsets:
            self._notes.setdefault((batch.source, batch.holder, batch.queue, became), set()).update(offsets)

    def take_notes(self) -> list[Note]:
        """Return the notes since the last call, to be written in one transaction with the rows."""
        notes = [
            Note(source, sorted(offsets), became, queue, holder)
            for (source, holder, queue, became), offsets in self._notes.items()
        ]
        self._notes.clear()
        return notes

    def take_rows(self) -> dict[bytes, bytes]:
        """Return the rows that have changed since the last call."""
        changed = {
            rows.places_key(source, number): self._places[source].chunk(number) for source, number in self._touched
        }
        self._touched.clear()
        return changed

    def put_row(self, key: bytes, row: bytes) -> None:
        """Restore a row of the table."""
        source, number = rows.parse_places_key(key)
        self._places.setdefault(source, Places()).put(number, row)
