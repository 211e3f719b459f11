"""Filters of dead letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypedDict

from marq.core.deliveries.dead_letter_records import DeadLetterRecord, dead_lettered_at_ms, text_of
from marq.dead_letters.error_kinds import error_kind
from marq.dead_letters.snapshots import Snapshot
from marq.settings.durations import Duration, duration_ms
from marq.settings.hints import refuse
from marq.wire.errors import ConfigError
from marq.wire.names import ERROR_HEADER, ID_HEADER, REASON_HEADER, RESERVED_HEADER

#: The maximum age: a hundred years.
_MAX_AGE_MS = 100 * 366 * 24 * 3_600_000


class Filters(TypedDict, total=False):
    """Filters of dead letters, which must all match; no filter matches all dead letters.

    ``reason`` and ``error`` match a part of the text, case-insensitively. ``header`` has names and values of the
    sender's headers, None for any value. ``older_than`` and ``newer_than`` are ages (seconds or timedelta) by this
    machine's clock, or moments (datetime with a time zone) at which the message was dead-lettered. ``id`` is the id of
    a message, or a list of ids. ``kind`` is one of :meth:`marq.DeadLetters.kinds`. ``as_of`` is the result of
    :meth:`marq.DeadLetters.snapshot`: only dead letters that existed then match, with their ages then.
    """

    reason: str | None
    error: str | None
    header: Mapping[str, bytes | str | None] | None
    older_than: Duration | datetime | None
    newer_than: Duration | datetime | None
    id: str | Sequence[str] | None
    kind: str | None
    as_of: Snapshot | None


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Checked filters; times in ms since the epoch."""

    reason: str
    error: str
    headers: Mapping[str, bytes | None]
    before_ms: int | None
    after_ms: int | None
    ids: frozenset[str]
    kind: str | None
    as_of: Snapshot | None

    @classmethod
    def read(cls, call: str, filters: Mapping[str, Any], now_ms: int) -> DeadLetterFilter:
        """Check the keywords of a call.

        Raises:
            ConfigError: a value can't be used; the text names it.
            TypeError: there is no such filter.
        """
        refuse(call, {name: value for name, value in filters.items() if name not in Filters.__annotations__})
        as_of = _as_of(filters.get("as_of"))
        if as_of is not None:
            now_ms = as_of.at_ms
        return cls(
            _text("reason", filters).lower(),
            _text("error", filters).lower(),
            _headers(filters.get("header")),
            _moment("older_than", filters, now_ms),
            _moment("newer_than", filters, now_ms),
            _ids(filters.get("id")),
            _kind(filters.get("kind")),
            as_of,
        )

    def fits(self, record: DeadLetterRecord) -> bool:
        headers = record.headers
        if self.as_of is not None and not self.as_of.includes(record.partition, record.offset):
            return False
        if self.ids and text_of(headers, ID_HEADER) not in self.ids:
            return False
        if self.kind is not None and error_kind(record) != self.kind:
            return False
        if self.before_ms is not None and dead_lettered_at_ms(record) > self.before_ms:
            return False
        if self.after_ms is not None and dead_lettered_at_ms(record) < self.after_ms:
            return False
        if self.reason and self.reason not in text_of(headers, REASON_HEADER).lower():
            return False
        if self.error and self.error not in text_of(headers, ERROR_HEADER).lower():
            return False
        values = dict(headers) if self.headers else {}
        return all(name in values and value in (None, values[name]) for name, value in self.headers.items())


def _text(name: str, filters: Mapping[str, Any]) -> str:
    value = filters.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}={value!r}: expected text (str) that is not empty")
    return value


def _kind(value: object) -> str | None:
    # Empty is the kind of dead letters without an error or a reason.
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"kind={value!r}: expected a kind (str) from DeadLetters.kinds()")
    return value


def _as_of(value: object) -> Snapshot | None:
    if value is not None and not isinstance(value, Snapshot):
        raise ConfigError(f"as_of={value!r}: expected the result of DeadLetters.snapshot()")
    return value


def _ids(value: object) -> frozenset[str]:
    if value is None:
        return frozenset()
    ids = [value] if isinstance(value, str) else value
    if not isinstance(ids, list | tuple) or not ids or not all(isinstance(id_, str) and id_ for id_ in ids):
        raise ConfigError(f"id={value!r}: expected the id of a message (str) that is not empty, or a list of ids")
    return frozenset(ids)


def _headers(filters: object) -> dict[str, bytes | None]:
    if filters is None:
        return {}
    if not isinstance(filters, Mapping):
        raise ConfigError(f"header={filters!r}: expected a dict of names (str) and values (bytes or str, None for any)")
    headers: dict[str, bytes | None] = {}
    for name, value in filters.items():
        if not isinstance(name, str) or not isinstance(value, bytes | str | None):
            raise ConfigError(
                f"header {name!r}: {value!r}: expected a name (str) and a value (bytes or str, None for any)"
            )
        if name.startswith(RESERVED_HEADER):
            raise ConfigError(
                f"header {name!r}: names beginning with {RESERVED_HEADER!r} are reserved; filter by reason=, error=,"
                " id=, older_than= or newer_than="
            )
        headers[name] = value.encode() if isinstance(value, str) else value
    return headers


def _moment(name: str, filters: Mapping[str, Any], now_ms: int) -> int | None:
    value = filters.get(name)
    if value is None:
        return None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ConfigError(
                f"{name}={value!r}: the datetime has no time zone; call .astimezone() for this machine's zone"
            )
        return round((value - _EPOCH) / timedelta(milliseconds=1))
    return now_ms - duration_ms(name, value, most_ms=_MAX_AGE_MS)


_EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
