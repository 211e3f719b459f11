"""The connection to Kafka: options for Spark's connector from the environment, and questions to the cluster.

The variables are those of every Marq client (``MARQ_BOOTSTRAP_SERVERS``, ``MARQ_PREFIX``, ``MARQ_SECURITY_PROTOCOL``,
``MARQ_SASL_…``, ``MARQ_SSL_…``). Executors get certificates as text, because their machines may lack the files.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import time
from base64 import urlsafe_b64decode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.sql import DataFrame, SparkSession

from marq.settings.client import MEMORY_SCHEME, OAUTHBEARER, ClientSettings
from marq.settings.topic_configs import LIMIT
from marq.wire.names import Names
from pipeline.errors import PipelineError, root_cause, sentence

#: Time limit of a request to the cluster.
ANSWER_LIMIT_MS = 10_000
#: The id that a broker before Kafka 2.8 gives all its topics.
NO_ID = "A" * 22
_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
#: Escapes of Java's login configuration, which are those of C.
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"})

#: Keys of OpenSSL 1 and older: RSA PRIVATE KEY, EC PRIVATE KEY.
_OLD_KEY = re.compile(r"-----BEGIN (?:RSA|EC|DSA) PRIVATE KEY-----")

#: {topic: {partition: offset}}, with partitions as text, as in JSON.
Offsets = dict[str, dict[str, int]]
#: Offset, timestamp in ms, key, value, headers.
Record = tuple[int, int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the cluster is, how to log in, and the names of a namespace on it."""

    bootstrap_servers: str
    names: Names
    #: Kafka's own settings for TLS and login.
    security: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Connection:
        """Return the connection that the environment describes.

        Raises:
            ConfigError, PipelineError: a value is missing or invalid; the text names the variable.
        """
        # Java reads the certificates; a context of any kind keeps Python from loading them, and a token provider of any
        # kind from importing one.
        options = {"ssl_context": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "sasl_token_provider": lambda: ""}
        settings = ClientSettings.read(None, options, environment=environment)
        servers = settings.bootstrap_servers
        if servers.startswith(MEMORY_SCHEME):
            raise PipelineError(f"MARQ_BOOTSTRAP_SERVERS={servers!r}: expected host:port, several separated by commas")
        return cls(servers, settings.names, _security(settings, environment))

    def options(self) -> dict[str, str]:
        """Return options for ``spark.read.format("kafka")`` and its streaming counterpart."""
        return {f"kafka.{name}": value for name, value in self.client().items()}

    def client(self) -> dict[str, str]:
        """Return properties for Kafka's own Java clients."""
        return {"bootstrap.servers": self.bootstrap_servers, **self.security}


def committed_records(
    spark: SparkSession, connection: Connection, ranges: Mapping[str, Mapping[str, tuple[int, int]]], **options: str
) -> DataFrame:
    """Return the records between two offsets of each partition, the second excluded."""

    def offsets(index: int) -> str:
        return json.dumps({topic: {p: ends[index] for p, ends in parts.items()} for topic, parts in ranges.items()})

    settings = {
        **connection.options(),
        "kafka.isolation.level": "read_committed",
        "assign": json.dumps({topic: sorted(map(int, partitions)) for topic, partitions in ranges.items()}),
        "startingOffsets": offsets(0),
        "endingOffsets": offsets(1),
        **options,
    }
    return spark.read.format("kafka").options(**settings).load()


class MissingTopicError(PipelineError):
    def __init__(self, topic: str, bootstrap_servers: str) -> None:
        super().__init__(
            f"there is no topic {topic} on {bootstrap_servers}: check MARQ_BOOTSTRAP_SERVERS and MARQ_PREFIX; the first"
            " worker or client that starts creates Marq's topics"
        )
        self.topic = topic


class TopicAdmin:
    """Asks the cluster about topics, with Kafka's AdminClient in Spark's Java process; py4j converts lists and maps.

    Every method raises PipelineError within about 10 seconds if the broker does not answer, refuses the login or
    permission, or lacks the topic.
    """

    def __init__(self, spark: SparkSession, connection: Connection) -> None:
        self._jvm: Any = spark.sparkContext._jvm
        self._connection = connection
        self._opened: Any = None

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Answer all questions within this context over one connection."""
        if self._opened is not None:
            yield
            return
        with self._asked("connecting"):
            self._opened = self._jvm.org.apache.kafka.clients.admin.AdminClient.create(self._settings())
        try:
            yield
        finally:
            opened, self._opened = self._opened, None
            with suppress(Py4JError):  # Spark's Java process may have ended
                opened.close(self._jvm.java.time.Duration.ofSeconds(1))

    def existing(self) -> set[str]:
        """Return the names of all visible topics."""
        with self._admin("listing topics") as admin:
            return set(admin.listTopics().names().get())

    def partitions(self, topics: Iterable[str]) -> dict[str, int]:
        with self._admin("listing the topics") as admin:
            described = self._described(admin, topics)
            return {topic: len(description.partitions()) for topic, description in described.items()}

    def ids(self, topics: Iterable[str]) -> dict[str, str]:
        """Return the ids of topics, which change if a topic is recreated; brokers before Kafka 2.8 have none."""
        with self._admin("listing the topics") as admin:
            ids = {
                topic: description.topicId().toString() for topic, description in self._described(admin, topics).items()
            }
        return {topic: urlsafe_b64decode(f"{id_}==").hex() for topic, id_ in ids.items() if id_ != NO_ID}

    def ends(self, topics: Iterable[str], committed: bool = True) -> Offsets:
        """Return the offset after the last record; ``committed``: after the last that read_committed returns now."""
        return self._offsets(topics, self._jvm.org.apache.kafka.clients.admin.OffsetSpec.latest(), committed)

    def begins(self, topics: Iterable[str]) -> Offsets:
        """Return the offset of the first retained record."""
        return self._offsets(topics, self._jvm.org.apache.kafka.clients.admin.OffsetSpec.earliest(), False)

    def limit_bytes(self, topic: str) -> int:
        """Return the largest record batch that a topic accepts."""
        with self._admin(f"reading the settings of {topic}") as admin:
            [config] = self._configs(admin, [topic])
            return int(config.get().get(LIMIT).value())

    def compacted(self, topics: Iterable[str]) -> list[str]:
        """Return the topics that are compacted, as far as this user may read their settings."""
        compacted = []
        with self._admin("reading the settings of topics") as admin:
            names = [*topics]
            for topic, config in zip(names, self._configs(admin, names), strict=True):
                with suppress(Py4JError):
                    if "compact" in config.get().get("cleanup.policy").value():
                        compacted.append(topic)
        return compacted

    def _configs(self, admin: Any, topics: Iterable[str]) -> list[Any]:
        java = self._jvm.org.apache.kafka.common.config
        resources = [java.ConfigResource(java.ConfigResource.Type.TOPIC, topic) for topic in topics]
        answers = admin.describeConfigs(resources).values()
        return [answers.get(resource) for resource in resources]

    def read(self, topic: str, partition: int, offsets: range) -> tuple[list[Record], int]:
        """Read committed records one by one, which is slow; return them, and the offset to continue at."""
        kafka = self._jvm.org.apache.kafka
        settings = {
            "key.deserializer": "org.apache.kafka.common.serialization.ByteArrayDeserializer",
            "value.deserializer": "org.apache.kafka.common.serialization.ByteArrayDeserializer",
            "isolation.level": "read_committed",
            "enable.auto.commit": "false",
            "auto.offset.reset": "none",
        }
        place = kafka.common.TopicPartition(topic, partition)
        records: list[Record] = []
        doing = f"reading {topic}/{partition} from {offsets.start}"
        with self._asked(doing):
            consumer = kafka.clients.consumer.KafkaConsumer({**self._settings(), **settings})
            try:
                consumer.assign([place])
                consumer.seek(place, offsets.start)
                position, moved_s = offsets.start, time.monotonic()
                while position < offsets.stop:
                    polled = consumer.poll(self._jvm.java.time.Duration.ofMillis(200)).records(place)
                    records += [_record(record) for record in polled if record.offset() < offsets.stop]
                    before, position = position, consumer.position(place)
                    if position > before:
                        moved_s = time.monotonic()
                    elif time.monotonic() > moved_s + ANSWER_LIMIT_MS / 1000:
                        raise PipelineError(f"{doing}: {self._connection.bootstrap_servers} returned no records")
            finally:
                consumer.close()
        return records, position

    def cluster_id(self) -> str:
        """Return the cluster's id: offsets are meaningless on another cluster."""
        with self._admin("requesting the cluster's id") as admin:
            return str(admin.describeCluster().clusterId().get())

    def _offsets(self, topics: Iterable[str], which: object, committed: bool) -> Offsets:
        java = self._jvm.org.apache.kafka
        level = java.common.IsolationLevel.READ_COMMITTED if committed else java.common.IsolationLevel.READ_UNCOMMITTED
        with self._admin("requesting offsets") as admin:
            places = {
                (topic, number): java.common.TopicPartition(topic, number)
                for topic, count in self.partitions(topics).items()
                for number in range(count)
            }
            wanted = self._jvm.java.util.HashMap()
            for place in places.values():
                wanted.put(place, which)
            answers = admin.listOffsets(wanted, java.clients.admin.ListOffsetsOptions(level)).all().get()
            offsets: Offsets = {}
            for (topic, number), place in places.items():
                offsets.setdefault(topic, {})[str(number)] = answers.get(place).offset()
        return offsets

    def _described(self, admin: Any, topics: Iterable[str]) -> dict[str, Any]:
        wanted = list(dict.fromkeys(topics))
        descriptions = admin.describeTopics(wanted).topicNameValues()
        described = {}
        for topic in wanted:
            try:
                described[topic] = descriptions.get(topic).get()
            except Py4JError as error:
                if root_cause(error)[0] != "UnknownTopicOrPartitionException":
                    raise
                raise MissingTopicError(topic, self._connection.bootstrap_servers) from None
        return described

    @contextmanager
    def _admin(self, doing: str) -> Iterator[Any]:
        with self._asked(doing), self.connected():
            yield self._opened

    @contextmanager
    def _asked(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Py4JError as error:
            raise PipelineError(self._sentence(doing, error)) from error

    def _settings(self) -> dict[str, str]:
        limits = {"default.api.timeout.ms": str(ANSWER_LIMIT_MS), "request.timeout.ms": str(ANSWER_LIMIT_MS // 2)}
        return {**self._connection.client(), **limits}

    def _sentence(self, doing: str, error: Py4JError) -> str:
        servers = self._connection.bootstrap_servers
        if isinstance(error, Py4JNetworkError):
            return sentence(error)
        name, text = root_cause(error)
        if name in ("SaslAuthenticationException", "SslAuthenticationException"):
            return f"{servers} refused the login ({text}): check MARQ_SECURITY_PROTOCOL, MARQ_SASL_… and MARQ_SSL_…"
        if name.endswith("AuthorizationException"):
            return f"{doing}: {servers} permission denied ({text})"
        if name in ("TimeoutException", "DisconnectException") or "bootstrap" in text:
            return (
                f"{servers} does not answer ({text}): start Kafka there (`make broker`), or set MARQ_BOOTSTRAP_SERVERS "
                "and MARQ_SECURITY_PROTOCOL to those of yours"
            )
        return f"{doing} on {servers} failed: {name}: {text}"


def _security(settings: ClientSettings, environment: Mapping[str, str]) -> dict[str, str]:
    protocol = settings.security_protocol
    if protocol == "PLAINTEXT":
        return {}
    properties = {"security.protocol": protocol}
    if "SASL" in protocol:
        if settings.sasl_mechanism == OAUTHBEARER:
            raise PipelineError(
                "MARQ_SASL_MECHANISM=OAUTHBEARER: the pipeline logs in with PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512 only;"
                " give it a user and a password, or a listener with client certificates"
            )
        module = _MODULES[settings.sasl_mechanism.partition("-")[0]]
        login = (settings.sasl_username or "", settings.sasl_password or "")
        name, password = (value.translate(_ESCAPES) for value in login)
        properties["sasl.mechanism"] = settings.sasl_mechanism
        properties["sasl.jaas.config"] = f'{module} required username="{name}" password="{password}";'
    return properties | _tls(environment) if "SSL" in protocol.split("_") else properties


def _tls(environment: Mapping[str, str]) -> dict[str, str]:
    names = ("MARQ_SSL_CAFILE", "MARQ_SSL_CERTFILE", "MARQ_SSL_KEYFILE", "MARQ_SSL_PASSWORD")
    authorities, certificate, key, password = ((name, environment.get(name, "").strip()) for name in names)
    properties: dict[str, str] = {}
    if authorities[1]:
        trusted = _pem(*authorities, "CERTIFICATE")
        properties |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": trusted}
    if certificate[1]:
        properties |= {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": _pem(*certificate, "CERTIFICATE"),
            # One file may contain both, as for Python's own clients.
            "ssl.keystore.key": _pem(*(key if key[1] else certificate), "PRIVATE KEY"),
        }
        if password[1]:
            properties["ssl.key.password"] = password[1]
    return properties


def _pem(variable: str, path: str, block: str) -> str:
    """Return the PEM blocks of one kind in a file, without the text around them."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text: expected PEM"
        raise PipelineError(f"{variable}={path!r} can't be read: {reason}") from error
    if block == "PRIVATE KEY" and _OLD_KEY.search(text):
        raise PipelineError(
            f"{variable}={path!r}: Java reads private keys as PKCS#8 only; "
            "convert it: openssl pkcs8 -topk8 -nocrypt -in OLD -out NEW"
        )
    pattern = rf"-----BEGIN (?:ENCRYPTED )?{block}-----.*?-----END (?:ENCRYPTED )?{block}-----"
    blocks = re.findall(pattern, text, re.DOTALL)
    if not blocks:
        raise PipelineError(f"{variable}={path!r}: expected PEM with -----BEGIN {block}-----")
    return "\n".join(blocks)


def _record(record: Any) -> Record:
    headers = [(header.key(), header.value()) for header in record.headers().toArray()]
    return record.offset(), record.timestamp(), record.key(), record.value(), headers
