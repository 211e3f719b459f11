"""The settings of one queue: the documents that define it, and the result of several of them.

A document is a table of marq.toml, a value of the queues topic, or the keywords of ``Queues.change``. All have the
same keys, with durations in seconds, and only the keys that they change (see :mod:`marq.settings.definitions`).
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from marq.settings.backoff import Backoff
from marq.settings.durations import pause_end, pause_end_ms
from marq.settings.hints import OURS
from marq.settings.limits import Limits, Rate, check_key
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
class Breaker:
    """A circuit breaker: it opens when a share ``failure_rate`` of the last ``window`` outcomes are failures.

    After ``reset_timeout_ms`` one message passes, whose outcome closes the breaker or starts another pause.
    """

    failure_rate: float = 0.5
    window: int = 20
    reset_timeout_ms: int = 30_000


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


#: Raises ConfigError for a wrong value; its text begins with the name of the key.
Check = Callable[[str, object], object]


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
    said = {key: value for document in documents for key, value in document.items()}
    values = _read(said, SETTINGS)
    values.setdefault("max_lease_ms", max(MAX_LEASE_MS, values.get("lease_ms", 0)))
    if values.get("delivery") == AT_MOST_ONCE:
        # With the marker first, a crash between ACQUIRE and commit duplicates messages.
        values["transactional"] = True
    if isinstance(paused := values.get("paused"), str):
        values["paused_until_ms"], values["paused"] = pause_end_ms(paused), True
    return QueueSettings(**values)


def settings_document(settings: QueueSettings) -> dict[str, Any]:
    """Return all settings with the keys and units of a document."""
    return {**_write(settings, SETTINGS), "paused": settings.paused_until or settings.paused}


# --- values -----------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """A key of a document: what its value must be, and how it is converted to the value of a field, and back.

    The field has the name of the key, and ``unit`` after it.
    """

    check: Check
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value
    unit: str = ""


def _read(document: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the fields of a checked document."""
    return {f"{key}{settings[key].unit}": settings[key].read(value) for key, value in document.items()}


def _write(fields: object, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the document of an object with these fields."""
    return {key: setting.write(getattr(fields, f"{key}{setting.unit}")) for key, setting in settings.items()}


def _checks(settings: Mapping[str, Setting]) -> dict[str, Check]:
    return {key: setting.check for key, setting in settings.items()}


def _none_is(word: object, setting: Setting) -> Setting:
    """Return a setting in whose documents ``word`` stands for None."""
    return setting._replace(
        read=lambda value: None if value == word else setting.read(value),
        write=lambda value: word if value is None else setting.write(value),
    )


def _duration(most: float, *, above: bool = False, or_false: bool = False) -> Setting:
    """Return the setting of a number of seconds; ``above``: 0 is not allowed, and less than a millisecond is one."""
    check = _number(0, most, unit=" of seconds", above=above, or_false=or_false)
    setting = Setting(check, lambda seconds: max(_ms(seconds), int(above)), _seconds, "_ms")
    return _none_is(False, setting) if or_false else setting


def _table_or_false(
    example: str, checks: Mapping[str, Check], read: Callable[[Any], object], write: Callable[[Any], dict[str, Any]]
) -> Setting:
    def check(name: str, value: object) -> None:
        if value is False:
            return
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: expected false or a table like {example}, not {value!r}")
        check_table(name, value, checks, separator=".")

    return _none_is(False, Setting(check, read, write))


def _rejects(said: object) -> bool:
    return said is False or said == REJECT


def _backoff(said: Any) -> Backoff:
    values = _read(said if isinstance(said, Mapping) else {"delays": said}, _BACKOFF)
    # A list is exact unless jitter is asked for.
    return Backoff(**({"jitter": False, **values} if "delays_ms" in values else values))


def _backoff_document(backoff: Backoff) -> dict[str, Any]:
    keys = ("delays", "jitter") if backoff.delays_ms else ("base", "factor", "max", "jitter")
    return _write(backoff, {key: _BACKOFF[key] for key in keys})


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _seconds(ms: int) -> float:
    return ms // 1000 if ms % 1000 == 0 else ms / 1000


# --- checks -----------------------------------------------------------------------------------------------------------


def expects(what: str, fits: Callable[[Any], object]) -> Check:
    """Return the check that a value fits; an error says ``what`` was expected."""

    def check(name: str, value: object) -> None:
        if not fits(value):
            raise ConfigError(f"{name}: expected {what}, not {value!r}")

    return check


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _number(least: float, most: float, *, unit: str = "", above: bool = False, or_false: bool = False) -> Check:
    limits = f"above {least:g}, to {most}" if above else f"from {least:g} to {most}"

    def fits(value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return (number and least <= value <= most and not (above and value == least)) or (or_false and value is False)

    return expects(f"a number{unit} {limits}{', or false' if or_false else ''}", fits)


def _count(most: int) -> Check:
    return expects(f"a whole number from 1 to {most}", lambda value: _is_count(value, most))


def _count_or(most: int, other: str | bool, noun: str = "whole number") -> Check:
    words = "false" if other is False else f'"{other}"'
    return expects(
        f"a {noun} from 1 to {most}, or {words}",
        # 0 equals False.
        lambda value: _is_count(value, most) or (value == other and isinstance(value, bool) is isinstance(other, bool)),
    )


def _either(one: str, other: str) -> Check:
    return expects(f"{one!r} or {other!r}", lambda value: value in (one, other))


switch = expects("true or false", lambda value: isinstance(value, bool))


def _delays(name: str, value: object) -> None:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_DELAYS:
        raise ConfigError(f"{name}: expected a list of 1 to {MAX_DELAYS} numbers of seconds, not {value!r}")
    for place, delay in enumerate(value):
        _SECONDS.check(f"{name}[{place}]", delay)


def _backoff_said(name: str, value: object) -> None:
    if isinstance(value, list | tuple):
        _delays(name, value)
        return
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{name}: expected a table like {{ base = 1, factor = 2, max = 600 }}, or a list of seconds like"
            f" [1, 5, 60], not {value!r}"
        )
    check_table(name, value, _checks(_BACKOFF), separator=".")
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


def named(rule: Callable[[object], object]) -> Check:
    def check(name: str, value: object) -> None:
        try:
            rule(value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error

    return check


def _suggestion(key: str, checks: Mapping[str, Check]) -> str:
    table, _, inner = key.partition(".")
    if table in checks:
        return f"write {table} = {{ {inner} = … }}, which replaces the whole table"
    ours = next((word for word in re.findall(r"\w+", OURS.get(key, "")) if word in checks), None)
    close = ours or closest_name(key, checks)
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


_SECONDS = _duration(MAX_SECONDS)
_BACKOFF: Mapping[str, Setting] = {
    "base": _SECONDS,
    "factor": Setting(_number(1, MAX_FACTOR)),
    "max": _SECONDS,
    "jitter": Setting(switch),
    "delays": Setting(
        _delays, lambda delays: tuple(map(_ms, delays)), lambda delays: list(map(_seconds, delays)), "_ms"
    ),
}
_BREAKER: Mapping[str, Setting] = {
    "failure_rate": Setting(_number(0, 1, above=True)),
    "window": Setting(_count(MAX_WINDOW)),
    "reset_timeout": _duration(MAX_SECONDS, above=True),
}
_KEY_LIMITS: Mapping[str, Check] = {"concurrency": _count(MAX_CONCURRENCY), "rate": named(Rate.parse)}
_LIMITS: Mapping[str, Check] = {
    **_KEY_LIMITS,
    "per_key": lambda name, value: check_table(name, value, _KEY_LIMITS, separator="."),
}
#: Every key of a document.
SETTINGS: Mapping[str, Setting] = {
    "lease": _duration(MAX_LEASE_SECONDS, above=True),
    "max_lease": _duration(MAX_LEASE_SECONDS, above=True),
    "max_attempts": Setting(
        _count_or(MAX_ATTEMPTS, UNLIMITED),
        lambda said: UNLIMITED_ATTEMPTS if said == UNLIMITED else said,
        lambda attempts: UNLIMITED if attempts == UNLIMITED_ATTEMPTS else attempts,
    ),
    "backoff": Setting(_backoff_said, _backoff, _backoff_document),
    "dead_letter": Setting(switch),
    "group": Setting(named(check_group_name)),
    "topic": Setting(named(check_topic_name)),
    "handler": Setting(
        expects("'module:function'", lambda said: isinstance(said, str) and re.fullmatch(r"\w[\w.]*:\w[\w.]*", said))
    ),
    "concurrency": Setting(_count(MAX_CONCURRENCY)),
    "delay": _SECONDS,
    "delivery": Setting(_either(AT_LEAST_ONCE, AT_MOST_ONCE)),
    "transactional": Setting(switch),
    "errors": Setting(
        _errors,
        lambda said: {name: None if _rejects(backoff) else _backoff(backoff) for name, backoff in said.items()},
        lambda errors: {name: _backoff_document(backoff) if backoff else REJECT for name, backoff in errors.items()},
    ),
    "breaker": _table_or_false(
        "{ failure_rate = 0.5, reset_timeout = 30 }",
        _checks(_BREAKER),
        lambda said: Breaker(**_read(said, _BREAKER)),
        lambda breaker: _write(breaker, _BREAKER),
    ),
    "partitions": _none_is(ALL, Setting(_count_or(MAX_SPREAD, ALL, "number of partitions"))),
    "paused": Setting(named(lambda said: isinstance(said, bool) or pause_end_ms(said))),
    "ordering": Setting(_either(UNORDERED, ORDERED_BY_KEY)),
    "on_dead_letter": Setting(_either(CONTINUE, BLOCK)),
    "start": Setting(_either(EARLIEST, LATEST)),
    "deduplication_window": _duration(MAX_DEDUPLICATION_SECONDS, above=True),
    "shutdown_timeout": _none_is(None, _duration(MAX_SHUTDOWN_SECONDS)),
    "tracebacks": Setting(switch),
    "key": Setting(named(check_key)),
    "limits": _table_or_false(
        '{ concurrency = 50, rate = "200/s", per_key = { concurrency = 2 } }', _LIMITS, Limits.read, Limits.document
    ),
    "fair": Setting(switch),
    "priority": _none_is(False, Setting(_count_or(MAX_PRIORITY, False))),
    "expires_after": _duration(MAX_SECONDS, above=True, or_false=True),
    "expired": Setting(_either(DROP, DEAD_LETTER)),
}
CHECKS: Mapping[str, Check] = _checks(SETTINGS)
