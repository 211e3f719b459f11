"""The options of ``send`` and ``send_many``: their types and checks, and the headers and times that they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple, TypedDict

from marq.settings.durations import Duration, duration_ms
from marq.wire.errors import ConfigError
from marq.wire.names import (
    DEDUPLICATION_ID_HEADER,
    EXPIRES_AT_HEADER,
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
Delay = Duration | Sequence[Duration]
At = datetime | Sequence[datetime]

#: Bytes of a deduplication id as UTF-8.
MAX_ID_BYTES = 1_024
#: A delay may be as long as the calendar: more than 9,000 years.
MAX_DELAY_MS = 10_000 * 366 * 24 * 3_600_000


class TimeOptions(TypedDict, total=False):
    """When to deliver a message."""

    delay: Duration | None
    at: datetime | None


class SendOptions(TimeOptions, total=False):
    """The options of ``send``."""

    headers: Headers | None
    type: str | None
    ordering_key: str | bytes | None
    deduplication_id: str | None
    expires_in: Duration | None


class SendManyOptions(TypedDict, total=False):
    """The options of ``send_many``."""

    headers: Headers | None
    type: str | None
    ordering_key: str | bytes | None
    delay: Delay | None
    at: At | None
    deduplication_ids: Sequence[str] | None
    expires_in: Duration | None


# --- queues, headers and ids ------------------------------------------------------------------------------------------


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


# --- delivery time and expiry -----------------------------------------------------------------------------------------


class When(NamedTuple):
    """``time_ms`` counts from the marker's position in the log if ``relative``, else since the epoch."""

    time_ms: int
    relative: bool


AT_ONCE = When(0, relative=True)


class Expiry(NamedTuple):
    """Messages expire ``life_ms`` after they are due; ``now_ms`` is the sender's clock."""

    life_ms: int
    now_ms: int

    def header(self, due: When | None) -> Header:
        """Return the header of a message that is due at this time, None for now."""
        due_ms = self.now_ms
        if due is not None:
            due_ms = due_ms + due.time_ms if due.relative else max(due_ms, due.time_ms)
        return EXPIRES_AT_HEADER, b"%d" % (due_ms + self.life_ms)


def when(call: str, delay: Duration | None, at: datetime | None) -> When | None:
    """Return the delivery time, None for immediately. Raises ConfigError if both or invalid ones are given."""
    if delay is not None and at is not None:
        raise ConfigError(f"{call}: delay={delay!r} and at={at!r}: pass one of them")
    if at is not None:
        return _at("at", at)
    return None if delay is None else _delay("delay", delay)


def whens(call: str, delay: Delay | None, at: At | None, count: int) -> list[When] | None:
    """Return the delivery time of each of several messages: one for all, or a list with one for each.

    Raises ConfigError like :func:`when`, or if a list has the wrong length.
    """
    for name, given in (("delay", delay), ("at", at)):
        if isinstance(given, Sequence) and not isinstance(given, str | bytes):
            if delay is not None and at is not None:
                raise ConfigError(f"{call}: delay and at: pass one of them")
            if len(given) != count:
                raise ConfigError(f"{call}: {name} has {len(given)} times for {count} messages: one for each, or one")
            one = _delay if name == "delay" else _at
            return [one(f"{name}[{index}]", value) or AT_ONCE for index, value in enumerate(given)]
    found = when(call, delay, at)  # type: ignore[arg-type]
    return None if found is None else [found] * count


def expiry(expires_in: Duration, now_s: float) -> Expiry:
    """Return when messages expire that are sent now. Raises ConfigError."""
    life_ms = duration_ms("expires_in", expires_in, least_ms=1, most_ms=MAX_DELAY_MS)
    return Expiry(life_ms, round(now_s * 1000))


def with_expiry(headers: Sequence[Header], expires: Expiry | None, due: When | None) -> list[Header]:
    """Return the headers of a message that is due at this time, None for now."""
    return [*headers] if expires is None else [*headers, expires.header(due)]


def _delay(name: str, delay: object) -> When | None:
    ms = duration_ms(name, delay, most_ms=MAX_DELAY_MS)
    return When(ms, True) if ms else None


def _at(name: str, at: object) -> When:
    if not isinstance(at, datetime):
        raise ConfigError(f"{name}={at!r}: expected a datetime with a time zone, not {type(at).__name__}")
    if at.tzinfo is None:
        raise ConfigError(
            f"{name}={at!r}: the datetime has no time zone: use datetime.now(timezone.utc) + …, or"
            " .astimezone() for this machine's zone"
        )
    return When(max(0, round(at.timestamp() * 1000)), False)
