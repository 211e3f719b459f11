"""Records as columns, so that a check of thousands of them needs no object for each.

Most records are only passed on: their keys name the queue, their values go into an ACQUIRE, their offsets into an ACK.
Making, comparing and packing a list of values or numbers is many times faster than visiting as many objects, and leaves
nothing for the garbage collector to search.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple, overload

from marq.kafka import header_columns
from marq.kafka.header_columns import OneHeader, column_of
from marq.wire.markers import Headers, Record
from marq.wire.record_headers import are_copied, without_copied

_name_of = itemgetter(0)


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
            self._encoded_headers = header_columns.encoded(self.headers)
        return self._encoded_headers

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
            header_columns.joined([part.headers for part in parts], [len(part) for part in parts]),
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
            header_columns.at(self.headers, indexes),
        )

    def without_values(self) -> Records:
        """Return the same records with None for each value."""
        return Records(self.offsets, self.timestamps, self.keys, (None,) * len(self), self.headers)

    def with_fitting_headers(self) -> Records:
        """Return the same records without headers that do not fit into markers; itself if all fit."""
        if self.headers is None:
            return self
        headers = header_columns.fitting(self.headers, self._header_names(self.headers))
        if headers is self.headers:
            return self
        return Records(self.offsets, self.timestamps, self.keys, self.values, headers if any(headers) else None)

    def without_copied_headers(self, *, own_topic: bool) -> Records:
        """Return the same records without Marq's headers that came with copies; itself if there are none."""
        if self.headers is None or not are_copied(self._header_names(self.headers), own_topic=own_topic):
            return self
        headers = header_columns.column_of([without_copied(row, own_topic=own_topic) for row in self.headers])
        return Records(self.offsets, self.timestamps, self.keys, self.values, headers)

    def with_keys(self, keys: Sequence[bytes | None]) -> Records:
        """Return the same records under other keys."""
        return Records(self.offsets, self.timestamps, keys, self.values, self.headers)


def _joined_offsets(parts: Sequence[Sequence[int]]) -> Sequence[int]:
    first, last = parts[0][0], parts[-1][-1]
    if last - first == sum(map(len, parts)) - 1:
        return range(first, last + 1)
    return list(chain.from_iterable(parts))
