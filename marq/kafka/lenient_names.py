"""aiokafka's consumer, which also reads headers whose names are not UTF-8.

Kafka brokers accept any bytes as the name of a header, and some clients send them. aiokafka 0.14 fails on such a record
whenever it reads its batch, so one record would stop a partition and every process that reads it: with the messages
topic, all queues. Here a replacement character (U+FFFD) stands for bytes that are not UTF-8, as in Kafka's Java client.

A batch is read a second time only after such a failure. All uses of aiokafka's private names for this are in this file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import chain
from types import FunctionType
from typing import Any

import aiokafka.consumer.fetcher
from aiokafka import AIOKafkaConsumer
from aiokafka.consumer.fetcher import Fetcher, PartitionRecords
from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import decode_varint_py

#: The offset of a record batch and the length of what follows, with which it begins.
_HEAD = struct.Struct(">qi")


class _LenientBytes(bytearray):
    """Bytes whose parts are decoded without an error."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return found if isinstance(found, int) else _LenientBytes(found)

    def decode(self, *_: Any) -> str:
        return super().decode("utf-8", "replace")


class LenientBatch(_DefaultRecordBatchPy):  # type: ignore[misc]
    """A batch whose headers may have any names."""

    _buffer: bytearray

    def _maybe_uncompress(self) -> None:
        super()._maybe_uncompress()
        self._buffer = _LenientBytes(self._buffer)

    def _read_msg(self) -> Any:
        # The faster function accepts no subclass of bytearray.
        return super()._read_msg(decode_varint_py)


class _Records:
    """aiokafka's ``MemoryRecords``, which can read its last batch again."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._records: Any = MemoryRecords(data)
        #: Where the last batch begins and ends.
        self._begin = self._end = 0

    def size_in_bytes(self) -> int:
        return int(self._records.size_in_bytes())

    def has_next(self) -> bool:
        return bool(self._records.has_next())

    def next_batch(self) -> Any:
        self._begin = self._end
        self._end += _HEAD.size + _HEAD.unpack_from(self.data, self._begin)[1]
        return self._records.next_batch()

    def batch_again(self) -> LenientBatch:
        return LenientBatch(self.data[self._begin : self._end])


class _PartitionRecords(PartitionRecords):  # type: ignore[misc]
    """The fetched records of a partition."""

    next_fetch_offset: int

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except UnicodeDecodeError:
            self._records_iterator = chain(self._unpack_again(), self._unpack_records())
            return super().__next__()

    def _unpack_again(self) -> Iterator[Any]:
        batch = self._records.batch_again()
        for record in batch:
            if record.offset >= self.next_fetch_offset:
                self.next_fetch_offset = record.offset + 1
                yield self._consumer_record(self._tp, record)
        self.next_fetch_offset = batch.next_offset


class LenientFetcher(Fetcher):  # type: ignore[misc]
    #: aiokafka's own, with our classes.
    _proc_fetch_request: Any = FunctionType(
        Fetcher._proc_fetch_request.__code__,
        {**vars(aiokafka.consumer.fetcher), "MemoryRecords": _Records, "PartitionRecords": _PartitionRecords},
    )


class LenientConsumer(AIOKafkaConsumer):  # type: ignore[misc]
    """A consumer that reads header names of any bytes."""

    _made_fetcher: Any = None

    @property
    def _fetcher(self) -> Any:
        return self._made_fetcher

    @_fetcher.setter
    def _fetcher(self, fetcher: Any) -> None:
        if isinstance(fetcher, Fetcher):
            # Its fetch task has not run yet: aiokafka sets this before it waits for anything.
            self._adapt(fetcher)
        self._made_fetcher = fetcher

    def _adapt(self, fetcher: Any) -> None:
        """Give a fetcher of aiokafka's own class ours."""
        fetcher.__class__ = LenientFetcher
