"""The way to Kafka: what the environment says, as options of Spark's connector, and what only Kafka itself can tell.

The variables and their rules are those of all of Marq (``MARQ_BOOTSTRAP_SERVERS``, ``MARQ_PREFIX``,
``MARQ_SECURITY_PROTOCOL``, ``MARQ_SASL_…``, ``MARQ_SSL_…``). Certificates go to executors as text: their machines need
not have the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.sql import SparkSession

from marq.core.errors import ConfigError
from marq.core.names import DEFAULT_PREFIX, Names, check_prefix
from pipeline.errors import PipelineError
from pipeline.sentences import root_cause, sentence

DEFAULT_BOOTSTRAP_SERVERS = "127.0.0.1:9092"
SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
#: How long a question to the cluster may take; a broker that is away is said to be after this.
ANSWER_LIMIT_MS = 10_000
_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
#: Escapes of Java's login configuration, which are those of C.
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"})

#: Keys of OpenSSL 1 and older: RSA PRIVATE KEY, EC PRIVATE KEY.
_OLD_KEY = re.compile(r"-----BEGIN (?:RSA|EC|DSA) PRIVATE KEY-----")

Offsets = dict[str, dict[int, int]]


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the cluster is, how to log in, and the names of this installation on it."""

    bootstrap_servers: str = DEFAULT_BOOTSTRAP_SERVERS
    names: Names = field(default_factory=Names)
    #: Kafka's own settings for TLS and login.
    security: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Connection:
        """Return what the environment says.

        Raises:
            PipelineError: a value is missing or wrong; the text names the variable and says what was expected.
        """
        values = _Values(environment)
        try:
            names = Names(check_prefix(values.text("PREFIX") or DEFAULT_PREFIX, "MARQ_PREFIX"))
        except ConfigError as error:
            raise PipelineError(str(error)) from error
        return cls(_servers(values), names, _security(values))

    def options(self) -> dict[str, str]:
        """Return options for ``spark.read.format("kafka")`` and its kin."""
        return {f"kafka.{name}": value for name, value in self.client().items()}

    def client(self) -> dict[str, str]:
        """Return the same as Kafka's own clients take it."""
        return {"bootstrap.servers": self.bootstrap_servers, **self.security}


class Topics:
    """What the cluster knows of its topics, asked by Kafka's own AdminClient in Spark's Java process.

    Every method raises PipelineError, after about 10 seconds at most: the broker is away, refuses the login or the
    right, or has no such topic.
    """

    def __init__(self, spark: SparkSession, connection: Connection) -> None:
        self._jvm: Any = spark.sparkContext._jvm
        self._connection = connection

    def existing(self) -> set[str]:
        """Return the names of all topics that one may see."""
        with self._admin("listing topics") as admin:
            return set(_answer(admin.listTopics().names()))

    def partitions(self, topics: Iterable[str]) -> dict[str, int]:
        """Return how many partitions each topic has."""
        with self._admin("looking at topics") as admin:
            return self._partitions(admin, topics)

    def ends(self, topics: Iterable[str], committed: bool = True) -> Offsets:
        """Return the offset after the last record; ``committed``: after the last that read_committed gives now."""
        return self._offsets(topics, self._jvm.org.apache.kafka.clients.admin.OffsetSpec.latest(), committed)

    def begins(self, topics: Iterable[str]) -> Offsets:
        """Return the offset of the first record that is still kept."""
        return self._offsets(topics, self._jvm.org.apache.kafka.clients.admin.OffsetSpec.earliest(), False)

    def settings(self, topic: str) -> dict[str, str]:
        """Return the topic's settings as they apply, defaults of the broker included."""
        java = self._jvm.org.apache.kafka.common.config
        resource = java.ConfigResource(java.ConfigResource.Type.TOPIC, topic)
        with self._admin(f"looking at the settings of {topic}") as admin:
            found = _answer(admin.describeConfigs(self._list([resource])).all()).get(resource)
            return {entry.name(): entry.value() for entry in self._jvm.java.util.ArrayList(found.entries())}

    def cluster_id(self) -> str:
        """Return the cluster's own name for itself: offsets mean nothing on another one."""
        with self._admin("asking for the cluster's id") as admin:
            return str(_answer(admin.describeCluster().clusterId()))

    def _offsets(self, topics: Iterable[str], which: object, committed: bool) -> Offsets:
        java = self._jvm.org.apache.kafka
        level = java.common.IsolationLevel.READ_COMMITTED if committed else java.common.IsolationLevel.READ_UNCOMMITTED
        with self._admin("asking for offsets") as admin:
            counts = self._partitions(admin, topics)
            wanted = self._jvm.java.util.HashMap()
            for topic, count in counts.items():
                for partition in range(count):
                    wanted.put(java.common.TopicPartition(topic, partition), which)
            found = _answer(admin.listOffsets(wanted, java.clients.admin.ListOffsetsOptions(level)).all())
            offsets: Offsets = {topic: {} for topic in counts}
            for place in wanted.keySet():
                offsets[place.topic()][place.partition()] = found.get(place).offset()
        return {topic: dict(sorted(partitions.items())) for topic, partitions in offsets.items()}

    def _partitions(self, admin: Any, topics: Iterable[str]) -> dict[str, int]:
        wanted = list(dict.fromkeys(topics))
        descriptions = admin.describeTopics(self._list(wanted)).topicNameValues()
        counts = {}
        for topic in wanted:
            try:
                counts[topic] = len(_answer(descriptions.get(topic)).partitions())
            except Py4JError as error:
                if root_cause(error)[0] != "UnknownTopicOrPartitionException":
                    raise
                raise PipelineError(
                    f"there is no topic {topic} on {self._connection.bootstrap_servers}: check MARQ_BOOTSTRAP_SERVERS "
                    "and MARQ_PREFIX; the first worker or client that starts makes Marq's topics"
                ) from None
        return counts

    def _list(self, items: Iterable[object]) -> Any:
        found = self._jvm.java.util.ArrayList()
        for item in items:
            found.add(item)
        return found

    @contextmanager
    def _admin(self, doing: str) -> Iterator[Any]:
        admin = None
        try:
            admin = self._jvm.org.apache.kafka.clients.admin.AdminClient.create(self._settings())
            yield admin
        except Py4JError as error:
            raise PipelineError(self._sentence(doing, error)) from error
        finally:
            if admin is not None:
                admin.close(self._jvm.java.time.Duration.ofSeconds(1))

    def _settings(self) -> Any:
        settings = self._jvm.java.util.HashMap()
        for name, value in self._connection.client().items():
            settings.put(name, value)
        settings.put("default.api.timeout.ms", str(ANSWER_LIMIT_MS))
        settings.put("request.timeout.ms", str(ANSWER_LIMIT_MS // 2))
        return settings

    def _sentence(self, doing: str, error: Py4JError) -> str:
        servers = self._connection.bootstrap_servers
        if isinstance(error, Py4JNetworkError):
            return sentence(error)
        name, said = root_cause(error)
        if name in ("SaslAuthenticationException", "SslAuthenticationException"):
            return f"{servers} refused the login ({said}): check MARQ_SECURITY_PROTOCOL, MARQ_SASL_… and MARQ_SSL_…"
        if name.endswith("AuthorizationException"):
            return f"{doing}: {servers} refused for want of a right ({said})"
        if name in ("TimeoutException", "DisconnectException") or "bootstrap" in said:
            return (
                f"{servers} does not answer ({said}): start Kafka there (`make broker`), or set MARQ_BOOTSTRAP_SERVERS "
                "and MARQ_SECURITY_PROTOCOL to those of yours"
            )
        return f"{doing} on {servers} failed: {name}: {said}"


class _Values:
    """The variables, without the spaces that files leave around values."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, name: str) -> str:
        return self._environment.get(f"MARQ_{name}", "").strip()

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self.text(name) or allowed[0]
        if value.upper() not in allowed:
            raise PipelineError(f"MARQ_{name}={value!r}: expected one of {', '.join(allowed)}")
        return value.upper()

    def file(self, name: str) -> str | None:
        path = self.text(name)
        if not path:
            return None
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text: expected PEM"
            raise PipelineError(f"MARQ_{name}={path!r} can't be read: {reason}") from error


def _servers(values: _Values) -> str:
    servers = values.text("BOOTSTRAP_SERVERS") or DEFAULT_BOOTSTRAP_SERVERS
    for server in servers.split(","):
        host, _, port = server.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise PipelineError(f"MARQ_BOOTSTRAP_SERVERS={servers!r}: expected host:port, several separated by commas")
    return servers


def _security(values: _Values) -> dict[str, str]:
    protocol = values.choice("SECURITY_PROTOCOL", SECURITY_PROTOCOLS)
    mechanism = values.choice("SASL_MECHANISM", SASL_MECHANISMS)
    if protocol == "PLAINTEXT":
        return {}
    found = {"security.protocol": protocol}
    if "SASL" in protocol:
        found |= _login(values, protocol, mechanism)
    if "SSL" in protocol.split("_"):
        found |= _tls(values)
    return found


def _login(values: _Values, protocol: str, mechanism: str) -> dict[str, str]:
    given = {name: values.text(name) for name in ("SASL_USERNAME", "SASL_PASSWORD")}
    for name, value in given.items():
        if not value:
            raise PipelineError(f"MARQ_{name} is missing: MARQ_SECURITY_PROTOCOL={protocol} logs in with it")
    module = _MODULES[mechanism.partition("-")[0]]
    name, password = (value.translate(_ESCAPES) for value in given.values())
    return {
        "sasl.mechanism": mechanism,
        "sasl.jaas.config": f'{module} required username="{name}" password="{password}";',
    }


def _tls(values: _Values) -> dict[str, str]:
    found = {}
    authorities = values.file("SSL_CAFILE")
    if authorities is not None:
        _expect("SSL_CAFILE", values, authorities, "CERTIFICATE")
        found |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": _blocks(authorities, "CERTIFICATE")}
    certificate = values.file("SSL_CERTFILE")
    if certificate is None:
        return found
    _expect("SSL_CERTFILE", values, certificate, "CERTIFICATE")
    key = values.file("SSL_KEYFILE")
    # One file may have both, as with Python's own clients.
    _expect("SSL_CERTFILE" if key is None else "SSL_KEYFILE", values, key or certificate, "PRIVATE KEY")
    found |= {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": _blocks(certificate, "CERTIFICATE"),
        "ssl.keystore.key": _blocks(key or certificate, "PRIVATE KEY"),
    }
    if password := values.text("SSL_PASSWORD"):
        found["ssl.key.password"] = password
    return found


def _expect(name: str, values: _Values, text: str, block: str) -> None:
    path = values.text(name)
    if block == "PRIVATE KEY" and _OLD_KEY.search(text):
        raise PipelineError(
            f"MARQ_{name}={path!r}: Java reads private keys as PKCS#8 only; "
            "rewrite it: openssl pkcs8 -topk8 -nocrypt -in OLD -out NEW"
        )
    if not _blocks(text, block):
        raise PipelineError(f"MARQ_{name}={path!r}: expected PEM with -----BEGIN {block}-----")


def _blocks(text: str, block: str) -> str:
    """The PEM blocks of one kind, without what stands around them."""
    pattern = rf"-----BEGIN (?:ENCRYPTED )?{block}-----.*?-----END (?:ENCRYPTED )?{block}-----"
    return "\n".join(re.findall(pattern, text, re.DOTALL))


def _answer(future: Any) -> Any:
    return future.get()
