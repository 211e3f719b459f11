"""docs/protocol.md: what the page says is what Marq does; its worked example has the bytes that it names.

Nothing here encodes with marq.wire.markers: what is written is written by the tables of the page.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any
from zlib import crc32

import pytest

import marq.wire.names
import marq.wire.ordered_holders
from marq.client.message_token import Token
from marq.client.message_token import encode as encode_token
from marq.core.storage import rows
from marq.wire import dead_letter_notes, marker_codec, markers
from marq.wire.errors import CorruptMarker, UnknownVersion
from marq.wire.names import RESERVED_HEADER, Names, markers_partition
from marq.wire.record_headers import origin
from tests.docs import protocol_client
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")

# --- batches by the tables of the page --------------------------------------------------------------------------------

PROTOCOL = protocol_client.read()
Header = tuple[str, bytes | None]
#: Queue, holder, topic, partition, offsets.
Frame = tuple[str, int, str, int, Sequence[int]]


def encode(kind: str, about: Frame, *, written: Sequence[str] = (), **fields: Any) -> bytes:
    queue, holder, topic, partition, offsets = about
    values = {"queue": queue, "holder": holder, "topic": topic, "partition": partition, "offsets": offsets, **fields}
    return PROTOCOL.encode(kind, values, written=written)


def acquire(
    about: Frame,
    lease_ms: int,
    from_offset: int,
    timestamps: Sequence[int],
    values: Sequence[bytes | None],
    **columns: Sequence[Any],
) -> bytes:
    given = {"timestamps": timestamps, "values": values, **columns}
    written = [name.upper() for name in columns]
    return encode("ACQUIRE", about, written=written, lease=lease_ms, from_offset=from_offset, **given)


def delay(
    about: Frame,
    times_ms: Sequence[int],
    timestamps: Sequence[int],
    values: Sequence[bytes | None],
    *,
    relative: bool = False,
    from_offset: int = -1,
) -> bytes:
    given = {"times": times_ms, "timestamps": timestamps, "values": values, "relative": relative}
    return encode("DELAY", about, from_offset=from_offset, **given)


def reschedule(about: Frame, times_ms: Sequence[int]) -> bytes:
    return encode("RESCHEDULE", about, times=times_ms, relative=False)


def ack(about: Frame) -> bytes:
    return encode("ACK", about)


def resumed(acquired: Sequence[int]) -> bytes:
    columns = {name: [0] * 3 for name in ("states", "attempts", "waits")}
    return encode("RESUMED", GAPS, asked_at=0, left=0, acquired=acquired, errors=[""] * 3, **columns)


HOLDER = 0x0123456789ABCDEF
#: The topic of a source that a sender has generated.
DRAWN = "~9f86d081884c7d659a2feaa0c55ad015"
GAPS: Frame = ("emails", HOLDER, "marq.messages", 3, [41, 44, 2**32])
ROW: Frame = ("Grüße 🚚", 2**64 - 1, "orders.v2", 2**32 - 1, [7, 8, 9])


# --- what the page says besides ---------------------------------------------------------------------------------------


def test_a_note() -> None:
    found = re.search(r"at most ([\d,]+) offsets", PAGE)
    assert found is not None
    assert int(found[1].replace(",", "")) == dead_letter_notes.MAX_OFFSETS
    [(value, headers)] = dead_letter_notes.encoded(
        dead_letter_notes.Note(markers.Source("t", 1), [3, 4, 9], dead_letter_notes.Disposition.DELETED, "q", 0x5555)
    )

    assert json.loads(value) == {
        "offsets": [[3, 4], [9, 9]], "became": "deleted", "queue": "q", "by": "0000000000005555",
    }  # fmt: skip
    assert headers == [("marq-settled", b"deleted")]
    assert all(f"`{became}`" in PAGE for became in dead_letter_notes.Disposition)


def test_the_partition_rule() -> None:
    assert crc32(b"marq.messages") == 3_196_731_807
    assert protocol_client.markers_partition("marq.messages", 3, 4) == 2
    for count in (1, 4, 7):
        for partition in range(9):
            assert markers_partition("marq.messages", partition, count) == (3_196_731_807 + partition) % count
    assert [markers_partition("marq.messages", partition, 4) for partition in range(5)] == [3, 0, 1, 2, 3]
    assert crc32(DRAWN.encode()) == 2_075_904_540
    assert protocol_client.markers_partition(DRAWN, 0, 4) == markers_partition(DRAWN, 0, 4) == 0


def test_the_source_that_a_sender_draws() -> None:
    assert protocol_client.drawn_topic(0x9F86D081884C7D659A2FEAA0C55AD015) == DRAWN
    for number in (0, 1, 2**128 - 1):
        drawn = protocol_client.drawn_topic(number)
        assert drawn == marq.wire.names.synthetic_topic(number)
        assert marq.wire.names.is_synthetic(drawn)


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"\x02mq",
            b"\0" + ack(GAPS)[1:],
            b"\x20" + ack(GAPS)[1:],
            b"\x02" + ack(GAPS)[1:14],
            b"\x02mq\x03" + bytes(20),
        ),
        *(None, b"", b"\x01", b"\x01m", b"\x01MQ\x03", b"{}", ack(GAPS) + b"\0", ack(GAPS)[:-1]),
        *(delay(GAPS, [-1, 0, 0], [0] * 3, [b""] * 3), delay(GAPS, [0] * 3, [0] * 3, [b""] * 3, from_offset=42)),
        *(delay(GAPS, [0] * 3, [0] * 3, [b""] * 3, from_offset=-2), reschedule(GAPS, [0, -1, 0])),
        acquire(GAPS, 1, 0, [0] * 3, [b""] * 3, dues=[0, -2, 0]),
        encode("RELEASE", GAPS, delays=[0, -3, 0]),
        *(resumed(acquired) for acquired in ([5, 5], [5, 4], [1, 4, 4, 6], [5, 6, 1, 2])),
        *(ack(GAPS)[:3] + bytes([kind]) + ack(GAPS)[4:] for kind in (0, 10, 32, 38, 63, 65, 255)),
    ],
)
def test_what_the_page_calls_unreadable_is_put_aside(data: bytes | None) -> None:
    with pytest.raises(CorruptMarker) as caught:
        marker_codec.decode(data)
    assert not isinstance(caught.value, UnknownVersion)


@pytest.mark.parametrize("version", [2, 31])
def test_what_the_page_says_stops_a_partition_does(version: int) -> None:
    with pytest.raises(UnknownVersion):
        marker_codec.decode(bytes([version]) + ack(GAPS)[1:])


def test_flags_that_the_page_does_not_name_are_ignored() -> None:
    data = bytearray(ack(ROW))
    data[4] |= 0xFE

    assert marker_codec.decode(bytes(data)) == marker_codec.decode(ack(ROW))


def test_the_tables_name_every_kind_flag_and_topic() -> None:
    kinds = {name: int(code) for code, name in re.findall(r"^\| (\d+) \| ([A-Z_]+) \| ", PAGE, re.MULTILINE)}
    flags = {(name, value) for value, name in re.findall(r"^\| \d \| (\d+) \| ([A-Z_]+) \| ", PAGE, re.MULTILINE)}

    assert kinds == {kind.name: kind.value for kind in markers.Kind}
    assert flags == {(name, str(vars(marker_codec)[name])) for name, _ in flags}
    assert len(flags) == 14
    names = Names()
    topics = (
        names.messages,
        names.markers,
        names.dead_letters,
        names.quarantine,
        names.queues,
        names.changelog,
    )
    others = (
        names.group("NAME"),
        names.named_group("GROUP"),
        names.app_id,
        names.transactional_id(0).removesuffix("0") + "N",
    )
    for name in (*topics, *others):
        assert f"`PREFIX{name.removeprefix('marq')}`" in PAGE, name


def test_the_table_names_every_header() -> None:
    headers = {value for name, value in vars(marq.wire.names).items() if name.endswith("_HEADER")} - {RESERVED_HEADER}

    assert set(re.findall(r"^\| `(marq-[a-z-]+)` \| ", PAGE, re.MULTILINE)) == headers


def test_the_tables_name_every_state_cause_and_outcome() -> None:
    states = re.findall(r"^\| ([A-Z_]+)(?: \(holder, attempt\))? \| [^|]+ \| [^|]+ \|$", PAGE, re.MULTILINE)
    assert {*states} >= {state.name for state in rows.State}
    row = ", ".join(f"{state.value} {state.name}" for state in rows.State)
    assert f"| state: {row} |" in PAGE
    causes = re.search(r"\| causes \| (.+) \|", PAGE)
    assert causes is not None
    assert [int(number) for number in re.findall(r"(\d) ", causes[1])] == [*markers.Cause]
    outcomes = re.search(r"\| outcomes \| (.+) \|", PAGE)
    assert outcomes is not None
    assert dict(re.findall(r"(\d) ([A-Z_]+)", outcomes[1])) == {
        str(int(outcome)): outcome.name for outcome in markers.RequestOutcome
    }


def test_the_counters_of_the_page() -> None:
    found = re.search(r"counters: u64 each: ([a-z_, ]+);", PAGE)

    assert found is not None
    assert found[1].split(", ") == [field.name for field in fields(rows.EventCounts)]


def test_a_plain_record_and_unreadable_headers_are_read_as_the_page_says() -> None:
    source = markers.Source("marq.messages", 3)

    assert origin(source, 42, 99, []) == ("marq.messages/3/42", 1, 99)
    for attempt in (b"", b"x", b"-1", b"0", b"4294967296", b"1" * 21):
        assert origin(source, 42, 99, [("marq-attempt", attempt), ("marq-id", b"")]) == ("marq.messages/3/42", 1, 99)
    twice: list[Header] = [("marq-attempt", b"2"), ("marq-attempt", b"3"), ("marq-first-sent", b"7")]
    assert origin(source, 42, 99, twice) == ("marq.messages/3/42", 3, 7)


def test_the_lease_row_of_the_page() -> None:
    queue, text = b"emails", b"boom"
    row = struct.pack(">BBBIQqqBH", 1, 2, 0, 3, 0, 500, 400, len(queue), len(text)) + queue + text
    row += struct.pack(">qiii", 77, -1, 0, 2) + b"hi"

    lease, _ = rows.decode_lease(row)

    found = (lease.queue, lease.holder, lease.attempt, lease.due_ms, lease.since_ms, lease.counted, lease.text)
    assert found == ("emails", 0, 3, 500, 400, False, "boom")
    assert lease.state is rows.State.RELEASED
    assert rows.decode_payload(row) == (77, 3, None, (), b"hi", False)
    left = row[: -struct.calcsize(">qiii2x")] + struct.pack(">q", 77)
    assert rows.decode_payload(left) == (77, 3, None, (), None, True)
    source = b"\x01t" + struct.pack(">I", 9)
    assert rows.row_key("q", markers.Source("t", 9), 5) == b"r\x01q" + source + struct.pack(">Q", 5)
    assert rows.mark_key("q", markers.Source("t", 9)) == b"m\x01q" + source


def test_the_token_of_the_page() -> None:
    data = struct.pack(">BQIQB", 1, HOLDER, 3, 42, 6) + b"emails" + b"marq.messages"
    text = base64.urlsafe_b64encode(data).decode().rstrip("=")

    assert encode_token(Token("emails", HOLDER, markers.Source("marq.messages", 3), 42)) == text


# --- the worked example -----------------------------------------------------------------------------------------------

SOURCE = ("marq.messages", 3)


def about(*offsets: int, holder: int = HOLDER) -> Frame:
    return ("emails", holder, *SOURCE, offsets)


def ordered(*offsets: int, holder: int = marq.wire.ordered_holders.ordered_holder(7, 0xBEEF)) -> Frame:
    return ("orders", holder, *SOURCE, offsets)


def delayed(holder: int) -> Frame:
    return ("emails", holder, DRAWN, 0, [7])


#: The statement in the text around each block.
EXAMPLE: Mapping[str, Callable[[], bytes]] = {
    "acquire": lambda: acquire(
        about(41, 42),
        30_000,
        40,
        [1767225600000, 1767225600250],
        [b"hi", None],
        attempts=[1, 2],
        headers=[[], [("tenant", b"acme"), ("marq-attempt", b"2")]],
    ),
    "mixed": lambda: encode(
        "MIXED_ACQUIRE",
        ("", HOLDER, *SOURCE, [50, 51]),
        lease=30_000,
        from_offsets=[46, 48],
        timestamps=[1767225600000, 1767225600250],
        queues=["emails", "invoices"],
    ),
    "ack": lambda: ack(about(41)),
    "renew": lambda: encode("RENEW", about(42, 45), lease=30_000),
    "release": lambda: encode("RELEASE", about(42), delays=[-1], counted=True, errors=["boom"]),
    "reject": lambda: encode("REJECT", about(45), reasons=["bad"]),
    "tick": lambda: PROTOCOL.encode("TICK", {"holder": 0x1111, "monotonic": 86_400_000}),
    "redelivered": lambda: encode("REDELIVERED", about(42, holder=0x1111), attempts=[3], causes=[2]),
    "delay": lambda: delay(delayed(0x2222), [90_000], [1767225600000], [b"hi"], relative=True),
    "reschedule": lambda: reschedule(delayed(0x3333), [1767312000000]),
    "answered": lambda: encode("ANSWERED", delayed(0x3333), outcomes=[1]),
    "cancel": lambda: encode("CANCEL", delayed(0x4444)),
    "cancelled": lambda: encode("CANCELLED", delayed(0x1111), attempts=[1], causes=[6]),
    "dispatch": lambda: encode("DISPATCH", about(42, 45), lease=30_000),
    "resume": lambda: encode("RESUME", ordered(40, holder=0x6666), onwards=True),
    "resumed": lambda: encode(
        "RESUMED",
        ordered(40, 41, 44, holder=0x6666),
        asked_at=7,
        left=0,
        acquired=[12, 50],
        states=[0, rows.State.LEASED_IN_ORDER, rows.State.WAITING_IN_ORDER],
        attempts=[0, 1, 3],
        waits=[0, 25_000, 1_500],
        errors=["", "", "boom"],
    ),
    "ordered": lambda: encode(
        "ACQUIRE",
        ordered(44),
        lease=30_000,
        from_offset=44,
        timestamps=[1767225600000],
        values=[b"hi"],
        attempts=[3],
        in_order=True,
    ),
    "last": lambda: encode("RELEASE", ordered(44), delays=[-2], counted=True, errors=["boom"]),
    "purge": lambda: encode("PURGE", about(46, holder=0x7777)),
    "purge_without_records": lambda: encode("PURGE", ("emails", 0x7777, "~", 1, [1767225600000]), delayed=True),
    "discard": lambda: encode("DISCARD", ("emails", 0x5555, "marq.dead-letters", 1, [3, 9])),
}


def example_blocks() -> dict[str, bytes]:
    blocks = re.findall(r"^```hex (\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return {
        name: bytes.fromhex("".join(line.partition("#")[0] for line in block.splitlines())) for name, block in blocks
    }


def test_the_example_has_every_kind_but_three_that_are_like_another() -> None:
    kinds = {data[3] for data in example_blocks().values()}

    assert kinds == {*markers.Kind} - {markers.Kind.DEAD_LETTERED, markers.Kind.DELIVERED, markers.Kind.ABANDONED}


@pytest.mark.parametrize("name", EXAMPLE)
def test_the_bytes_of_the_example_are_what_the_text_says_and_marq_reads_them(name: str) -> None:
    data = example_blocks()[name]

    assert data == EXAMPLE[name]()
    assert marker_codec.encode(marker_codec.decode(data)) == data
