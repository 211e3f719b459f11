"""The token provider of OAUTHBEARER logins: a user's object, or the path of one."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from marq.wire.errors import ConfigError, error_text


class SupportsToken(Protocol):
    """The shape of ``aiokafka.abc.AbstractTokenProvider``; ``extensions`` is optional."""

    def token(self) -> str | Awaitable[str]: ...


#: What users pass as ``sasl_token_provider``; text is ``MODULE:ATTRIBUTE``.
TokenProvider = SupportsToken | Callable[[], str] | Callable[[], Awaitable[str]] | str


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class NamedProvider:
    """A provider, and what errors call it. Clients with the same one share their tokens."""

    name: str
    provider: Any


def token_provider(said_as: str, provider: object) -> NamedProvider:
    """Return the provider of a user's setting; ``said_as`` is the setting as the user wrote it. Raises ConfigError."""
    if not isinstance(provider, str):
        return NamedProvider(_name(provider), _usable(said_as, provider))
    try:
        return _imported(provider)
    except ConfigError as error:
        raise ConfigError(f"{said_as}={provider!r}: {error}") from error.__cause__


# All clients of a process share one object, and so the tokens that it keeps.
@cache
def _imported(path: str) -> NamedProvider:
    name, _, attribute = path.partition(":")
    if not name or not attribute:
        raise ConfigError("expected MODULE:ATTRIBUTE, for example mypackage.auth:provider")
    # The scripts of Faust and others have no current directory in the path; handlers are imported from there, too.
    if (directory := str(Path.cwd())) not in sys.path:
        sys.path.append(directory)
    try:
        provider = attrgetter(attribute)(import_module(name))
    except Exception as error:
        raise ConfigError(f"it can't be imported: {type(error).__name__}: {error_text(error)}") from error
    return NamedProvider(path, _usable("the provider", provider))


def _usable(said_as: str, provider: Any) -> Any:
    if isinstance(provider, type):
        try:
            provider = provider()
        except Exception as error:
            said = f"{type(error).__name__}: {error_text(error)}"
            raise ConfigError(f"{said_as}: {_name(provider)}() failed: {said}") from error
    if not callable(getattr(provider, "token", provider)):
        raise ConfigError(
            f"{said_as}: expected MODULE:ATTRIBUTE, a callable that returns a token, or an object with token(), not"
            f" {type(provider).__name__}"
        )
    return provider


def _name(provider: object) -> str:
    with suppress(AttributeError):
        return f"{provider.__module__}.{provider.__qualname__}"  # type: ignore[attr-defined]
    return f"{type(provider).__module__}.{type(provider).__qualname__}"
