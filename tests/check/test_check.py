"""``faust -A app check`` on installations that are broken in one way each."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

import marq
from app.checkup.examination import LIMIT_S
from app.checkup.findings import Level
from broker import Certificates, EmbeddedBroker
from marq.core.kafka_tools import Tools
from marq.core.names import Names
from marq.core.rights import Kind, Right, consumer, grants, redriver, sender, transactional_consumer, worker
from tests.check.checking import Check, NewWorker, Outcome, lags, make_topics, obey
from tests.check.conftest import PASSWORD
from tests.embedded import kafka_tools
from tests.worker.harness import LIMIT_SECONDS, Installation, Worker, eventually

# --- nothing is wrong -------------------------------------------------------------------------------------------------


async def test_a_healthy_installation(check: Check, new_worker: NewWorker, prefix: str) -> None:
    running = await new_worker(prefix=prefix, queues="[queues.emails]\nlease = 60\n").start().ready()
    client = {"bootstrap_servers": check.environment["MARQ_BOOTSTRAP_SERVERS"], "prefix": prefix}
    async with marq.Producer(**client) as producer, marq.Consumer("emails", **client) as consumer:
        # Delivered by the tracker: a transaction's own record is the last one of its partitions, and waits for nobody.
        await producer.send("emails", b"value", delay=0.1)
        [message] = await consumer.receive(wait=LIMIT_SECONDS)
        await message.ack()
        await eventually(lambda: lags(running), lambda found: not any(found))
        found = await healthy(check, running)

    assert "1 that read queues" in found.of(Level.OK, "groups").found


async def healthy(check: Check, running: Worker) -> Outcome:
    found = await check(MARQ_QUEUES_FILE=str(running.directory / "queues.toml"), MARQ_WEB_PORT=str(running.web_port))

    assert found.exit_code == 0, str(found)
    assert not found.has(Level.WARNING), str(found)
    assert "1 in group" in found.of(Level.OK, "trackers").found
    assert "emails" in found.of(Level.OK, "queues").found
    assert found.has(Level.OK, "clock")
    assert found.of(Level.OK, "web port").found == "is that of a running worker"
    return found


async def test_an_installation_that_nobody_has_started_yet_is_no_problem_and_stays_so(
    check: Check, names: Names, admin: AIOKafkaAdminClient
) -> None:
    code, text = await check.text()

    assert code == 0, text
    assert f"WARNING  topics: missing: {names.messages}, {names.markers}" in text
    assert f"WARNING  trackers: none runs: group {names.app_id} has no members. Start one:\n" in text
    assert not [topic for topic in await admin.list_topics() if topic.startswith(names.prefix)]


async def test_it_changes_nothing(
    check: Check, new_worker: NewWorker, prefix: str, names: Names, admin: AIOKafkaAdminClient
) -> None:
    running = await new_worker(prefix=prefix).start().ready()
    async with Installation(running._environment["MARQ_BOOTSTRAP_SERVERS"], names) as installation:
        # Of the others the worker itself writes something now and then.
        topics = [names.messages, names.dead_letters, names.quarantine]
        groups = await groups_of(admin, names)

        assert (await check("--role", "worker", "--role", "consumer", "--role", "sender")).exit_code == 0

        assert await groups_of(admin, names) == groups
        assert not [record for topic in topics for record in await installation.records(topic)]
        assert [(record.key, record.value) for record in await installation.records(names.queues)] == [(b"check", None)]
    assert all(part["state"] == "owner" for part in (await running.partitions()).values())


async def groups_of(admin: AIOKafkaAdminClient, names: Names) -> set[str]:
    """The groups of an installation, but for that by which its worker counts what waits, whenever it does."""
    listed = {name for name, *_ in await admin.list_consumer_groups()}
    return {name for name in listed if name.startswith(names.prefix)} - {names.census}


# --- no broker --------------------------------------------------------------------------------------------------------


async def test_nothing_listens(check: Check) -> None:
    found = await check(MARQ_BOOTSTRAP_SERVERS="127.0.0.1:1")

    broker = found.problem("broker")
    assert broker.found == "nothing listens at 127.0.0.1:1 (Connection refused)"
    assert "MARQ_BOOTSTRAP_SERVERS" in broker.advice
    assert found.seconds < LIMIT_S + 45


async def test_something_else_than_kafka_listens(check: Check, http_server: str) -> None:
    broker = (await check(MARQ_BOOTSTRAP_SERVERS=http_server)).problem("broker")

    assert broker.found == f"what listens at {http_server} is an HTTP server"
    assert "correct the address" in broker.advice


async def test_something_that_never_answers_does_not_hold_it_up(check: Check) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        broker = (await check(MARQ_BOOTSTRAP_SERVERS=f"127.0.0.1:{server.getsockname()[1]}")).problem("broker")

    assert "does not answer" in broker.found


async def test_a_broker_that_sends_its_clients_elsewhere(tmp_path: Path, prefix: str) -> None:
    # Brokers in containers do, until somebody sets their advertised.listeners.
    with EmbeddedBroker(properties={"advertised.listeners": "BROKER://127.0.0.1:1"}) as broker:
        check = Check(tmp_path, {"MARQ_BOOTSTRAP_SERVERS": broker.bootstrap_servers, "MARQ_PREFIX": prefix})

        found = (await check()).problem("broker")

    assert "sends its clients on to 127.0.0.1:1" in found.found
    assert "advertised.listeners" in found.advice


async def test_a_wrong_password(tmp_path: Path, login: dict[str, str], user: str) -> None:
    found = (await Check(tmp_path, {**login, "MARQ_SASL_PASSWORD": "wrong"})()).problem("broker")

    assert f"refuses the login of '{user}' by SCRAM-SHA-256" in found.found
    assert found.found.startswith("authentication failed")
    assert "MARQ_SASL_PASSWORD" in found.advice


async def test_a_login_over_tls_and_one_that_does_not_trust_the_broker(
    secured: EmbeddedBroker, certificates: Certificates, tmp_path: Path, login: dict[str, str]
) -> None:
    address = secured.listener("SASL_SSL")
    tls = {**login, "MARQ_BOOTSTRAP_SERVERS": address, "MARQ_SECURITY_PROTOCOL": "SASL_SSL"}

    trusting = await Check(tmp_path, {**tls, "MARQ_SSL_CAFILE": str(certificates.authority)})()
    other = await Check(tmp_path, tls)()

    assert f"{address} can be used by SASL_SSL" in [each.found for each in trusting.findings]
    assert f"the certificate of {address} is not trusted" in other.problem("broker").found
    assert "MARQ_SSL_CAFILE" in other.problem("broker").advice


# --- topics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "setting", "wrong", "needed"),
    [
        ("markers", "message.timestamp.type", "CreateTime", "LogAppendTime"),
        ("dead_letters", "max.message.bytes", "1000", "1114124 or more"),
        ("changelog", "cleanup.policy", "delete", "compact"),
        ("queues", "cleanup.policy", "delete", "compact"),
    ],
)
async def test_a_topic_with_a_wrong_setting_until_the_command_was_run(
    check: Check, servers: str, prefix: str, names: Names, topic: str, setting: str, wrong: str, needed: str
) -> None:
    name = getattr(names, topic)
    await make_topics(servers, prefix)
    await kafka_tools.run(Tools(servers).alter_topic(name, setting, wrong), servers)

    found = (await check()).problem(f"topic {name}")

    assert found.found == f"{setting} is {wrong}"
    assert found.expected == needed
    await obey(found, servers)
    assert not (await check()).has(Level.PROBLEM, f"topic {name}")


async def test_markers_that_are_kept_too_briefly(check: Check, servers: str, prefix: str, names: Names) -> None:
    await make_topics(servers, prefix)
    await kafka_tools.run(Tools(servers).alter_topic(names.markers, "retention.ms", "86400000"), servers)

    found = (await check()).of(Level.WARNING, f"topic {names.markers}")

    assert found.found == "retention.ms is 86400000"
    assert found.expected == "604800000 or more"
    await obey(found, servers)
    assert not (await check()).has(Level.WARNING, f"topic {names.markers}")


async def test_topics_that_may_not_be_made_until_an_administrator_did(
    secured: EmbeddedBroker, tmp_path: Path, login: dict[str, str], user: str, prefix: str
) -> None:
    check = Check(tmp_path, {**login, "MARQ_PREFIX": prefix})
    see = Tools("any").allow(f"User:{user}", ["Describe", "DescribeConfigs"], ["--topic", prefix], prefixed=True)
    await kafka_tools.run(see, secured.bootstrap_servers)

    found = (await check()).problem("topics")

    assert f"missing: {prefix}.messages" in found.found
    assert f"User:{user} can't make them" in found.found
    await obey(found, secured.bootstrap_servers)
    assert (await check()).has(Level.OK, "topics")


async def test_more_copies_than_brokers(check: Check) -> None:
    found = (await check(MARQ_REPLICATION_FACTOR="3")).problem("topics")

    assert "with 3 copies" in found.found
    assert "set MARQ_REPLICATION_FACTOR=1" in found.advice


# --- queues -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queues", "subject", "found", "advice"),
    [
        ("[queues.a]\nleese = 1\n", "queues", "unknown key", "correct the file"),
        ('[queues.a]\nhandler = "no_such_module:handle"\n', "handlers", "no_such_module", ""),
        ('[queues.a]\nhandler = "os:no_such_function"\n', "handlers", "no_such_function", ""),
        (
            '[queues.a]\nhandler = "posixpath:basename"\ngroup = "g"\n[queues.b]\ngroup = "g"\n',
            "handlers",
            "none for 'b'",
            "",
        ),
    ],
)
async def test_a_queues_file_that_can_t_work(
    check: Check, tmp_path: Path, queues: str, subject: str, found: str, advice: str
) -> None:
    (tmp_path / "queues.toml").write_text(queues)

    problem = (await check(MARQ_QUEUES_FILE=str(tmp_path / "queues.toml"))).problem(subject)

    assert found in problem.found
    assert advice in problem.advice


async def test_a_module_of_handlers_that_never_ends_its_import(check: Check, tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time\nprint('a line')\ntime.sleep(3600)\n")

    found = await check(MARQ_HANDLERS="endless", PYTHONPATH=f"{tmp_path}{os.pathsep}{check.environment['PYTHONPATH']}")

    assert "must not wait" in found.of(Level.WARNING, "handlers").advice


async def test_definitions_that_contradict_each_other(
    check: Check, servers: str, prefix: str, names: Names, admin: AIOKafkaAdminClient
) -> None:
    await make_topics(servers, prefix)
    big = f"{prefix}-big"
    await admin.create_topics([NewTopic(big, 1, 1, topic_configs={"max.message.bytes": "5000000"})])
    async with Installation(servers, names) as installation:
        for key, value in {
            "file:absent": f'{{"topic": "{prefix}-absent"}}',
            "file:one": f'{{"topic": "{big}"}}',
            "file:two": f'{{"topic": "{big}"}}',
            "file:broken": '{"lease": "long"}',
            "nonsense": "{}",
        }.items():
            await installation.producer.send_and_wait(names.queues, value.encode(), key.encode(), partition=0)

    found = await check()

    absent = found.problem("queue absent")
    assert absent.found == f"its topic {prefix}-absent does not exist"
    several, small = (each for each in found.findings if each.subject == f"topic {big}")
    assert several.found == "belongs to several queues: one, two"
    assert several.commands == ("faust -A app queue two --unset topic",)
    assert f"{names.markers}, {names.dead_letters}, {names.changelog} can't carry" in small.found
    unreadable = [each.found for each in found.findings if each.subject == f"topic {names.queues}"]
    assert len(unreadable) == 2, str(found)
    for finding in (absent, small):
        await obey(finding, servers)
    again = await check()
    assert not again.has(Level.PROBLEM, "queue absent")
    assert [each.found for each in again.findings if each.subject == f"topic {big}"] == [several.found]


# --- this machine -----------------------------------------------------------------------------------------------------


async def test_a_data_directory_that_can_t_be_written(check: Check, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    found = (await check(MARQ_DATA_DIR=str(tmp_path / "file" / "data"))).problem("data directory")

    assert found.found == f"{tmp_path / 'file'} is no directory"
    assert "MARQ_DATA_DIR" in found.advice


async def test_a_web_port_that_another_program_has(check: Check, http_server: str) -> None:
    found = (await check(MARQ_WEB_PORT=http_server.partition(":")[2])).of(Level.WARNING, f"web port {http_server}")

    assert found.found == "is taken by another program"
    assert "MARQ_WEB_PORT" in found.advice


async def test_a_web_address_that_is_no_address_of_this_machine(check: Check) -> None:
    found = await check(MARQ_WEB_BIND="192.0.2.1")

    assert "MARQ_WEB_BIND" in found.problem("web port").advice
    # Others could reach it, and nobody would be asked who he is.
    assert "MARQ_WEB_OPERATORS" in found.problem("web access").found


# --- rights -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def guarded(secured: EmbeddedBroker, tmp_path: Path, login: dict[str, str], prefix: str) -> Check:
    """The command of a user without rights, for an installation whose topics are there."""
    await make_topics(secured.bootstrap_servers, prefix)
    return Check(tmp_path, {**login, "MARQ_PREFIX": prefix})


def _of(right: Right) -> tuple[str, str]:
    return right.kind, right.name


def _of(right: Right) -> tuple[str, str]:
    return right.kind, right.name


async def allow(secured: EmbeddedBroker, user: str, rights: list[Right]) -> None:
    for command in grants(rights, f"User:{user}", Tools("any")):
        await kafka_tools.run(command, secured.bootstrap_servers)


@pytest.mark.parametrize(
    ("role", "needed", "kind", "operation", "name"),
    [
        ("sender", sender, "topic", "Write", "messages"),
        ("redriver", redriver, "topic", "Read", "dead_letters"),
        ("consumer", consumer, "topic", "Write", "markers"),
        ("worker", worker, "topic", "Write", "markers"),
        ("worker", worker, "topic", "DescribeConfigs", "quarantine"),
        ("worker", worker, "group", "Read", "app_id"),
        ("worker", worker, "transactional-id", "Write", "transactional_ids"),
        ("transactional-consumer", transactional_consumer, "transactional-id", "Write", "start_ids"),
    ],
)
async def test_a_right_that_is_missing_until_the_command_was_run(
    guarded: Check,
    secured: EmbeddedBroker,
    user: str,
    names: Names,
    role: str,
    needed: Callable[[Names], list[Right]],
    kind: str,
    operation: str,
    name: str,
) -> None:
    resource = getattr(names, name)
    missing = (kind, resource, operation)
    await allow(secured, user, [right for right in needed(names) if (*_of(right), right.operation) != missing])

    found = (await guarded("--role", role)).problem(f"rights as {role}")

    assert found.found.startswith(f"User:{user} lacks {operation} on {kind} {resource}")
    assert len(found.commands) == 1
    assert f"--operation {operation} --{kind} {resource}" in found.commands[0]
    assert "--command-config admin.properties" in found.commands[0]
    await obey(found, secured.bootstrap_servers)
    again = await guarded("--role", role)
    assert role in again.of(Level.OK, "rights").found
    assert not again.has(Level.PROBLEM, "rights")


@pytest.mark.parametrize("role", ["sender", "consumer", "transactional-consumer"])
async def test_what_check_grants_to_a_service_is_all_that_it_needs(
    guarded: Check, secured: EmbeddedBroker, names: Names, prefix: str, role: str
) -> None:
    options = {
        "prefix": prefix,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_username": guarded.environment["MARQ_SASL_USERNAME"],
        "sasl_password": PASSWORD,
    }
    await obey((await guarded("--role", role)).problem("rights"), secured.bootstrap_servers)
    sending = options if role == "sender" else {}
    address = secured.listener("SASL_PLAINTEXT") if role == "sender" else secured.bootstrap_servers

    async with marq.Producer(address, **{"prefix": prefix, **sending}) as producer:
        await producer.send("emails", b"value")
    if role != "sender":
        start = {"start": "transactional"} if role == "transactional-consumer" else {}
        async with marq.Consumer("emails", secured.listener("SASL_PLAINTEXT"), **start, **options) as receiver:
            [message] = await receiver.receive(wait=20)
            await message.ack()


async def test_what_check_grants_to_who_redrives_is_all_that_is_needed(
    guarded: Check, secured: EmbeddedBroker, names: Names, prefix: str
) -> None:
    options: dict[str, Any] = {
        "prefix": prefix,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_username": guarded.environment["MARQ_SASL_USERNAME"],
        "sasl_password": PASSWORD,
    }
    async with Installation(secured.bootstrap_servers, names) as installation:
        await installation.producer.send_and_wait(names.dead_letters, b"x", b"emails")
    address = secured.listener("SASL_PLAINTEXT")
    await allow(secured, options["sasl_username"], [each for each in redriver(names) if each.operation != "Read"])
    async with marq.DeadLetters(address, **options) as letters:
        with pytest.raises(marq.ConfigError, match=f"no right to Read on topic {names.dead_letters}"):
            await letters.count()

    await obey((await guarded("--role", "redriver")).problem("rights"), secured.bootstrap_servers)

    async with marq.DeadLetters(address, request_timeout=1, **options) as letters:
        assert await letters.count() == [("emails", "", 1)]
        # No worker runs: asked for all the same.
        with pytest.raises(marq.BrokerUnavailable, match="1 dead letters were asked for"):
            await letters.redrive("emails")


async def test_a_literal_right_on_its_own_group_is_enough_for_a_consumer(
    guarded: Check, secured: EmbeddedBroker, user: str, names: Names
) -> None:
    rights = [right for right in consumer(names) if not right.prefixed]
    own = [Right(Kind.GROUP, names.group("emails"), "Read"), Right(Kind.GROUP, names.named_group("bulk"), "Read")]
    await allow(secured, user, [*rights, *own])
    async with Installation(secured.bootstrap_servers, names) as installation:
        for queue, document in {"emails": "{}", "letters": '{"group": "bulk"}'}.items():
            await installation.producer.send_and_wait(names.queues, document.encode(), f"file:{queue}".encode())

    found = await guarded("--role", "consumer")

    assert not found.has(Level.PROBLEM, "rights"), str(found)


async def test_what_check_grants_to_a_worker_is_all_that_it_needs(
    guarded: Check, secured: EmbeddedBroker, tmp_path: Path, names: Names, prefix: str
) -> None:
    (tmp_path / "queues.toml").write_text('[queues.emails]\nhandler = "posixpath:basename"\n')
    queues = {"MARQ_QUEUES_FILE": str(tmp_path / "queues.toml")}
    await obey((await guarded(**queues)).problem("rights"), secured.bootstrap_servers)
    login = {name: value for name, value in guarded.environment.items() if name.startswith("MARQ_S")}
    running = Worker(secured.listener("SASL_PLAINTEXT"), tmp_path, prefix=prefix, environment={**login, **queues})

    try:
        await running.start().ready(2)
        found = await guarded(**queues)
    finally:
        running.close()

    assert found.exit_code == 0, str(found)
    assert "marq: " not in running.log(), running.log()


@pytest.mark.parametrize(
    ("kind", "operation", "name"),
    [
        ("group", "Read", "app_id"),
        ("transactional-id", "Write", "transactional_ids"),
        ("topic", "Write", "markers"),
        ("topic", "Create", "changelog"),
    ],
)
async def test_a_worker_that_lacks_a_right_ends_with_one_sentence_and_the_command(
    guarded: Check,
    secured: EmbeddedBroker,
    tmp_path: Path,
    user: str,
    names: Names,
    kind: str,
    operation: str,
    name: str,
) -> None:
    resource = getattr(names, name)
    missing = (kind, resource, operation)
    await allow(secured, user, [right for right in worker(names) if (*_of(right), right.operation) != missing])
    login = {name: value for name, value in guarded.environment.items() if name.startswith("MARQ_S")}
    running = Worker(secured.listener("SASL_PLAINTEXT"), tmp_path, prefix=names.prefix, environment=login)

    try:
        code = await running.start().ended()
    finally:
        running.close()

    said = running.log()
    assert code == 1
    assert f"marq: User:{user} has no right to {operation} on {kind} {resource}" in said
    assert f"--operation {operation} --{kind} {resource}" in said
    assert "Traceback" not in said
