"""Which dead letters are meant, as users say it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Self, TypedDict

from marq.core.dead_letters import LetterRecord, died_at_ms, kind_of, text_of
from marq.core.errors import ConfigError
from marq.core.names import ERROR_HEADER, ID_HEADER, REASON_HEADER, RESERVED_HEADER
from marq.durations import Duration, duration_ms
from marq.words import refuse

#: A hundred years: of an age.
_MAX_AGE_MS = 100 * 366 * 24 * 3_600_000


class Snapshot(NamedTuple):
    """The dead letters that existed at one moment: those before the offset ``ends`` has for their partition.

    Pass the same snapshot when you count and when you act, so that the action does not affect messages that were
    dead-lettered in between. ``at_ms`` (ms since the epoch) is the time to which ages refer.
    """

    at_ms: int
    ends: Mapping[int, int]

    def __str__(self) -> str:
        return f"{self.at_ms}/{','.join(f'{partition}:{end}' for partition, end in sorted(self.ends.items()))}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what ``str()`` returned.

        Raises:
            ConfigError: the text is not a snapshot.
        """
        match = re.fullmatch(r"(\d{1,15})/((?:\d{1,9}:\d{1,18},?)*)", text, re.ASCII)
        if match is None:
            raise ConfigError(f"as_of={text}: not a snapshot of the dead letters; get a new one and pass it unchanged")
        ends = [pair.split(":") for pair in match[2].split(",") if pair]
        return cls(int(match[1]), {int(partition): int(end) for partition, end in ends})


class Filters(TypedDict, total=False):
    """Which dead letters are meant: those that fit all that is said; without any, all.

    ``reason`` and ``error`` are parts of what is said there, whatever the case of the letters. ``header`` has names and
    values of the sender's headers, None for any value. ``older_than`` and ``newer_than`` are ages (seconds or
    timedelta) by this machine's clock, or moments (datetime with a time zone) at which the message died. ``id`` is the
    id of one message, or a list of ids. ``kind`` is that of :meth:`marq.DeadLetters.kinds`, as it is told there.
    ``as_of`` is what :meth:`marq.DeadLetters.snapshot` returned: only letters that existed then, with their ages then.
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
class LetterFilter:
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
    def read(cls, call: str, given: Mapping[str, Any], now_ms: int) -> LetterFilter:
        """Return the filter that a call's keywords say.

        Raises:
            ConfigError: a value can't be used; the text names it.
            TypeError: there is no such filter.
        """
        refuse(call, {name: value for name, value in given.items() if name not in Filters.__annotations__})
        as_of = _as_of(given.get("as_of"))
        if as_of is not None:
            now_ms = as_of.at_ms
        return cls(
            _text("reason", given).lower(),
            _text("error", given).lower(),
            _headers(given.get("header")),
            _moment("older_than", given, now_ms),
            _moment("newer_than", given, now_ms),
            _ids(given.get("id")),
            _kind(given.get("kind")),
            as_of,
        )

    def fits(self, record: LetterRecord) -> bool:
        """Whether a dead letter is meant."""
        headers = record.headers
        if self.as_of is not None and record.offset >= self.as_of.ends.get(record.partition, 0):
            return False
        if self.ids and text_of(headers, ID_HEADER) not in self.ids:
            return False
        if self.kind is not None and kind_of(record) != self.kind:
            return False
        if self.before_ms is not None and died_at_ms(record) > self.before_ms:
            return False
        if self.after_ms is not None and died_at_ms(record) < self.after_ms:
            return False
        if self.reason and self.reason not in text_of(headers, REASON_HEADER).lower():
            return False
        if self.error and self.error not in text_of(headers, ERROR_HEADER).lower():
            return False
        return not self.headers or self._has_headers(dict(headers))

    def _has_headers(self, found: Mapping[str, bytes | None]) -> bool:
        return all(name in found and (value is None or found[name] == value) for name, value in self.headers.items())


def _text(name: str, given: Mapping[str, Any]) -> str:
    value = given.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}={value!r}: expected text (str) that is not empty")
    return value


def _kind(given: object) -> str | None:
    # Empty: of those that died without a word.
    if given is not None and not isinstance(given, str):
        raise ConfigError(f"kind={given!r}: expected text (str), as DeadLetters.kinds() tells it")
    return given


def _as_of(given: object) -> Snapshot | None:
    if given is not None and not isinstance(given, Snapshot):
        raise ConfigError(f"as_of={given!r}: expected what DeadLetters.snapshot() returned")
    return given


def _ids(given: object) -> frozenset[str]:
    if given is None:
        return frozenset()
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, list | tuple) or not found or not all(isinstance(each, str) and each for each in found):
        raise ConfigError(f"id={given!r}: expected the id of a message (str) that is not empty, or a list of ids")
    return frozenset(found)


def _headers(given: object) -> dict[str, bytes | None]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"header={given!r}: expected a dict of names (str) and values (bytes or str, None for any)")
    found: dict[str, bytes | None] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, bytes | str | None):
            raise ConfigError(
                f"header {name!r}: {value!r}: expected a name (str) and a value (bytes or str, None for any)"
            )
        if name.startswith(RESERVED_HEADER):
            raise ConfigError(
                f"header {name!r}: names beginning with {RESERVED_HEADER!r} are marq's own; filter by reason=, error=,"
                " id=, older_than= or newer_than="
            )
        found[name] = value.encode() if isinstance(value, str) else value
    return found


def _moment(name: str, given: Mapping[str, Any], now_ms: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ConfigError(
                f"{name}={value!r}: a datetime without a time zone says nothing: take .astimezone() for one of this"
                " machine's zone"
            )
        return round((value - _EPOCH) / timedelta(milliseconds=1))
    return now_ms - duration_ms(name, value, most_ms=_MAX_AGE_MS)


_EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
