"""What makes an embedded broker one with users: listeners with SASL and TLS, and ACLs.

The plain listener (`EmbeddedBroker.bootstrap_servers`) stays as it is. With ACLs its principal, User:ANONYMOUS, is a
super user: it is the administrator's door, and the broker's own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from broker.certificates import Certificates
from broker.errors import BrokerError

PROTOCOLS = ("SASL_PLAINTEXT", "SSL", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
ADMINISTRATOR = "User:ANONYMOUS"
_AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
_PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
# Both end up in Java's login configuration and in the storage tool's list, which have no escapes in common.
_WORD = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Security:
    """Listeners beside the plain one, each with a port of its own, and who may do what.

    `protocols`: of "SASL_PLAINTEXT", "SSL", "SASL_SSL". `users`: name -> password, by PLAIN, SCRAM-SHA-256 and
    SCRAM-SHA-512 alike; fixed when the data directory is made. `certificates`: for TLS. `acls`: nothing is allowed
    that no ACL allows, but for the plain listener and `super_users`. On "SSL" a client is User:NAME by its certificate
    (`Certificates.client(NAME)`); without one it is User:ANONYMOUS, and so the administrator.
    """

    protocols: Sequence[str] = ("SASL_PLAINTEXT",)
    users: Mapping[str, str] = field(default_factory=dict)
    certificates: Certificates | None = None
    acls: bool = False
    super_users: Sequence[str] = ()

    def __post_init__(self) -> None:
        unknown = set(self.protocols) - set(PROTOCOLS)
        if unknown:
            raise BrokerError(f"unknown security protocol {min(unknown)!r}: expected some of {', '.join(PROTOCOLS)}")
        if self.certificates is None and any("SSL" in protocol for protocol in set(self.protocols) - {PROTOCOLS[0]}):
            raise BrokerError("a listener with TLS needs certificates: give it Certificates.make(directory)")
        for word in (*self.users, *self.users.values()):
            if not _WORD.fullmatch(word):
                raise BrokerError(f"a user's name or password is of letters, digits, '.', '_' and '-', not {word!r}")

    def properties(self) -> dict[str, str]:
        """The broker's settings for it, the listeners' addresses apart."""
        found: dict[str, str] = {}
        for protocol in self.protocols:
            if "SASL" in protocol:
                found |= self._sasl(f"listener.name.{protocol.lower()}")
        if self.certificates is not None:
            found |= _tls(self.certificates)
        if self.acls:
            supers = [ADMINISTRATOR, *(f"User:{name}" for name in self.super_users)]
            found |= {"authorizer.class.name": _AUTHORIZER, "super.users": ";".join(supers)}
        return found

    def format_options(self) -> list[str]:
        """What the storage tool has to know of the users: SCRAM keeps them in the cluster's own log."""
        return [
            part
            for name, password in self.users.items()
            for mechanism in MECHANISMS[1:]
            for part in ("--add-scram", f"{mechanism}=[name={name},password={password}]")
        ]

    def _sasl(self, listener: str) -> dict[str, str]:
        users = "".join(f' user_{name}="{password}"' for name, password in self.users.items())
        scram = {f"{listener}.{name.lower()}.sasl.jaas.config": f"{_SCRAM_MODULE} required;" for name in MECHANISMS[1:]}
        return {
            f"{listener}.sasl.enabled.mechanisms": ",".join(MECHANISMS),
            f"{listener}.plain.sasl.jaas.config": f"{_PLAIN_MODULE} required{users};",
            **scram,
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
