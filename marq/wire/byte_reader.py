"""Reads numbers, texts and columns from untrusted bytes."""

from __future__ import annotations

from struct import Struct, unpack_from

from marq.wire.errors import CorruptMarker

#: Bytes of one number with each format code.
_SIZES = {"B": 1, "H": 2, "I": 4, "i": 4, "q": 8, "Q": 8}


class ByteReader:
    """A position in bytes that never passes their end.

    Every method raises CorruptMarker or ``struct.error`` if the bytes end before its field does.
    """

    __slots__ = ("data", "position")

    def __init__(self, data: bytes, position: int) -> None:
        self.data = data
        self.position = position

    def number(self, layout: Struct) -> int:
        value: int = layout.unpack_from(self.data, self.position)[0]
        self.position += layout.size
        return value

    def numbers(self, code: str, count: int) -> tuple[int, ...]:
        """Return a column of numbers with this format code."""
        end = self.position + _SIZES[code] * count
        # Compared before unpacking: a hostile count must not become a huge format.
        if end > len(self.data):
            raise CorruptMarker(f"a column of {count} numbers passes the end of the batch")
        values = unpack_from(f">{count}{code}", self.data, self.position)
        self.position = end
        return values

    def span(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self.data):
            raise CorruptMarker(f"a field of {length} bytes passes the end of the batch")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def text(self, length: int) -> str:
        return self.span(length).decode()

    def finish(self) -> None:
        if self.position != len(self.data):
            raise CorruptMarker(f"{len(self.data) - self.position} bytes follow the end of the batch")
