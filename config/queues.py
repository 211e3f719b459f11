"""Queue definitions: ``config/queues.toml``, checked; a queue that nobody defined works with the defaults."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from config.settings import explain
from marq.core.backoff import Backoff
from marq.core.errors import ConfigError
from marq.core.names import check_queue_name
from marq.core.queue import QueueSettings

_MAX_SECONDS = 365 * 24 * 3600


class BackoffDefinition(BaseModel):
    """Seconds; see :class:`marq.core.backoff.Backoff`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    base: Annotated[float, Field(ge=0, le=_MAX_SECONDS)] = 1.0
    factor: Annotated[float, Field(ge=1, le=1000)] = 2.0
    max: Annotated[float, Field(ge=0, le=_MAX_SECONDS)] = 600.0
    jitter: bool = True


class QueueDefinition(BaseModel):
    """One table of queues.toml."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lease: Annotated[float, Field(gt=0, le=_MAX_SECONDS)] = 30.0
    max_attempts: Annotated[int, Field(ge=1, le=1_000_000)] = 5
    backoff: BackoffDefinition = BackoffDefinition()
    dead_letter: bool = True
    #: ``module:function``, run by the worker.
    handler: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    concurrency: Annotated[int, Field(ge=1, le=10_000)] = 64

    @property
    def settings(self) -> QueueSettings:
        """The same in the units of the core."""
        backoff = Backoff(
            int(self.backoff.base * 1000), self.backoff.factor, int(self.backoff.max * 1000), self.backoff.jitter
        )
        return QueueSettings(int(self.lease * 1000), self.max_attempts, backoff, self.dead_letter)


@dataclass(frozen=True)
class Queues:
    """All definitions; calling it gives the core's settings of a queue, defined or not."""

    defaults: QueueDefinition
    defined: Mapping[str, QueueDefinition]
    _settings: Mapping[str, QueueSettings]
    _default_settings: QueueSettings

    def __call__(self, queue: str) -> QueueSettings:
        return self._settings.get(queue, self._default_settings)

    @property
    def with_handlers(self) -> dict[str, QueueDefinition]:
        return {name: queue for name, queue in self.defined.items() if queue.handler}


def load_queues(path: Path) -> Queues:
    """Read a file of queue definitions; one that does not exist defines nothing.

    Raises:
        ConfigError: it is no TOML, or has an unknown key or a wrong value; the message names the queue and the key.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    unknown = set(document) - {"defaults", "queues"}
    if unknown:
        raise ConfigError(f"{path}: unknown table {min(unknown)!r}; expected [defaults] and [queues.NAME]")
    defaults = _table(document, "defaults", path)
    queues = _table(document, "queues", path)
    if "handler" in defaults:
        raise ConfigError(f"{path}: [defaults] can't name a handler; give each queue its own")
    base = _definition(defaults, f"{path}: [defaults]")
    defined = {
        check_queue_name(name): _definition(
            _merge(defaults, queue, f"{path}: [queues.{name}]"), f"{path}: [queues.{name}]"
        )
        for name, queue in queues.items()
    }
    return Queues(base, defined, {name: queue.settings for name, queue in defined.items()}, base.settings)


def _table(document: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name} is a table, not {table!r}")
    return table


def _merge(defaults: Mapping[str, Any], queue: object, place: str) -> Mapping[str, Any]:
    if not isinstance(queue, dict):
        raise ConfigError(f"{place} is a table, not {queue!r}")
    return {**defaults, **queue}


def _definition(table: Mapping[str, Any], place: str) -> QueueDefinition:
    # TOML has integers where a duration is a whole number of seconds; strictness is for text and booleans.
    try:
        return QueueDefinition.model_validate(table)
    except ValidationError as error:
        raise ConfigError(explain(error, place)) from error
