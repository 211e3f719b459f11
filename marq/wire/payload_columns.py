"""The payloads of an ACQUIRE or DELAY as bytes: columns of timestamps, attempts, keys, headers and values.

Values are not copied out of a batch until they are asked for: most messages are acknowledged before the tracker has to
keep them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from struct import Struct, pack, unpack_from

from marq.wire.errors import CorruptMarker
from marq.wire.markers import Headers, LeftPayloads, Payload, Payloads

#: Flags of a batch: which of the columns that may be left out it has.
ATTEMPTS, KEYS, HEADERS = 2, 4, 8

#: In place of the length of a value: the message's key, headers and value are only in its record.
LEFT = -2

_U16, _I32 = Struct(">H"), Struct(">i")
_LEFT = _I32.pack(LEFT)
_NO_HEADERS = _U16.pack(0)


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


class Columns(Payloads):
    """The payloads of an ACQUIRE as columns, for a writer that has thousands of them: no object for each.

    None stands for a column that is not written: attempts that are all 1, keys that are all the queue's name, or no
    headers. ``headers`` are those of each message as :func:`encode_headers` returns them. ``left`` says of each message
    whether its payload is only in its record; None if there is no such message.
    """

    __slots__ = ("attempts", "headers", "keys", "left", "queue_key", "timestamps", "values")

    def __init__(
        self,
        queue_key: bytes,
        timestamps: Sequence[int],
        values: Sequence[bytes | None],
        *,
        left: Sequence[bool] | None = None,
        attempts: Sequence[int] | None = None,
        keys: Sequence[bytes | None] | None = None,
        headers: Sequence[bytes] | None = None,
    ) -> None:
        self.queue_key = queue_key
        self.timestamps = timestamps
        self.values = values
        self.left = left
        self.attempts = attempts
        self.keys = keys
        self.headers = headers

    def __len__(self) -> int:
        return len(self.timestamps)

    def __getitem__(self, index: int) -> Payload:  # type: ignore[override]
        attempt = 1 if self.attempts is None else self.attempts[index]
        if self.left is not None and self.left[index]:
            return Payload(self.timestamps[index], attempt, None, (), None, left=True)
        key = self.queue_key if self.keys is None else self.keys[index]
        headers: Headers = () if self.headers is None else decode_headers(self.headers[index])
        return Payload(self.timestamps[index], attempt, key, headers, self.values[index])


def write_payloads(payloads: Sequence[Payload], queue_key: bytes, parts: list[bytes], *, may_leave: bool) -> int:
    """Append the columns to ``parts``, and return the flags of those that are written."""
    count = len(payloads)
    if isinstance(payloads, LeftPayloads):
        _check(may_leave)
        parts += [pack(f">{count}q", *payloads.timestamps), _LEFT * count]
        return 0
    columns = payloads if isinstance(payloads, Columns) else _columns(payloads, queue_key)
    _check(may_leave or columns.left is None)
    flags = 0
    parts.append(pack(f">{count}q", *columns.timestamps))
    if columns.attempts is not None:
        flags |= ATTEMPTS
        parts.append(pack(f">{count}I", *columns.attempts))
    if columns.keys is not None:
        flags |= KEYS
        _write_values(columns.keys, parts)
    if columns.headers is not None:
        flags |= HEADERS
        _write_values(columns.headers, parts)
    _write_values(columns.values, parts, columns.left)
    return flags


def _check(allowed: bool) -> None:
    if not allowed:
        raise ValueError("a marker of this kind must contain its payloads, because its messages have no records")


def _columns(payloads: Sequence[Payload], queue_key: bytes) -> Columns:
    timestamps, attempts, keys, headers, values, left = zip(*payloads, strict=True)
    count = len(timestamps)
    named = any(key != queue_key for absent, key in zip(left, keys, strict=True) if not absent)
    return Columns(
        queue_key,
        timestamps,
        values,
        left=left if any(left) else None,
        attempts=attempts if attempts.count(1) != count else None,
        keys=keys if named else None,
        headers=[encode_headers(message_headers) for message_headers in headers] if any(headers) else None,
    )


def _write_values(values: Sequence[bytes | None], parts: list[bytes], left: Sequence[bool] | None = None) -> None:
    if left is not None:
        lengths = [
            LEFT if absent else -1 if value is None else len(value) for absent, value in zip(left, values, strict=True)
        ]
        parts.append(pack(f">{len(lengths)}i", *lengths))
        parts += [value for length, value in zip(lengths, values, strict=True) if value is not None and length >= 0]
        return
    if None not in values:
        parts.append(pack(f">{len(values)}i", *map(len, values)))  # type: ignore[arg-type]
        parts += values  # type: ignore[arg-type]
        return
    parts.append(pack(f">{len(values)}i", *[-1 if value is None else len(value) for value in values]))
    parts += [value for value in values if value is not None]


def read_payloads(reader: ByteReader, flags: int, queue_key: bytes, count: int, *, may_leave: bool) -> ReadPayloads:
    """Return the payloads of ``count`` messages."""
    timestamps = reader.numbers("q", count)
    attempts = reader.numbers("I", count) if flags & ATTEMPTS else None
    keys = ReadColumn(reader, count) if flags & KEYS else None
    headers = ReadColumn(reader, count) if flags & HEADERS else None
    if headers is not None:
        headers.check_headers()
    values = ReadColumn(reader, count, least=LEFT if may_leave else -1)
    return ReadPayloads(timestamps, attempts, keys, headers, values, queue_key)


class ReadColumn:
    """Values of one column, whose places are computed when the first value is asked for."""

    __slots__ = ("_data", "_end", "_ends", "_start", "lengths")

    def __init__(self, reader: ByteReader, count: int, least: int = -1) -> None:
        #: The bytes of each value; -1 stands for None, and :data:`LEFT` for one that is only in its record.
        self.lengths = reader.numbers("i", count)
        if min(self.lengths) < least:
            raise CorruptMarker("a value of negative length")
        self._data = reader.data
        self._start = reader.position
        self._ends: list[int] | None = None
        # A negative length takes no room.
        lengths = self.lengths
        reader.position += sum(lengths) + lengths.count(-1) - LEFT * lengths.count(LEFT)
        if reader.position > len(reader.data):
            raise CorruptMarker("the values pass the end of the batch")
        self._end = reader.position

    def check_headers(self) -> None:
        """Raise CorruptMarker if a value can't be decoded as headers."""
        data, start = self._data, self._start
        #: The bytes before the value of a message's only header, by the length of both: nearly all share a few.
        heads: dict[int, bytes] = {}
        for length in self.lengths:
            head = heads.get(length)
            if head is None or not data.startswith(head, start):
                headers = decode_headers(data[start : start + length] if length > 0 else _NO_HEADERS)
                if len(headers) == 1:
                    heads[length] = data[start : start + length - len(headers[0][1] or b"")]
            if length > 0:
                start += length

    def contains(self, data: bytes) -> bool:
        """Return whether the values contain these bytes."""
        return self._data.find(data, self._start, self._end) >= 0

    def __getitem__(self, index: int) -> bytes | None:
        if self._ends is None:
            sizes = self.lengths if min(self.lengths) >= 0 else [max(length, 0) for length in self.lengths]
            self._ends = list(accumulate(sizes, initial=self._start))
        length = self.lengths[index]
        return None if length < 0 else self._data[self._ends[index] : self._ends[index + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class ReadPayloads(Payloads):
    """The payloads of a batch, cut out of its bytes when they are asked for."""

    timestamps: tuple[int, ...]
    attempts: tuple[int, ...] | None
    keys: ReadColumn | None
    headers: ReadColumn | None
    values: ReadColumn
    queue_key: bytes

    def __len__(self) -> int:
        return len(self.timestamps)

    def may_have(self, header: str) -> bool:
        return self.headers is not None and self.headers.contains(header.encode())

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each value; -1 stands for None, :data:`LEFT` for one that is only in its record."""
        return self.values.lengths

    def __getitem__(self, index: int) -> Payload:  # type: ignore[override]
        if self.values.lengths[index] == LEFT:
            attempt = 1 if self.attempts is None else self.attempts[index]
            return Payload(self.timestamps[index], attempt, None, (), None, left=True)
        key = self.queue_key if self.keys is None else self.keys[index]
        headers = () if self.headers is None else decode_headers(self.headers[index] or _NO_HEADERS)
        attempt = 1 if self.attempts is None else self.attempts[index]
        return Payload(self.timestamps[index], attempt, key, headers, self.values[index])


def encode_headers(headers: Headers) -> bytes:
    """Return the headers of one record as bytes, in their original order and with duplicates."""
    parts = [_U16.pack(len(headers))]
    for name, value in headers:
        parts += (_encoded_name(name), _I32.pack(-1 if value is None else len(value)), value or b"")
    return b"".join(parts)


@lru_cache(maxsize=1_024)
def _encoded_name(name: str) -> bytes:
    encoded = name.encode()
    return _U16.pack(len(encoded)) + encoded


def decode_headers(data: bytes) -> Headers:
    """Return the headers of one record. Raises CorruptMarker if the bytes are not valid headers."""
    reader = ByteReader(data, 0)
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(reader.number(_U16)):
        name = reader.text(reader.number(_U16))
        length = reader.number(_I32)
        if length < -1:
            raise CorruptMarker("a header of negative length")
        headers.append((name, None if length == -1 else reader.span(length)))
    reader.finish()
    return tuple(headers)
