"""Questions to a cluster about its topics, and errors if it does not answer."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from marq.wire.names import Names
from marq_worker.broker import Certificates, EmbeddedBroker, Security
from marq_worker.broker.ports import free_port
from pipeline import kafka
from pipeline.errors import PipelineError
from pipeline.kafka import Connection, TopicAdmin
from tests.pipeline.namespace import Namespace

NAME, PASSWORD = "reader", "secret"


@pytest.fixture
def topics(spark: SparkSession, connection: Connection) -> TopicAdmin:
    return TopicAdmin(spark, connection)


@pytest.fixture
def topic(servers: str, names: Names) -> Namespace:
    """A topic with three records in partition 1, called like the prefix."""
    namespace = Namespace(servers, names)
    fill(namespace)
    return namespace


def fill(namespace: Namespace) -> None:
    topic = namespace.names.prefix
    namespace.make(topic)
    for value in (b"one", b"two", b"three"):
        namespace.write(topic, value, partition=1)


def test_ends_and_begins_are_those_of_each_partition(topics: TopicAdmin, topic: Namespace, prefix: str) -> None:
    assert prefix in topics.existing()
    assert topics.partitions([prefix]) == {prefix: 2}
    assert topics.begins([prefix]) == {prefix: {"0": 0, "1": 0}}
    assert topics.ends([prefix]) == {prefix: {"0": 0, "1": 3}}
    assert [len(id_) for id_ in topics.ids([prefix]).values()] == [32]
    assert topics.limit_bytes(prefix) > 1_000_000
    assert len(topics.cluster_id()) == 22


def test_an_open_transaction_is_after_the_committed_end(topics: TopicAdmin, topic: Namespace, prefix: str) -> None:
    with topic.transaction(commit=False) as producer:
        topic.write(prefix, partition=1, producer=producer)

        assert topics.ends([prefix]) == {prefix: {"0": 0, "1": 3}}
        assert topics.ends([prefix], committed=False) == {prefix: {"0": 0, "1": 4}}


def test_a_topic_that_is_not_there_is_named(topics: TopicAdmin, servers: str, prefix: str) -> None:
    with pytest.raises(PipelineError, match=rf"there is no topic {prefix} on {servers}: check MARQ_BOOTSTRAP_SERVERS"):
        topics.ends([prefix])


def test_a_broker_that_is_down_is_named_in_time(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kafka.ANSWER_LIMIT_MS <= 10_000
    monkeypatch.setattr(kafka, "ANSWER_LIMIT_MS", 2_000)
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    began_s = time.monotonic()

    with pytest.raises(PipelineError, match=rf"^{address} does not answer .*: start Kafka there"):
        TopicAdmin(spark, Connection.read({"MARQ_BOOTSTRAP_SERVERS": address})).existing()

    # Java's own limit is a minute.
    assert time.monotonic() - began_s < 40


def test_an_unknown_host_is_named(spark: SparkSession) -> None:
    with pytest.raises(PipelineError, match=r"^no-such-host\.invalid:9092 does not answer"):
        TopicAdmin(spark, Connection.read({"MARQ_BOOTSTRAP_SERVERS": "no-such-host.invalid:9092"})).existing()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secured(certificates: Certificates, needs_spark: None) -> Iterator[EmbeddedBroker]:
    """A broker that permits nothing but the reader."""
    security = Security(["SASL_SSL", "SSL"], {NAME: PASSWORD}, certificates, acls=True, super_users=[NAME])
    with EmbeddedBroker(security=security) as broker:
        yield broker


def settings(broker: EmbeddedBroker, certificates: Certificates, protocol: str, mechanism: str) -> dict[str, str]:
    found = {
        "MARQ_BOOTSTRAP_SERVERS": broker.listener(protocol),
        "MARQ_SECURITY_PROTOCOL": protocol,
        "MARQ_SSL_CAFILE": str(certificates.authority),
    }
    if protocol == "SSL":
        return {**found, "MARQ_SSL_CERTFILE": str(certificates.client(NAME))}
    login = {"MARQ_SASL_USERNAME": NAME, "MARQ_SASL_PASSWORD": PASSWORD}
    return {**found, "MARQ_SASL_MECHANISM": mechanism, **login}


@pytest.mark.verify
@pytest.mark.parametrize(("protocol", "mechanism"), [("SASL_SSL", "PLAIN"), ("SASL_SSL", "SCRAM-SHA-512"), ("SSL", "")])
def test_records_are_read_over_a_secured_listener(
    spark: SparkSession, secured: EmbeddedBroker, certificates: Certificates, prefix: str, protocol: str, mechanism: str
) -> None:
    fill(Namespace(secured.bootstrap_servers, Names(prefix)))
    connection = Connection.read(settings(secured, certificates, protocol, mechanism))

    records = spark.read.format("kafka").options(**connection.options()).option("subscribe", prefix).load()

    assert prefix in TopicAdmin(spark, connection).existing()
    assert sorted(bytes(row.value) for row in records.select("value").collect()) == [b"one", b"three", b"two"]


@pytest.mark.verify
def test_a_wrong_password_is_named(spark: SparkSession, secured: EmbeddedBroker, certificates: Certificates) -> None:
    environment = settings(secured, certificates, "SASL_SSL", "PLAIN") | {"MARQ_SASL_PASSWORD": "wrong"}

    with pytest.raises(PipelineError, match=r"refused the login \(Authentication failed.*\): check MARQ_SECURITY"):
        TopicAdmin(spark, Connection.read(environment)).existing()
