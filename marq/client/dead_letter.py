"""A dead letter as users see it: the message, and why it was dead-lettered."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Generic

from marq.client.codecs import Codec, V, decode
from marq.core.deliveries.dead_letter_records import DeadLetterRecord, dead_lettered_at_ms, text_of
from marq.wire.markers import Source
from marq.wire.names import (
    ERROR_HEADER,
    KEY_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
    RESERVED_HEADER,
    TRACEBACK_HEADER,
)
from marq.wire.record_headers import Origin, message_type, origin


class DeadLetter(Generic[V]):
    """A message that exhausted its attempts, or was rejected."""

    __slots__ = ("_codec", "_record", "_topic", "queue")

    def __init__(self, record: DeadLetterRecord, queue: str, topic: str, codec: Codec[V] | None) -> None:
        #: The queue in which it was dead-lettered.
        self.queue = queue
        self._record = record
        self._topic = topic
        self._codec = codec

    @property
    def id(self) -> str:
        """``topic/partition/offset`` of the message's first record, like :attr:`marq.Message.id`."""
        return self._origin.id

    @property
    def value(self) -> V:
        """The value, decoded by the codec; without a codec :attr:`body`.

        Raises:
            DecodeError: the codec can't decode it, which may be why it was dead-lettered.
        """
        # Without a codec, V is not known.
        return self.body if self._codec is None else decode(self._codec, self.body)  # type: ignore[return-value]

    @property
    def body(self) -> bytes:
        """The sender's bytes; empty for a record without a value."""
        return self._record.value or b""

    @property
    def headers(self) -> dict[str, bytes | None]:
        """The sender's headers; if a name occurs twice, the last value counts."""
        return {name: value for name, value in self._record.headers if not name.startswith(RESERVED_HEADER)}

    @property
    def type(self) -> str | None:
        """The type that the message was sent with, or None."""
        return message_type(self._record.headers)

    @property
    def key(self) -> bytes | None:
        """The sender's record key; None if the key only names the queue."""
        return dict(self._record.headers).get(KEY_HEADER)

    @property
    def reason(self) -> str:
        """Why the message was dead-lettered."""
        return text_of(self._record.headers, REASON_HEADER)

    @property
    def last_error(self) -> str:
        """Error of the last release, such as the handler's exception; empty if there was none."""
        return text_of(self._record.headers, ERROR_HEADER)

    @property
    def traceback(self) -> str:
        """Traceback of the last attempt, its last 4,096 bytes; empty if no exception ended it, or none was kept."""
        return text_of(self._record.headers, TRACEBACK_HEADER)

    @property
    def attempts(self) -> int:
        """The number of attempts; 0 if none counted."""
        return self._origin.attempt

    @property
    def first_sent(self) -> datetime:
        """When the message was first sent, by its sender's clock (UTC)."""
        return time_of(self._origin.first_sent_ms)

    @property
    def dead_lettered_at(self) -> datetime:
        """When it was dead-lettered, by the broker's clock (UTC)."""
        return time_of(dead_lettered_at_ms(self._record))

    @property
    def origin(self) -> str:
        """``topic/partition/offset`` of the record that was dead-lettered."""
        return text_of(self._record.headers, ORIGIN_HEADER)

    @property
    def partition(self) -> int:
        """The partition of the dead-letter topic that contains it."""
        return self._record.partition

    @property
    def offset(self) -> int:
        return self._record.offset

    def __repr__(self) -> str:
        return f"<DeadLetter {self.id} queue={self.queue!r} reason={self.reason!r}>"

    @property
    def _origin(self) -> Origin:
        record = self._record
        return origin(Source(self._topic, record.partition), record.offset, record.timestamp, record.headers)


def time_of(time_ms: int) -> datetime:
    """Return a datetime in UTC; 1970 for a time that a datetime can't represent."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        # Another program wrote the header.
        return datetime.fromtimestamp(0, UTC)
