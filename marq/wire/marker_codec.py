"""The bytes of marker batches.

docs/protocol.md describes the layout field by field. Every number is big-endian, as everywhere in Kafka. The first byte
is the version and the next two are a magic, and every version begins with the same head. So a batch of a newer version
(whose partition must stop) can be distinguished from garbage (which is quarantined). Then come queue, source and
offsets, and then the fields of :data:`LAYOUTS`, which drives encoding and decoding alike. Fields that differ between
the messages of a batch are written in columns, which the ``struct`` module packs thousands at a time. Values are not
copied out of a batch until they are asked for: most messages are acknowledged before the tracker has to keep them.

Decoding is total: any bytes result in a batch or :class:`CorruptMarker`. The decoder therefore checks each length
before it trusts it, and that no bytes are left over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from operator import ge, gt
from struct import Struct, error, pack, unpack_from
from typing import Any, Protocol

from marq.wire.error_texts import cut_text
from marq.wire.errors import CorruptMarker, UnknownVersion
from marq.wire.markers import (
    ANY_QUEUE,
    FACTS,
    LAST,
    MAX_BATCH_MARKERS,
    NOW,
    Ack,
    Acquire,
    Answer,
    Batch,
    Cancel,
    Delay,
    Discard,
    Dispatch,
    Fact,
    Headers,
    Kind,
    LeftPayloads,
    MixedAcquire,
    Payload,
    Payloads,
    Purge,
    Reject,
    Release,
    Renew,
    Reschedule,
    Resume,
    Resumed,
    Source,
    Tick,
)
from marq.wire.names import MAX_QUEUE_NAME_BYTES

VERSION = 1
#: Versions that a newer Marq may write. From 32 on the byte is a printable character, and a text such as "amqp://host"
#: has the magic in the right place, too.
NEWER_VERSIONS = range(VERSION + 1, 32)
MAGIC = b"mq"

#: Flags of a batch.
CONTIGUOUS, UNCOUNTED, TEXTS, DUES, RELATIVE = 1, 16, 32, 64, 128
#: The flag of an ACQUIRE in order, that of a RESUME onwards, and those of a RENEW: user code has the messages; their
#: leases end exactly then.
IN_ORDER, ONWARDS, STARTED, EXACTLY = 128, 16, 16, 32
#: The flags of a PURGE: messages in flight and delayed ones, too.
IN_FLIGHT, DELAYED = 16, 32
#: The flags of payloads: which of the columns that may be left out they have.
ATTEMPTS, KEYS, HEADERS = 2, 4, 8

#: In place of the length of a value: the message's key, headers and value are only in its record.
LEFT = -2

_HEAD = Struct(">B2sBBQB")  # version, magic, kind, flags, holder, length of the queue's name
_U8, _U16, _U32, _U64, _I32, _I64 = (Struct(f">{code}") for code in "BHIQiq")
_LEFT = _I32.pack(LEFT)
_NO_HEADERS = _U16.pack(0)
#: Bytes of one number with each format code.
_SIZES = {"B": 1, "H": 2, "I": 4, "i": 4, "q": 8, "Q": 8}

#: The first fields of every kind except TICK: queue, holder, source, offsets.
_Frame = tuple[str, int, Source, Sequence[int]]


# --- fields -----------------------------------------------------------------------------------------------------------


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


class _Field(Protocol):
    """An attribute of a batch, as bytes."""

    @property
    def name(self) -> str: ...

    def write(self, batch: Any, parts: list[bytes]) -> int:
        """Append the bytes to ``parts``; return the flags that the field sets."""

    def read(self, reader: ByteReader, flags: int, frame: _Frame) -> Any:
        """Return the value of the attribute."""


@dataclass(frozen=True, slots=True)
class _Flag:
    """A truth value; the flag is set if it is ``when``."""

    name: str
    flag: int
    when: bool

    def write(self, batch: Any, parts: list[bytes]) -> int:
        return self.flag if getattr(batch, self.name) is self.when else 0

    def read(self, reader: ByteReader, flags: int, frame: _Frame) -> bool:
        return bool(flags & self.flag) is self.when


@dataclass(frozen=True, slots=True)
class _Number:
    """A number of the batch."""

    name: str
    layout: Struct

    def write(self, batch: Any, parts: list[bytes]) -> int:
        parts.append(self.layout.pack(getattr(batch, self.name)))
        return 0

    def read(self, reader: ByteReader, flags: int, frame: _Frame) -> int:
        return reader.number(self.layout)


@dataclass(frozen=True, slots=True)
class _Intervals:
    """Ascending intervals of offsets, each from its first to the one after its last."""

    name: str

    def write(self, batch: Any, parts: list[bytes]) -> int:
        numbers = [number for interval in getattr(batch, self.name) for number in interval]
        if any(map(ge, numbers, numbers[1:])):
            raise ValueError(f"{self.name} that do not increase: {numbers}")
        parts.append(pack(f">I{len(numbers)}Q", len(numbers) // 2, *numbers))
        return 0

    def read(self, reader: ByteReader, flags: int, frame: _Frame) -> tuple[tuple[int, int], ...]:
        numbers = reader.numbers("Q", 2 * reader.number(_U32))
        if any(map(ge, numbers, numbers[1:])):
            raise CorruptMarker(f"{self.name} that do not increase")
        return tuple(zip(numbers[::2], numbers[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class _FromOffset:
    """The offset from which all messages are known; -1 stands for None, which not all kinds allow."""

    least: int
    name: str = "from_offset"

    def write(self, batch: Any, parts: list[bytes]) -> int:
        from_offset = -1 if batch.from_offset is None else batch.from_offset
        if not self.least <= from_offset <= batch.offsets[0]:
            raise ValueError(f"known from {from_offset} on, but the first message is {batch.offsets[0]}")
        parts.append(_I64.pack(from_offset))
        return 0

    def read(self, reader: ByteReader, flags: int, frame: _Frame) -> int | None:
        from_offset = reader.number(_I64)
        if not self.least <= from_offset <= frame[3][0]:
            raise CorruptMarker(f"known from {from_offset} on, but the first message is {frame[3][0]}")
        return None if from_offset == -1 else from_offset


@dataclass(frozen=True, slots=True)
class _Queues:
    """The queue of each message."""

    name: str = "queues"

    def write(self, batch: Any, parts: list[bytes]) -> int:
        queues = [queue.encode() for queue in batch.queues]
        if batch.queue != ANY_QUEUE or len(queues) != len(batch.offsets) or not _are_names(list(map(len, queues))):
            raise ValueError(f"{len(batch.offsets)} messages need as many names of queues, got {batch.queues}")
        parts.append(pack(f">{len(queues)}H", *map(len, queues)))
        parts += queues
        return 0

    def read(self, reader: ByteReader, flags: int, frame: _Frame) -> tuple[str, ...]:
        lengths = reader.numbers("H", len(frame[3]))
        if frame[0] != ANY_QUEUE or not _are_names(lengths):
            raise CorruptMarker("the name of a queue is empty or too long, or the head has one, too")
        return tuple([reader.text(length) for length in lengths])


def _are_names(lengths: Sequence[int]) -> bool:
    return min(lengths) > 0 and max(lengths) <= MAX_QUEUE_NAME_BYTES


@dataclass(frozen=True, slots=True)
class _FromOffsets:
    """The ``from_offset`` of each message."""

    name: str = "from_offsets"

    def write(self, batch: Any, parts: list[bytes]) -> int:
        known, offsets = batch.from_offsets, batch.offsets
        if len(known) != len(offsets) or min(known) < 0 or any(map(gt, known, offsets)):
            raise ValueError(f"each from_offset must be 0 to the message's offset, got {known} for {offsets}")
        parts.append(pack(f">{len(known)}q", *known))
        return 0

    def read(self, reader: ByteReader, flags: int, frame: _Frame) -> tuple[int, ...]:
        known = reader.numbers("q", len(frame[3]))
        if min(known) < 0 or any(map(gt, known, frame[3])):
            raise CorruptMarker("a from_offset is negative, or after its message")
        return known


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A number of each message with this format code; None if the field has a flag that the batch lacks."""

    name: str
    code: str
    least: int | None = None
    flag: int = 0

    def write(self, batch: Any, parts: list[bytes]) -> int:
        values, count = getattr(batch, self.name), len(batch.offsets)
        if self.flag and values is None:
            return 0
        if len(values) != count:
            raise ValueError(f"{count} offsets but {len(values)} {self.name}")
        if self.least is not None and min(values) < self.least:
            raise ValueError(f"{min(values)} in {self.name}")
        parts.append(pack(f">{count}{self.code}", *values))
        return self.flag

    def read(self, reader: ByteReader, flags: int, frame: _Frame) -> tuple[int, ...] | None:
        if self.flag and not flags & self.flag:
            return None
        values = reader.numbers(self.code, len(frame[3]))
        if self.least is not None and min(values) < self.least:
            raise CorruptMarker(f"{min(values)} in {self.name}")
        return values


@dataclass(frozen=True, slots=True)
class _Texts:
    """A text of each message; all are empty if the field has a flag that the batch lacks."""

    name: str
    flag: int = 0

    def write(self, batch: Any, parts: list[bytes]) -> int:
        texts, count = getattr(batch, self.name), len(batch.offsets)
        if self.flag and not any(texts):
            return 0
        if len(texts) != count:
            raise ValueError(f"{count} offsets but {len(texts)} {self.name}")
        cut = [cut_text(text) for text in texts]
        parts.append(pack(f">{count}H", *map(len, cut)))
        parts += cut
        return self.flag

    def read(self, reader: ByteReader, flags: int, frame: _Frame) -> tuple[str, ...]:
        count = len(frame[3])
        if self.flag and not flags & self.flag:
            return ("",) * count
        return tuple([reader.text(length) for length in reader.numbers("H", count)])


@dataclass(frozen=True, slots=True)
class _Payloads:
    """The payload of each message; with ``may_leave``, it may be only in the message's record."""

    may_leave: bool
    name: str = "payloads"

    def write(self, batch: Any, parts: list[bytes]) -> int:
        if len(batch.payloads) != len(batch.offsets):
            raise ValueError(f"{len(batch.offsets)} offsets but {len(batch.payloads)} payloads")
        return write_payloads(batch.payloads, batch.queue.encode(), parts, may_leave=self.may_leave)

    def read(self, reader: ByteReader, flags: int, frame: _Frame) -> ReadPayloads:
        return read_payloads(reader, flags, frame[0].encode(), len(frame[3]), may_leave=self.may_leave)


# --- the table --------------------------------------------------------------------------------------------------------

_RELATIVE_TIMES = (_Flag("relative", RELATIVE, True), _Numbers("times_ms", "q", least=0))

#: How each kind is made, and the fields after its offsets, in the order of their bytes.
LAYOUTS: dict[int, tuple[Callable[..., Batch], tuple[_Field, ...]]] = {
    Kind.ACQUIRE: (
        Acquire,
        (
            _Number("lease_ms", _U32),
            _FromOffset(least=0),
            _Flag("in_order", IN_ORDER, True),
            _Flag("counted", UNCOUNTED, False),
            _Numbers("dues_ms", "q", least=NOW, flag=DUES),
            _Payloads(may_leave=True),
        ),
    ),
    Kind.MIXED_ACQUIRE: (
        MixedAcquire,
        (
            _Number("lease_ms", _U32),
            _Flag("counted", UNCOUNTED, False),
            _FromOffsets(),
            _Numbers("timestamps_ms", "q"),
            _Queues(),
        ),
    ),
    Kind.RENEW: (Renew, (_Number("lease_ms", _U32), _Flag("started", STARTED, True), _Flag("exactly", EXACTLY, True))),
    Kind.ACK: (Ack, ()),
    Kind.RELEASE: (
        Release,
        (
            _Flag("counted", UNCOUNTED, False),
            _Numbers("delays_ms", "q", least=LAST),
            _Texts("errors", flag=TEXTS),
        ),
    ),
    Kind.REJECT: (Reject, (_Texts("reasons"),)),
    Kind.DELAY: (Delay, (_FromOffset(least=-1), *_RELATIVE_TIMES, _Payloads(may_leave=False))),
    Kind.RESCHEDULE: (Reschedule, _RELATIVE_TIMES),
    Kind.CANCEL: (Cancel, ()),
    Kind.DISCARD: (Discard, ()),
    Kind.DISPATCH: (Dispatch, (_Number("lease_ms", _U32),)),
    Kind.RESUME: (Resume, (_Flag("onwards", ONWARDS, True),)),
    Kind.PURGE: (Purge, (_Flag("in_flight", IN_FLIGHT, True), _Flag("delayed", DELAYED, True))),
    **{kind: (partial(Fact, kind), (_Numbers("attempts", "I"), _Numbers("causes", "B"))) for kind in FACTS},
    Kind.ANSWERED: (Answer, (_Numbers("outcomes", "B"),)),
    Kind.RESUMED: (
        Resumed,
        (
            _Number("asked_at", _I64),
            _Number("left", _U32),
            _Intervals("acquired"),
            _Numbers("states", "B"),
            _Numbers("attempts", "I"),
            _Numbers("waits_ms", "I"),
            _Texts("errors", flag=TEXTS),
        ),
    ),
}
_KINDS = {make: kind for kind, (make, _) in LAYOUTS.items()}


# --- encoding ---------------------------------------------------------------------------------------------------------


def encode(batch: Batch) -> bytes:
    """Return the bytes of a batch. Raises ValueError."""
    try:
        return b"".join(_parts(batch))
    except error as why:
        raise ValueError(f"a field of {type(batch).__name__} is out of range: {why}") from why


def _parts(batch: Batch) -> list[bytes]:
    if isinstance(batch, Tick):
        return [_HEAD.pack(VERSION, MAGIC, Kind.TICK, 0, batch.holder, 0), _U64.pack(batch.monotonic_ms)]
    queue, topic, offsets = batch.queue.encode(), batch.source.topic.encode(), batch.offsets
    count = len(offsets)
    if not 0 < count <= MAX_BATCH_MARKERS:
        raise ValueError(f"a batch has 1 to {MAX_BATCH_MARKERS} markers, not {count}")
    base = offsets[0]
    # Unchecked, unordered offsets would be written as other ones, or as bytes that no tracker can read.
    if base < 0 or (not isinstance(offsets, range) and any(map(ge, offsets, offsets[1:]))):
        raise ValueError("the offsets of a batch must increase, from 0 on")
    kind, flags = batch.kind if isinstance(batch, Fact) else _KINDS[type(batch)], 0
    parts = [b"", queue, pack(f">B{len(topic)}sIIq", len(topic), topic, batch.source.partition, count, base)]
    if offsets[-1] - base == count - 1:
        flags = CONTIGUOUS
    else:
        parts.append(pack(f">{count}I", *[offset - base for offset in offsets]))
    for field in LAYOUTS[kind][1]:
        flags |= field.write(batch, parts)
    parts[0] = _HEAD.pack(VERSION, MAGIC, kind, flags, batch.holder, len(queue))
    return parts


# --- decoding ---------------------------------------------------------------------------------------------------------


def decode(data: bytes | None) -> Batch:
    """Return the batch in these bytes. Raises CorruptMarker; UnknownVersion if a newer version may have written it."""
    if data is None:
        raise CorruptMarker("a marker record without a value")
    try:
        return _decode(data)
    except (error, UnicodeDecodeError, OverflowError, MemoryError) as why:
        raise CorruptMarker(f"{len(data)} bytes that are not a marker batch: {why}") from why


def _decode(data: bytes) -> Batch:
    if data[1:3] != MAGIC:
        raise CorruptMarker(f"{len(data)} bytes without the magic of a marker batch")
    if data[0] != VERSION:
        raise _of_another_version(data)
    _, _, code, flags, holder, queue_length = _HEAD.unpack_from(data, 0)
    reader = ByteReader(data, _HEAD.size)
    if code == Kind.TICK:
        tick = Tick(holder, reader.number(_U64))
        reader.finish()
        return tick
    layout = LAYOUTS.get(code)
    if layout is None:
        raise CorruptMarker(f"marker kind {code} does not exist")
    make, fields = layout
    queue = reader.text(queue_length)
    source, offsets = _read_identities(reader, flags)
    frame = queue, holder, source, offsets
    values = {}
    for field in fields:
        values[field.name] = field.read(reader, flags, frame)
    reader.finish()
    return make(*frame, **values)


def _read_identities(reader: ByteReader, flags: int) -> tuple[Source, Sequence[int]]:
    topic = reader.text(reader.number(_U8))
    partition, count, base = reader.number(_U32), reader.number(_U32), reader.number(_I64)
    if not 0 < count <= MAX_BATCH_MARKERS or base < 0 or base + count > 2**63 - 1:
        raise CorruptMarker(f"{count} markers from offset {base}")
    if flags & CONTIGUOUS:
        return Source(topic, partition), range(base, base + count)
    deltas = reader.numbers("I", count)
    if deltas[0] != 0 or any(map(int.__ge__, deltas, deltas[1:])):
        raise CorruptMarker("offsets that do not increase")
    return Source(topic, partition), tuple([base + delta for delta in deltas])


def _of_another_version(data: bytes) -> CorruptMarker:
    """Return what to raise for bytes with the magic: UnknownVersion only if a newer Marq could have written them.

    Every version keeps the head, and has a body after the head and the queue's name.
    """
    version = data[0]
    if version not in NEWER_VERSIONS:
        return CorruptMarker(f"marker version {version}, which no Marq writes")
    if len(data) <= _HEAD.size:
        return CorruptMarker(f"marker version {version} in {len(data)} bytes, too few for a batch of any version")
    _, _, kind, _, holder, queue_length = _HEAD.unpack_from(data, 0)
    name = data[_HEAD.size : _HEAD.size + queue_length]
    if not kind or not holder or queue_length > MAX_QUEUE_NAME_BYTES or len(data) <= _HEAD.size + queue_length:
        return CorruptMarker(f"marker version {version} with a head that no version has")
    # A UnicodeDecodeError makes it corrupt, too.
    name.decode()
    return UnknownVersion(f"marker version {version}, and this Marq knows version {VERSION}")


# --- payloads ---------------------------------------------------------------------------------------------------------


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
