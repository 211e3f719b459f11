"""Bytes of markers as rows: they say what the codec says, and no bytes stop them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from marq.wire.error_texts import error_of
from marq.wire.errors import MarqError
from marq.wire.marker_codec import VERSION, decode, encode
from marq.wire.markers import (
    DUE_AT_ONCE,
    Ack,
    Acquire,
    Batch,
    Cause,
    Delay,
    Dispatch,
    Fact,
    Kind,
    MixedAcquire,
    Payload,
    Reject,
    Release,
    Renew,
    RequestOutcome,
    Reschedule,
    Source,
    Tick,
)
from marq.wire.markers import LAST as LAST_RELEASE
from marq.wire.record_headers import origin
from pipeline import markers
from pipeline.tables import LAST_MS, MARKERS, MOST_ATTEMPTS
from tests.unit.core.batches import ack, acquire, batches

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "markers-v1.json"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LOGGED_MS = 1_763_768_500_123

Row = dict[str, Any]


def rows(*values: bytes | None, logged_ms: int = LOGGED_MS) -> list[Row]:
    """What comes of records of markers at the offsets 0, 1, … of partition 3."""
    return [row for table in tables(values, logged_ms) for row in table.to_pylist()]


def tables(values: Sequence[bytes | None], logged_ms: int = LOGGED_MS) -> Iterator[pa.RecordBatch]:
    count = len(values)
    columns = {
        "partition": pa.array([3] * count, pa.int32()),
        "offset": pa.array(range(count), pa.int64()),
        "timestamp": pa.array([logged_ms * 1_000] * count, pa.timestamp("us", "UTC")),
        "value": pa.array(values, pa.binary()),
    }
    return markers._decode_all([pa.record_batch(columns)])


def expected(batch: Batch, log_offset: int = 0) -> list[Row]:
    """The same, marker by marker, as the documentation of the table says it."""
    nothing = dict.fromkeys([*MARKERS.names, "error", "raw"])
    if isinstance(batch, MixedAcquire):
        parts = [row for acquire in batch.acquires() for row in expected(acquire, log_offset)]
        return [{**row, "index": index} for index, row in enumerate(parts)]
    place = {"log_partition": 3, "log_offset": log_offset, "logged_at": at(LOGGED_MS), "version": VERSION}
    common = {**nothing, **place, "holder": f"{batch.holder:016x}"}
    if isinstance(batch, Tick):
        return [{**common, "index": 0, "kind": "TICK"}]
    common |= {"queue": batch.queue, "topic": batch.source.topic, "partition": batch.source.partition}
    return [
        {**common, "index": index, "offset": offset, **_said(batch, index)}
        for index, offset in enumerate(batch.offsets)
    ]


def _said(batch: Any, index: int) -> Row:
    kind = batch.kind.name if isinstance(batch, Fact) else type(batch).__name__.upper().replace("ANSWER", "ANSWERED")
    said: Row = {"kind": kind}
    if isinstance(batch, Acquire | Delay):
        payload = batch.payloads[index]
        ids = [value for name, value in payload.headers if name == "marq-id" and value is not None]
        said |= {
            "record_at": None if payload.timestamp_ms > LAST_MS else at(payload.timestamp_ms),
            "attempt": min(payload.attempt, MOST_ATTEMPTS),
            "size": None if payload.value is None else len(payload.value),
            "from_offset": batch.from_offset,
            "id": ids[-1].decode("utf-8", "replace") or None if ids else None,
        }
    if isinstance(batch, Acquire | Renew | Dispatch):
        said["lease_ms"] = batch.lease_ms
    if isinstance(batch, Renew) and batch.exactly:
        said["cause"] = "EXACTLY"
    if isinstance(batch, Acquire):
        said["in_order"] = batch.in_order
        said["line"] = _line(batch, index) if batch.in_order else None
    if isinstance(batch, Acquire) and batch.dues_ms is not None:
        said["due_at"] = at(LOGGED_MS if batch.dues_ms[index] == DUE_AT_ONCE else batch.dues_ms[index])
    if isinstance(batch, Delay | Reschedule):
        said["due_at"] = at(batch.times_ms[index] + (LOGGED_MS if batch.relative else 0))
    if isinstance(batch, Release):
        delay = batch.delays_ms[index]
        said |= {"delay_ms": None if delay < 0 else min(delay, LAST_MS), "counted": batch.counted}
        said |= {"text": error_of(batch.errors[index]) or None, "cause": "LAST" if delay == LAST_RELEASE else None}
    if isinstance(batch, Reject):
        said["text"] = error_of(batch.reasons[index])
    if isinstance(batch, Fact):
        said |= {"attempt": min(batch.attempts[index], MOST_ATTEMPTS), "cause": Cause(batch.causes[index]).name}
    if kind == "ANSWERED":
        said["outcome"] = RequestOutcome(batch.outcomes[index]).name
    return said


def _line(batch: Acquire, index: int) -> int | None:
    payload = batch.payloads[index]
    keys = [value for name, value in payload.headers if name == "marq-ordering-key"]
    own = payload.key if payload.key not in (None, batch.queue.encode()) else keys[-1] if keys else None
    return int.from_bytes(sha256(own).digest()[:8]) >> 1 if own else None


def at(ms: int) -> datetime | None:
    return None if ms < 0 else EPOCH + timedelta(milliseconds=min(ms, LAST_MS))


def _golden() -> list[Row]:
    cases: list[Row] = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    return cases


@pytest.mark.parametrize("case", _golden(), ids=lambda case: case["name"])
def test_golden_bytes_are_the_rows_that_the_codec_tells(case: Row) -> None:
    data = bytes.fromhex(case["hex"])

    assert rows(data) == expected(decode(data))


@settings(max_examples=50)
@given(st.lists(batches, min_size=1, max_size=4))
def test_batches_of_every_kind_side_by_side_are_the_rows_of_each(given: list[Batch]) -> None:
    found = rows(*[encode(batch) for batch in given])

    assert found == [row for offset, batch in enumerate(given) for row in expected(batch, offset)]


@st.composite
def garbage(draw: st.DrawFn) -> bytes | None:
    """Bytes that the codec refuses: any, with the format's first bytes, or a batch that is cut off."""
    whole = encode(draw(batches))
    cut = st.integers(0, len(whole) - 1).map(lambda end: whole[:end])
    begun = st.binary(max_size=60).map(lambda rest: b"\x01mq" + rest)
    data = draw(st.one_of(st.none(), st.binary(max_size=200), begun, cut))
    assume(_why_not(data))
    return data


@settings(max_examples=60)
@example(Ack("q", 1, Source("orders@0123456789ab", 0), (0,)), None)
@example(Renew("q", 1, Source("t", 0), (0,), 5, exactly=True), None)
@example(Reject("q", 1, Source("t", 0), (0, 1), ("\x1e", "error\x1eits traceback")), None)
@given(batches, garbage())
def test_garbage_is_one_row_with_its_bytes_and_what_is_wrong_and_its_neighbours_count(
    batch: Batch, data: bytes | None
) -> None:
    whole = encode(batch)

    found = rows(whole, data, whole)

    count = len(expected(batch))
    assert found[:count] == expected(batch, 0)
    assert found[count + 1 :] == expected(batch, 2)
    row = found[count]
    assert _why_not(data) in row["error"]
    assert row["raw"] == data
    told = {"log_partition", "log_offset", "logged_at", "index", "error", "raw"}
    assert all(value is None for name, value in row.items() if name not in told)


def _why_not(data: bytes | None) -> str:
    try:
        decode(data)
    except MarqError as error:
        return str(error)
    return ""


SOURCE, OFFSETS = Source("~0123456789abcdef0123456789abcdef", 2**32 - 1), (7,)
LAST = EPOCH + timedelta(milliseconds=LAST_MS)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        # A sender may choose any partition of 32 bits, and what it delays there is a message as all others.
        (Ack("q", 1, SOURCE, OFFSETS), {"partition": 2**32 - 1}),
        (Fact(Kind.REDELIVERED, "q", 1, SOURCE, OFFSETS, [2**32 - 1], [1]), {"attempt": 2**31 - 1}),
        (Reschedule("q", 1, SOURCE, OFFSETS, [2**63 - 1], True), {"due_at": LAST}),
        (Reschedule("q", 1, SOURCE, OFFSETS, [2**63 - 1], False), {"due_at": LAST}),
        (Release("q", 1, SOURCE, OFFSETS, [2**63 - 1], True, [""]), {"delay_ms": LAST_MS}),
        (
            Acquire("q", 1, SOURCE, OFFSETS, 2**32 - 1, 0, [Payload(2**63 - 1, 2**31, None, (), None)], [2**63 - 1]),
            {"due_at": LAST, "record_at": None, "attempt": 2**31 - 1, "lease_ms": 2**32 - 1},
        ),
        (Acquire("q", 1, SOURCE, OFFSETS, 0, 0, [Payload(-(2**63), 1, None, (), None)]), {"record_at": None}),
        (Ack("q", 1, SOURCE, (2**63 - 3,)), {"offset": 2**63 - 3}),
        (Tick(2**64 - 1, 2**64 - 1), {"holder": "f" * 16}),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_the_largest_numbers_of_the_format_are_cut_to_what_tables_can_say(batch: Batch, said: Row) -> None:
    [row] = rows(encode(batch))

    assert said.items() <= row.items()
    assert row["error"] is None


@pytest.mark.parametrize(
    ("values", "found"),
    [([], None), ([b"a"], "a"), ([b"a", b"b"], "b"), ([b"a", None], "a"), ([b"a", b""], None), ([b"\xff"], "\ufffd")],
)
def test_of_several_ids_the_last_one_counts_as_it_does_for_trackers(values: list[bytes | None], found: str) -> None:
    payload = Payload(0, 1, None, [("marq-id", value) for value in values], None)

    [row] = rows(encode(Acquire("q", 1, Source("t", 0), (7,), 1, 7, [payload])))

    assert row["id"] == found
    assert origin(Source("t", 0), 7, 0, payload.headers).id == found or found is None


def test_a_newer_version_is_told_from_garbage() -> None:
    [newer, other] = rows(b"\x02" + encode(ack([1]))[1:], b"\x02mq")

    assert newer["error"].startswith("unknown version: marker version 2")
    assert "unknown version" not in other["error"]


def test_long_batches_and_large_records_leave_in_pieces_that_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markers, "_BYTES_AT_ONCE", 1_000)
    garbage = [b"x" * 600] * 5
    long = encode(acquire(range(30_000)))

    found = list(tables([*garbage, long, long]))

    assert [table.num_rows for table in found] == [2, 2, 30_001, 30_000]
    assert found[-1].column("index").to_pylist() == list(range(30_000))
