"""The content of a dead letter, and the markers that redrive or delete it.

Its record is like a redelivery of the message, with headers that say why it was dead-lettered. A redrive is a DELAY of
zero that names the place of the dead letter. The tracker accepts each place only once, so any client may write these
markers again at any time, without effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from marq.wire.dead_letter_notes import is_note
from marq.wire.errors import ConfigError
from marq.wire.markers import Delay, Discard, Headers, Payload, Record, Source, payload_bytes, spans
from marq.wire.names import (
    ATTEMPT_HEADER,
    DEAD_LETTERED_AT_HEADER,
    ERROR_HEADER,
    EXPIRED_HEADER,
    FIRST_RECEIVED_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
    TRACEBACK_HEADER,
    UNCOUNTED_HEADER,
    check_queue_name,
)
from marq.wire.record_headers import last_value, not_expiring

#: Headers of earlier deliveries and of their end; a redriven message starts without them.
_DEATH_HEADERS = frozenset(
    {
        ATTEMPT_HEADER,
        DEAD_LETTERED_AT_HEADER,
        ERROR_HEADER,
        EXPIRED_HEADER,
        FIRST_RECEIVED_HEADER,
        ORIGIN_HEADER,
        REASON_HEADER,
        TRACEBACK_HEADER,
        UNCOUNTED_HEADER,
    }
)
#: Bytes of a batch besides its payloads: names, head and columns.
_HEAD_BYTES = 1_024
#: Maximum number of dead letters in one batch, which limits how much a tracker writes at once.
MAX_BATCH_LETTERS = 1_000


class DeadLetterRecord(Record, Protocol):
    """A record of the dead-letter topic."""

    @property
    def partition(self) -> int: ...


def queue_of(record: DeadLetterRecord) -> str | None:
    """Return the queue of a dead letter; None for a note or a record of another program."""
    try:
        queue = check_queue_name((record.key or b"").decode())
    except (UnicodeDecodeError, ConfigError):
        return None
    return None if is_note(record) else queue


def text_of(headers: Headers, name: str) -> str:
    """Return a header as text, the last one of several; empty if there is none."""
    return (last_value(headers, name) or b"").decode("utf-8", "replace")


def dead_lettered_at_ms(record: DeadLetterRecord) -> int:
    """Return when a message became a dead letter by the log's clock; the record's time if no header is readable."""
    text = text_of(record.headers, DEAD_LETTERED_AT_HEADER)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else record.timestamp


def redriven(record: DeadLetterRecord, queue: str) -> Payload:
    """Return the message as its sender wrote it, for a queue; it keeps its id and its first send time.

    It does not expire any more: it may have been sent long ago, and an operator wants it to be delivered.
    """
    headers = not_expiring([header for header in record.headers if header[0] not in _DEATH_HEADERS])
    return Payload(record.timestamp, 1, queue.encode(), headers, record.value)


def redrive(
    queue: str, holder: int, source: Source, records: Sequence[DeadLetterRecord], limit_bytes: int
) -> Iterator[Delay]:
    """Return the markers that send dead letters to a queue; a batch of several has at most ``limit_bytes``.

    ``source`` is the partition of all of them, in the order of their offsets. ``holder`` is a random number
    that identifies the client in the answering notes.
    """
    payloads = [redriven(record, queue) for record in records]
    sizes = [payload_bytes(payload) + 8 for payload in payloads]
    for span in spans(sizes, limit_bytes - _HEAD_BYTES):
        for start in range(span.start, span.stop, MAX_BATCH_LETTERS):
            piece = slice(start, min(start + MAX_BATCH_LETTERS, span.stop))
            offsets = [record.offset for record in records[piece]]
            yield Delay(queue, holder, source, offsets, [0] * len(offsets), True, offsets[0], payloads[piece])


def discard(queue: str, holder: int, source: Source, offsets: Sequence[int]) -> Iterator[Discard]:
    """Return the markers that delete dead letters of a queue, in ascending order of their offsets in one partition."""
    for start in range(0, len(offsets), MAX_BATCH_LETTERS):
        yield Discard(queue, holder, source, offsets[start : start + MAX_BATCH_LETTERS])
