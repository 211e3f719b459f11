"""The delivery time of a message: after a ``delay``, or ``at`` a time; and the time at which it expires."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from marq.client.message_checks import Header
from marq.settings.durations import Duration, duration_ms
from marq.wire.errors import ConfigError
from marq.wire.names import EXPIRES_AT_HEADER

#: A delay may be as long as the calendar: more than 9,000 years.
MAX_DELAY_MS = 10_000 * 366 * 24 * 3_600_000

Delay = Duration | Sequence[Duration]
At = datetime | Sequence[datetime]


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
