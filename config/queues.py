"""Definitions of queues and schedules in ``marq.toml``, or another file: read and checked.

Workers publish them at their start. They use the definitions in the queues topic (:mod:`marq.settings.definitions`),
not the file.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from marq.settings.combinations import check_combinations
from marq.settings.cron import check_times
from marq.settings.definitions import DEFAULTS_KEY, Definitions, defaults_key, layer_key
from marq.settings.queue import check_defaults, check_document
from marq.settings.schedule_definitions import LAYERS as SCHEDULE_LAYERS
from marq.settings.schedule_definitions import PROJECT, check_schedule, check_schedule_name, schedule_of
from marq.wire.errors import ConfigError
from marq.wire.names import check_queue_name
from marq_worker.config.settings import PROJECT_FILE, AppSettings

FILE_LAYER = SCHEDULE_LAYERS[0]


@dataclass(frozen=True)
class QueuesFile:
    """The documents of a file: defaults, queues by name, schedules by name.

    ``project`` is the name of the project that publishes them, "" if it has none. ``present``: whether the file exists.
    """

    path: Path
    defaults: Mapping[str, Any]
    queues: Mapping[str, Mapping[str, Any]]
    schedules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    project: str = ""
    present: bool = True

    @property
    def runs_project(self) -> str | None:
        """The project whose handlers a worker with this file runs, as in marq.settings.removed_handlers.handler_of."""
        return self.project if self.present or self.project else None

    @property
    def records(self) -> dict[bytes, Mapping[str, Any]]:
        """The records that publish the documents, by key."""
        records = {defaults_key(self.project): self.defaults} if self.defaults else {}
        records |= {layer_key("file", name): document for name, document in self.queues.items()}
        records |= {layer_key(FILE_LAYER, name): document for name, document in self.schedules.items()}
        named = {PROJECT: self.project} if self.project else {}
        return {key: {**document, **named} for key, document in records.items()}

    @property
    def fingerprint(self) -> str:
        """Equal for files with equal definitions, independent of path and layout."""
        document = json.dumps(
            [self.defaults, self.queues, *([self.schedules] if self.schedules else [])], sort_keys=True, default=dict
        )
        return f"{crc32(document.encode()):08x}"

    @property
    def definitions(self) -> Definitions:
        """The definitions that the file alone would make."""
        definitions = Definitions()
        definitions.fold(DEFAULTS_KEY, self.defaults)
        for key, document in self.records.items():
            definitions.fold(key, document)
        return definitions


def load_queues(path: Path, decorated: Collection[str] | None = (), project: str | None = None) -> QueuesFile:
    """Read a file of queue definitions of a project; a missing file defines nothing.

    ``decorated``: queues that have a handler in code; None if not known, in which case mixed groups are not rejected.
    The ConfigError names the queue (or schedule) and the key.
    """
    present = path.exists()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8")) if present else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    # Its settings are read elsewhere (:mod:`marq_worker.config.settings`).
    settings = {"settings"} if path.absolute() == PROJECT_FILE.absolute() else set()
    unknown = set(document) - {"defaults", "queues", "schedules"} - settings
    if unknown:
        if settings and min(unknown) in AppSettings.model_fields:
            raise ConfigError(f"{path}: {min(unknown)} is a setting: write it below [settings]")
        raise ConfigError(
            f"{path}: unknown table {min(unknown)!r}; expected [defaults], [queues.NAME] and [schedules.NAME]"
        )
    defaults = check_defaults(document.get("defaults", {}), f"{path}: [defaults]")
    queues = document.get("queues", {})
    if not isinstance(queues, dict):
        raise ConfigError(f"{path}: expected tables [queues.NAME], not {queues!r}")
    file = QueuesFile(
        path,
        defaults,
        {check_queue_name(name): check_document(queue, f"{path}: [queues.{name}]") for name, queue in queues.items()},
        _schedules(path, document.get("schedules", {})),
        project or "",
        present,
    )
    try:
        check_combinations(file.definitions)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if decorated is not None:
        _check_groups(file, decorated)
    return file


def _schedules(path: Path, tables: object) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: expected tables [schedules.NAME], not {tables!r}")
    checked = {}
    for name, table in tables.items():
        document = check_schedule(table, f"{path}: [schedules.{check_schedule_name(name)}]", whole=True)
        checked[name] = document
        schedule = schedule_of(name, document)
        assert schedule is not None, "it was checked to be whole"
        try:
            check_times(schedule, time.time())
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    return checked


def _check_groups(file: QueuesFile, decorated: Collection[str]) -> None:
    definitions = file.definitions
    handled: dict[str, str] = {}
    unhandled: dict[str, str] = {}
    for queue in file.queues:
        group = definitions.group(queue)
        if group is not None:
            has_one = definitions.settings(queue).handler is not None or queue in decorated
            (handled if has_one else unhandled).setdefault(group, queue)
    for group in sorted(handled.keys() & unhandled.keys()):
        raise ConfigError(
            f"{file.path}: group {group!r}: queue {handled[group]!r} has a handler and queue {unhandled[group]!r} has"
            " none. A group is read as a whole, by workers or by consumers: give both a handler, or move one to"
            " another group"
        )
