"""Settings of the Faust application: ``MARQ_…`` in the environment, else in ``.env``.

Workers and commands read the settings of clients (:mod:`marq.settings.client`) from there too; a service that only
imports marq never reads a file. Durations are in seconds.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from dotenv import dotenv_values
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from marq.settings.client import ClientSettings
from marq.wire.errors import ConfigError
from marq.wire.names import PREFIX_RULE, Names

#: Read from the directory in which the worker or the command is started.
ENV_FILE = Path(".env")


class Role(StrEnum):
    """The tasks of a worker: keep leases, run handlers, serve web pages."""

    TRACKER = "tracker"
    HANDLERS = "handlers"
    WEB = "web"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class AppSettings(BaseSettings):
    """Settings of a worker; docs/operations/settings.md describes each one."""

    model_config = SettingsConfigDict(
        env_prefix="MARQ_", env_file=ENV_FILE, env_ignore_empty=True, extra="ignore", frozen=True
    )

    bootstrap_servers: str = "127.0.0.1:9092"
    prefix: str = "marq"
    #: Parent of the RocksDB files; each worker on a machine takes a folder of its own below it.
    data_dir: Path = Path(".marq/data")
    queues_file: Path = Path("config/queues.toml")
    web_bind: str = "127.0.0.1"
    #: The first port to try; a second worker on the machine takes the next free one.
    web_port: Annotated[int, Field(ge=1, le=65535)] = 6066
    #: The name or address by which other workers and users reach it.
    web_host: str | None = None
    #: NAME:PASSWORD or NAME:HASH, and tokens, each separated by commas: operators may act, viewers only look.
    web_operators: SecretStr | None = None
    web_viewers: SecretStr | None = None
    web_operator_tokens: SecretStr | None = None
    web_viewer_tokens: SecretStr | None = None
    session_timeout: Annotated[float, Field(ge=6, le=300)] = 10.0
    #: Seconds between two writes of the lease table; markers that end within it leave no row.
    flush_interval: Annotated[float, Field(gt=0, le=5)] = 1.0
    #: Time limit of a shutdown; then the process ends anyway.
    stop_timeout: Annotated[float, Field(ge=1, le=300)] = 9.0
    #: A worker without progress for this long ends itself, so that its supervisor restarts it.
    watchdog: Annotated[float, Field(ge=5, le=3600)] = 60.0
    #: If true, trackers read the keys of all messages to count the backlog of each queue.
    count_waiting: bool = True
    #: Static membership: restarts of this worker cause no rebalance.
    instance_id: str | None = None
    roles: Annotated[frozenset[Role], NoDecode] = frozenset(Role)
    #: Modules with functions that are decorated with ``marq.handler``.
    handlers: Annotated[tuple[str, ...], NoDecode] = ()

    log_format: LogFormat = LogFormat.TEXT
    tracing: bool = False
    #: Fields of JSON payloads, and headers, that pages hide.
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
        names = _words(roles)
        if not names or not set(names) <= set(Role):
            raise ValueError(f"expected one or more of {', '.join(Role)}, separated by commas")
        return frozenset(map(Role, names))

    @field_validator("handlers", mode="before")
    @classmethod
    def _read_handlers(cls, modules: object) -> object:
        if not isinstance(modules, str):
            return modules
        names = _words(modules)
        for module in names:
            if not all(part.isidentifier() for part in module.split(".")):
                raise ValueError(f"expected names of modules, separated by commas; {module!r} is not one")
        return tuple(dict.fromkeys(names))

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
    """Return the variables of ``.env``, if there is one, overridden by non-empty ones of the environment."""
    try:
        written = dotenv_values(ENV_FILE) if ENV_FILE.is_file() else {}
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(error) from error
    environment = {name: value for name, value in os.environ.items() if value.strip()}
    return {**{name: value for name, value in written.items() if value is not None}, **environment}


def load_settings() -> AppSettings:
    """Read the settings of a worker; an empty variable counts as missing."""
    try:
        return AppSettings()
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(error) from error


def load_client_settings(settings: AppSettings) -> ClientSettings:
    """Read the settings of a worker's clients; address and prefix are those of the worker."""
    return ClientSettings.read(settings.bootstrap_servers, {"prefix": settings.prefix}, environment=read_environment())


def _unreadable(error: Exception) -> ConfigError:
    return ConfigError(f"{ENV_FILE.absolute()} can't be read: {error}")


def _explain(error: ValidationError) -> str:
    """Explain each mistake: the variable, the expected value, and the actual one."""
    return "; ".join(
        f"MARQ_{str(mistake['loc'][0]).upper()}: {mistake['msg'].removeprefix('Value error, ')}"
        f" (found {mistake['input']!r})"
        for mistake in error.errors()
    )
