"""Records as columns, so that a check of thousands of them needs no object for each.

Most records are only passed on: their keys name the queue, their values go into an ACQUIRE, their offsets into an ACK.
Making, comparing and packing a list of values or numbers is many times faster than visiting as many objects, and leaves
nothing for the garbage collector to search.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from struct import Struct
from typing import NamedTuple, overload

from marq.wire.marker_codec import encode_headers
from marq.wire.markers import Headers, Record
from marq.wire.names import MAX_HEADER_NAME_BYTES, MAX_HEADERS, RESERVED_HEADER
from marq.wire.record_headers import are_copied, without_copied

_name_of = itemgetter(0)
_pack_length = Struct(">i").pack


class OneHeader(Sequence[Headers]):
    """Headers of records that all have one header, of the same name, with a value."""

    __slots__ = ("name", "values")

    def __init__(self, name: str, values: Sequence[bytes]) -> None:
        self.name = name
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> Headers: ...

    @overload
    def __getitem__(self, index: slice) -> OneHeader: ...

    def __getitem__(self, index: int | slice) -> Headers | OneHeader:
        if isinstance(index, slice):
            return OneHeader(self.name, self.values[index])
        return ((self.name, self.values[index]),)

    def __iter__(self) -> Iterator[Headers]:
        name = self.name
        return (((name, value),) for value in self.values)


def column_of(rows: Sequence[Headers]) -> Sequence[Headers] | None:
    """Return the headers of some records as a column; None if no record has any."""
    if not any(rows):
        return None
    try:
        pairs = [pair for [pair] in rows]
    except ValueError:
        # A record has no header, or several. The garbage collector skips tuples of text and bytes.
        return [tuple(row) for row in rows]
    name = pairs[0][0]
    values = [value for other, value in pairs if other == name and value is not None]
    return OneHeader(name, values) if len(values) == len(rows) else [tuple(row) for row in rows]


def joined_columns(parts: Sequence[Sequence[Headers] | None], lengths: Sequence[int]) -> Sequence[Headers] | None:
    """Return the column of the records of all parts, which have these lengths."""
    if not any(parts):
        return None
    alike = [part for part in parts if isinstance(part, OneHeader)]
    if len(alike) == len(parts) and len({part.name for part in alike}) == 1:
        return OneHeader(alike[0].name, list(chain.from_iterable([part.values for part in alike])))
    return [row for part, length in zip(parts, lengths, strict=True) for row in part or [()] * length]


def column_at(column: Sequence[Headers] | None, indexes: Sequence[int]) -> Sequence[Headers] | None:
    """Return the column of the records at these indexes."""
    if column is None or not indexes:
        return None
    if isinstance(column, OneHeader):
        return OneHeader(column.name, tuple([column.values[index] for index in indexes]))
    rows = [column[index] for index in indexes]
    return rows if any(rows) else None


def fitting_column(column: Sequence[Headers], names: Iterable[str]) -> Sequence[Headers]:
    """Return a column without the headers that do not fit into markers, or the same column if all fit.

    ``names`` are the names of all its headers.
    """
    long = {name for name in names if len(name.encode()) > MAX_HEADER_NAME_BYTES}
    if not long and (isinstance(column, OneHeader) or max(map(len, column)) <= MAX_HEADERS):
        return column
    return [_first([header for header in row if header[0] not in long]) for row in column]


def _first(headers: Headers) -> Headers:
    """Return the first headers if there are too many, and Marq's own, which a redelivery has at the end."""
    excess = len(headers) - MAX_HEADERS
    if excess <= 0:
        return headers
    others = [index for index, (name, _) in enumerate(headers) if not name.startswith(RESERVED_HEADER)]
    dropped = set(others[-excess:])
    return [header for index, header in enumerate(headers) if index not in dropped][-MAX_HEADERS:]


def encoded_column(column: Sequence[Headers]) -> list[bytes]:
    """Return the headers of each record as bytes."""
    if not isinstance(column, OneHeader) or not column:
        return [encode_headers(headers) for headers in column]
    head = encode_headers(((column.name, b""),))[: -len(_pack_length(0))]
    return [head + _pack_length(len(value)) + value for value in column.values]


class Row(NamedTuple):
    """One record of :class:`Records`."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class Records(Sequence[Row]):
    """Records of one source partition, in order; ``timestamps`` in ms, ``headers`` None where no record has any."""

    __slots__ = ("_encoded_headers", "_names", "headers", "keys", "offsets", "timestamps", "values")

    def __init__(
        self,
        offsets: Sequence[int],
        timestamps: Sequence[int],
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        headers: Sequence[Headers] | None = None,
    ) -> None:
        self.offsets = offsets
        self.timestamps = timestamps
        self.keys = keys
        self.values = values
        self.headers = headers
        self._names: set[str] | None = None
        self._encoded_headers: Sequence[bytes] | None = None

    def has_header(self, name: str) -> bool:
        """Return whether a record has a header of this name."""
        return self.headers is not None and name in self._header_names(self.headers)

    @property
    def header_names(self) -> set[str]:
        """The names of all headers of these records."""
        return set() if self.headers is None else self._header_names(self.headers)

    def _header_names(self, headers: Sequence[Headers]) -> set[str]:
        if self._names is None:
            self._names = (
                {headers.name} if isinstance(headers, OneHeader) else set(map(_name_of, chain.from_iterable(headers)))
            )
        return self._names

    @property
    def encoded_headers(self) -> Sequence[bytes] | None:
        """The headers of each record as bytes; None if no record has any."""
        if self._encoded_headers is None and self.headers is not None:
            self._encoded_headers = encoded_column(self.headers)
        return self._encoded_headers

    @property
    def headers_bytes(self) -> int:
        """How many bytes the headers take in markers."""
        if isinstance(self.headers, OneHeader):
            return len(self) * len(encode_headers(((self.headers.name, b""),))) + sum(map(len, self.headers.values))
        return sum(map(len, self.encoded_headers or ()))

    @classmethod
    def of(cls, records: Iterable[Record]) -> Records:
        """Return objects as columns."""
        read = records if isinstance(records, list) else list(records)
        gapless = read and read[-1].offset - read[0].offset == len(read) - 1
        return cls(
            range(read[0].offset, read[-1].offset + 1) if gapless else [record.offset for record in read],
            [record.timestamp for record in read],
            [record.key for record in read],
            [record.value for record in read],
            column_of([record.headers for record in read]),
        )

    @classmethod
    def joined(cls, parts: Sequence[Records]) -> Records:
        """Return the records of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            _joined_offsets([part.offsets for part in parts]),
            list(chain.from_iterable([part.timestamps for part in parts])),
            list(chain.from_iterable([part.keys for part in parts])),
            list(chain.from_iterable([part.values for part in parts])),
            joined_columns([part.headers for part in parts], [len(part) for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Records: ...

    def __getitem__(self, index: int | slice) -> Row | Records:
        headers = self.headers
        if isinstance(index, slice):
            cut = None if headers is None else headers[index]
            return Records(
                self.offsets[index], self.timestamps[index], self.keys[index], self.values[index],
                cut if cut is not None and any(cut) else None,
            )  # fmt: skip
        return Row(
            self.offsets[index],
            self.timestamps[index],
            self.keys[index],
            self.values[index],
            () if headers is None else headers[index],
        )

    def __iter__(self) -> Iterator[Row]:
        headers: Sequence[Headers] = [()] * len(self) if self.headers is None else self.headers
        return map(Row, self.offsets, self.timestamps, self.keys, self.values, headers)

    def at(self, indexes: Sequence[int]) -> Records:
        """Return the records at these indexes, in tuples: the garbage collector skips tuples of numbers and bytes."""
        return Records(
            tuple([self.offsets[index] for index in indexes]),
            tuple([self.timestamps[index] for index in indexes]),
            tuple([self.keys[index] for index in indexes]),
            tuple([self.values[index] for index in indexes]),
            column_at(self.headers, indexes),
        )

    def without_values(self) -> Records:
        """Return the same records with None for each value."""
        return Records(self.offsets, self.timestamps, self.keys, (None,) * len(self), self.headers)

    def with_fitting_headers(self) -> Records:
        """Return the same records without headers that do not fit into markers; itself if all fit."""
        if self.headers is None:
            return self
        headers = fitting_column(self.headers, self._header_names(self.headers))
        if headers is self.headers:
            return self
        return Records(self.offsets, self.timestamps, self.keys, self.values, headers if any(headers) else None)

    def without_copied_headers(self, *, own_topic: bool) -> Records:
        """Return the same records without Marq's headers that came with copies; itself if there are none."""
        if self.headers is None or not are_copied(self._header_names(self.headers), own_topic=own_topic):
            return self
        headers = column_of([without_copied(row, own_topic=own_topic) for row in self.headers])
        return Records(self.offsets, self.timestamps, self.keys, self.values, headers)

    def with_keys(self, keys: Sequence[bytes | None]) -> Records:
        """Return the same records under other keys."""
        return Records(self.offsets, self.timestamps, keys, self.values, self.headers)


def _joined_offsets(parts: Sequence[Sequence[int]]) -> Sequence[int]:
    first, last = parts[0][0], parts[-1][-1]
    if last - first == sum(map(len, parts)) - 1:
        return range(first, last + 1)
    return list(chain.from_iterable(parts))
