"""Security of an embedded broker: listeners with SASL and TLS, users, ACLs, and certificates made by `openssl`.

The plain listener (`EmbeddedBroker.bootstrap_servers`) remains. With ACLs its principal, User:ANONYMOUS, is a super
user, for the administrator and for the broker itself.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from marq_worker.broker.errors import BrokerError

PROTOCOLS = ("SASL_PLAINTEXT", "SSL", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
ADMINISTRATOR = "User:ANONYMOUS"
_AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
_PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
_TOKEN_MODULE = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
# Java's login configuration and the storage tool's list use different escapes.
_WORD = re.compile(r"[A-Za-z0-9._-]+")
VALID_DAYS = 2
LIMIT_SECONDS = 30.0
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files in one directory: an authority, and its certificates for 127.0.0.1, localhost and clients."""

    directory: Path

    @classmethod
    def make(cls, directory: Path) -> Self:
        """Make an authority and a server's certificate. Raises BrokerError: openssl is missing or fails."""
        made = cls(directory)
        directory.mkdir(parents=True, exist_ok=True)
        authority = ["-addext", "keyUsage=critical,keyCertSign,cRLSign", "-days", str(VALID_DAYS)]
        made._openssl("req", "-x509", *_NEW_KEY, "-keyout", "authority.key", "-out", "authority.pem", *authority)
        made._sign("server", "subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth\n")
        return made

    @property
    def authority(self) -> Path:
        """The authority that clients must trust (MARQ_SSL_CAFILE)."""
        return self.directory / "authority.pem"

    @property
    def server(self) -> Path:
        """The broker's key and certificate in one file, as Kafka reads them."""
        return self.directory / "server.pem"

    def client(self, name: str) -> Path:
        """Key and certificate of a client in one file (MARQ_SSL_CERTFILE); the broker calls it User:`name`."""
        path = self.directory / f"{name}.pem"
        if not path.exists():
            self._sign(name, "extendedKeyUsage=clientAuth\n")
        return path

    def _sign(self, name: str, extensions: str) -> None:
        directory = self.directory
        (directory / f"{name}.extensions").write_text(
            f"basicConstraints=CA:FALSE\nkeyUsage=digitalSignature\nauthorityKeyIdentifier=keyid\n{extensions}"
        )
        self._openssl("req", "-new", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.request", name=name)
        signing = ["-CA", "authority.pem", "-CAkey", "authority.key", "-CAcreateserial", "-days", str(VALID_DAYS)]
        files = ["-in", f"{name}.request", "-out", f"{name}.certificate", "-extfile", f"{name}.extensions"]
        self._openssl("x509", "-req", *signing, *files, name=None)
        (directory / f"{name}.pem").write_bytes(
            (directory / f"{name}.key").read_bytes() + (directory / f"{name}.certificate").read_bytes()
        )

    def _openssl(self, *arguments: str, name: str | None = "marq embedded broker") -> None:
        tool = shutil.which("openssl")
        if tool is None:
            raise BrokerError("openssl is missing, which creates the broker's certificates: install it")
        subject = [] if name is None else ["-subj", f"/CN={name}"]
        result = subprocess.run(
            [tool, *arguments, *subject],
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT_SECONDS,
            check=False,
        )
        if result.returncode != 0:
            raise BrokerError(f"openssl {arguments[0]} failed: {result.stdout.strip()}")


@dataclass(frozen=True)
class Security:
    """Further listeners, each with its own port, and permissions.

    Args:
        protocols: "SASL_PLAINTEXT", "SSL", "SASL_SSL". On "SSL" a client is User:NAME by its certificate
            (`Certificates.client(NAME)`); without one it is User:ANONYMOUS, and so the administrator.
        users: passwords by name, for PLAIN, SCRAM-SHA-256 and SCRAM-SHA-512; fixed when the data directory is created.
        certificates: for TLS.
        acls: allow only what ACLs allow, except on the plain listener and for `super_users`.
        tokens: also accept OAUTHBEARER logins, with unsigned tokens (JWT, alg "none") of any user.
    """

    protocols: Sequence[str] = ("SASL_PLAINTEXT",)
    users: Mapping[str, str] = field(default_factory=dict)
    certificates: Certificates | None = None
    acls: bool = False
    super_users: Sequence[str] = ()
    tokens: bool = False

    def __post_init__(self) -> None:
        unknown = set(self.protocols) - set(PROTOCOLS)
        if unknown:
            raise BrokerError(f"unknown security protocol {min(unknown)!r}: expected some of {', '.join(PROTOCOLS)}")
        if self.certificates is None and any("SSL" in protocol for protocol in set(self.protocols) - {PROTOCOLS[0]}):
            raise BrokerError("a listener with TLS needs certificates: give it Certificates.make(directory)")
        for word in (*self.users, *self.users.values()):
            if not _WORD.fullmatch(word):
                raise BrokerError(
                    f"a user's name or password may only contain A-Z, a-z, 0-9, '.', '_' and '-', got {word!r}"
                )

    def properties(self) -> dict[str, str]:
        """Return the broker's settings, except the listeners' addresses."""
        settings: dict[str, str] = {}
        for protocol in self.protocols:
            if "SASL" in protocol:
                settings |= self._sasl(f"listener.name.{protocol.lower()}")
        if self.certificates is not None:
            settings |= _tls(self.certificates)
        if self.acls:
            supers = [ADMINISTRATOR, *(f"User:{name}" for name in self.super_users)]
            settings |= {"authorizer.class.name": _AUTHORIZER, "super.users": ";".join(supers)}
        return settings

    def format_options(self) -> list[str]:
        """Return the users for the storage tool, because SCRAM keeps them in the cluster's own log."""
        return [
            part
            for name, password in self.users.items()
            for mechanism in MECHANISMS[1:]
            for part in ("--add-scram", f"{mechanism}=[name={name},password={password}]")
        ]

    def _sasl(self, listener: str) -> dict[str, str]:
        users = "".join(f' user_{name}="{password}"' for name, password in self.users.items())
        scram = {f"{listener}.{name.lower()}.sasl.jaas.config": f"{_SCRAM_MODULE} required;" for name in MECHANISMS[1:]}
        tokens = {f"{listener}.oauthbearer.sasl.jaas.config": f"{_TOKEN_MODULE} required;"} if self.tokens else {}
        mechanisms = [*MECHANISMS, "OAUTHBEARER"] if self.tokens else MECHANISMS
        return {
            f"{listener}.sasl.enabled.mechanisms": ",".join(mechanisms),
            f"{listener}.plain.sasl.jaas.config": f"{_PLAIN_MODULE} required{users};",
            **scram,
            **tokens,
        }


def _tls(certificates: Certificates) -> dict[str, str]:
    return {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificates.server),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificates.authority),
        "ssl.client.auth": "requested",
        "ssl.principal.mapping.rules": "RULE:^CN=([^,]*).*$/$1/,DEFAULT",
    }
