"""Settings of the Faust application: ``MARQ_…`` in the environment, else in ``.env``.

The settings of clients (:mod:`marq.settings`) are read from the same place by a worker and by the commands; a service
that only imports marq never reads a file.
Durations are seconds, as everywhere in the public interface.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from dotenv import dotenv_values
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from marq.core.errors import ConfigError
from marq.core.names import PREFIX_RULE, Names
from marq.settings import ClientSettings

#: Read from the directory that the worker or the command is started in.
ENV_FILE = Path(".env")


class Role(StrEnum):
    """What a worker may do: keep leases, run handlers, serve web pages."""

    TRACKER = "tracker"
    HANDLERS = "handlers"
    WEB = "web"


class LogFormat(StrEnum):
    """How a worker's log is written."""

    TEXT = "text"
    JSON = "json"


class AppSettings(BaseSettings):
    """What a worker needs to know; see docs/operations.md for each setting's effect."""

    model_config = SettingsConfigDict(
        env_prefix="MARQ_", env_file=ENV_FILE, env_ignore_empty=True, extra="ignore", frozen=True
    )

    bootstrap_servers: str = "127.0.0.1:9092"
    prefix: str = "marq"
    #: Where the lease table's RocksDB files are; each worker on a machine takes a folder of its own below it.
    data_dir: Path = Path(".marq/data")
    queues_file: Path = Path("config/queues.toml")
    web_bind: str = "127.0.0.1"
    #: The first port to try; a second worker on the machine takes the next free one.
    web_port: Annotated[int, Field(ge=1, le=65535)] = 6066
    #: The name or address by which other workers and people reach it.
    web_host: str | None = None
    #: NAME:PASSWORD or NAME:HASH, and tokens, each separated by commas: who may act, and who may only look.
    web_operators: SecretStr | None = None
    web_viewers: SecretStr | None = None
    web_operator_tokens: SecretStr | None = None
    web_viewer_tokens: SecretStr | None = None
    #: Seconds after which a dead worker's partitions go to another one.
    session_timeout: Annotated[float, Field(ge=6, le=300)] = 10.0
    #: Seconds between two writes of the lease table; markers that end within it leave no row.
    flush_interval: Annotated[float, Field(gt=0, le=5)] = 1.0
    #: Seconds that a shutdown may take before the process ends anyway.
    stop_timeout: Annotated[float, Field(ge=1, le=300)] = 9.0
    #: Seconds after which a worker that makes no progress ends itself, so that its supervisor starts it again.
    watchdog: Annotated[float, Field(ge=5, le=3600)] = 60.0
    #: Whether a tracker reads the keys of all messages, to count what waits in each queue.
    census: bool = True
    #: Static membership: restarts of this worker cause no rebalance.
    instance_id: str | None = None
    #: Separated by commas in the environment.
    roles: Annotated[frozenset[Role], NoDecode] = frozenset(Role)
    #: Modules with functions that are decorated with ``marq.handler``, separated by commas in the environment.
    handlers: Annotated[tuple[str, ...], NoDecode] = ()

    log_format: LogFormat = LogFormat.TEXT
    #: Whether handlers are told of in spans, by OpenTelemetry.
    tracing: bool = False
    #: Fields of JSON payloads, and headers, that pages do not show; separated by commas in the environment.
    redact: Annotated[tuple[str, ...], NoDecode] = ()

    @field_validator("prefix")
    @classmethod
    def _check_prefix(cls, prefix: str) -> str:
        try:
            return Names(prefix).prefix
        except ConfigError as error:
            raise ValueError(PREFIX_RULE) from error

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

    @field_validator("redact", mode="before")
    @classmethod
    def _read_redact(cls, names: object) -> object:
        return tuple(dict.fromkeys(_words(names))) if isinstance(names, str) else names

    @property
    def names(self) -> Names:
        return Names(self.prefix)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def read_environment() -> dict[str, str]:
    """Return the variables of ``.env``, if there is one, and over them those of the environment that are not empty.

    Raises:
        ConfigError: the file can't be read.
    """
    try:
        written = dotenv_values(ENV_FILE) if ENV_FILE.is_file() else {}
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(error) from error
    given = {name: value for name, value in os.environ.items() if value.strip()}
    return {**{name: value for name, value in written.items() if value is not None}, **given}


def load_settings() -> AppSettings:
    """Read the settings of a worker; a variable that is empty counts as one that is not there.

    Raises:
        ConfigError: a value has the wrong type or is out of range; the message names the setting.
    """
    try:
        return AppSettings()
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(error) from error


def load_client_settings(settings: AppSettings) -> ClientSettings:
    """Read the settings of a worker's clients; its address and prefix are those of the worker.

    Raises:
        ConfigError: a value has the wrong type or is out of range; the message names the setting.
    """
    return ClientSettings.read(settings.bootstrap_servers, {"prefix": settings.prefix}, environment=read_environment())


def _unreadable(error: Exception) -> ConfigError:
    return ConfigError(f"{ENV_FILE.absolute()} can't be read: {error}")


def _explain(error: ValidationError) -> str:
    """Say of each mistake which variable is wrong, what was expected, and what was found."""
    return "; ".join(
        f"MARQ_{str(mistake['loc'][0]).upper()}: {mistake['msg'].removeprefix('Value error, ')}"
        f" (found {mistake['input']!r})"
        for mistake in error.errors()
    )
