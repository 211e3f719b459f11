"""The codec: it reads what it writes, and rejects all other bytes in one of two ways."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from struct import error as StructError  # noqa: N812 - its own name says too little
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from marq.wire.error_texts import MAX_TEXT_BYTES, cut_text
from marq.wire.errors import CorruptMarker, UnknownVersion
from marq.wire.marker_codec import Columns, decode, decode_headers, encode, encode_headers
from marq.wire.markers import (
    MAX_BATCH_MARKERS,
    Ack,
    Acquire,
    Answer,
    Batch,
    Cancel,
    Delay,
    Discard,
    Dispatch,
    Fact,
    Kind,
    MixedAcquire,
    Payload,
    Purge,
    Reject,
    Release,
    Renew,
    Reschedule,
    Resume,
    Resumed,
    Source,
    Tick,
    kind_of,
    payload_bytes,
    spans,
)
from tests.unit.core.batches import (
    NEWER,
    SOURCE,
    ack,
    acquire,
    acquires,
    batches,
    payload,
    reject,
    release,
    renew,
    resume,
)

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "markers-v1.json"


def fields(batch: Batch) -> dict[str, Any]:
    """All fields of a batch, sequences as lists: what two equal batches have in common."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    columns = {name: list(value) for name, value in values.items() if isinstance(value, Sequence)}
    return {**values, **columns, "queue": values.get("queue"), "source": values.get("source")}


def _resumed(**other: Any) -> Resumed:
    return dataclasses.replace(Resumed("q", 1, SOURCE, [5], 40, 0, [(1, 4), (5, 9)], [7], [2], [100], ["why"]), **other)


@given(batches)
def test_a_batch_of_any_kind_is_read_as_it_was_written(batch: Batch) -> None:
    data = encode(batch)

    found = decode(data)

    assert type(found) is type(batch)
    assert fields(found) == fields(batch)
    assert encode(found) == data


@given(st.sampled_from([*Kind]), st.binary(max_size=120))
def test_any_bytes_after_a_valid_beginning_are_a_batch_or_corrupt(kind: Kind, rest: bytes) -> None:
    data = b"\x01mq" + bytes([kind]) + rest

    try:
        found = decode(data)
    except CorruptMarker:
        return

    assert list(getattr(found, "payloads", [])) is not None
    assert encode(found)


@given(batches, st.data())
def test_a_batch_cut_short_or_with_something_after_its_end_is_corrupt(batch: Batch, data: st.DataObject) -> None:
    valid = encode(batch)
    end = data.draw(st.integers(0, len(valid) - 1))

    with pytest.raises(CorruptMarker):
        decode(valid[:end])
    with pytest.raises(CorruptMarker, match="bytes"):
        decode(valid + data.draw(st.binary(min_size=1, max_size=3)))


@given(batches, st.data())
def test_a_batch_with_a_flipped_bit_is_a_batch_or_corrupt(batch: Batch, data: st.DataObject) -> None:
    valid = bytearray(encode(batch))
    bit = data.draw(st.integers(0, len(valid) * 8 - 1))
    valid[bit // 8] ^= 1 << bit % 8

    try:
        found = decode(bytes(valid))
    except CorruptMarker:
        return

    # What was decoded is whole: its payloads and headers can be cut out, too.
    assert len(list(getattr(found, "payloads", []))) == (
        len(found.offsets) if isinstance(found, Acquire | Delay) else 0
    )


@pytest.mark.parametrize("version", [2, 3, 31])
@pytest.mark.parametrize("batch", [ack([1]), Tick(1, 5), acquire([1])], ids=lambda batch: type(batch).__name__)
def test_a_newer_version_whose_head_is_whole_is_unknown(version: int, batch: Batch) -> None:
    with pytest.raises(UnknownVersion, match=f"version {version}"):
        decode(bytes([version]) + encode(batch)[1:])


def test_the_newer_head_of_these_tests_is_plausible() -> None:
    with pytest.raises(UnknownVersion):
        decode(NEWER)


@pytest.mark.parametrize(
    "data",
    [
        None,
        b"",
        b"\x01",
        b"\x01m",
        b"\x02xx",
        b"hello",
        b'{"kind": "ack"}',
        b"\x02mq",
        b"\x00" + NEWER[1:],  # no version
        b"\x20" + NEWER[1:],  # a printable character
        b"amqp://user:secret@host:5672/vhost",
        b"zmq" + b"x" * 300,
        NEWER[:14],  # the head alone
        NEWER[:-4],  # nothing follows the queue's name
        NEWER[:17],  # half of a name
        NEWER[:3] + b"\x00" + NEWER[4:],  # kind 0
        NEWER[:5] + bytes(8) + NEWER[13:],  # holder 0
        NEWER[:13] + b"\xc9" + b"q" * 300,  # a name of 201 bytes
        NEWER[:14] + b"\xff" * 6 + NEWER[20:],  # a name that is not text
    ],
)
def test_garbage_and_what_no_newer_version_can_have_written_is_corrupt_and_stops_nothing(data: bytes | None) -> None:
    with pytest.raises(CorruptMarker) as caught:
        decode(data)

    assert not isinstance(caught.value, UnknownVersion)


@pytest.mark.parametrize("kind", [0, 14, 32, 40, 63, 65, 255])
def test_a_kind_that_does_not_exist_is_corrupt_and_not_unknown(kind: int) -> None:
    data = bytearray(encode(ack([1])))
    data[3] = kind

    with pytest.raises(CorruptMarker, match=f"kind {kind}") as caught:
        decode(bytes(data))

    assert not isinstance(caught.value, UnknownVersion)


def test_a_huge_count_in_few_bytes_is_corrupt_at_once() -> None:
    data = bytearray(encode(renew([5])))
    count_at = data.index(b"marq.messages") + len(b"marq.messages") + 4
    data[count_at : count_at + 4] = (MAX_BATCH_MARKERS + 1).to_bytes(4, "big")

    with pytest.raises(CorruptMarker, match=str(MAX_BATCH_MARKERS + 1)):
        decode(bytes(data))


@pytest.mark.parametrize(
    "batch",
    [
        ack([]),
        ack(range(MAX_BATCH_MARKERS + 1)),
        ack([3, 2]),
        ack([1, 1]),
        ack([1, 5, 3]),
        ack([1, 3, 2]),
        ack([0, 2**32]),
        ack([-1]),
        ack([1], holder=2**64),
        renew([1], lease_ms=-1),
        renew([1], lease_ms=2**32),
        release([1], -3),
        Release("q", 1, Source("t", 0), [1, 2], [0], True, ["", ""]),
        Release("q", 1, Source("t", 0), [1, 2], [0, 0], True, ["why"]),
        Reject("q", 1, Source("t", 0), [1, 2], ["why"]),
        Acquire("q", 1, Source("t", 0), [], 0, 0, []),
        Acquire("q", 1, Source("t", 0), [1, 2], 0, 0, [payload()]),
        acquire([5], from_offset=6),
        acquire([5], from_offset=-1),
        acquire([5], attempt=-1),
        resume([]),
        _resumed(acquired=[(3, 3)]),
        _resumed(acquired=[(1, 4), (4, 6)]),
        _resumed(acquired=[(5, 6), (1, 2)]),
        _resumed(acquired=[(-1, 2)]),
        _resumed(states=[256]),
        _resumed(waits_ms=[-1]),
        _resumed(waits_ms=[2**32]),
        _resumed(attempts=[1, 2]),
        _resumed(left=-1),
        Ack("q" * 256, 1, Source("t", 0), [1]),
        Ack("q", 1, Source("t", -1), [1]),
        Tick(1, -1),
    ],
    ids=repr,
)
def test_what_could_not_be_read_is_not_written(batch: Batch) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        encode(batch)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        # Intervals: [1, 4) and [5, 9).
        (_resumed(), [(5, 9), (1, 4)]),
        (_resumed(), [(1, 5), (5, 9)]),
        (_resumed(), [(4, 4), (5, 9)]),
        (_resumed(), [(1, 4), (9, 5)]),
    ],
)
def test_intervals_that_do_not_rise_are_corrupt(good: Resumed, bad: list[tuple[int, int]]) -> None:
    def written(intervals: Sequence[tuple[int, int]]) -> bytes:
        return b"".join(number.to_bytes(8, "big") for interval in intervals for number in interval)

    data = encode(good).replace(written(good.acquired), written(bad))

    with pytest.raises(CorruptMarker, match="acquired that do not increase"):
        decode(data)


def test_a_huge_count_of_intervals_in_few_bytes_is_corrupt_at_once() -> None:
    data = encode(_resumed()).replace(b"\x00\x00\x00\x02", b"\xff\xff\xff\xff", 1)

    with pytest.raises(CorruptMarker, match="passes the end"):
        decode(data)


@pytest.mark.parametrize("delay_ms", [-3, -(2**63)])
def test_a_delay_below_the_last_special_one_is_corrupt(delay_ms: int) -> None:
    data = encode(release([1], 5)).replace((5).to_bytes(8, "big"), delay_ms.to_bytes(8, "big", signed=True))

    with pytest.raises(CorruptMarker, match="in delays_ms"):
        decode(data)


def test_consecutive_offsets_take_no_room() -> None:
    dense, sparse = encode(ack(range(1_000))), encode(ack(range(0, 2_000, 2)))

    assert len(dense) == len(encode(ack([1])))
    assert len(sparse) == len(dense) + 4 * 1_000


def test_attempts_keys_and_headers_take_room_only_where_they_differ() -> None:
    plain = encode(acquire(range(10)))

    with_attempts = encode(acquire(range(10), attempt=2))

    assert len(with_attempts) == len(plain) + 4 * 10


def test_columns_are_written_as_the_payloads_they_hold() -> None:
    payloads = [Payload(5, 1, b"emails", (), b"a"), Payload(6, 3, None, (("tenant", b"acme"), ("tenant", None)), None)]
    columns = Columns(
        b"emails",
        [5, 6],
        [b"a", None],
        attempts=[1, 3],
        keys=[b"emails", None],
        headers=[encode_headers(payload.headers) for payload in payloads],
    )
    one_by_one = Acquire("emails", 7, Source("t", 1), [4, 9], 30, 2, payloads)

    assert list(columns) == payloads
    assert encode(dataclasses.replace(one_by_one, payloads=columns)) == encode(one_by_one)


def test_an_acquire_knows_its_attempts_before_and_after_the_wire() -> None:
    first, later = acquire([1, 2]), acquire([1, 2], attempt=4)

    assert first.attempts is None
    assert later.attempts == [4, 4]
    decoded = decode(encode(later))
    assert isinstance(decoded, Acquire)
    assert decoded.attempts == (4, 4)


def test_a_long_text_is_cut_and_never_inside_a_character() -> None:
    text = "ü" * MAX_TEXT_BYTES

    cut = cut_text("x" + text)

    assert len(cut) == MAX_TEXT_BYTES - 1
    assert cut.decode() == "x" + "ü" * (MAX_TEXT_BYTES // 2 - 1)
    decoded = decode(encode(reject([1], reason="x" + text)))
    assert isinstance(decoded, Reject)
    assert decoded.reasons == (cut.decode(),)


@given(st.text(max_size=2_000))
def test_any_text_can_be_cut(text: str) -> None:
    cut = cut_text(text)

    assert len(cut) <= MAX_TEXT_BYTES
    assert text.startswith(cut.decode())


def test_text_that_is_not_unicode_is_written_with_replacements() -> None:
    assert cut_text("a\udc80b") == b"a?b"


@given(st.lists(st.tuples(st.text(max_size=20), st.none() | st.binary(max_size=20)), max_size=5))
def test_headers_keep_their_order_and_their_doubles(headers: list[tuple[str, bytes | None]]) -> None:
    assert list(decode_headers(encode_headers(headers))) == headers


@given(st.binary(max_size=60))
def test_any_bytes_are_headers_or_refused(data: bytes) -> None:
    try:
        headers = decode_headers(data)
    except (CorruptMarker, UnicodeDecodeError, StructError):
        return

    assert encode_headers(headers) == data


_ENCODED = st.sampled_from(
    [encode_headers(headers) for headers in [(), (("key", b"ab"),), (("key", b"b"),), (("kex", None),)]]
)


@st.composite
def _damaged(draw: st.DrawFn) -> bytes:
    """Headers of which one byte has another value."""
    data = draw(_ENCODED)
    at = draw(st.integers(0, len(data) - 1))
    return data[:at] + draw(st.binary(min_size=1, max_size=1)) + data[at + 1 :]


@given(st.lists(_ENCODED | _damaged() | st.binary(min_size=1, max_size=12), min_size=1, max_size=6))
def test_a_column_of_headers_is_refused_if_one_value_would_be(values: list[bytes]) -> None:
    def is_headers(data: bytes) -> bool:
        try:
            decode_headers(data)
        except (CorruptMarker, UnicodeDecodeError, StructError):
            return False
        return True

    count = len(values)
    columns = Columns(b"q", [0] * count, [b""] * count, headers=values)
    encoded = encode(Acquire("q", 7, Source("t", 0), range(count), 30, 0, columns))
    try:
        decode(encoded)
    except CorruptMarker:
        assert not all(map(is_headers, values))
    else:
        assert all(map(is_headers, values))


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 100))
def test_spans_cover_all_in_order_and_keep_the_limit(sizes: list[int], limit: int) -> None:
    runs = list(spans(sizes, limit))

    assert [index for run in runs for index in range(run.start, run.stop)] == list(range(len(sizes)))
    for run in runs:
        assert sum(sizes[run]) <= limit or run.stop - run.start == 1
    for run, following in itertools.pairwise(runs):
        assert sum(sizes[run.start : following.start + 1]) > limit


def test_spans_of_nothing_are_none() -> None:
    assert list(spans([], 10)) == []


def test_a_span_has_at_most_as_many_markers_as_a_batch_may_have() -> None:
    runs = list(spans([0] * (MAX_BATCH_MARKERS + 1), 10))

    assert [run.stop - run.start for run in runs] == [MAX_BATCH_MARKERS, 1]


@given(acquires)
@example(
    Acquire(
        "q" * 100,
        1,
        Source("t", 0),
        range(9),
        0,
        0,
        (*[Payload(0, 1, None, (), None, left=True)] * 8, Payload(0, 1, None, (), None)),
    )
)
def test_a_payload_is_never_larger_than_was_reckoned(batch: Acquire) -> None:
    frame = 200 + len(batch.queue.encode()) + len(batch.source.topic.encode())

    assert len(encode(batch)) <= frame + sum(payload_bytes(payload) for payload in batch.payloads)


# --- golden: the bytes of version 1, which never change ---------------------------------------------------------------

_CLASSES = {
    kind.__name__: kind
    for kind in (
        Acquire,
        Renew,
        Ack,
        Release,
        Reject,
        Delay,
        Reschedule,
        Cancel,
        Discard,
        Fact,
        Answer,
        Tick,
        Resume,
        Resumed,
        Purge,
        MixedAcquire,
    )
}
_CLASSES["Spend"] = Dispatch  # as it was called when the file was written


def _from_json(name: str, values: dict[str, Any]) -> Batch:
    values = dict(values)
    if "source" in values:
        values["source"] = Source(*values["source"])
    if "payloads" in values:
        values["payloads"] = [
            Payload(
                document["timestamp_ms"],
                document["attempt"],
                None if document["key"] is None else bytes.fromhex(document["key"]),
                tuple(
                    (header, None if value is None else bytes.fromhex(value)) for header, value in document["headers"]
                ),
                None if document["value"] is None else bytes.fromhex(document["value"]),
                document.get("left", False),
            )
            for document in values["payloads"]
        ]
    if "acquired" in values:
        values["acquired"] = [tuple(interval) for interval in values["acquired"]]
    if name == "Fact":
        values["kind"] = Kind[values["kind"]]
    batch: Batch = _CLASSES[name](**values)
    return batch


def _golden() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
    return cases


@pytest.mark.parametrize("case", _golden(), ids=lambda case: case["name"])
def test_the_bytes_of_version_1_are_read_and_written_as_ever(case: dict[str, Any]) -> None:
    batch, data = _from_json(case["batch"], case["fields"]), bytes.fromhex(case["hex"])

    assert fields(decode(data)) == fields(batch)
    assert encode(batch) == data
    assert encode(decode(data)) == data
    assert kind_of(batch) == data[3]


def test_every_kind_of_version_1_has_golden_bytes() -> None:
    kinds = {bytes.fromhex(case["hex"])[3] for case in _golden()}

    assert kinds == {kind.value for kind in Kind}
