"""The embedded broker with users, TLS and ACLs."""

import ssl
from collections.abc import Iterator

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaConnectionError, TopicAuthorizationFailedError

from marq_worker.broker import BrokerError, Certificates, EmbeddedBroker, Security, ports
from marq_worker.broker.settings import FIRST_NODE_ID
from tests.brokers import UNFENCED
from tests.embedded import kafka_tools


@pytest.fixture(scope="module")
def broker(certificates: Certificates) -> Iterator[EmbeddedBroker]:
    protocols = ["SASL_PLAINTEXT", "SSL", "SASL_SSL"]
    security = Security(protocols, users={"alice": "secret"}, certificates=certificates, acls=True)
    with EmbeddedBroker(security=security, properties=UNFENCED) as broker:
        yield broker


async def send(
    broker: EmbeddedBroker,
    topic: str,
    protocol: str,
    *,
    context: ssl.SSLContext | None = None,
    mechanism: str = "PLAIN",
    password: str = "secret",
) -> None:
    producer = AIOKafkaProducer(
        bootstrap_servers=broker.listener(protocol),
        security_protocol=protocol,
        ssl_context=context,
        sasl_mechanism=mechanism,
        sasl_plain_username="alice",
        sasl_plain_password=password,
    )
    try:
        await producer.start()
        await producer.send_and_wait(topic, b"value")
    finally:
        await producer.stop()


async def create(broker: EmbeddedBroker, topic: str, *, writer: str | None = None) -> None:
    """Make a topic, as the administrator."""
    at = f"--bootstrap-server {broker.bootstrap_servers}"
    make = f"kafka-topics.sh {at} --create --topic {topic} --partitions 1 --replication-factor 1"
    await kafka_tools.run(make, broker.bootstrap_servers)
    if writer is not None:
        allow = f"kafka-acls.sh {at} --add --allow-principal User:{writer} --operation Write --topic {topic}"
        await kafka_tools.run(allow, broker.bootstrap_servers)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
async def test_a_user_with_the_right_password_may_what_an_acl_allows(
    broker: EmbeddedBroker, certificates: Certificates, protocol: str, mechanism: str
) -> None:
    topic = f"{protocol}.{mechanism}"
    await create(broker, topic, writer="alice")
    context = ssl.create_default_context(cafile=certificates.authority) if protocol == "SASL_SSL" else None

    await send(broker, topic, protocol, context=context, mechanism=mechanism)


# aiokafka 0.14 lets go of a refused connection before its transport is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_a_wrong_password_is_refused(broker: EmbeddedBroker, mechanism: str) -> None:
    with pytest.raises(KafkaConnectionError):
        await send(broker, "any", "SASL_PLAINTEXT", mechanism=mechanism, password="wrong")


async def test_what_no_acl_allows_is_refused(broker: EmbeddedBroker) -> None:
    await create(broker, "forbidden")

    with pytest.raises(TopicAuthorizationFailedError):
        await send(broker, "forbidden", "SASL_PLAINTEXT")


async def test_a_client_with_a_certificate_is_the_user_that_it_names(
    broker: EmbeddedBroker, certificates: Certificates
) -> None:
    await create(broker, "certified", writer="bob")
    context = ssl.create_default_context(cafile=certificates.authority)
    context.load_cert_chain(certificates.client("bob"))
    other = ssl.create_default_context(cafile=certificates.authority)
    other.load_cert_chain(certificates.client("eve"))

    await send(broker, "certified", "SSL", context=context)

    with pytest.raises(TopicAuthorizationFailedError):
        await send(broker, "certified", "SSL", context=other)


async def test_a_client_that_does_not_trust_the_authority_gets_no_connection(broker: EmbeddedBroker) -> None:
    with pytest.raises(KafkaConnectionError):
        await send(broker, "any", "SSL", context=ssl.create_default_context())


def test_listeners_keep_their_ports_over_a_restart(broker: EmbeddedBroker) -> None:
    before = [broker.listener(protocol) for protocol in ("SASL_PLAINTEXT", "SSL", "SASL_SSL")]

    broker.stop()
    broker.start()

    assert [broker.listener(protocol) for protocol in ("SASL_PLAINTEXT", "SSL", "SASL_SSL")] == before
    assert ports.is_ready(*ports.split_address(broker.bootstrap_servers), FIRST_NODE_ID, limit_seconds=30)


def test_a_listener_that_was_not_asked_for_is_named(broker: EmbeddedBroker) -> None:
    with pytest.raises(BrokerError, match="no listener 'PLAIN'"):
        broker.listener("PLAIN")


@pytest.mark.parametrize(
    ("security", "reason"),
    [
        ({"protocols": ["SASL"]}, "unknown security protocol 'SASL'"),
        ({"protocols": ["SSL"]}, "needs certificates"),
        ({"users": {"alice": 'se"cret'}}, "may only contain A-Z"),
    ],
)
def test_what_the_broker_can_t_be_given_is_refused(security: dict[str, object], reason: str) -> None:
    with pytest.raises(BrokerError, match=reason):
        Security(**security)  # type: ignore[arg-type]


def test_without_openssl_the_error_says_what_to_install(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(BrokerError, match="openssl is missing"):
        Certificates.make(tmp_path / "certificates")
