"""The headers of many records as a column.

Records of a queue with ordering have one header each, with their key. Only the values of these headers are kept: a
hundred thousand tuples would burden the garbage collector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from struct import Struct
from typing import overload

from marq.wire.markers import Headers
from marq.wire.names import MAX_HEADER_NAME_BYTES, MAX_HEADERS, RESERVED_HEADER
from marq.wire.payload_columns import encode_headers

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


def joined(parts: Sequence[Sequence[Headers] | None], lengths: Sequence[int]) -> Sequence[Headers] | None:
    """Return the column of the records of all parts, which have these lengths."""
    if not any(parts):
        return None
    alike = [part for part in parts if isinstance(part, OneHeader)]
    if len(alike) == len(parts) and len({part.name for part in alike}) == 1:
        return OneHeader(alike[0].name, list(chain.from_iterable([part.values for part in alike])))
    return [row for part, length in zip(parts, lengths, strict=True) for row in part or [()] * length]


def at(column: Sequence[Headers] | None, indexes: Sequence[int]) -> Sequence[Headers] | None:
    """Return the column of the records at these indexes."""
    if column is None or not indexes:
        return None
    if isinstance(column, OneHeader):
        return OneHeader(column.name, tuple([column.values[index] for index in indexes]))
    rows = [column[index] for index in indexes]
    return rows if any(rows) else None


def fitting(column: Sequence[Headers], names: Iterable[str]) -> Sequence[Headers]:
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


def encoded(column: Sequence[Headers]) -> list[bytes]:
    """Return the headers of each record as bytes."""
    if not isinstance(column, OneHeader) or not column:
        return [encode_headers(headers) for headers in column]
    head = encode_headers(((column.name, b""),))[: -len(_pack_length(0))]
    return [head + _pack_length(len(value)) + value for value in column.values]
