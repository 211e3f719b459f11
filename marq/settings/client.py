"""How clients reach the cluster: constructor arguments, else ``MARQ_…`` in the environment, else defaults.

The environment is read when a client is created, never at import.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from marq.settings.durations import Duration, duration_ms
from marq.settings.hints import refuse
from marq.settings.token_provider import NamedProvider, TokenProvider, token_provider
from marq.wire.errors import ConfigError
from marq.wire.names import DEFAULT_PREFIX, Names, check_prefix

DEFAULT_BOOTSTRAP_SERVERS = "127.0.0.1:9092"
#: Prefix of the addresses of brokers in this process's memory (marq.testing).
MEMORY_SCHEME = "memory://"
DEFAULT_CONNECT_TIMEOUT_MS = 10_000
DEFAULT_REQUEST_TIMEOUT_MS = 30_000
#: A consumer that does not answer for this long loses its partitions (its leases continue).
DEFAULT_SESSION_TIMEOUT_MS = 10_000
#: A consumer whose reader is stuck for this long loses its partitions; one with a full buffer still polls in time.
DEFAULT_MAX_POLL_INTERVAL_MS = 300_000
DEFAULT_PARTITIONS = 4
#: One replica works on every cluster; set MARQ_REPLICATION_FACTOR=3 in production, before the first start.
DEFAULT_REPLICATION_FACTOR = 1
#: How long markers are kept: a tracker that is away for longer can't continue.
DEFAULT_MARKERS_RETENTION_MS = 7 * 24 * 3600 * 1000

SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
#: Kafka's codecs; aiokafka knows "none" as None.
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
OAUTHBEARER = "OAUTHBEARER"
SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", OAUTHBEARER)
_MAX_COUNT = 10_000
_MAX_RETENTION_MS = 10 * 365 * 24 * 3600 * 1000


class ClientOptions(TypedDict, total=False):
    """Keyword arguments that every client takes; each may come from ``MARQ_`` + its name in capitals instead."""

    prefix: str
    client_id: str
    connect_timeout: Duration
    request_timeout: Duration
    session_timeout: Duration
    max_poll_interval: Duration
    compression: str
    partitions: int
    markers_partitions: int
    replication_factor: int
    markers_retention: Duration
    security_protocol: str
    ssl_context: ssl.SSLContext
    ssl_cafile: str
    ssl_certfile: str
    ssl_keyfile: str
    ssl_password: str
    sasl_mechanism: str
    sasl_username: str
    sasl_password: str
    sasl_token_provider: TokenProvider


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Checked settings; times in ms.

    ``compression`` is for messages that a producer sends. ``partitions`` and the settings after it apply only when
    topics are created.
    """

    bootstrap_servers: str = DEFAULT_BOOTSTRAP_SERVERS
    names: Names = field(default_factory=Names)
    client_id: str = "marq"
    connect_timeout_ms: int = DEFAULT_CONNECT_TIMEOUT_MS
    request_timeout_ms: int = DEFAULT_REQUEST_TIMEOUT_MS
    session_timeout_ms: int = DEFAULT_SESSION_TIMEOUT_MS
    max_poll_interval_ms: int = DEFAULT_MAX_POLL_INTERVAL_MS
    compression: str = "none"
    partitions: int = DEFAULT_PARTITIONS
    markers_partitions: int = DEFAULT_PARTITIONS
    replication_factor: int = DEFAULT_REPLICATION_FACTOR
    markers_retention_ms: int = DEFAULT_MARKERS_RETENTION_MS
    security_protocol: str = "PLAINTEXT"
    ssl_context: ssl.SSLContext | None = field(default=None, repr=False)
    sasl_mechanism: str = "PLAIN"
    sasl_username: str | None = None
    sasl_password: str | None = field(default=None, repr=False)
    #: For OAUTHBEARER, instead of a name and a password.
    sasl_token_provider: NamedProvider | None = None

    @property
    def login(self) -> str | None:
        """The name that tells the logins of a process apart: that of a user or of a token provider."""
        return self.sasl_username if self.sasl_token_provider is None else self.sasl_token_provider.name

    @classmethod
    def read(
        cls,
        bootstrap_servers: str | Sequence[str] | None = None,
        options: Mapping[str, object] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        owner: str = "ClientSettings",
    ) -> ClientSettings:
        """Return the settings from arguments and environment.

        Raises:
            ConfigError: a value is of the wrong type or out of range; the text names it and says what was expected.
            TypeError: there is no such option.
        """
        given = dict(options or {})
        refuse(owner, {name: value for name, value in given.items() if name not in ClientOptions.__annotations__})
        return _read(_Values(bootstrap_servers, given, os.environ if environment is None else environment))


def _read(values: _Values) -> ClientSettings:
    partitions = values.count("partitions", DEFAULT_PARTITIONS)
    protocol = values.choice("security_protocol", SECURITY_PROTOCOLS)
    return ClientSettings(
        bootstrap_servers=values.bootstrap_servers(),
        names=Names(check_prefix(values.text("prefix", DEFAULT_PREFIX), values.said_as("prefix"))),
        client_id=values.text("client_id", "marq"),
        connect_timeout_ms=values.duration("connect_timeout", DEFAULT_CONNECT_TIMEOUT_MS, least_ms=100),
        request_timeout_ms=values.duration("request_timeout", DEFAULT_REQUEST_TIMEOUT_MS, least_ms=1_000),
        session_timeout_ms=values.duration("session_timeout", DEFAULT_SESSION_TIMEOUT_MS, least_ms=1_000),
        max_poll_interval_ms=values.duration("max_poll_interval", DEFAULT_MAX_POLL_INTERVAL_MS, least_ms=1_000),
        compression=values.choice("compression", COMPRESSIONS),
        partitions=partitions,
        markers_partitions=values.count("markers_partitions", partitions),
        replication_factor=values.count("replication_factor", DEFAULT_REPLICATION_FACTOR),
        markers_retention_ms=values.duration(
            "markers_retention", DEFAULT_MARKERS_RETENTION_MS, least_ms=3_600_000, most_ms=_MAX_RETENTION_MS
        ),
        security_protocol=protocol,
        ssl_context=_ssl_context(values, protocol),
        sasl_mechanism=values.choice("sasl_mechanism", SASL_MECHANISMS),
        sasl_username=_login(values, protocol, "sasl_username"),
        sasl_password=_login(values, protocol, "sasl_password"),
        sasl_token_provider=_tokens(values, protocol),
    )


def _login(values: _Values, protocol: str, name: str) -> str | None:
    text: str | None = values.text(name, None)
    if text is None and (mechanism := _mechanism(values, protocol)) not in (None, OAUTHBEARER):
        raise ConfigError(_missing(name, protocol, mechanism))
    return text


def _tokens(values: _Values, protocol: str) -> NamedProvider | None:
    name = "sasl_token_provider"
    if _mechanism(values, protocol) != OAUTHBEARER:
        return None
    if (provider := values.get(name, str)) is None:
        raise ConfigError(_missing(name, protocol, OAUTHBEARER))
    return token_provider(values.said_as(name), provider)


def _mechanism(values: _Values, protocol: str) -> str | None:
    """Return how a client logs in; None if it does not."""
    return values.choice("sasl_mechanism", SASL_MECHANISMS) if "SASL" in protocol.split("_") else None


def _missing(name: str, protocol: str, mechanism: str | None) -> str:
    return (
        f"{name} is missing (MARQ_{name.upper()}): security_protocol={protocol} with sasl_mechanism={mechanism}"
        " needs it to log in"
    )


def _ssl_context(values: _Values, protocol: str) -> ssl.SSLContext | None:
    given = values.get("ssl_context", str)
    if given is not None and not isinstance(given, ssl.SSLContext):
        raise ConfigError(f"ssl_context: expected an ssl.SSLContext, not {type(given).__name__}")
    if given is not None or "SSL" not in protocol.split("_"):
        return given
    authorities, certificate = values.text("ssl_cafile", None), values.text("ssl_certfile", None)
    try:
        context = ssl.create_default_context(cafile=authorities)
        if certificate is not None:
            key, password = values.text("ssl_keyfile", None), values.text("ssl_password", None)
            context.load_cert_chain(certificate, key, password)
    except OSError as error:
        files = {"ssl_cafile": authorities, "ssl_certfile": certificate}
        named = ", ".join(f"{values.said_as(name)}={file!r}" for name, file in files.items() if file is not None)
        raise ConfigError(f"{named}: can't be used: {error}") from error
    return context


class _Values:
    """The sources of settings: arguments and the environment; errors name the source."""

    def __init__(self, servers: object, given: Mapping[str, object], environment: Mapping[str, str]) -> None:
        self._servers = servers
        self._given = given
        self._environment = environment

    def get(self, name: str, parse: Callable[[str], Any]) -> Any:
        """Return the argument, else the value in the environment, else None."""
        if self._given.get(name) is not None:
            return self._given[name]
        variable = f"MARQ_{name.upper()}"
        text = self._environment.get(variable, "").strip()
        if not text:
            return None
        try:
            return parse(text)
        except ValueError:
            raise ConfigError(f"{variable}={text!r}: expected a number") from None

    def said_as(self, name: str) -> str:
        """Return the name of a setting as the user wrote it: its keyword or its environment variable."""
        return name if self._given.get(name) is not None else f"MARQ_{name.upper()}"

    def text(self, name: str, default: Any) -> Any:
        value = self.get(name, str)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ConfigError(f"{name}={value!r}: expected text (str), not {type(value).__name__}")
        return value

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        value: str = self.text(name, allowed[0])
        for option in allowed:
            if option.casefold() == value.casefold():
                return option
        raise ConfigError(f"{self.said_as(name)}={value!r}: expected one of {', '.join(allowed)}")

    def duration(self, name: str, default_ms: int, *, least_ms: int, most_ms: int = 3_600_000) -> int:
        value = self.get(name, float)
        return (
            default_ms if value is None else duration_ms(self.said_as(name), value, least_ms=least_ms, most_ms=most_ms)
        )

    def count(self, name: str, default: int) -> int:
        value = self.get(name, int)
        return default if value is None else whole_number(self.said_as(name), value, most=_MAX_COUNT)

    def bootstrap_servers(self) -> str:
        value, said_as = self._servers, "bootstrap_servers"
        if value is None:
            value = self._environment.get("MARQ_BOOTSTRAP_SERVERS", "").strip() or DEFAULT_BOOTSTRAP_SERVERS
            said_as = "MARQ_BOOTSTRAP_SERVERS"
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            value = ",".join(map(str, value))
        if not isinstance(value, str):
            raise ConfigError(f"bootstrap_servers={value!r}: expected 'host:port,…', not {type(value).__name__}")
        if not value.startswith(MEMORY_SCHEME):
            for server in value.split(","):
                _check_server(said_as, value, server.strip())
        return value


def _check_server(said_as: str, servers: str, server: str) -> None:
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError(f"{said_as}={servers!r}: expected host:port, several separated by commas")


def whole_number(name: str, value: object, *, most: int) -> int:
    """Return a whole number of at least 1. Raises ConfigError for any other value, or one above ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name}={value!r}: expected a whole number from 1 to {most}")
    return value
