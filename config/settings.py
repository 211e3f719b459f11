"""Settings of the Faust application: constructor arguments, else ``MARQ_…`` in the environment, else ``.env``.

Durations are seconds, as everywhere in the public interface.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from marq.core.errors import ConfigError
from marq.core.names import Names


class Role(StrEnum):
    """What a worker may do: keep leases, run handlers, serve web pages."""

    TRACKER = "tracker"
    HANDLERS = "handlers"
    WEB = "web"


class AppSettings(BaseSettings):
    """What a worker needs to know; see docs/operations.md for each setting's effect."""

    model_config = SettingsConfigDict(env_prefix="MARQ_", env_file=".env", extra="ignore", frozen=True)

    bootstrap_servers: str = "127.0.0.1:9092"
    prefix: str = "marq"
    #: Where the lease table's RocksDB files are; each worker on a machine takes a folder of its own below it.
    data_dir: Path = Path(".marq/data")
    queues_file: Path = Path("config/queues.toml")
    web_bind: str = "127.0.0.1"
    #: The first port to try; a second worker on the machine takes the next free one.
    web_port: Annotated[int, Field(ge=1, le=65535)] = 6066
    #: Seconds after which a dead worker's partitions go to another one.
    session_timeout: Annotated[float, Field(ge=6, le=300)] = 10.0
    #: Seconds between two writes of the lease table; markers that end within it leave no row.
    flush_interval: Annotated[float, Field(gt=0, le=5)] = 1.0
    #: Seconds that a shutdown may take before the process ends anyway.
    stop_timeout: Annotated[float, Field(ge=1, le=300)] = 9.0
    #: Static membership: restarts of this worker cause no rebalance.
    instance_id: str | None = None
    #: Separated by commas in the environment.
    roles: Annotated[frozenset[Role], NoDecode] = frozenset(Role)
    #: Modules with functions that are decorated with ``marq.handler``, separated by commas in the environment.
    handlers: Annotated[tuple[str, ...], NoDecode] = ()

    @field_validator("prefix")
    @classmethod
    def _check_prefix(cls, prefix: str) -> str:
        try:
            return Names(prefix).prefix
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @field_validator("roles", mode="before")
    @classmethod
    def _read_roles(cls, roles: object) -> object:
        if not isinstance(roles, str):
            return roles
        found = _words(roles)
        if not found or not set(found) <= set(Role):
            raise ValueError(f"expected one or more of {', '.join(Role)}, separated by commas")
        return frozenset(map(Role, found))

    @field_validator("handlers", mode="before")
    @classmethod
    def _read_handlers(cls, modules: object) -> object:
        if not isinstance(modules, str):
            return modules
        found = _words(modules)
        for module in found:
            if not all(part.isidentifier() for part in module.split(".")):
                raise ValueError(f"expected names of modules, separated by commas: {module!r} is none")
        return tuple(dict.fromkeys(found))

    @property
    def names(self) -> Names:
        return Names(self.prefix)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def load_settings() -> AppSettings:
    """Read the environment and ``.env``.

    Raises:
        ConfigError: a value has the wrong type or is out of range; the message names the setting.
    """
    try:
        return AppSettings()
    except ValidationError as error:
        raise ConfigError(explain(error, lambda place: f"MARQ_{place.upper()}")) from error


def explain(error: ValidationError, name: object) -> str:
    """Say in one line per mistake which setting is wrong, what was found, and what was expected."""
    lines = []
    for mistake in error.errors():
        place = ".".join(str(part) for part in mistake["loc"])
        label = name(place) if callable(name) else f"{name}: {place}"
        if mistake["type"] == "extra_forbidden":
            lines.append(f"{label}: unknown key; see docs/operations.md for the known ones")
        else:
            lines.append(f"{label}: {mistake['msg'].removeprefix('Value error, ')} (found {mistake['input']!r})")
    return "; ".join(lines)
