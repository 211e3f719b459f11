"""Services over listeners that demand TLS or a login, each with the rights of its role and no others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import GroupAuthorizationFailedError, TopicAuthorizationFailedError

import marq
from broker import Certificates, EmbeddedBroker
from marq.connection import client_options, stop_consumer, stop_producer
from marq.core.kafka_tools import Tools
from marq.core.names import Names
from marq.core.rights import ROLES, grants
from marq.settings import ClientSettings
from marq.topics import ensure_topics
from tests.check.conftest import PASSWORD
from tests.embedded import kafka_tools

LIMIT_S = 90


async def allow(secured: EmbeddedBroker, user: str, names: Names, *roles: str) -> None:
    """Make the topics, and grant a user what these roles need."""
    settings = ClientSettings.read(secured.bootstrap_servers, {"prefix": names.prefix, "partitions": 1}, environment={})
    await ensure_topics(settings, changelog=True)
    rights = [right for role in roles for right in ROLES[role](names, ())]
    for command in grants(rights, f"User:{user}", Tools("any")):
        await kafka_tools.run(command, secured.bootstrap_servers)


@pytest.mark.parametrize(
    ("protocol", "mechanism"),
    [("SASL_PLAINTEXT", "SCRAM-SHA-512"), ("SASL_SSL", "PLAIN"), ("SASL_SSL", "SCRAM-SHA-256"), ("SSL", "PLAIN")],
)
async def test_messages_go_there_and_back_over_a_secured_listener(
    secured: EmbeddedBroker,
    certificates: Certificates,
    user: str,
    names: Names,
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
    mechanism: str,
) -> None:
    await allow(secured, user, names, "sender", "consumer")
    variables = {"BOOTSTRAP_SERVERS": secured.listener(protocol), "PREFIX": names.prefix, "SECURITY_PROTOCOL": protocol}
    if "SSL" in protocol:
        variables["SSL_CAFILE"] = str(certificates.authority)
    if protocol == "SSL":
        variables["SSL_CERTFILE"] = str(certificates.client(user))
    else:
        variables |= {"SASL_MECHANISM": mechanism, "SASL_USERNAME": user, "SASL_PASSWORD": PASSWORD}
    for name, value in variables.items():
        monkeypatch.setenv(f"MARQ_{name}", value)

    async with marq.Producer() as producer, marq.Consumer("emails") as consumer:
        await producer.send("emails", b"over a secured connection")
        [message] = await consumer.receive(wait=LIMIT_S)
        await message.ack()

    assert message.value == b"over a secured connection"


async def test_a_service_that_may_only_send_can_do_nothing_else(
    secured: EmbeddedBroker, user: str, names: Names
) -> None:
    await allow(secured, user, names, "sender")
    address = secured.listener("SASL_PLAINTEXT")
    options: dict[str, Any] = {
        "prefix": names.prefix,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_username": user,
        "sasl_password": PASSWORD,
    }

    async with marq.Producer(address, **options) as producer:
        await producer.send("emails", b"value")
        with pytest.raises(marq.MarqError, match=f"no right to Write on topic {names.markers}"):
            await producer.send("emails", b"value", delay=60)
    with pytest.raises(marq.ConfigError, match="no right to"):
        async with marq.Consumer("emails", address, **options) as consumer:
            await consumer.receive(wait=LIMIT_S)

    # Nor by Kafka's own clients, which ask nothing of marq.
    settings = ClientSettings.read(address, options, environment={})
    for topic in (names.messages, names.markers, names.dead_letters, names.quarantine):
        assert not await can_read(settings, topic), topic
    for topic in (names.markers, names.dead_letters, names.queues, names.quarantine):
        assert not await can_write(settings, topic), topic
    assert await can_write(settings, names.messages)


async def can_read(settings: ClientSettings, topic: str) -> bool:
    reader = AIOKafkaConsumer(auto_offset_reset="earliest", enable_auto_commit=False, **client_options(settings))
    await reader.start()
    try:
        reader.assign([TopicPartition(topic, 0)])
        async with asyncio.timeout(LIMIT_S):
            await reader.getmany(timeout_ms=1_000)
    except (TopicAuthorizationFailedError, GroupAuthorizationFailedError):
        return False
    finally:
        await stop_consumer(reader, 1.0)
    return True


async def can_write(settings: ClientSettings, topic: str) -> bool:
    writer = AIOKafkaProducer(**client_options(settings))
    await writer.start()
    try:
        await writer.send_and_wait(topic, b"value", b"emails", partition=0)
    except TopicAuthorizationFailedError:
        return False
    finally:
        await stop_producer(writer, 1.0)
    return True
