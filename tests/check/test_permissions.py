"""Services and workers with the permissions of their role and no others, over listeners that require TLS or a login."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import GroupAuthorizationFailedError, TopicAuthorizationFailedError

import marq
from marq.kafka.connection import client_options, stop_consumer, stop_producer
from marq.kafka.role_permissions import ROLES, redriver, worker
from marq.settings.client import ClientSettings
from marq.wire.names import Names
from marq_worker.broker import Certificates, EmbeddedBroker
from tests.check.checking import Check, allow, make_topics, obey
from tests.check.conftest import PASSWORD
from tests.worker.harness import LIMIT_SECONDS, Namespace, Worker, eventually

pytestmark = pytest.mark.verify


@pytest.fixture
def options(prefix: str, user: str) -> dict[str, Any]:
    """The options of this user's clients."""
    return {"prefix": prefix, "security_protocol": "SASL_PLAINTEXT", "sasl_username": user, "sasl_password": PASSWORD}


# --- documented permissions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "mechanism"),
    [("SASL_PLAINTEXT", "SCRAM-SHA-512"), ("SASL_SSL", "PLAIN"), ("SASL_SSL", "SCRAM-SHA-256"), ("SSL", "PLAIN")],
)
async def test_a_sender_and_a_consumer_work_over_a_secured_listener(
    secured: EmbeddedBroker,
    certificates: Certificates,
    user: str,
    names: Names,
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
    mechanism: str,
) -> None:
    await make_topics(secured.bootstrap_servers, names.prefix)
    for role in ("sender", "consumer"):
        await allow(secured.bootstrap_servers, user, ROLES[role](names, ()))
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
        [message] = await consumer.receive(wait=LIMIT_SECONDS)
        await message.ack()

    assert message.value == b"over a secured connection"


async def test_a_service_that_may_only_send_can_do_nothing_else(
    secured: EmbeddedBroker, user: str, names: Names, options: dict[str, Any]
) -> None:
    await make_topics(secured.bootstrap_servers, names.prefix)
    await allow(secured.bootstrap_servers, user, ROLES["sender"](names, ()))
    address = secured.listener("SASL_PLAINTEXT")

    async with marq.Producer(address, **options) as producer:
        await producer.send("emails", b"value")
        with pytest.raises(marq.MarqError, match=f"lacks permission for Write on topic {names.markers}"):
            await producer.send("emails", b"value", delay=60)
    with pytest.raises(marq.ConfigError, match="lacks permission for"):
        async with marq.Consumer("emails", address, **options) as consumer:
            await consumer.receive(wait=LIMIT_SECONDS)

    # The broker also refuses clients that do not use marq.
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
        async with asyncio.timeout(LIMIT_SECONDS):
            while not await reader.getmany(timeout_ms=1_000):
                pass
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


# --- permissions that the check grants --------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["sender", "consumer", "transactional-consumer"])
async def test_the_commands_of_the_check_grant_a_service_all_that_it_needs(
    guarded: Check, secured: EmbeddedBroker, options: dict[str, Any], prefix: str, role: str
) -> None:
    await obey((await guarded(role)).problem("permissions"), secured.bootstrap_servers)
    sending = options if role == "sender" else {}
    address = secured.listener("SASL_PLAINTEXT") if role == "sender" else secured.bootstrap_servers

    async with marq.Producer(address, **{"prefix": prefix, **sending}) as producer:
        await producer.send("emails", b"value")
    if role != "sender":
        start = {"transactional": True} if role == "transactional-consumer" else {}
        async with marq.Consumer("emails", secured.listener("SASL_PLAINTEXT"), **start, **options) as receiver:
            [message] = await receiver.receive(wait=LIMIT_SECONDS)
            await message.ack()


async def test_the_commands_of_the_check_grant_all_that_a_redrive_needs(
    guarded: Check, secured: EmbeddedBroker, user: str, names: Names, options: dict[str, Any]
) -> None:
    async with Namespace(secured.bootstrap_servers, names) as namespace:
        await namespace.producer.send_and_wait(names.dead_letters, b"x", b"emails")
    address = secured.listener("SASL_PLAINTEXT")
    await allow(secured.bootstrap_servers, user, [use for use in redriver(names) if use.operation != "Read"])
    async with marq.DeadLetters(address, **options) as letters:
        with pytest.raises(marq.ConfigError, match=f"lacks permission for Read on topic {names.dead_letters}"):
            await letters.count()

    await obey((await guarded("redriver")).problem("permissions"), secured.bootstrap_servers)

    async with marq.DeadLetters(address, request_timeout=5, **options) as letters:
        assert await letters.count() == [("emails", "", 1)]
        # The request is allowed, but a worker is missing to answer it.
        with pytest.raises(marq.BrokerUnavailable, match="no worker has answered the requests for 1 dead letters"):
            await letters.redrive("emails")


def worker_of(guarded: Check, secured: EmbeddedBroker, directory: Path, prefix: str, **environment: str) -> Worker:
    login = {name: value for name, value in guarded.environment.items() if name.startswith("MARQ_S")}
    return Worker(secured.listener("SASL_PLAINTEXT"), directory, prefix=prefix, environment={**login, **environment})


async def test_the_commands_of_the_check_grant_all_that_a_worker_needs(
    guarded: Check, secured: EmbeddedBroker, tmp_path: Path, prefix: str
) -> None:
    (tmp_path / "queues.toml").write_text('[queues.emails]\nhandler = "posixpath:basename"\n')
    queues = {"MARQ_QUEUES_FILE": str(tmp_path / "queues.toml")}
    await obey((await guarded(**queues)).problem("permissions"), secured.bootstrap_servers)

    with worker_of(guarded, secured, tmp_path, prefix, **queues) as running:
        await running.ready(2)
        # The process of the handlers joins its group after the worker is ready.
        await eventually(lambda: guarded(**queues), lambda found: found.exit_code == 0)

    assert "marq: " not in running.log(), running.log()


async def test_a_worker_that_lacks_permissions_ends_with_one_sentence_and_the_commands(
    guarded: Check, secured: EmbeddedBroker, tmp_path: Path, user: str, names: Names
) -> None:
    missing = {
        ("group", names.app_id, "Read"),
        ("transactional-id", names.transactional_ids, "Write"),
        ("topic", names.markers, "Write"),
        ("topic", names.changelog, "Create"),
    }
    granted = [
        permission
        for permission in worker(names)
        if (permission.kind, permission.name, permission.operation) not in missing
    ]
    await allow(secured.bootstrap_servers, user, granted)

    with worker_of(guarded, secured, tmp_path, names.prefix) as running:
        code = await running.ended()

    log = running.log()
    [sentence] = [line for line in log.splitlines() if line.startswith("marq: ")]
    assert code == 1
    assert sentence.startswith(f"marq: User:{user} lacks permission for ")
    for kind, name, operation in missing:
        assert f"{operation} on {kind} {name}" in sentence
        assert f"--operation {operation} --{kind} {name}" in log
    assert "Traceback" not in log
