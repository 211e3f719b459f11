"""Credentials of a worker's pages: names with passwords, and tokens of programs.

A password is given in clear or as a hash (``marq web-password``). Hashes are slow to check, so correct
credentials are remembered, by a keyed digest, while the process lives.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass, field
from enum import IntEnum
from urllib.parse import quote, unquote

from pydantic import SecretStr

from marq.wire.errors import ConfigError
from marq_worker.config.settings import AppSettings

SCHEME = "scrypt"
#: The scheme of commands between workers, and how long one is valid: their clocks may differ.
COMMAND_SCHEME, COMMAND_VALID_S = "Marq", 60
#: Cost (memory: 128 bytes times both), about 50 ms of one core.
_COST, _BLOCKS, _LANES = 1 << 14, 8, 1
_SALT_BYTES, _HASH_BYTES = 16, 32
MIN_PASSWORD, MIN_TOKEN = 8, 16
#: Correct credentials to remember.
MAX_REMEMBERED = 1_000


class Access(IntEnum):
    """Permission levels, each including the one before."""

    VIEWER = 1
    OPERATOR = 2


@dataclass(frozen=True, slots=True)
class Visitor:
    name: str
    access: Access


@dataclass(frozen=True, slots=True)
class _Login:
    visitor: Visitor
    secret: str = field(repr=False)


class Credentials:
    """All credentials of a worker's settings; without any, visitors are not authenticated."""

    def __init__(
        self, passwords: list[_Login], tokens: list[_Login], peer_token: str, command_key: bytes = b""
    ) -> None:
        self._passwords = passwords
        self._tokens = tokens
        #: The token of this namespace's workers and commands; empty if none is needed.
        self.peer_token = peer_token
        #: Signs commands between workers; empty if no visitor may act.
        self._command_key = command_key
        self._key = secrets.token_bytes(32)
        self._remembered: dict[bytes, Visitor] = {}

    @classmethod
    def of(cls, settings: AppSettings) -> Credentials:
        """Return the credentials of a worker's settings."""
        passwords = [
            *_logins("MARQ_WEB_VIEWERS", settings.web_viewers, Access.VIEWER),
            *_logins("MARQ_WEB_OPERATORS", settings.web_operators, Access.OPERATOR),
        ]
        tokens = [
            *_bearers("MARQ_WEB_VIEWER_TOKENS", settings.web_viewer_tokens, Access.VIEWER),
            *_bearers("MARQ_WEB_OPERATOR_TOKENS", settings.web_operator_tokens, Access.OPERATOR),
        ]
        names = [login.visitor.name for login in passwords]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"MARQ_WEB_VIEWERS, MARQ_WEB_OPERATORS: {name!r} is named twice")
        if not (passwords or tokens):
            return cls([], [], "")
        # All workers have the same settings, so all derive the same token.
        joined = "\n".join([settings.prefix, *[login.secret for login in [*passwords, *tokens]]])
        peer = hmac.new(joined.encode(), b"workers of one namespace", "sha256").hexdigest()
        # Only from operators' secrets, so that a viewer's own secret does not reveal it.
        operators = [login.secret for login in [*passwords, *tokens] if login.visitor.access >= Access.OPERATOR]
        joined = "\n".join([settings.prefix, *operators])
        key = hmac.digest(joined.encode(), b"commands between workers", "sha256") if operators else b""
        return cls(passwords, [*tokens, _Login(Visitor("another worker", Access.VIEWER), peer)], peer, key)

    @property
    def required(self) -> bool:
        """Whether visitors are authenticated."""
        return bool(self._tokens)

    def is_of_peer(self, authorization: str) -> bool:
        """Return whether a header has the token of this namespace's workers and commands."""
        expected = f"Bearer {self.peer_token}".encode()
        return bool(self.peer_token) and hmac.compare_digest(_bytes(authorization), expected)

    def sign_command(self, who: str, address: str) -> dict[str, str]:
        """Return the headers of a command to another worker, in the name of an operator; ``address``: path and query.

        It is signed instead of sent with a token or the operator's password. Any client that can join the trackers'
        group can publish an address there; what it receives must not work at other workers.
        """
        if not self.required:
            return {}
        text = f"{quote(who, safe='')}:{int(time.time()) + COMMAND_VALID_S}"
        return {"Authorization": f"{COMMAND_SCHEME} {text}:{self._signature(text, address)}"}

    def of_command(self, authorization: str, address: str) -> Visitor | None:
        """Return the operator in whose name another worker sends a command; None without a valid signature."""
        kind, _, value = authorization.partition(" ")
        text, _, signature = value.rpartition(":")
        name, _, until_s = text.rpartition(":")
        if kind != COMMAND_SCHEME or not self._command_key:
            return None
        if not hmac.compare_digest(_bytes(signature), self._signature(text, address).encode()):
            return None
        return Visitor(unquote(name), Access.OPERATOR) if int(until_s) >= time.time() else None

    def _signature(self, text: str, address: str) -> str:
        return hmac.digest(self._command_key, _bytes(f"{text}\n{address}"), "sha256").hex()

    def remembered(self, authorization: str) -> Visitor | None:
        """Return the visitor of a token, or of a header that was correct before: both are quick."""
        kind, _, value = authorization.partition(" ")
        if kind.lower() == "bearer":
            token = _bytes(value.strip())
            # Compare all of them, so that the time reveals nothing.
            visitors = [login.visitor for login in self._tokens if hmac.compare_digest(login.secret.encode(), token)]
            return visitors[0] if visitors else None
        return self._remembered.get(self._digest(authorization))

    def check(self, authorization: str) -> Visitor | None:
        """Return the visitor with this name and password; slow, so it is called in a thread."""
        name, password = _basic(authorization)
        for login in self._passwords:
            if login.visitor.name == name and _fits(password, login.secret):
                if len(self._remembered) < MAX_REMEMBERED:
                    self._remembered[self._digest(authorization)] = login.visitor
                return login.visitor
        return None

    def _digest(self, authorization: str) -> bytes:
        return hmac.digest(self._key, _bytes(authorization), "sha256")


def hashed(password: str) -> str:
    """Return the hash of a password for the settings."""
    if len(password) < MIN_PASSWORD:
        raise ConfigError(f"the password is too short: at least {MIN_PASSWORD} characters")
    salt = secrets.token_bytes(_SALT_BYTES)
    return f"{SCHEME}${salt.hex()}${_scrypt(password, salt).hex()}"


def _scrypt(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, n=_COST, r=_BLOCKS, p=_LANES, dklen=_HASH_BYTES)


def _fits(password: str, secret: str) -> bool:
    if not secret.startswith(f"{SCHEME}$"):
        return hmac.compare_digest(password.encode(), secret.encode())
    _, salt, expected = secret.split("$")
    return hmac.compare_digest(_scrypt(password, bytes.fromhex(salt)), bytes.fromhex(expected))


def _bytes(header: str) -> bytes:
    """Return the bytes that were sent, even if they are not UTF-8."""
    return header.encode(errors="surrogateescape")


def _basic(authorization: str) -> tuple[str, str]:
    kind, _, value = authorization.partition(" ")
    if kind.lower() != "basic":
        return "", ""
    try:
        name, _, password = base64.b64decode(value, validate=True).decode().partition(":")
    except ValueError:
        return "", ""
    return name, password


def _logins(variable: str, value: SecretStr | None, access: Access) -> list[_Login]:
    logins = []
    for number, entry in enumerate(_parts(value), 1):
        name, colon, secret = entry.partition(":")
        if not (name and colon):
            raise ConfigError(f"{variable}: entry {number}: expected NAME:PASSWORD; separate several with commas")
        if secret.startswith(f"{SCHEME}$"):
            _check_hash(variable, name, secret)
        elif len(secret) < MIN_PASSWORD:
            raise ConfigError(f"{variable}: the password of {name!r} is too short: at least {MIN_PASSWORD} characters")
        logins.append(_Login(Visitor(name, access), secret))
    return logins


def _bearers(variable: str, value: SecretStr | None, access: Access) -> list[_Login]:
    tokens = _parts(value)
    for number, token in enumerate(tokens, 1):
        if len(token) < MIN_TOKEN or not token.isascii() or any(map(str.isspace, token)):
            raise ConfigError(f"{variable}: token {number}: expected at least {MIN_TOKEN} ASCII characters, no spaces")
    return [_Login(Visitor(f"{variable} {number}", access), token) for number, token in enumerate(tokens, 1)]


def _parts(value: SecretStr | None) -> list[str]:
    return [] if value is None else [part for item in value.get_secret_value().split(",") if (part := item.strip())]


def _check_hash(variable: str, name: str, secret: str) -> None:
    parts = secret.split("$")
    try:
        lengths = [len(bytes.fromhex(part)) for part in parts[1:]]
    except ValueError:
        lengths = []
    if lengths != [_SALT_BYTES, _HASH_BYTES]:
        raise ConfigError(f"{variable}: the hash of {name!r} is damaged: create it with `marq web-password`")
