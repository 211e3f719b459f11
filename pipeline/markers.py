"""Rows from marker batches: ``marq.core``'s own codec decodes the bytes, and its columns become Arrow columns.

Decoding a batch takes some microseconds plus some hundred nanoseconds per marker, because all values that differ
between the markers of a batch are already in columns. A record that is not a batch becomes a row with only an
``error`` and its bytes.

Numbers that tables can't express are capped, because their markers still count: a time after the year 9999 becomes its
end, an attempt of 2^31 or more becomes 2^31 - 1. Negative numbers mean absence (a RELEASE without a delay of its own, a
record without a timestamp) and become null, as do the timestamps of records after the year 9999.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from marq.settings.ordering_keys import line_of
from marq.wire.error_texts import error_of
from marq.wire.errors import CorruptMarker, UnknownVersion
from marq.wire.marker_codec import VERSION, decode
from marq.wire.markers import (
    DUE_AT_ONCE,
    LAST,
    Acquire,
    Answer,
    Cause,
    Delay,
    Dispatch,
    Fact,
    LeftPayloads,
    Payload,
    PlainBatch,
    Reject,
    Release,
    Renew,
    RequestOutcome,
    Reschedule,
    Tick,
    kind_of,
    may_have,
    split,
)
from marq.wire.names import DEDUPLICATION_ID_HEADER, ID_HEADER, is_scheduled, is_synthetic
from marq.wire.record_headers import deduplication_id, ordering_key
from pipeline.tables import CORRUPT, LAST_MS, MARKERS, MOST_ATTEMPTS

#: Rows that leave Python at once.
_ROWS_AT_ONCE = 20_000
#: Bytes of records buffered for rows: one may have a megabyte, and an Arrow column is limited to two gigabytes.
_BYTES_AT_ONCE = 64 * 2**20
#: Stands for null in columns of numbers, like all negative numbers.
_NULL = -1

_DECODED = StructType([*MARKERS.fields, *[CORRUPT[name] for name in ("error", "raw")]])
_SCHEMA = to_arrow_schema(_DECODED, timezone="UTC")
_MICROSECONDS = pa.timestamp("us", tz="UTC")
#: The types of columns, with times in ms.
_TYPES = {field.name: pa.timestamp("ms", tz="UTC") if field.type == _MICROSECONDS else field.type for field in _SCHEMA}


def decoded(records: DataFrame) -> DataFrame:
    """Return the rows of :data:`~pipeline.tables.MARKERS`; records that are not batches have ``error`` and ``raw``."""
    chosen = records.select("partition", "offset", "timestamp", "value")
    return chosen.mapInArrow(_decode_all, _DECODED)


def _decode_all(tables: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    rows = _Rows()
    for table in tables:
        times = np.minimum(table.column("timestamp").cast(_MICROSECONDS).cast(pa.int64()).to_numpy() // 1000, LAST_MS)
        partitions, offsets = (table.column(name).to_pylist() for name in ("partition", "offset"))
        for partition, offset, logged_ms, value in zip(
            partitions, offsets, times.tolist(), table.column("value"), strict=True
        ):
            rows.add(partition, offset, logged_ms, value.as_py())
            if rows.count >= _ROWS_AT_ONCE or rows.size_bytes >= _BYTES_AT_ONCE:
                yield rows.take()
    if rows.count:
        yield rows.take()


class _Rows:
    """A buffer of rows, which repeats the values shared by a batch only when it is taken."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.count = 0
        self.size_bytes = 0
        #: Per batch: its rows, and those of the batches before it in its record.
        self._counts: list[int] = []
        self._before: list[int] = []
        #: Per batch: values shared by all of its markers.
        self._common: dict[str, list[Any]] = {name: [] for name in _COMMON}
        #: Per marker.
        self._numbers: dict[str, list[np.ndarray]] = {name: [] for name in _NUMBERS}
        self._texts: dict[str, list[str | None]] = {name: [] for name in _TEXTS}

    def add(self, partition: int, offset: int, logged_ms: int, value: bytes | None) -> None:
        place: dict[str, Any] = {"log_partition": partition, "log_offset": offset, "logged_at": logged_ms}
        self.size_bytes += len(value or b"")
        before = self.count
        try:
            for batch in split(decode(value)):
                common, columns = _columns(batch, logged_ms)
                self._add(common | place | {"version": VERSION}, columns, before)
        except UnknownVersion as error:
            self._add(place | {"error": f"unknown version: {error}", "raw": value}, {}, before)
        except CorruptMarker as error:
            self._add(place | {"error": str(error), "raw": value}, {}, before)

    def _add(self, common: dict[str, Any], columns: dict[str, Any], before: int) -> None:
        """Add the rows of a batch; ``before`` is the number of rows when its record began."""
        count = len(columns["offset"]) if "offset" in columns else 1
        self._counts.append(count)
        self._before.append(self.count - before)
        self.count += count
        for name, values in self._common.items():
            values.append(common.get(name))
        for name, arrays in self._numbers.items():
            arrays.append(_numbers(columns.get(name), count))
        for name, texts in self._texts.items():
            texts.extend(columns.get(name) or [None] * count)

    def take(self) -> pa.RecordBatch:
        """Return the buffered rows, and clear the buffer."""
        indices = pa.array(np.repeat(np.arange(len(self._counts), dtype=np.int32), self._counts))
        arrays: dict[str, pa.Array] = {}
        for name, values in self._common.items():
            arrays[name] = pa.array(values, _TYPES[name]).take(indices)
        for name, parts in self._numbers.items():
            numbers = np.concatenate(parts)
            cut = np.minimum(numbers, _MOST.get(name, _LONGEST))
            unknown = (numbers < 0) | (numbers > LAST_MS) if name == "record_at" else numbers < 0
            arrays[name] = pa.array(cut, mask=unknown).cast(_TYPES[name])
        for name, texts in self._texts.items():
            arrays[name] = pa.array(texts, pa.string())
        starts = np.cumsum(self._counts) - self._counts - self._before
        arrays["index"] = pa.array(np.arange(self.count) - np.repeat(starts, self._counts))
        self._clear()
        return pa.RecordBatch.from_arrays([arrays[field.name].cast(field.type) for field in _SCHEMA], schema=_SCHEMA)


_COMMON = (
    "log_partition", "log_offset", "logged_at", "version", "kind", "queue", "holder", "topic", "partition", "lease_ms",
    "from_offset", "counted", "in_order", "error", "raw",
)  # fmt: skip
_NUMBERS = ("offset", "attempt", "due_at", "delay_ms", "record_at", "size", "line")
_TEXTS = ("text", "cause", "outcome", "id")
_LONGEST = 2**63 - 1
#: Limits of columns that are narrower than their fields in the format.
_MOST = {"attempt": MOST_ATTEMPTS, **dict.fromkeys(("due_at", "record_at", "delay_ms"), LAST_MS)}


def _numbers(values: Any, count: int) -> np.ndarray:
    if values is None:
        return np.full(count, _NULL, dtype=np.int64)
    if isinstance(values, range):
        return np.arange(values.start, values.stop, dtype=np.int64)
    return np.asarray(values, dtype=np.int64)


def _columns(batch: PlainBatch, logged_ms: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values shared by all markers of a batch, and the columns that differ."""
    common: dict[str, Any] = {"kind": kind_of(batch).name, "holder": f"{batch.holder:016x}"}
    if isinstance(batch, Tick):
        return common, {}
    common |= {"queue": batch.queue, "topic": batch.source.topic, "partition": batch.source.partition}
    columns: dict[str, Any] = {"offset": batch.offsets}
    if isinstance(batch, Acquire | Delay):
        columns |= _payload_columns(batch.payloads)
        common["from_offset"] = batch.from_offset
    if isinstance(batch, Acquire | Renew | Dispatch):
        common["lease_ms"] = batch.lease_ms
    if isinstance(batch, Renew) and batch.exactly:
        columns["cause"] = ["EXACTLY"] * len(batch.offsets)
    if isinstance(batch, Acquire):
        common["in_order"] = batch.in_order
        if batch.dues_ms is not None:
            columns["due_at"] = [logged_ms if due_ms == DUE_AT_ONCE else due_ms for due_ms in batch.dues_ms]
        columns |= {"line": _lines(batch)} if batch.in_order else {}
    elif isinstance(batch, Delay | Reschedule):
        # Capped before the addition, which would overflow.
        columns["due_at"] = np.minimum(batch.times_ms, LAST_MS) + (logged_ms if batch.relative else 0)
        columns |= {"text": _deduplication_ids(batch)} if isinstance(batch, Delay) else {}
    elif isinstance(batch, Release):
        columns["delay_ms"] = batch.delays_ms
        columns["text"] = [error_of(error) or None for error in batch.errors]
        columns["cause"] = ["LAST" if delay_ms == LAST else None for delay_ms in batch.delays_ms]
        common["counted"] = batch.counted
    elif isinstance(batch, Reject):
        columns["text"] = [error_of(reason) for reason in batch.reasons]
    elif isinstance(batch, Fact):
        columns["attempt"] = batch.attempts
        columns["cause"] = [_name(Cause, cause) for cause in batch.causes]
    elif isinstance(batch, Answer):
        columns["outcome"] = [_name(RequestOutcome, outcome) for outcome in batch.outcomes]
    return common, columns


def _payload_columns(payloads: Sequence[Payload]) -> dict[str, Any]:
    columns: dict[str, Any] = {"record_at": payloads.timestamps}  # type: ignore[attr-defined]
    attempts = payloads.attempts  # type: ignore[attr-defined]
    columns["attempt"] = [1] * len(payloads) if attempts is None else attempts
    columns["size"] = None if isinstance(payloads, LeftPayloads) else payloads.sizes  # type: ignore[attr-defined]
    if payloads.headers is not None:  # type: ignore[attr-defined]
        columns["id"] = [_id(payload) for payload in payloads]
    return columns


def _id(payload: Payload) -> str | None:
    ids = [value for name, value in payload.headers if name == ID_HEADER and value is not None]
    return ids[-1].decode("utf-8", "replace") or None if ids else None


def _deduplication_ids(batch: Delay) -> list[str | None] | None:
    """Return a digest of each message's deduplication id; None if there are none, or none that count."""
    topic = batch.source.topic
    counts = is_synthetic(topic) and not is_scheduled(topic) and may_have(batch.payloads, DEDUPLICATION_ID_HEADER)
    return [_deduplication_id(payload) for payload in batch.payloads] if counts else None


def _deduplication_id(payload: Payload) -> str | None:
    own_id = deduplication_id(payload.headers)
    key = ordering_key(payload.headers) or b""
    return None if own_id is None else blake2b(b"%d:%b%b" % (len(key), key, own_id), digest_size=16).hexdigest()


def _lines(batch: Acquire) -> list[int]:
    """Return a number for each message's ordering key, or :data:`_NULL`."""
    queue = batch.queue.encode()
    # In the messages topic, the record key is the queue's name.
    keys = [
        ordering_key(payload.headers) if payload.key in (None, queue) else payload.key for payload in batch.payloads
    ]
    return [line_of(key) >> 1 if key else _NULL for key in keys]


def _name(names: Any, number: int) -> str:
    # A later version may have more names.
    return names(number).name if number in names._value2member_map_ else str(number)
