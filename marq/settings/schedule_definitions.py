"""Definitions of schedules: messages that recur at the times of a cron expression.

A definition is a table ``[schedules.NAME]`` of marq.toml, or was made at run time: two layers of the queues topic, as
for queues (:mod:`marq.settings.definitions`). The cron library and time zones belong to the shell
(:mod:`marq.settings.cron`); :mod:`marq.core.deliveries.schedule_planner` decides when to send messages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from marq.settings.queue import Check, check_table, expects, named, switch
from marq.wire.errors import ConfigError
from marq.wire.markers import Headers, Source
from marq.wire.names import (
    MAX_HEADER_NAME_BYTES,
    RESERVED_HEADER,
    TYPE_HEADER,
    check_queue_name,
    check_type_name,
    markers_partition,
    schedule_topic,
    source_partition,
    utf8,
)

#: Layers of one schedule, weakest first: marq.toml, and changes at run time.
LAYERS = ("schedule-file", "schedule")
#: The key of a document that names the project that published it (:mod:`marq.settings.definitions`).
PROJECT = "project"
#: Keys that a definition must have.
REQUIRED = ("queue", "cron")

MAX_NAME = 100
MAX_CRON = 200
MAX_VALUE_BYTES = 65_536
MAX_HEADERS = 100
#: Names of common cron expressions.
CRON_NAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_NAME = re.compile(r"[a-zA-Z0-9._-]+")
_FIELD = re.compile(r"[0-9a-zA-Z*/,#-]+")
#: Names of zoneinfo, such as "Europe/Berlin", and no other paths.
_ZONE = re.compile(r"[A-Za-z0-9+_-]+(/[A-Za-z0-9+_-]+)*")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A message for a queue at each time of a cron expression in ``timezone``.

    After a time without workers or a pause of the queue, a message is sent for each missed time with ``catch_up``, else
    only for the first.
    """

    name: str
    queue: str
    cron: str
    value: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    timezone: str = "UTC"
    enabled: bool = True
    catch_up: bool = False
    type: str = ""

    @property
    def digest(self) -> str:
        """A value that is equal for definitions of the same messages at the same times."""
        said = [self.queue, self.cron, self.value, self.headers, self.timezone, *([self.type] if self.type else [])]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:12]

    @property
    def payload_headers(self) -> Headers:
        kind = [(TYPE_HEADER, self.type.encode())] if self.type else []
        return [*((name, value.encode()) for name, value in self.headers), *kind]

    def source(self, partitions: int) -> Source:
        """Return the source of its messages, whose numbers are their times in seconds since the epoch.

        A changed definition has another source in the same markers partition, so one owner has both.
        """
        topic = schedule_topic(self.name, self.digest)
        return Source(topic, source_partition(topic, home_partition(self.name, partitions), partitions))


def home_partition(name: str, partitions: int) -> int:
    """Return the markers partition whose owner plans a schedule."""
    return markers_partition(schedule_topic(name, ""), 0, partitions)


class ScheduleLayers:
    """The layers of all schedules, and the current schedules; ``version`` rises with each change."""

    def __init__(self) -> None:
        self.version = 0
        self.current: dict[str, Schedule] = {}
        self._layers: dict[str, dict[str, dict[str, Any]]] = {}
        self._publishers: dict[str, str] = {}

    def fold(self, layer: str, name: str, document: Mapping[str, Any] | None) -> None:
        """Fold one record of the queues topic. Raises ConfigError."""
        check_schedule_name(name)
        layers = self._layers.get(name, {})
        if document is None:
            layers.pop(layer, None)
        else:
            known: object = document
            if isinstance(document, Mapping):
                known = {key: value for key, value in document.items() if key in CHECKS}
            layers[layer] = check_schedule(known, f"the record '{layer}:{name}'")
            if layer == LAYERS[0]:
                self._publishers[name] = project_of(document)
        if layers:
            self._layers[name] = layers
        else:
            self._layers.pop(name, None)
        self.version += 1
        self.current.pop(name, None)
        found = schedule_of(name, *(layers[layer_name] for layer_name in LAYERS if layer_name in layers))
        if found is not None:
            self.current[name] = found

    def layer(self, layer: str, name: str) -> Mapping[str, Any] | None:
        """Return one layer of a schedule as it was written."""
        return self._layers.get(name, {}).get(layer)

    def publisher(self, name: str) -> str | None:
        """Return the project whose marq.toml defines a schedule, "" without a name; None if none does."""
        return None if self.layer(LAYERS[0], name) is None else self._publishers[name]

    def names(self) -> list[str]:
        """Return all schedules that have a layer, sorted."""
        return sorted(self._layers)


def project_of(document: object) -> str:
    """Return the project that a document of the queues topic names; "" if it names none."""
    project = document.get(PROJECT) if isinstance(document, Mapping) else None
    return project if isinstance(project, str) else ""


def schedule_of(name: str, *documents: Mapping[str, Any]) -> Schedule | None:
    """Return the schedule of checked documents, for each key the last value; None if a required key is missing."""
    values: dict[str, Any] = {}
    for document in documents:
        values.update(document)
    if any(key not in values for key in REQUIRED):
        return None
    values["headers"] = tuple(sorted(values.get("headers", {}).items()))
    return Schedule(name, **values)


def schedule_document(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule with the keys of a document."""
    document = asdict(schedule)
    del document["name"]
    return {**document, "headers": dict(schedule.headers)}


def check_schedule_name(name: object) -> str:
    """Return the name of a schedule. Raises ConfigError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise ConfigError(
            f"expected the name of a schedule, 1 to {MAX_NAME} of the characters a-z A-Z 0-9 . _ -, not {name!r}"
        )
    return name


def check_schedule(document: object, place: str, *, whole: bool = False) -> dict[str, Any]:
    """Return a copy of a document with settings of a schedule, its value as text.

    ``whole``: no required key may be missing.

    Raises:
        ConfigError: not a table, an unknown or missing key, or a wrong value; the text names ``place`` and key.
    """
    checked = check_table(place, document, CHECKS)
    missing = [key for key in REQUIRED if whole and key not in checked]
    if missing:
        raise ConfigError(f"{place}: {missing[0]} is missing; a schedule needs at least {' and '.join(REQUIRED)}")
    if "value" in checked:
        checked["value"] = _text_of(checked["value"])
    return checked


def _is_cron(value: object) -> bool:
    if not isinstance(value, str) or len(value) > MAX_CRON:
        return False
    fields = value.split()
    return value in CRON_NAMES or (len(fields) in (5, 6) and all(_FIELD.fullmatch(field) for field in fields))


def _is_zone(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME and _ZONE.fullmatch(value) is not None


def _text_of(value: object) -> str:
    """Return the text of a value: itself, or JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"expected text, or a value for JSON, not {value!r} ({error})") from error


def _value(value: object) -> None:
    size = len(utf8(_text_of(value), "it"))
    if size > MAX_VALUE_BYTES:
        raise ConfigError(f"it has {size} bytes; at most {MAX_VALUE_BYTES} are allowed")


def _headers(value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"expected a table of texts, not {value!r}")
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ConfigError(f"{name}: expected text, not {text!r}")
        if name.startswith(RESERVED_HEADER):
            raise ConfigError(f"{name}: names beginning with {RESERVED_HEADER!r} are reserved; use another name")
    # The total may not exceed the limit of one name, so no name can exceed it.
    size = sum(len(utf8(name + text, "it")) for name, text in value.items())
    if len(value) > MAX_HEADERS or size > MAX_HEADER_NAME_BYTES:
        raise ConfigError(f"at most {MAX_HEADERS} headers with {MAX_HEADER_NAME_BYTES} bytes in total are allowed")


#: Every key of a document, with what its value must be.
CHECKS: Mapping[str, Check] = {
    "queue": named(check_queue_name),
    "cron": expects(
        "a cron expression of five fields (minute, hour, day of the month, month, day of the week), as in"
        f" '0 9 * * MON-FRI', or of six with the seconds before them, or one of {', '.join(CRON_NAMES)}",
        _is_cron,
    ),
    "value": named(_value),
    "headers": named(_headers),
    "timezone": expects("the name of a time zone, as in 'Europe/Berlin'", _is_zone),
    "enabled": switch,
    "catch_up": switch,
    "type": named(check_type_name),
}
