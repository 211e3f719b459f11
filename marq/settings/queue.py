"""The settings of one queue: the documents that define it, and the result of several of them.

A document is a table of marq.toml, a value of the queues topic, or the keywords of ``Queues.change``. All have the
same keys, with durations in seconds, and only the keys that they change (see :mod:`marq.settings.definitions`).
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from marq.settings.backoff import Backoff
from marq.settings.breaker_thresholds import Breaker
from marq.settings.hints import OURS
from marq.settings.limits import Limits, Rate, check_key
from marq.settings.pauses import pause_end, pause_end_ms
from marq.wire.errors import ConfigError
from marq.wire.names import check_group_name, check_topic_name, closest_name

MAX_SECONDS = 365 * 24 * 3600
#: A marker holds a lease as milliseconds in 32 bits: 49 days.
MAX_LEASE_SECONDS = (2**32 - 1) // 1000
#: The default of ``max_lease``, unless the lease is longer.
MAX_LEASE_MS = 3_600_000
MAX_ATTEMPTS = 1_000_000
#: No limit: the largest attempt of a marker, which no message reaches. In a document it is "unlimited".
UNLIMITED_ATTEMPTS = 2**32 - 1
UNLIMITED = "unlimited"
MAX_FACTOR = 1_000
MAX_CONCURRENCY = 10_000
#: Maximum numbers of entries in a list of delays, and of error classes with their own backoff.
MAX_DELAYS, MAX_ERRORS = 100, 100
MAX_WINDOW = 10_000
MAX_PRIORITY = 9
#: The longest memory of deduplication ids: each takes some 200 bytes of a worker's memory.
MAX_DEDUPLICATION_SECONDS = 7 * 24 * 3600
#: The longest wait for handlers of a stopping worker.
MAX_SHUTDOWN_SECONDS = 3600
#: A value instead of a backoff: the message becomes a dead letter immediately.
REJECT = "reject"
#: The value of ``partitions`` for all partitions.
ALL = "all"
MAX_SPREAD = 10_000
#: The settings with which keys take turns.
TURN_KEYS = ("limits", "fair", "priority")
#: Keys that [defaults] may not have.
OWN_KEYS = (
    "group", "topic", "handler", "partitions", "ordering", "on_dead_letter", "start", "key", "limits", "fair",
)  # fmt: skip


AT_LEAST_ONCE, AT_MOST_ONCE = "at-least-once", "at-most-once"
#: Values of ``start``.
EARLIEST, LATEST = "earliest", "latest"
#: Values of ``ordering``.
UNORDERED, ORDERED_BY_KEY = "none", "key"
#: Values of ``on_dead_letter``: whether the later messages of a dead letter's ordering key are delivered.
CONTINUE, BLOCK = "continue", "block"
#: The value of ``key`` for the ordering key, which is the record key in a queue's own topic.
ORDERING_KEY = "ordering"
#: Values of ``expired``: what becomes of an expired message.
DROP, DEAD_LETTER = "drop", "dead-letter"


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The settings of a queue.

    The consumer renews a lease until ``max_lease_ms`` after the delivery. ``max_attempts`` counts deliveries; after the
    last one a message becomes a dead letter, or is dropped if ``dead_letter`` is False. ``group`` is the named group
    whose consumers serve the queue. The records of ``topic`` are messages of the queue, from the first one on or, with
    ``start`` LATEST, after the last one when the queue is defined. ``handler`` is a ``module:function`` that workers
    run, with ``concurrency`` calls at a time. Messages are delivered ``delay_ms`` after sending. A consumer of a
    ``transactional`` queue acquires the messages of all its queues in transactions; a queue that delivers at most once
    is always transactional. ``partitions`` is the number of partitions of the messages topic, None for all. ``errors``
    maps names of exceptions to backoffs, None for those that no retry can fix. With ``ordering`` ORDERED_BY_KEY, a
    message is delivered after all earlier ones of its ordering key; with ``on_dead_letter`` BLOCK, a dead letter blocks
    the later ones of its key. Of messages with one deduplication id, only the first of ``deduplication_window_ms`` is
    delivered. A stopping worker waits for running handlers for ``shutdown_timeout_ms``, None for the worker's setting.
    With ``tracebacks``, a dead letter has the traceback of the last attempt. ``limits`` bounds how many messages run at
    a time and begin per second, of the queue and of each key; with ``fair``, keys take turns. ``key`` tells what the
    key of a message is, "ordering" for its ordering key. Of the queues of a group, those with the highest ``priority``
    come first; None for no priority. A message is not delivered ``expires_after_ms`` after it was sent, or after it was
    due if it was delayed; with ``expired`` DEAD_LETTER it becomes a dead letter then, otherwise it is dropped.

    While ``paused``, nothing is delivered; messages in flight end as usual, and senders continue. A pause ends at
    ``paused_until_ms``: :meth:`marq.settings.definitions.Definitions.end_pauses` replaces the settings then.
    """

    lease_ms: int = 30_000
    max_attempts: int = 5
    backoff: Backoff = field(default_factory=Backoff)
    dead_letter: bool = True
    group: str | None = None
    topic: str | None = None
    handler: str | None = None
    concurrency: int = 64
    delay_ms: int = 0
    delivery: str = AT_LEAST_ONCE
    transactional: bool = False
    errors: Mapping[str, Backoff | None] = field(default_factory=dict)
    breaker: Breaker | None = None
    partitions: int | None = None
    paused: bool = False
    max_lease_ms: int = MAX_LEASE_MS
    paused_until_ms: int | None = None
    ordering: str = UNORDERED
    on_dead_letter: str = CONTINUE
    start: str = EARLIEST
    deduplication_window_ms: int = 300_000
    shutdown_timeout_ms: int | None = None
    tracebacks: bool = True
    key: str = ORDERING_KEY
    limits: Limits | None = None
    fair: bool = False
    priority: int | None = None
    expires_after_ms: int | None = None
    expired: str = DROP

    @property
    def by_key(self) -> bool:
        """Whether its consumers decide by key which message is next, and messages keep their places until then."""
        return self.ordered or self.limited

    @property
    def limited(self) -> bool:
        """Whether keys take turns (:mod:`marq.consumer.turns`)."""
        return self.limits is not None or self.fair or self.priority is not None

    @property
    def ordered(self) -> bool:
        """Whether messages of the same ordering key are delivered one after the other."""
        return self.ordering == ORDERED_BY_KEY

    @property
    def paused_until(self) -> str | None:
        """The end of the pause in ISO 8601; None without an end."""
        return None if self.paused_until_ms is None else pause_end(self.paused_until_ms / 1000)


Check = Callable[[str, object], None]


def check_document(document: object, place: str) -> dict[str, Any]:
    """Return a copy of a queue's document. Raises ConfigError with ``place`` and key."""
    return check_table(place, document, CHECKS)


def check_defaults(document: object, place: str) -> dict[str, Any]:
    """Return a copy of a document for all queues. Raises ConfigError with ``place`` and key."""
    checked = check_document(document, place)
    for key in OWN_KEYS:
        if key in checked:
            raise ConfigError(f"{place} can't name {key!r}; give each queue its own")
    return checked


def queue_settings(*documents: Mapping[str, Any]) -> QueueSettings:
    """Return the settings of checked documents: for each key the last value, or the built-in default."""
    values: dict[str, Any] = {}
    for document in documents:
        values.update(document)
    if "lease" in values:
        values["lease_ms"] = max(_ms(values.pop("lease")), 1)
    if "max_lease" in values:
        values["max_lease_ms"] = max(_ms(values.pop("max_lease")), 1)
    else:
        values["max_lease_ms"] = max(MAX_LEASE_MS, values.get("lease_ms", 0))
    if "delay" in values:
        values["delay_ms"] = _ms(values.pop("delay"))
    if "deduplication_window" in values:
        values["deduplication_window_ms"] = max(_ms(values.pop("deduplication_window")), 1)
    if "shutdown_timeout" in values:
        values["shutdown_timeout_ms"] = _ms(values.pop("shutdown_timeout"))
    if "expires_after" in values:
        expires_after = values.pop("expires_after")
        values["expires_after_ms"] = None if expires_after is False else max(_ms(expires_after), 1)
    if values.get("delivery") == AT_MOST_ONCE:
        # With the marker first, a crash between ACQUIRE and commit duplicates messages.
        values["transactional"] = True
    if values.get("max_attempts") == UNLIMITED:
        values["max_attempts"] = UNLIMITED_ATTEMPTS
    if "backoff" in values:
        values["backoff"] = _backoff(values["backoff"])
    if "errors" in values:
        values["errors"] = {name: None if _rejects(said) else _backoff(said) for name, said in values["errors"].items()}
    if "breaker" in values:
        values["breaker"] = _breaker(values["breaker"])
    if "limits" in values:
        values["limits"] = None if values["limits"] is False else Limits.read(values["limits"])
    if values.get("priority") is False:
        values["priority"] = None
    if values.get("partitions") == ALL:
        values["partitions"] = None
    if isinstance(values.get("paused"), str):
        values["paused_until_ms"], values["paused"] = pause_end_ms(values["paused"]), True
    return QueueSettings(**values)


def settings_document(settings: QueueSettings) -> dict[str, Any]:
    """Return all settings with the keys and units of a document."""
    return {
        "lease": _seconds(settings.lease_ms),
        "max_lease": _seconds(settings.max_lease_ms),
        "max_attempts": UNLIMITED if settings.max_attempts == UNLIMITED_ATTEMPTS else settings.max_attempts,
        "backoff": _backoff_document(settings.backoff),
        "dead_letter": settings.dead_letter,
        "group": settings.group,
        "topic": settings.topic,
        "handler": settings.handler,
        "concurrency": settings.concurrency,
        "delay": _seconds(settings.delay_ms),
        "delivery": settings.delivery,
        "transactional": settings.transactional,
        "errors": {name: REJECT if said is None else _backoff_document(said) for name, said in settings.errors.items()},
        "breaker": False if settings.breaker is None else _breaker_document(settings.breaker),
        "partitions": ALL if settings.partitions is None else settings.partitions,
        "paused": settings.paused_until or settings.paused,
        "ordering": settings.ordering,
        "on_dead_letter": settings.on_dead_letter,
        "start": settings.start,
        "deduplication_window": _seconds(settings.deduplication_window_ms),
        "shutdown_timeout": None if settings.shutdown_timeout_ms is None else _seconds(settings.shutdown_timeout_ms),
        "tracebacks": settings.tracebacks,
        "key": settings.key,
        "limits": False if settings.limits is None else settings.limits.document(),
        "fair": settings.fair,
        "priority": False if settings.priority is None else settings.priority,
        "expires_after": False if settings.expires_after_ms is None else _seconds(settings.expires_after_ms),
        "expired": settings.expired,
    }


def _backoff_document(backoff: Backoff) -> dict[str, Any]:
    if backoff.delays_ms:
        return {"delays": [_seconds(delay_ms) for delay_ms in backoff.delays_ms], "jitter": backoff.jitter}
    return {
        "base": _seconds(backoff.base_ms),
        "factor": backoff.factor,
        "max": _seconds(backoff.max_ms),
        "jitter": backoff.jitter,
    }


def _breaker_document(breaker: Breaker) -> dict[str, Any]:
    return {
        "failure_rate": breaker.failure_rate,
        "window": breaker.window,
        "reset_timeout": _seconds(breaker.reset_timeout_ms),
    }


def _breaker(said: Any) -> Breaker | None:
    if said is False:
        return None
    values = dict(said)
    if "reset_timeout" in values:
        values["reset_timeout_ms"] = max(_ms(values.pop("reset_timeout")), 1)
    return Breaker(**values)


def _rejects(said: object) -> bool:
    return said is False or said == REJECT


def _backoff(said: Any) -> Backoff:
    values = dict(said) if isinstance(said, Mapping) else {"delays": said}
    if "delays" in values:
        # A list is exact unless jitter is asked for.
        delays_ms = tuple(_ms(delay) for delay in values["delays"])
        return Backoff(jitter=values.get("jitter", False), delays_ms=delays_ms)
    for key in ("base", "max"):
        if key in values:
            values[f"{key}_ms"] = _ms(values.pop(key))
    return Backoff(**values)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _seconds(ms: int) -> float:
    return ms // 1000 if ms % 1000 == 0 else ms / 1000


def _number(least: float, most: float, *, unit: str = "", above: bool = False) -> Check:
    limits = f"above {least:g}, to {most}" if above else f"from {least:g} to {most}"

    def check(name: str, value: object) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= value <= most or (above and value == least):  # type: ignore[operator]
            raise ConfigError(f"{name}: expected a number{unit} {limits}, not {value!r}")

    return check


def _seconds_or_false(name: str, value: object) -> None:
    try:
        if value is not False:
            _number(0, MAX_SECONDS, above=True)(name, value)
    except ConfigError:
        raise ConfigError(
            f"{name}: expected a number of seconds above 0, to {MAX_SECONDS}, or false, not {value!r}"
        ) from None


def _count(most: int) -> Check:
    def check(name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError(f"{name}: expected a whole number from 1 to {most}, not {value!r}")

    return check


def _count_or(most: int, other: str | bool, noun: str = "whole number") -> Check:
    words = "false" if other is False else f'"{other}"'

    def check(name: str, value: object) -> None:
        try:
            # 0 equals False.
            if value != other or isinstance(value, bool) is not isinstance(other, bool):
                _count(most)(name, value)
        except ConfigError:
            raise ConfigError(f"{name}: expected a {noun} from 1 to {most}, or {words}, not {value!r}") from None

    return check


def switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: expected true or false, not {value!r}")


def _delays(name: str, value: object) -> None:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_DELAYS:
        raise ConfigError(f"{name}: expected a list of 1 to {MAX_DELAYS} numbers of seconds, not {value!r}")
    for place, delay in enumerate(value):
        _SECONDS(f"{name}[{place}]", delay)


def _backoff_said(name: str, value: object) -> None:
    if isinstance(value, list | tuple):
        _delays(name, value)
        return
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{name}: expected a table like {{ base = 1, factor = 2, max = 600 }}, or a list of seconds like"
            f" [1, 5, 60], not {value!r}"
        )
    check_table(name, value, _BACKOFF, separator=".")
    others = sorted(value.keys() - {"delays", "jitter"})
    if "delays" in value and others:
        raise ConfigError(f"{name}: delays and {', '.join(others)}: use either a list of delays or a computed backoff")


def _errors(name: str, value: object) -> None:
    if not isinstance(value, Mapping) or len(value) > MAX_ERRORS:
        raise ConfigError(f"{name}: expected a table of at most {MAX_ERRORS} names of exceptions, not {value!r}")
    for error, said in value.items():
        _check_error_name(name, error)
        if not _rejects(said):
            if isinstance(said, str | bool):
                raise ConfigError(f'{name}.{error}: expected a backoff, or "{REJECT}", not {said!r}')
            _backoff_said(f"{name}.{error}", said)


def _check_error_name(name: str, error: object) -> None:
    if not isinstance(error, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", error):
        raise ConfigError(f"{name}: expected the name of an exception, like ValueError or module.Class, not {error!r}")
    if "." not in error:
        found = getattr(builtins, error, None)
        if not isinstance(found, type) or not issubclass(found, Exception):
            raise ConfigError(f"{name}: {error} is not a built-in exception; write module.{error}")


def _table_or_false(example: str, checks: Mapping[str, Check]) -> Check:
    def check(name: str, value: object) -> None:
        if value is False:
            return
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: expected false or a table like {example}, not {value!r}")
        check_table(name, value, checks, separator=".")

    return check


def _key_limits_said(name: str, value: object) -> None:
    check_table(name, value, _KEY_LIMITS, separator=".")


def _paused(name: str, value: object) -> None:
    if not isinstance(value, bool):
        named(pause_end_ms)(name, value)


def _either(one: str, other: str) -> Check:
    def check(name: str, value: object) -> None:
        if value not in (one, other):
            raise ConfigError(f"{name}: expected {one!r} or {other!r}, not {value!r}")

    return check


def _handler(name: str, value: object) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"\w[\w.]*:\w[\w.]*", value):
        raise ConfigError(f"{name}: expected 'module:function', not {value!r}")


def named(rule: Callable[[object], object]) -> Check:
    def check(name: str, value: object) -> None:
        try:
            rule(value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error

    return check


def _suggestion(key: str, checks: Mapping[str, Check]) -> str:
    ours = OURS.get(key, "").partition(" ")[0]
    close = ours if ours in checks else closest_name(key, checks)
    return f"did you mean {close!r}?" if close else f"expected one of {', '.join(checks)}"


def check_table(place: str, table: object, checks: Mapping[str, Check], separator: str = ": ") -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{place}: expected a table of settings, not {table!r}")
    for key, value in table.items():
        name = f"{place}{separator}{key}"
        if key not in checks:
            raise ConfigError(f"{name}: unknown key; {_suggestion(str(key), checks)}")
        checks[key](name, value)
    return dict(table)


_SECONDS = _number(0, MAX_SECONDS, unit=" of seconds")
_BACKOFF: Mapping[str, Check] = {
    "base": _SECONDS,
    "factor": _number(1, MAX_FACTOR),
    "max": _SECONDS,
    "jitter": switch,
    "delays": _delays,
}
_BREAKER: Mapping[str, Check] = {
    "failure_rate": _number(0, 1, above=True),
    "window": _count(MAX_WINDOW),
    "reset_timeout": _number(0, MAX_SECONDS, unit=" of seconds", above=True),
}
_KEY_LIMITS: Mapping[str, Check] = {"concurrency": _count(MAX_CONCURRENCY), "rate": named(Rate.parse)}
_LIMITS: Mapping[str, Check] = {**_KEY_LIMITS, "per_key": _key_limits_said}
#: Every key of a document, with what its value must be.
CHECKS: Mapping[str, Check] = {
    "lease": _number(0, MAX_LEASE_SECONDS, unit=" of seconds", above=True),
    "max_lease": _number(0, MAX_LEASE_SECONDS, unit=" of seconds", above=True),
    "max_attempts": _count_or(MAX_ATTEMPTS, UNLIMITED),
    "backoff": _backoff_said,
    "dead_letter": switch,
    "group": named(check_group_name),
    "topic": named(check_topic_name),
    "handler": _handler,
    "concurrency": _count(MAX_CONCURRENCY),
    "delay": _SECONDS,
    "delivery": _either(AT_LEAST_ONCE, AT_MOST_ONCE),
    "transactional": switch,
    "errors": _errors,
    "breaker": _table_or_false("{ failure_rate = 0.5, reset_timeout = 30 }", _BREAKER),
    "partitions": _count_or(MAX_SPREAD, ALL, "number of partitions"),
    "paused": _paused,
    "ordering": _either(UNORDERED, ORDERED_BY_KEY),
    "on_dead_letter": _either(CONTINUE, BLOCK),
    "start": _either(EARLIEST, LATEST),
    "deduplication_window": _number(0, MAX_DEDUPLICATION_SECONDS, unit=" of seconds", above=True),
    "shutdown_timeout": _number(0, MAX_SHUTDOWN_SECONDS, unit=" of seconds"),
    "tracebacks": switch,
    "key": named(check_key),
    "limits": _table_or_false('{ concurrency = 50, rate = "200/s", per_key = { concurrency = 2 } }', _LIMITS),
    "fair": switch,
    "priority": _count_or(MAX_PRIORITY, False),
    "expires_after": _seconds_or_false,
    "expired": _either(DROP, DEAD_LETTER),
}
