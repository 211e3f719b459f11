"""The check without workers, each time with something broken."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete

import marq
from marq.kafka.role_permissions import ROLES, Permission, ResourceType, Tools, consumer
from marq.wire.names import Names
from marq_worker.broker import Certificates, EmbeddedBroker
from marq_worker.findings import Level
from tests.brokers import UNFENCED
from tests.check.checking import Check, allow, make_topics, obey, read_report
from tests.embedded import kafka_tools
from tests.worker.harness import LIMIT_SECONDS, Namespace, admin

# aiokafka 0.14 lets go of a refused connection before its transport is closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


# --- the command ------------------------------------------------------------------------------------------------------


async def test_the_command_prints_findings_and_exits_with_0_for_warnings(
    check: Check, names: Names, admin: AIOKafkaAdminClient
) -> None:
    code, text = await check.command()

    assert code == 0, text
    assert f"WARNING  topics: missing: {names.messages}, {names.markers}" in text
    assert f"WARNING  trackers: none is running: group {names.app_id} has no members. Start one:\n" in text
    assert not [topic for topic in await admin.list_topics() if topic.startswith(names.prefix)]


async def test_the_command_ends_with_1_for_problems_although_a_module_of_handlers_never_ends_its_import(
    check: Check, tmp_path: Path
) -> None:
    (tmp_path / "endless.py").write_text("import time\nprint('a line')\ntime.sleep(3600)\n")

    code, output = await check.command(
        *["--json", "--role", "sender", "--role", "worker"],
        MARQ_BOOTSTRAP_SERVERS="127.0.0.1:1",
        MARQ_HANDLERS="endless",
        PYTHONPATH=f"{tmp_path}{os.pathsep}{check.environment['PYTHONPATH']}",
    )

    found = read_report(output)
    assert code == 1
    assert "must not block" in found.of(Level.WARNING, "handlers").advice
    broker = found.problem("broker")
    assert broker.found == "nothing listens at 127.0.0.1:1 (Connection refused)"
    assert "MARQ_BOOTSTRAP_SERVERS" in broker.advice


# --- no broker --------------------------------------------------------------------------------------------------------


async def test_a_server_that_never_answers_does_not_hold_up_the_check(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marq_worker.check.examination.REACH_LIMIT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        broker = (await check(MARQ_BOOTSTRAP_SERVERS=f"127.0.0.1:{server.getsockname()[1]}")).problem("broker")

    assert "does not answer" in broker.found


async def test_a_broker_sends_its_clients_to_an_unreachable_address(check: Check, secured: EmbeddedBroker) -> None:
    found = (await check(MARQ_BOOTSTRAP_SERVERS=secured.listener("ELSEWHERE"))).problem("broker")

    assert "directs clients to 127.0.0.1:1" in found.found
    assert "advertised.listeners" in found.advice


async def test_a_login_over_tls_with_and_without_trust_in_the_broker(
    secured: EmbeddedBroker, certificates: Certificates, tmp_path: Path, login: dict[str, str]
) -> None:
    address = secured.listener("SASL_SSL")
    tls = {**login, "MARQ_BOOTSTRAP_SERVERS": address, "MARQ_SECURITY_PROTOCOL": "SASL_SSL"}

    trusting = await Check(tmp_path, {**tls, "MARQ_SSL_CAFILE": str(certificates.authority)})()
    other = await Check(tmp_path, tls)()

    assert f"{address} is reachable with SASL_SSL" in [finding.found for finding in trusting.findings]
    assert f"the certificate of {address} is not trusted" in other.problem("broker").found
    assert "MARQ_SSL_CAFILE" in other.problem("broker").advice


# --- topics -----------------------------------------------------------------------------------------------------------

WRONG_SETTINGS = [
    (Level.PROBLEM, "markers", "message.timestamp.type", "CreateTime", "LogAppendTime"),
    (Level.WARNING, "markers", "retention.ms", "86400000", "604800000 or more"),
    (Level.PROBLEM, "dead_letters", "max.message.bytes", "1000", "1114124 or more"),
    (Level.PROBLEM, "changelog", "cleanup.policy", "delete", "compact"),
    (Level.PROBLEM, "queues", "cleanup.policy", "delete", "compact"),
]


async def test_topics_have_wrong_settings_until_the_commands_were_run(
    check: Check, servers: str, prefix: str, names: Names
) -> None:
    await make_topics(servers, prefix)
    for _, topic, setting, wrong, _ in WRONG_SETTINGS:
        await kafka_tools.run(Tools(servers).alter_topic(getattr(names, topic), setting, wrong), servers)

    wrongs = [(level, f"topic {getattr(names, topic)}") for level, topic, *_ in WRONG_SETTINGS]
    found = await check.until(lambda outcome: all(outcome.has(*expected) for expected in wrongs))

    for level, topic, setting, wrong, needed in WRONG_SETTINGS:
        finding = found.of(level, f"topic {getattr(names, topic)}")
        assert (finding.found, finding.expected) == (f"{setting} is {wrong}", needed)
        await obey(finding, servers)
    again = await check.until(
        lambda outcome: not outcome.has(Level.PROBLEM, "topic") and not outcome.has(Level.WARNING, "topic")
    )
    trackers = again.problem("trackers")
    assert trackers.found == f"none is running: group {names.app_id} has no members"
    assert trackers.commands == ("marq worker",)


async def test_topics_that_may_not_be_made_until_an_administrator_did(
    secured: EmbeddedBroker, tmp_path: Path, login: dict[str, str], user: str, prefix: str
) -> None:
    check = Check(tmp_path, {**login, "MARQ_PREFIX": prefix})
    see = Tools("any").allow(f"User:{user}", ["Describe", "DescribeConfigs"], ["--topic", prefix], prefixed=True)
    await kafka_tools.run(see, secured.bootstrap_servers)

    found = (await check()).problem("topics")

    assert f"missing: {prefix}.messages" in found.found
    assert f"User:{user} can't create them" in found.found
    await obey(found, secured.bootstrap_servers)
    await check.until(lambda outcome: outcome.has(Level.OK, "topics"))


async def test_more_replicas_than_brokers(check: Check) -> None:
    found = (await check(MARQ_REPLICATION_FACTOR="3")).problem("topics")

    assert "with 3 replicas" in found.found
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


async def test_definitions_that_contradict_each_other(
    check: Check, servers: str, prefix: str, names: Names, admin: AIOKafkaAdminClient
) -> None:
    await make_topics(servers, prefix)
    big = f"{prefix}-big"
    await admin.create_topics([NewTopic(big, 1, 1, topic_configs={"max.message.bytes": "5000000"})])
    async with Namespace(servers, names) as namespace:
        for key, value in {
            "file:absent": f'{{"topic": "{prefix}-absent"}}',
            "file:one": f'{{"topic": "{big}", "group": "shop"}}',
            "file:two": f'{{"topic": "{big}", "group": "shop"}}',
            "file:broken": '{"lease": "long"}',
            "nonsense": "{}",
        }.items():
            await namespace.producer.send_and_wait(names.queues, value.encode(), key.encode(), partition=0)

    found = await check.until(lambda outcome: outcome.has(Level.PROBLEM, f"topic {big}"))

    absent = found.problem("queue absent")
    assert absent.found == f"its topic {prefix}-absent does not exist"
    [small] = (finding for finding in found.findings if finding.subject == f"topic {big}")
    assert f"topic '{big}' is also that of queue 'two' in the same group 'shop'" in found.problem("queue one").found
    assert f"{names.markers}, {names.dead_letters}, {names.changelog} can't carry" in small.found
    unreadable = [finding.found for finding in found.findings if finding.subject == f"topic {names.queues}"]
    assert len(unreadable) == 2, str(found)
    for finding in (absent, small):
        await obey(finding, servers)
    again = await check.until(lambda outcome: not outcome.has(Level.PROBLEM, "queue absent"))
    assert not [finding.found for finding in again.findings if finding.subject == f"topic {big}"]


async def test_a_broker_that_creates_unknown_topics_is_left_as_it_was(
    prefix: str, names: Names, tmp_path: Path
) -> None:
    with EmbeddedBroker(properties={**UNFENCED, "auto.create.topics.enable": "true"}) as broker:
        servers = broker.bootstrap_servers
        await make_topics(servers, prefix)
        async with Namespace(servers, names) as namespace:
            definition = b'{"topic": "absent"}', b"file:orders"
            await namespace.producer.send_and_wait(names.queues, *definition, partition=0)

        found = await Check(tmp_path, {"MARQ_BOOTSTRAP_SERVERS": servers, "MARQ_PREFIX": prefix})()

        assert found.problem("queue orders").found == "its topic absent does not exist"
        assert not found.has(Level.PROBLEM, "waiting messages")
        async with admin(servers) as client:
            assert "absent" not in await client.list_topics()


async def test_queues_without_consumers_and_settings_that_the_topics_do_not_fit(
    check: Check, servers: str, prefix: str, names: Names, admin: AIOKafkaAdminClient
) -> None:
    await make_topics(servers, prefix)
    client = {"bootstrap_servers": servers, "prefix": prefix}
    minute_ago_ms = int((time.time() - 60) * 1000)
    async with (
        marq.Queues(**client) as queues,
        marq.Producer(**client) as producer,
        AIOKafkaProducer(bootstrap_servers=servers) as plain,
    ):
        await queues.change("emails", handler="shop:send")
        await queues.change("reports", partitions=9)
        async with marq.Consumer("left-alone", **client) as consumer:
            await producer.send("left-alone", b"read")
            [message] = await consumer.receive(wait=LIMIT_SECONDS)
            await message.ack()
        for queue in ("left-alone", "left-alone", "never-read", "paused"):
            await plain.send_and_wait(names.messages, b"old", queue.encode(), timestamp_ms=minute_ago_ms)
        await queues.pause("paused")
        await queues.change("just-sent", lease=60)
        # A handler that takes its time: nothing is committed meanwhile.
        async with marq.Consumer("slow", max_in_flight=1, **client) as consumer:
            await producer.send_many("slow", [b"held", b"waits", b"waits"])
            await consumer.receive(wait=LIMIT_SECONDS)
            # Last, for the broker removes what is older when it looks next.
            await kafka_tools.run(Tools(servers).alter_topic(names.messages, "retention.ms", "20000"), servers)
            # Its consumers may be about to start.
            await producer.send("just-sent", b"new")
            found = await check.until(
                lambda outcome: outcome.has(Level.PROBLEM, f"topic {names.messages}"),
                MARQ_PARTITIONS="4",
                MARQ_ROLES="tracker,web",
            )

    handlers = found.problem(f"group {names.named_group('handlers')}")
    assert "no worker runs the handlers of emails" in handlers.found
    assert handlers.commands == ("marq worker",)
    assert re.fullmatch(
        r"has no consumer; 2 messages wait, the oldest for \d+ m.*", found.problem("queue left-alone").found
    )
    assert found.problem("queue never-read").found.startswith("has no consumer; 1 message waits")
    for queue in ("paused", "just-sent", "slow"):
        assert not found.has(Level.PROBLEM, f"queue {queue}"), str(found)
        assert not found.has(Level.WARNING, f"queue {queue}"), str(found)
    assert "partitions is 9, but" in found.of(Level.WARNING, "queue reports").found
    few, kept = found.of(Level.WARNING, f"topic {names.messages}"), found.problem(f"topic {names.messages}")
    assert few.found == "it has 2 partitions, and MARQ_PARTITIONS is 4"
    assert "retention.ms is 20000" in kept.found
    for finding in (few, kept):
        await obey(finding, servers)
    # As retention does.
    ends = {TopicPartition(names.messages, partition): RecordsToDelete(before_offset=-1) for partition in range(2)}
    await admin.delete_records(ends)
    again = await check.until(
        lambda outcome: (
            not outcome.has(Level.WARNING, f"topic {names.messages}")
            and not outcome.has(Level.PROBLEM, f"topic {names.messages}")
        ),
        MARQ_PARTITIONS="4",
        MARQ_ROLES="tracker,web",
    )
    assert f"the retention of {names.messages} removed" in again.problem(f"group {names.group('left-alone')}").found


async def test_keys_that_most_messages_lack(check: Check, servers: str, prefix: str) -> None:
    await make_topics(servers, prefix)
    client = {"bootstrap_servers": servers, "prefix": prefix}
    async with marq.Queues(**client) as queues, marq.Producer(**client) as producer:
        await queues.change("by-tenant", fair=True, key="header:tenant")
        await queues.change("by-order", limits={"per_key": {"concurrency": 1}})
        await queues.change("with-keys", fair=True, key="header:tenant")
        for number in range(30):
            await producer.send("by-tenant", b"", headers={"tenant": "a"} if number % 3 == 0 else {"client": "a"})
            await producer.send("by-order", b"")
            await producer.send("with-keys", b"", headers={"tenant": f"tenant {number}"})

        found = await check()

    of_tenants = found.of(Level.WARNING, "queue by-tenant")
    assert "20 of its newest 30 messages have no header tenant" in of_tenants.found
    assert "30 of its newest 30 messages have no ordering key" in found.of(Level.WARNING, "queue by-order").found
    assert not found.has(Level.WARNING, "queue with-keys")


# --- this machine -----------------------------------------------------------------------------------------------------


async def test_a_data_directory_and_web_addresses_that_can_t_be_used(
    check: Check, tmp_path: Path, http_server: str
) -> None:
    (tmp_path / "file").touch()

    found = await check(MARQ_DATA_DIR=str(tmp_path / "file" / "data"), MARQ_WEB_PORT=http_server.partition(":")[2])
    elsewhere = await check(MARQ_WEB_BIND="192.0.2.1")

    directory, port = found.problem("data directory"), found.of(Level.WARNING, f"web port {http_server}")
    assert directory.found == f"{tmp_path / 'file'} is not a directory"
    assert "MARQ_DATA_DIR" in directory.advice
    assert port.found == "in use by another program"
    assert "MARQ_WEB_PORT" in port.advice
    assert "MARQ_WEB_BIND" in elsewhere.problem("web port").advice
    # Other machines could reach such an address without authentication.
    assert "MARQ_WEB_OPERATORS" in elsewhere.problem("web access").found


async def test_a_clock_that_is_off(check: Check, servers: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await make_topics(servers, prefix)
    monkeypatch.setattr("marq_worker.check.cluster.time", SimpleNamespace(time=lambda: time.time() + 60))

    found = (await check()).of(Level.WARNING, "clock")

    # Less the time that the broker took.
    assert re.fullmatch(r"this machine's is [1-6]\d s ahead of the broker's", found.found)
    assert "NTP" in found.advice
    assert "Leases, redelivery and delays in seconds use only the broker's clock" in found.advice


# --- permissions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "missing"),
    [
        ("sender", [("topic", "messages", "Write")]),
        ("redriver", [("topic", "dead_letters", "Read")]),
        ("consumer", [("topic", "markers", "Write")]),
        (
            "worker",
            [
                ("group", "app_id", "Read"),
                ("topic", "markers", "Write"),
                ("topic", "quarantine", "DescribeConfigs"),
                ("transactional-id", "transactional_ids", "Write"),
            ],
        ),
        ("transactional-consumer", [("transactional-id", "start_ids", "Write")]),
    ],
)
async def test_permissions_are_missing_until_the_commands_were_run(
    guarded: Check, secured: EmbeddedBroker, user: str, names: Names, role: str, missing: list[tuple[str, str, str]]
) -> None:
    without = {(kind, getattr(names, name), operation) for kind, name, operation in missing}
    needed = ROLES[role](names, ())
    await allow(
        secured.bootstrap_servers,
        user,
        [use for use in needed if (use.kind, use.name, use.operation) not in without],
    )

    found = (await guarded(role)).problem(f"permissions as {role}")

    lacking = re.findall(r"(\w+) on ([\w-]+) ([^\s*,]+)\*?", found.found)
    assert found.found.startswith(f"User:{user} lacks ")
    assert {(kind, name, operation) for operation, kind, name in lacking} == without
    assert len(found.commands) == len(missing)
    for kind, name, operation in without:
        assert any(f"--operation {operation} --{kind} {name}" in command for command in found.commands), found
    assert all("--command-config admin.properties" in command for command in found.commands)
    await obey(found, secured.bootstrap_servers)
    again = await guarded.until(lambda outcome: not outcome.has(Level.PROBLEM, "permissions"), role)
    assert role in again.of(Level.OK, "permissions").found


async def test_a_literal_permission_on_its_own_group_is_enough_for_a_consumer(
    guarded: Check, secured: EmbeddedBroker, user: str, names: Names
) -> None:
    permissions = [permission for permission in consumer(names) if not permission.prefixed]
    own = [
        Permission(ResourceType.GROUP, names.group("emails"), "Read"),
        Permission(ResourceType.GROUP, names.named_group("bulk"), "Read"),
    ]
    await allow(secured.bootstrap_servers, user, [*permissions, *own])
    async with Namespace(secured.bootstrap_servers, names) as namespace:
        for queue, document in {"emails": "{}", "letters": '{"group": "bulk"}'}.items():
            await namespace.producer.send_and_wait(names.queues, document.encode(), f"file:{queue}".encode())

    found = await guarded("consumer")

    assert not found.has(Level.PROBLEM, "permissions"), str(found)
