"""Checks of the headers, queues and deduplication id of a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from marq.wire.errors import ConfigError
from marq.wire.names import (
    DEDUPLICATION_ID_HEADER,
    MAX_HEADER_NAME_BYTES,
    MAX_HEADERS,
    RESERVED_HEADER,
    TYPE_HEADER,
    check_queue_name,
    check_type_name,
    utf8,
)

Header = tuple[str, bytes | None]
#: A header as a sender gives it; text is sent as UTF-8.
SentHeader = tuple[str, str | bytes | None]
#: Not an Iterable: a dict would be one, too, and mypy would infer a different type for a dict with text and bytes.
Headers = Mapping[str, str | bytes | None] | Sequence[SentHeader]

#: Bytes of a deduplication id as UTF-8.
MAX_ID_BYTES = 1_024


def check_queues(queues: Sequence[str]) -> list[str]:
    """Return the names of the queues to which one message is to be sent. Raises ConfigError."""
    if not isinstance(queues, Sequence) or isinstance(queues, bytes | bytearray):
        raise ConfigError(f"a queue's name is text (str), or several a list of names, not {queues!r}")
    names = [check_queue_name(queue) for queue in queues]
    if not names:
        raise ConfigError("the list of queues is empty: name at least one")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"queue {twice!r} appears twice in the list of queues")
    return names


def check_headers(headers: Headers) -> list[Header]:
    """Return headers as pairs with encoded values.

    Raises ConfigError if a name is not text, too long or one of Marq's own, if a value is not text, bytes or None, or
    if there are too many headers.
    """
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    checked: list[Header] = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(f"header {pair!r}: expected a dict, or pairs of a name (str) and a value (str or bytes)")
        name, value = pair
        checked.append((_header_name(name), header_value(name, value)))
    if len(checked) > MAX_HEADERS:
        raise ConfigError(f"the message has {len(checked)} headers, at most {MAX_HEADERS} are allowed")
    return checked


def with_type(headers: Headers | None, kind: str | None) -> list[Header]:
    """Return checked headers, and that of the type. Raises ConfigError, like :func:`check_headers`."""
    pairs = check_headers(headers or ())
    return pairs if kind is None else [*pairs, (TYPE_HEADER, check_type_name(kind).encode())]


def _header_name(name: object) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"header {name!r}: expected a name of type str, not {type(name).__name__}")
    if name.startswith(RESERVED_HEADER):
        hint = "; for the type of a message, pass type=" if name == TYPE_HEADER else "; use another name"
        raise ConfigError(f"header {name!r}: names beginning with {RESERVED_HEADER!r} are reserved{hint}")
    size = len(utf8(name, f"header {name!r}: the name"))
    if size > MAX_HEADER_NAME_BYTES:
        raise ConfigError(
            f"header {name[:40]!r}…: the name has {size} bytes, at most {MAX_HEADER_NAME_BYTES} are allowed"
        )
    return name


def header_value(name: str, value: object) -> bytes | None:
    """Return the bytes of a header's value. Raises ConfigError."""
    if value is None or isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"header {name!r}: expected a value of type str, bytes or None, not {type(value).__name__}")
    return utf8(value, f"header {name!r}: the value")


def check_id(given: object, name: str = "deduplication_id") -> bytes:
    """Return the bytes of a deduplication id; errors call it ``name``. Raises ConfigError."""
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
    """Return the headers of a message with this deduplication id."""
    return [*headers] if own_id is None else [*headers, (DEDUPLICATION_ID_HEADER, own_id)]
