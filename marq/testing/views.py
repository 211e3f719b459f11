"""What a test sees of messages: values of their own, as they were at the moment of the look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from marq.codecs import Codec, decode
from marq.core.copies import origin
from marq.core.markers import Headers, Source
from marq.core.names import (
    DIED_AT_HEADER,
    ERROR_HEADER,
    KEY_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
    RESERVED_HEADER,
)


@dataclass(frozen=True)
class SeenMessage:
    """A message of a queue.

    ``id``, ``headers``, ``key`` and ``sent_at`` are as in :class:`marq.Message`; ``attempt`` is that of the delivery
    that it was or is in, or that is to come.
    """

    queue: str
    id: str
    body: bytes
    headers: Mapping[str, bytes | None]
    key: bytes | None
    attempt: int
    sent_at: datetime
    _codec: Codec | None = None

    @property
    def value(self) -> Any:
        """The body, decoded by the codec that the test gave; without one the bytes themselves."""
        return self.body if self._codec is None else decode(self._codec, self.body)


@dataclass(frozen=True)
class DeadLetter(SeenMessage):
    """A message that ended: why, after which attempt, and where it stood then (``topic/partition/offset``).

    ``error`` is what was said at the last release of the message, such as the handler's exception.
    """

    reason: str = ""
    error: str = ""
    origin: str = ""
    died_at: datetime = datetime.fromtimestamp(0, UTC)
