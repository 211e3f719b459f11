"""Settings of the worker: ``MARQ_…`` in the environment, else in ``.env``, else ``[settings]`` of ``marq.toml``.

While ``marq dev`` runs in the directory, its broker, namespace, project and web port follow last.

Workers and commands read the settings of clients (:mod:`marq.settings.client`) from there too; a service that only
imports marq never reads a file. Durations are in seconds.
"""

from __future__ import annotations

import difflib
import fcntl
import os
import re
import tomllib
from enum import StrEnum
from io import StringIO
from math import inf
from pathlib import Path
from typing import Annotated, Any

from dotenv import dotenv_values
from dotenv.parser import parse_stream
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, ValidationInfo, field_validator

from marq.settings.client import ClientOptions, ClientSettings
from marq.wire.errors import ConfigError
from marq.wire.names import PREFIX_RULE, Names

#: Read from the directory in which the worker or the command is started.
ENV_FILE = Path(".env")
PROJECT_FILE = Path("marq.toml")
#: The settings of a `marq dev` that runs in this directory; locked by it while it does.
DEV_FILE = Path(".marq/dev.env")
#: Internal: the parameters of a handler process.
HANDLERS_PROCESS = "MARQ_HANDLERS_PROCESS"
#: The parts of a stop that handlers can't use: the worker's own, and, in a handler process, cancelling its handlers and
#: writing their outcomes.
OWN_STOP_S, OUTCOMES_S = 3.0, 4.0
_VARIABLE = re.compile("MARQ_([A-Z_]+)")
#: How similar an unknown variable must be to a setting to be a misspelling (difflib's ratio). Kubernetes sets
#: MARQ_SERVICE_HOST and the like for a service of that name, and tools around Marq have variables of their own.
_SIMILAR = 0.8


class Role(StrEnum):
    """The tasks of a worker: keep leases, run handlers, serve web pages, serve the API of SQS."""

    TRACKER = "tracker"
    HANDLERS = "handlers"
    WEB = "web"
    SQS = "sqs"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class AppSettings(BaseModel):
    """Settings of a worker; docs/operations/settings.md describes each one."""

    model_config = ConfigDict(frozen=True)

    bootstrap_servers: str = "127.0.0.1:9092"
    prefix: str = "marq"
    #: The data directory of ``python -m pipeline``, for charts of more than 15 minutes.
    pipeline_data: Path | None = None
    #: Names the project whose definitions this worker publishes; only a start of the same project removes them.
    project: str | None = None
    #: Parent of the RocksDB files; each worker on a machine takes a folder of its own below it.
    data_dir: Path = Path(".marq/data")
    #: Where queues and schedules are defined.
    queues_file: Path = PROJECT_FILE
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
    #: Time limit of a shutdown; then the process ends anyway. Below the 30 s after which Kubernetes kills a pod.
    stop_timeout: Annotated[float, Field(ge=1, le=300)] = 29.0
    #: How long a shutdown waits for handlers; None: as long as the stop timeout allows.
    shutdown_timeout: Annotated[float, Field(ge=0)] | None = None
    #: A worker without progress for this long exits, so that its supervisor restarts it.
    watchdog: Annotated[float, Field(ge=5, le=3600)] = 60.0
    #: If true, trackers read the keys of all messages to count the backlog of each queue.
    count_waiting: bool = True
    #: Static membership: restarts of this worker cause no rebalance.
    instance_id: str | None = None
    roles: frozenset[Role] = frozenset(Role) - {Role.SQS}
    sqs_bind: str = "127.0.0.1"
    sqs_port: Annotated[int, Field(ge=1, le=65535)] = 9324
    #: The address in the URLs of queues, if clients must use a different one from that of their requests.
    sqs_url: str | None = None
    #: The file with the access keys of SQS clients.
    sqs_keys: Path | None = None
    #: Signs receipt handles; all endpoints of a namespace have the same.
    sqs_secret: SecretStr | None = None
    #: Modules with functions that are decorated with ``marq.handler``.
    handlers: tuple[str, ...] = ()

    log_format: LogFormat = LogFormat.TEXT
    tracing: bool = False
    #: Fields of JSON payloads, and headers, that pages hide.
    redact: tuple[str, ...] = ()

    @field_validator("prefix")
    @classmethod
    def _check_prefix(cls, prefix: str) -> str:
        try:
            return Names(prefix).prefix
        except ConfigError as error:
            raise ValueError(PREFIX_RULE) from error

    @field_validator("project")
    @classmethod
    def _check_project(cls, project: str | None) -> str | None:
        # It is part of names of groups and keys.
        if project:
            try:
                Names(project)
            except ConfigError as error:
                raise ValueError("expected 1 to 100 of the characters a-z A-Z 0-9 . _ -") from error
        return project

    @field_validator("shutdown_timeout")
    @classmethod
    def _check_shutdown_timeout(cls, shutdown_timeout: float | None, others: ValidationInfo) -> float | None:
        limit_s = shutdown_limit_s(others.data.get("stop_timeout", inf))
        if shutdown_timeout is not None and shutdown_timeout > limit_s:
            raise ValueError(
                f"expected at most {limit_s:g}, because a stop may take {others.data['stop_timeout']:g} s, and the rest"
                " is for writing outcomes and leaving the groups: lower it, or raise MARQ_STOP_TIMEOUT"
            )
        return shutdown_timeout

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
            if not _is_module(module):
                # A path, or a function of marq.toml.
                meant = module.partition(":")[0].removeprefix("./").removesuffix(".py").replace("/", ".")
                hint = f"; write {meant!r}" if _is_module(meant) else ""
                raise ValueError(f"expected names of modules, separated by commas; {module!r} is not one{hint}")
        return tuple(dict.fromkeys(names))

    @field_validator("redact", mode="before")
    @classmethod
    def _read_redact(cls, names: object) -> object:
        return tuple(dict.fromkeys(_words(names))) if isinstance(names, str) else names

    @property
    def names(self) -> Names:
        return Names(self.prefix)


def stop_limit_s(stop_timeout_s: float) -> float:
    """Return the part of the stop timeout for handler processes: at least half of it."""
    return max(stop_timeout_s - OWN_STOP_S, stop_timeout_s / 2)


def shutdown_limit_s(stop_timeout_s: float) -> float:
    """Return the longest time for which a handler process can wait for its handlers: at least half of its stop."""
    limit_s = stop_limit_s(stop_timeout_s)
    return max(limit_s - OUTCOMES_S, limit_s / 2)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _is_module(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def read_environment() -> dict[str, str]:
    """Return the variables of the environment, of ``.env``, of ``marq.toml`` and of a running ``marq dev``.

    The first that is not empty counts.

    A handler process has the settings of its worker: the files may have changed since the worker started.

    Raises ConfigError if a file can't be read.
    """
    if HANDLERS_PROCESS in os.environ:
        return {name: value for name, value in os.environ.items() if value.strip()}
    sources: list[dict[str, Any]] = [_running_dev(), _project_settings(), _env_file(), dict(os.environ)]
    return {name: value for source in sources for name, value in source.items() if value and value.strip()}


def as_written(text: str) -> str:
    """Return an error with the settings that ``marq.toml`` decides in the words of that file, not as variables."""
    if HANDLERS_PROCESS in os.environ:
        return text
    try:
        stronger = {**_env_file(), **os.environ}
        decided = {name for name in _project_settings() if not (stronger.get(name) or "").strip()}
    except ConfigError:
        # It is the error itself.
        return text
    return _VARIABLE.sub(
        lambda variable: f"{PROJECT_FILE}: [settings] {variable[1].lower()}" if variable[0] in decided else variable[0],
        text,
    )


def misspelt_variables() -> dict[str, str]:
    """Return variables that resemble a setting, but are none, each with the name of that setting."""
    known = {name.upper() for name in _known_settings()}
    # Without the prefix, which would make all names similar.
    unknown = {name.removeprefix("MARQ_") for name in read_environment() if name.startswith("MARQ_")} - known
    close = {name: difflib.get_close_matches(name, known, n=1, cutoff=_SIMILAR) for name in sorted(unknown)}
    return {f"MARQ_{name}": f"MARQ_{matches[0]}" for name, matches in close.items() if matches}


def _running_dev() -> dict[str, str | None]:
    try:
        with DEV_FILE.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return dotenv_values(stream=file)
    except (OSError, UnicodeDecodeError):
        pass
    return {}


def _env_file() -> dict[str, str | None]:
    try:
        if not ENV_FILE.is_file():
            return {}
        text = ENV_FILE.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(ENV_FILE, error) from error
    for line in parse_stream(StringIO(text)):
        # python-dotenv would skip it, and the worker would start without a setting.
        if line.error:
            blank = len(line.original.string) - len(line.original.string.lstrip("\n"))
            raise ConfigError(f"{ENV_FILE}, line {line.original.line + blank}: expected NAME=VALUE; correct the line")
    return dotenv_values(stream=StringIO(text))


def _project_settings() -> dict[str, str]:
    try:
        project = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8")) if PROJECT_FILE.exists() else {}
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(PROJECT_FILE, error) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{PROJECT_FILE} is not valid TOML: {error}") from error
    table = project.get("settings", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{PROJECT_FILE}: expected a table [settings], not {table!r}")
    known = _known_settings()
    for name in table:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "expected the name of a variable without MARQ_"
            raise ConfigError(f"{PROJECT_FILE}: [settings]: unknown setting {name!r}; {hint}")
    return {f"MARQ_{name.upper()}": _text(name, value) for name, value in table.items()}


def _known_settings() -> set[str]:
    return {*AppSettings.model_fields, *ClientOptions.__annotations__}


def _text(name: str, value: object) -> str:
    """Return a value as it would be written in the environment."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return ",".join(value)
    raise ConfigError(f"{PROJECT_FILE}: [settings]: {name} = {value!r}: expected text, a number, true, false or a list")


def load_settings() -> AppSettings:
    """Read the settings of a worker; an empty variable counts as missing."""
    environment = read_environment()
    given = {name: environment.get(f"MARQ_{name.upper()}") for name in AppSettings.model_fields}
    try:
        return AppSettings.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def load_client_settings(settings: AppSettings) -> ClientSettings:
    """Read the settings of a worker's clients; address and prefix are those of the worker."""
    own = {"MARQ_BOOTSTRAP_SERVERS": settings.bootstrap_servers, "MARQ_PREFIX": settings.prefix}
    return ClientSettings.read(environment=read_environment() | own)


def _unreadable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{file.absolute()} can't be read: {error}")


def _explain(error: ValidationError) -> str:
    """Explain each mistake: the variable, the expected value, and the actual one."""
    return "; ".join(
        f"MARQ_{str(mistake['loc'][0]).upper()}: {mistake['msg'].removeprefix('Value error, ')}"
        f" (found {mistake['input']!r})"
        for mistake in error.errors()
    )
