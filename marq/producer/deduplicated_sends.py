"""The deduplication ids of a producer's messages.

A message with an id goes to the tracker as a DELAY, because one owner must decide which messages are duplicates. The
producer does not wait for that decision.
"""

from __future__ import annotations

from collections.abc import Sequence

from marq.client.message_checks import Header
from marq.wire.errors import ConfigError
from marq.wire.names import DEDUPLICATION_ID_HEADER, utf8

#: Bytes of an id as UTF-8.
MAX_ID_BYTES = 1_024


def check_id(given: object, name: str = "deduplication_id") -> bytes:
    """Return the bytes of an id; errors call it ``name``. Raises ConfigError."""
    if not isinstance(given, str):
        raise ConfigError(f"{name}: expected an id of type str, not {type(given).__name__}")
    data = utf8(given, f"{name}: the id")
    if not data:
        raise ConfigError(f"{name}: the id is empty; leave it out to send a message without deduplication")
    if len(data) > MAX_ID_BYTES:
        raise ConfigError(f"{name}: the id has {len(data)} bytes, at most {MAX_ID_BYTES} are allowed")
    return data


def check_ids(given: object, count: int) -> list[bytes]:
    """Return the bytes of the ids of several messages. Raises ConfigError like :func:`check_id`."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ConfigError(f"deduplication_ids: expected a list with an id for each message, not {given!r}")
    if len(given) != count:
        raise ConfigError(f"deduplication_ids has {len(given)} ids for {count} messages: one for each")
    return [check_id(own_id, f"deduplication_ids[{index}]") for index, own_id in enumerate(given)]


def with_id(headers: Sequence[Header], own_id: bytes | None) -> list[Header]:
    """Return the headers of a message with this id."""
    return [*headers] if own_id is None else [*headers, (DEDUPLICATION_ID_HEADER, own_id)]
