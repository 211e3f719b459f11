"""What a dead letter says, and the markers that redrive or delete it.

Its record is as the copy of a message that would be delivered again, with headers that say why it is dead. To redrive
it is to delay the message that it was made of by nothing at all: the DELAY names the place of the dead letter, and the
tracker takes a place once. So these markers may be written again, by anybody and at any time: that changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

from marq.core.errors import ConfigError
from marq.core.markers import Delay, Discard, Headers, Payload, Record, Source, payload_bytes, spans
from marq.core.names import (
    ATTEMPT_HEADER,
    DIED_AT_HEADER,
    ERROR_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
    UNCOUNTED_HEADER,
    check_queue_name,
)
from marq.core.notes import is_note

#: Of a death, and of the deliveries before it: a redriven message begins anew.
_DEATH_HEADERS = frozenset(
    {ATTEMPT_HEADER, DIED_AT_HEADER, ERROR_HEADER, ORIGIN_HEADER, REASON_HEADER, UNCOUNTED_HEADER}
)
#: What differs from one error to the next of the same kind: numbers, also within words, and long ones in hexadecimal.
_VARIES = re.compile(r"\b(?=[a-f\-]*\d)[\da-f\-]{8,}\b|\d+(?:\.\d+)*", re.IGNORECASE)
#: Characters of a kind of errors; what follows varies more than it tells.
MAX_KIND = 200
#: Of a marker's bytes, what is no payload: names, head and columns of a batch.
_HEAD_BYTES = 1_024
#: Dead letters in one batch, so that what a tracker writes at once stays small.
MAX_BATCH_LETTERS = 1_000


class LetterRecord(Record, Protocol):
    """A record of the dead-letters topic."""

    @property
    def partition(self) -> int: ...


def queue_of(record: LetterRecord) -> str | None:
    """Return the queue of a dead letter; None for a record that is none: a note, or somebody else's."""
    try:
        queue = check_queue_name((record.key or b"").decode())
    except (UnicodeDecodeError, ConfigError):
        return None
    return None if is_note(record.headers) else queue


def text_of(headers: Headers, name: str) -> str:
    """Return a header as text; empty where there is none, the last one where there are several."""
    found = [value for header, value in headers if header == name]
    return ((found[-1] if found else None) or b"").decode("utf-8", "replace")


def died_at_ms(record: LetterRecord) -> int:
    """Return when a message died, by the log's clock; by the record's time where nothing is said that can be read."""
    text = text_of(record.headers, DIED_AT_HEADER)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else record.timestamp


def kind_of(record: LetterRecord) -> str:
    """Return what dead letters that died alike have in common: the first line of the error, or of the reason where
    there is none, with N for what varies."""
    text = text_of(record.headers, ERROR_HEADER) or text_of(record.headers, REASON_HEADER)
    first = text.strip().partition("\n")[0][: 4 * MAX_KIND]
    return _VARIES.sub("N", first)[:MAX_KIND].strip()


def redriven(record: LetterRecord, queue: str) -> Payload:
    """Return the message as its sender made it, for a queue; its id and the time of its first sending are kept."""
    headers = tuple((name, value) for name, value in record.headers if name not in _DEATH_HEADERS)
    return Payload(record.timestamp, 1, queue.encode(), headers, record.value)


def redrive(
    queue: str, holder: int, source: Source, records: Sequence[LetterRecord], limit_bytes: int
) -> Iterator[Delay]:
    """Return the markers that send dead letters to a queue, each with at most so many bytes if it has several.

    ``source`` is the partition where all of them stand, in the order of their offsets; ``holder`` a random number of
    whoever asks, by which notes answer.
    """
    payloads = [redriven(record, queue) for record in records]
    sizes = [payload_bytes(payload) + 8 for payload in payloads]
    for span in spans(sizes, limit_bytes - _HEAD_BYTES):
        for start in range(span.start, span.stop, MAX_BATCH_LETTERS):
            piece = slice(start, min(start + MAX_BATCH_LETTERS, span.stop))
            offsets = [record.offset for record in records[piece]]
            yield Delay(queue, holder, source, offsets, [0] * len(offsets), True, offsets[0], payloads[piece])


def discard(queue: str, holder: int, source: Source, offsets: Sequence[int]) -> Iterator[Discard]:
    """Return the markers that delete dead letters of a queue, given by rising offsets of one partition."""
    for start in range(0, len(offsets), MAX_BATCH_LETTERS):
        yield Discard(queue, holder, source, offsets[start : start + MAX_BATCH_LETTERS])
