"""What a test sees of messages: values of their own, as they were at the moment of the look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

from marq.codecs import Codec, decode
from marq.core.markers import Record, Source
from marq.core.names import (
    DIED_AT_HEADER,
    ERROR_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
)
from marq.lease import Lease
from marq.message import Message
from marq.outbox import Outbox
from marq.records import Records

#: Of a message that is only looked at, and never finished.
_NO_OUTBOX = cast("Outbox", None)


@dataclass(frozen=True, kw_only=True)
class SeenMessage:
    """A message of a queue.

    ``id``, ``headers``, ``key``, ``attempt`` and ``sent_at`` are as in :class:`marq.Message`; for a message that waits
    the attempt is that of the delivery to come, for one that is delayed or finished that of the last one.
    """

    queue: str
    id: str
    body: bytes
    headers: Mapping[str, bytes | None]
    key: bytes | None
    attempt: int
    sent_at: datetime
    _codec: Codec | None = field(repr=False, compare=False)

    @property
    def value(self) -> Any:
        """The body, decoded by the codec that the test gave; without one the bytes themselves."""
        return self.body if self._codec is None else decode(self._codec, self.body)


@dataclass(frozen=True, kw_only=True)
class DeadLetter(SeenMessage):
    """A message that ended: why, after which attempt, and where it stood then (``topic/partition/offset``).

    ``error`` is what was said at the last release of the message, such as the handler's exception.
    """

    reason: str
    error: str
    origin: str
    died_at: datetime


def seen(queue: str, source: Source, record: Record, codec: Codec | None, attempt: int | None = None) -> SeenMessage:
    """Return a record as a message of a queue; ``attempt`` where that is not what the record says."""
    return SeenMessage(**_parts(queue, source, record, codec, attempt))


def dead_letter(source: Source, record: Record, codec: Codec | None) -> DeadLetter:
    """Return a record of the dead letters."""
    found = dict(record.headers)
    queue = (record.key or b"").decode("utf-8", "replace")
    return DeadLetter(
        **_parts(queue, source, record, codec),
        reason=_text(found, REASON_HEADER),
        error=_text(found, ERROR_HEADER),
        origin=_text(found, ORIGIN_HEADER),
        died_at=wall(int(_text(found, DIED_AT_HEADER) or record.timestamp)),
    )


def wall(time_ms: int) -> datetime:
    """Return a time of the virtual wall clock (UTC)."""
    return datetime.fromtimestamp(time_ms / 1000, UTC)


def _parts(
    queue: str, source: Source, record: Record, codec: Codec | None, attempt: int | None = None
) -> dict[str, Any]:
    """What a message says of itself, as the message that a consumer gets says it."""
    keyed = record.key != queue.encode()
    lease = Lease(_NO_OUTBOX, queue, source, 0, Records.of([record]), 0, 0, own_topic=keyed)
    message = Message(lease, record.offset, record.value)
    return {
        "queue": queue,
        "id": message.id,
        "body": message.body,
        "headers": message.headers,
        "key": message.key,
        "attempt": attempt or message.attempt,
        "sent_at": message.sent_at,
        "_codec": codec,
    }


def _text(headers: Mapping[str, bytes | None], name: str) -> str:
    return (headers.get(name) or b"").decode("utf-8", "replace")
