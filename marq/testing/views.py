"""Snapshots of messages for a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

from marq.client import dead_letter as dead_letters
from marq.client.codecs import Codec, decode
from marq.core.deliveries.dead_letter_records import DeadLetterRecord
from marq.kafka.records import Records
from marq.leases.held import Keeper, LeasedBatch
from marq.leases.message import Message
from marq.wire.markers import Record, Source
from marq.wire.names import Names

#: Placeholder for messages that are never settled.
_NO_KEEPER = cast("Keeper", None)


@dataclass(frozen=True, kw_only=True)
class SeenMessage:
    """A message of a queue.

    ``id``, ``headers``, ``key``, ``type``, ``attempt`` and ``sent_at`` are as in :class:`marq.Message`. The attempt of
    a waiting message is that of the next delivery; that of a delayed or finished one is that of the last delivery.
    """

    queue: str
    id: str
    body: bytes
    headers: Mapping[str, bytes | None]
    key: bytes | None
    type: str | None
    attempt: int
    sent_at: datetime
    _codec: Codec | None = field(repr=False, compare=False)

    @property
    def value(self) -> Any:
        """The body, decoded by the test's codec; without one the bytes."""
        return self.body if self._codec is None else decode(self._codec, self.body)


@dataclass(frozen=True, kw_only=True)
class DeadLetter(SeenMessage):
    """A dead letter; ``origin`` (``topic/partition/offset``) is the record of its last delivery.

    ``error`` is the error of the last release, such as the handler's exception, and ``traceback`` that of the last
    attempt; both are empty if there was none.
    """

    reason: str
    error: str
    traceback: str
    origin: str
    dead_lettered_at: datetime


def seen(
    names: Names, queue: str, codec: Codec | None, source: Source, record: Record, attempt: int | None = None
) -> SeenMessage:
    """Return a record as a message of a queue; ``attempt`` overrides the record's."""
    own_topic = names.is_senders_topic(source.topic)
    [row] = Records.of([record]).without_copied_headers(own_topic=own_topic)
    return SeenMessage(**_parts(queue, source, row, codec, attempt, own_topic=own_topic))


def dead_letter(topic: str, record: DeadLetterRecord, codec: Codec | None) -> DeadLetter:
    """Return a record of the dead-letter topic as a dead letter."""
    queue = (record.key or b"").decode("utf-8", "replace")
    letter = dead_letters.DeadLetter(record, queue, topic, codec)
    return DeadLetter(
        **_parts(queue, Source(topic, record.partition), record, codec),
        reason=letter.reason,
        error=letter.last_error,
        traceback=letter.traceback,
        origin=letter.origin,
        dead_lettered_at=letter.dead_lettered_at,
    )


def _parts(
    queue: str,
    source: Source,
    record: Record,
    codec: Codec | None,
    attempt: int | None = None,
    *,
    own_topic: bool = False,
) -> dict[str, Any]:
    """Return the fields of a message as a consumer would see them."""
    lease = LeasedBatch(_NO_KEEPER, queue, source, 0, Records.of([record]), 0, 0, own_topic=own_topic)
    message = Message(lease, record.offset, record.value)
    return {
        "queue": queue,
        "id": message.id,
        "body": message.body,
        "headers": message.headers,
        "key": message.key,
        "type": message.type,
        "attempt": attempt or message.attempt,
        "sent_at": message.sent_at,
        "_codec": codec,
    }
