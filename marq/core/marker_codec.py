"""The bytes of marker batches.

The layout is documented field by field in docs/protocol.md; every number is big-endian, as everywhere in Kafka. The
first byte is the version and the next two are a magic, and every version begins with the same head. So a batch of a
newer version (whose partition must stop) can be told from garbage (which is put into quarantine). What differs between
the messages of a batch is written in columns, which the ``struct`` module packs thousands at a time.

Decoding is total: any bytes give a batch or :class:`CorruptMarker`. The decoder therefore checks each length before it
trusts it, and that nothing is left over. Values are not copied out of an ACQUIRE until somebody asks for them: most
messages are acknowledged before the tracker has to keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import ge
from struct import Struct, error, pack, unpack_from

from marq.core.errors import CorruptMarker, UnknownVersion
from marq.core.markers import (
    BACKOFF,
    FACTS,
    MAX_BATCH_MARKERS,
    NOW,
    Ack,
    Acquire,
    Answer,
    Batch,
    Cancel,
    Columns,
    Delay,
    Discard,
    Fact,
    Headers,
    Kind,
    Payload,
    Payloads,
    Reject,
    Release,
    Renew,
    Reschedule,
    Source,
    Spend,
    Tick,
)
from marq.core.names import MAX_QUEUE_NAME_BYTES

VERSION = 1
#: Versions that a newer Marq may write. They are counted one by one, and from 32 on the byte is a printable character:
#: a text such as "amqp://host" has the magic in the right place, too.
NEWER_VERSIONS = range(VERSION + 1, 32)
MAGIC = b"mq"
#: Bytes of an error or reason text that travel with a marker; longer ones are cut.
MAX_TEXT_BYTES = 1024

_CONTIGUOUS, _ATTEMPTS, _KEYS, _HEADERS, _UNCOUNTED, _TEXTS, _DUES, _RELATIVE = (1 << bit for bit in range(8))
#: In a DELAY: its writer never repeats itself.
_NO_READ = -1

_HEAD = Struct(">B2sBBQB")  # version, magic, kind, flags, holder, length of the queue's name
_U8, _U16, _U32, _U64, _I32, _I64 = (Struct(f">{code}") for code in "BHIQiq")


_Framed = Acquire | Renew | Ack | Release | Reject | Delay | Reschedule | Cancel | Discard | Spend | Fact | Answer


# --- encoding ---------------------------------------------------------------------------------------------------------


def encode(batch: Batch) -> bytes:
    """Return the bytes of a batch.

    Raises:
        ValueError: the batch has no markers or too many, offsets do not rise, or a field is out of range.
    """
    try:
        return b"".join(_parts(batch))
    except error as why:
        raise ValueError(f"a field of {type(batch).__name__} is out of range: {why}") from why


def _parts(batch: Batch) -> list[bytes]:
    if isinstance(batch, Tick):
        return [_HEAD.pack(VERSION, MAGIC, Kind.TICK, 0, batch.holder, 0), _U64.pack(batch.monotonic_ms)]
    if isinstance(batch, Acquire):
        return _acquire_parts(batch)
    if isinstance(batch, Renew | Spend):
        kind = Kind.RENEW if isinstance(batch, Renew) else Kind.SPEND
        return [*_start(kind, 0, batch), _U32.pack(batch.lease_ms)]
    if isinstance(batch, Ack):
        return _start(Kind.ACK, 0, batch)
    if isinstance(batch, Release):
        return _release_parts(batch)
    if isinstance(batch, Reject):
        return [*_start(Kind.REJECT, 0, batch), *_text_column(batch.reasons, len(batch.offsets))]
    count = len(batch.offsets)
    if isinstance(batch, Delay):
        return _delay_parts(batch)
    if isinstance(batch, Reschedule):
        return [*_start(Kind.RESCHEDULE, _RELATIVE if batch.relative else 0, batch), _times(batch.times_ms, count)]
    if isinstance(batch, Cancel | Discard):
        return _start(Kind.CANCEL if isinstance(batch, Cancel) else Kind.DISCARD, 0, batch)
    if isinstance(batch, Answer):
        return [*_start(Kind.ANSWERED, 0, batch), pack(f">{count}B", *batch.outcomes)]
    return [
        *_start(batch.kind, 0, batch),
        pack(f">{count}I", *batch.attempts),
        pack(f">{count}B", *batch.causes),
    ]


def _start(kind: Kind, flags: int, batch: _Framed) -> list[bytes]:
    queue, topic, offsets = batch.queue.encode(), batch.source.topic.encode(), batch.offsets
    count = len(offsets)
    if not 0 < count <= MAX_BATCH_MARKERS:
        raise ValueError(f"a batch has 1 to {MAX_BATCH_MARKERS} markers, not {count}")
    base = offsets[0]
    # Unchecked, offsets in disorder would be written as others, or as bytes that no tracker can read.
    if base < 0 or (not isinstance(offsets, range) and any(map(ge, offsets, offsets[1:]))):
        raise ValueError("the offsets of a batch must rise, from 0 on")
    contiguous = offsets[-1] - base == count - 1
    head = _HEAD.pack(VERSION, MAGIC, kind, flags | (_CONTIGUOUS if contiguous else 0), batch.holder, len(queue))
    source = pack(f">B{len(topic)}sIIq", len(topic), topic, batch.source.partition, count, base)
    if contiguous:
        return [head, queue, source]
    return [head, queue, source, pack(f">{count}I", *[offset - base for offset in offsets])]


def _acquire_parts(batch: Acquire) -> list[bytes]:
    flags, columns = _payload_parts(batch)
    if not 0 <= batch.from_offset <= batch.offsets[0]:
        raise ValueError(f"a read that began at {batch.from_offset}, behind its first record {batch.offsets[0]}")
    dues = b""
    if batch.dues_ms is not None:
        flags |= _DUES
        dues = _times(batch.dues_ms, len(batch.offsets), least=NOW)
    return [*_start(Kind.ACQUIRE, flags, batch), pack(">Iq", batch.lease_ms, batch.from_offset), dues, *columns]


def _delay_parts(batch: Delay) -> list[bytes]:
    flags, columns = _payload_parts(batch)
    from_offset = _NO_READ if batch.from_offset is None else batch.from_offset
    if from_offset > batch.offsets[0]:
        raise ValueError(f"known from {from_offset} on, behind its first message {batch.offsets[0]}")
    if batch.relative:
        flags |= _RELATIVE
    times = _times(batch.times_ms, len(batch.offsets))
    return [*_start(Kind.DELAY, flags, batch), pack(">q", from_offset), times, *columns]


def _times(times_ms: Sequence[int], count: int, least: int = 0) -> bytes:
    if len(times_ms) != count:
        raise ValueError(f"{count} offsets but {len(times_ms)} times")
    if min(times_ms) < least:
        raise ValueError(f"the time {min(times_ms)} ms")
    return pack(f">{count}q", *times_ms)


def _payload_parts(batch: Acquire | Delay) -> tuple[int, list[bytes]]:
    """Return the flags that say which columns there are, and these."""
    payloads = batch.payloads
    count = len(payloads)
    if not count or count != len(batch.offsets):
        raise ValueError(f"{len(batch.offsets)} offsets but {count} payloads")
    given = payloads if isinstance(payloads, Columns) else _columns(payloads, batch.queue.encode())
    flags = 0
    columns: list[bytes] = [pack(f">{count}q", *given.timestamps)]
    if given.attempts is not None:
        flags |= _ATTEMPTS
        columns.append(pack(f">{count}I", *given.attempts))
    if given.keys is not None:
        flags |= _KEYS
        columns += _bytes_column(given.keys)
    if given.headers is not None:
        flags |= _HEADERS
        columns += _bytes_column([encode_headers(each) for each in given.headers])
    columns += _bytes_column(given.values)
    return flags, columns


def _columns(payloads: Sequence[Payload], queue_key: bytes) -> Columns:
    timestamps, attempts, keys, headers, values = zip(*payloads, strict=True)
    count = len(timestamps)
    return Columns(
        queue_key,
        timestamps,
        values,
        attempts=attempts if attempts.count(1) != count else None,
        keys=keys if keys.count(queue_key) != count else None,
        headers=headers if any(headers) else None,
    )


def _release_parts(batch: Release) -> list[bytes]:
    flags = 0 if batch.counted else _UNCOUNTED
    texts: list[bytes] = []
    if any(batch.errors):
        flags |= _TEXTS
        texts = _text_column(batch.errors, len(batch.offsets))
    if min(batch.delays_ms) < BACKOFF:
        raise ValueError(f"a release with the delay {min(batch.delays_ms)} ms")
    return [*_start(Kind.RELEASE, flags, batch), pack(f">{len(batch.offsets)}q", *batch.delays_ms), *texts]


def _bytes_column(values: Sequence[bytes | None]) -> list[bytes]:
    if None not in values:
        return [pack(f">{len(values)}i", *map(len, values)), *values]  # type: ignore[arg-type, list-item]
    lengths = [-1 if value is None else len(value) for value in values]
    return [pack(f">{len(values)}i", *lengths), *[value for value in values if value is not None]]


def _text_column(texts: Sequence[str], count: int) -> list[bytes]:
    if len(texts) != count:
        raise ValueError(f"{count} offsets but {len(texts)} texts")
    cut = [cut_text(text) for text in texts]
    return [pack(f">{len(cut)}H", *map(len, cut)), *cut]


def cut_text(text: str) -> bytes:
    """Return at most :data:`MAX_TEXT_BYTES` of a text as UTF-8, never half a character."""
    return text.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore").encode()


def encode_headers(headers: Headers) -> bytes:
    """Return the headers of one record as bytes, order and doubles kept."""
    parts = [_U16.pack(len(headers))]
    for name, value in headers:
        encoded = name.encode()
        parts += [_U16.pack(len(encoded)), encoded, _I32.pack(-1 if value is None else len(value)), value or b""]
    return b"".join(parts)


# --- decoding ---------------------------------------------------------------------------------------------------------


def decode(data: bytes | None) -> Batch:
    """Return the batch that the bytes hold.

    Raises:
        UnknownVersion: a batch that a newer version may have written.
        CorruptMarker: anything else that is no batch.
    """
    if data is None:
        raise CorruptMarker("a marker record without a value")
    try:
        return _decode(data)
    except (error, UnicodeDecodeError, OverflowError, MemoryError) as why:
        raise CorruptMarker(f"{len(data)} bytes that are no marker batch: {why}") from why


def _decode(data: bytes) -> Batch:
    if data[1:3] != MAGIC:
        raise CorruptMarker(f"{len(data)} bytes without the magic of a marker batch")
    if data[0] != VERSION:
        raise _of_another_version(data)
    _, _, code, flags, holder, queue_length = _HEAD.unpack_from(data, 0)
    reader = _Reader(data, _HEAD.size)
    if code == Kind.TICK:
        tick = Tick(holder, reader.number(_U64))
        reader.finish()
        return tick
    decoder = _DECODERS.get(code)
    if decoder is None:
        raise CorruptMarker(f"marker kind {code} does not exist")
    queue = reader.text(queue_length)
    source, offsets = _decode_identities(reader, flags)
    batch = decoder(reader, flags, (queue, holder, source, offsets))
    reader.finish()
    return batch


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


#: What every kind but TICK begins with: queue, holder, source, offsets.
_Frame = tuple[str, int, Source, Sequence[int]]
_Decoder = Callable[["_Reader", int, _Frame], Batch]


class _Reader:
    """A position in bytes, which never passes their end."""

    __slots__ = ("data", "position")

    def __init__(self, data: bytes, position: int) -> None:
        self.data = data
        self.position = position

    def number(self, layout: Struct) -> int:
        value: int = layout.unpack_from(self.data, self.position)[0]
        self.position += layout.size
        return value

    def numbers(self, code: str, size: int, count: int) -> tuple[int, ...]:
        # Compared before unpacking: a hostile count must not become a huge format.
        if self.position + size * count > len(self.data):
            raise CorruptMarker(f"a column of {count} numbers passes the end of the batch")
        values = unpack_from(f">{count}{code}", self.data, self.position)
        self.position += size * count
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


def _decode_identities(reader: _Reader, flags: int) -> tuple[Source, Sequence[int]]:
    topic = reader.text(reader.number(_U8))
    partition, count, base = reader.number(_U32), reader.number(_U32), reader.number(_I64)
    if not 0 < count <= MAX_BATCH_MARKERS or base < 0 or base + count > 2**63 - 1:
        raise CorruptMarker(f"{count} markers from offset {base}")
    if flags & _CONTIGUOUS:
        return Source(topic, partition), range(base, base + count)
    deltas = reader.numbers("I", 4, count)
    if deltas[0] != 0 or any(map(int.__ge__, deltas, deltas[1:])):
        raise CorruptMarker("offsets that do not rise")
    return Source(topic, partition), tuple([base + delta for delta in deltas])


class _Column:
    """Values of one column; where each of them stands is worked out when the first is asked for."""

    __slots__ = ("_data", "_end", "_ends", "_start", "lengths")

    def __init__(self, reader: _Reader, count: int) -> None:
        lengths = reader.numbers("i", 4, count)
        if min(lengths) < -1:
            raise CorruptMarker("a value of negative length")
        self._data = reader.data
        self._start = reader.position
        #: Of the values, in bytes; -1 stands for None.
        self.lengths = lengths
        self._ends: list[int] | None = None
        # A length of -1 stands for None, which takes no room.
        reader.position += sum(lengths) + lengths.count(-1)
        if reader.position > len(reader.data):
            raise CorruptMarker("the values pass the end of the batch")
        self._end = reader.position

    def contains(self, data: bytes) -> bool:
        """Return whether the values contain these bytes."""
        return self._data.find(data, self._start, self._end) >= 0

    def __getitem__(self, index: int) -> bytes | None:
        if self._ends is None:
            sizes = self.lengths if -1 not in self.lengths else [max(length, 0) for length in self.lengths]
            self._ends = list(accumulate(sizes, initial=self._start))
        length = self.lengths[index]
        return None if length < 0 else self._data[self._ends[index] : self._ends[index + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class _Payloads(Payloads):
    """The payloads of an ACQUIRE or DELAY, cut out of its bytes when they are asked for."""

    timestamps: tuple[int, ...]
    attempts: tuple[int, ...] | None
    keys: _Column | None
    headers: _Column | None
    values: _Column
    queue_key: bytes

    def __len__(self) -> int:
        return len(self.timestamps)

    def may_have(self, header: str) -> bool:
        return self.headers is not None and self.headers.contains(header.encode())

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each value; -1 stands for None."""
        return self.values.lengths

    def __getitem__(self, index: int) -> Payload:  # type: ignore[override]
        key = self.queue_key if self.keys is None else self.keys[index]
        headers = () if self.headers is None else decode_headers(self.headers[index] or _NO_HEADERS)
        attempt = 1 if self.attempts is None else self.attempts[index]
        return Payload(self.timestamps[index], attempt, key, headers, self.values[index])


_NO_HEADERS = _U16.pack(0)


def _decode_acquire(reader: _Reader, flags: int, frame: _Frame) -> Acquire:
    offsets = frame[3]
    lease_ms, from_offset = reader.number(_U32), reader.number(_I64)
    if not 0 <= from_offset <= offsets[0]:
        raise CorruptMarker(f"a read that began at {from_offset}, behind its first record {offsets[0]}")
    dues = _decode_times(reader, len(offsets), NOW) if flags & _DUES else None
    return Acquire(*frame, lease_ms, from_offset, _decode_payloads(reader, flags, frame), dues)


def _decode_delay(reader: _Reader, flags: int, frame: _Frame) -> Delay:
    offsets = frame[3]
    from_offset = reader.number(_I64)
    if not _NO_READ <= from_offset <= offsets[0]:
        raise CorruptMarker(f"known from {from_offset} on, behind its first message {offsets[0]}")
    times = _decode_times(reader, len(offsets))
    known = None if from_offset == _NO_READ else from_offset
    return Delay(*frame, times, bool(flags & _RELATIVE), known, _decode_payloads(reader, flags, frame))


def _decode_times(reader: _Reader, count: int, least: int = 0) -> tuple[int, ...]:
    times = reader.numbers("q", 8, count)
    if min(times) < least:
        raise CorruptMarker(f"the time {min(times)} ms")
    return times


def _decode_payloads(reader: _Reader, flags: int, frame: _Frame) -> _Payloads:
    count = len(frame[3])
    timestamps = reader.numbers("q", 8, count)
    attempts = reader.numbers("I", 4, count) if flags & _ATTEMPTS else None
    keys = _Column(reader, count) if flags & _KEYS else None
    headers = _Column(reader, count) if flags & _HEADERS else None
    if headers is not None:
        for index in range(count):
            decode_headers(headers[index] or _NO_HEADERS)
    values = _Column(reader, count)
    return _Payloads(timestamps, attempts, keys, headers, values, frame[0].encode())


def decode_headers(data: bytes) -> Headers:
    """Return the headers of one record.

    Raises:
        CorruptMarker: the bytes hold no headers.
    """
    reader = _Reader(data, 0)
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(reader.number(_U16)):
        name = reader.text(reader.number(_U16))
        length = reader.number(_I32)
        if length < -1:
            raise CorruptMarker("a header of negative length")
        headers.append((name, None if length == -1 else reader.span(length)))
    reader.finish()
    return tuple(headers)


def _decode_renew(reader: _Reader, flags: int, frame: _Frame) -> Renew:
    return Renew(*frame, reader.number(_U32))


def _decode_spend(reader: _Reader, flags: int, frame: _Frame) -> Spend:
    return Spend(*frame, reader.number(_U32))


def _decode_ack(reader: _Reader, flags: int, frame: _Frame) -> Ack:
    return Ack(*frame)


def _decode_release(reader: _Reader, flags: int, frame: _Frame) -> Release:
    count = len(frame[3])
    delays = reader.numbers("q", 8, count)
    if min(delays) < BACKOFF:
        raise CorruptMarker(f"a release with the delay {min(delays)} ms")
    errors = _texts(reader, count) if flags & _TEXTS else ("",) * count
    return Release(*frame, delays, not flags & _UNCOUNTED, errors)


def _decode_reject(reader: _Reader, flags: int, frame: _Frame) -> Reject:
    return Reject(*frame, _texts(reader, len(frame[3])))


def _decode_reschedule(reader: _Reader, flags: int, frame: _Frame) -> Reschedule:
    return Reschedule(*frame, _decode_times(reader, len(frame[3])), bool(flags & _RELATIVE))


def _decode_cancel(reader: _Reader, flags: int, frame: _Frame) -> Cancel:
    return Cancel(*frame)


def _decode_discard(reader: _Reader, flags: int, frame: _Frame) -> Discard:
    return Discard(*frame)


def _decode_answer(reader: _Reader, flags: int, frame: _Frame) -> Answer:
    return Answer(*frame, reader.numbers("B", 1, len(frame[3])))


def _texts(reader: _Reader, count: int) -> tuple[str, ...]:
    return tuple([reader.text(length) for length in reader.numbers("H", 2, count)])


def _fact_decoder(kind: Kind) -> _Decoder:
    def decode_fact(reader: _Reader, flags: int, frame: _Frame) -> Fact:
        return Fact(kind, *frame, reader.numbers("I", 4, len(frame[3])), reader.numbers("B", 1, len(frame[3])))

    return decode_fact


_DECODERS: dict[int, _Decoder] = {
    Kind.ACQUIRE: _decode_acquire,
    Kind.RENEW: _decode_renew,
    Kind.ACK: _decode_ack,
    Kind.RELEASE: _decode_release,
    Kind.REJECT: _decode_reject,
    Kind.DELAY: _decode_delay,
    Kind.RESCHEDULE: _decode_reschedule,
    Kind.CANCEL: _decode_cancel,
    Kind.DISCARD: _decode_discard,
    Kind.SPEND: _decode_spend,
    **{kind: _fact_decoder(kind) for kind in FACTS},
    Kind.ANSWERED: _decode_answer,
}
