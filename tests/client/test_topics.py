"""The topics that clients make and check."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

import marq
from marq.kafka.topics import ensure_topics, topic_id
from marq.settings.client import ClientSettings
from marq.wire.names import ENVELOPE_ROOM_BYTES


@pytest.fixture
async def admin(servers):
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    yield admin
    await admin.close()


def settings(servers: str, prefix: str, **options: object) -> ClientSettings:
    return ClientSettings.read(servers, {"prefix": prefix, **options}, environment={})


async def config(admin: AIOKafkaAdminClient, topic: str) -> dict[str, str]:
    (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    return {entry[0]: entry[1] for entry in response.resources[0][4]}


async def test_missing_topics_are_made_as_the_markers_need_them(servers, prefix, names, admin) -> None:
    topics = await ensure_topics(settings(servers, prefix, partitions=3, markers_partitions=2))

    assert (topics.messages_partitions, topics.markers_partitions) == (3, 2)
    markers = await config(admin, names.markers)
    assert markers["message.timestamp.type"] == "LogAppendTime"
    assert int(markers["max.message.bytes"]) == topics.messages_limit_bytes + ENVELOPE_ROOM_BYTES
    assert markers["retention.ms"] == str(7 * 24 * 3600 * 1000)
    assert int((await config(admin, names.dead_letters))["max.message.bytes"]) == topics.markers_limit_bytes
    assert {names.messages, names.quarantine} <= set(await admin.list_topics())
    queues = await config(admin, names.queues)
    assert queues["cleanup.policy"] == "compact"
    assert queues["message.timestamp.type"] == "LogAppendTime"
    (described,) = await admin.describe_topics([names.queues])
    assert len(described["partitions"]) == 1


async def test_several_clients_that_start_at_once_make_the_topics_once(servers, prefix) -> None:
    found = await asyncio.gather(*[ensure_topics(settings(servers, prefix)) for _ in range(5)])

    assert len(set(found)) == 1


async def test_each_topic_has_its_own_id(servers, prefix, names) -> None:
    client = settings(servers, prefix)
    await ensure_topics(client)

    messages, again, markers, missing = [
        await topic_id(client, topic) for topic in (names.messages, names.messages, names.markers, f"{prefix}.none")
    ]

    assert messages == again != markers
    assert len(messages) == len(markers) == 32
    assert not missing


async def test_the_id_of_a_topic_is_empty_if_brokers_have_none(servers, prefix, names, monkeypatch) -> None:
    client = settings(servers, prefix)
    await ensure_topics(client)
    # Brokers before Kafka 2.8 support no version of the request that has ids.
    monkeypatch.setattr("marq.kafka.protocol._TOPIC_IDS.API_VERSION", 99)

    assert not await topic_id(client, names.messages)


async def test_topics_that_are_there_keep_their_partitions(servers, prefix) -> None:
    await ensure_topics(settings(servers, prefix, partitions=3))

    topics = await ensure_topics(settings(servers, prefix, partitions=8))

    assert (topics.messages_partitions, topics.markers_partitions) == (3, 3)


@pytest.mark.parametrize(
    ("topic", "wrong", "setting", "needed"),
    [
        ("markers", {"message.timestamp.type": "CreateTime"}, "message.timestamp.type", "LogAppendTime"),
        ("markers", {"max.message.bytes": "1000"}, "max.message.bytes", str(1_048_588 + ENVELOPE_ROOM_BYTES)),
        ("dead_letters", {"max.message.bytes": "1000"}, "max.message.bytes", str(1_048_588 + ENVELOPE_ROOM_BYTES)),
        ("messages", {"cleanup.policy": "compact"}, "cleanup.policy", "delete"),
        ("queues", {"message.timestamp.type": "CreateTime"}, "message.timestamp.type", "LogAppendTime"),
        ("queues", {"cleanup.policy": "delete"}, "cleanup.policy", "compact"),
    ],
)
async def test_a_wrong_setting_is_named_with_the_command_that_fixes_it(
    servers, prefix, names, admin, topic, wrong, setting, needed
) -> None:
    name = getattr(names, topic)
    right = {} if topic == "messages" else {"message.timestamp.type": "LogAppendTime", "max.message.bytes": "2000000"}
    if topic == "queues":
        right["cleanup.policy"] = "compact"
    await admin.create_topics([NewTopic(name, 1, 1, topic_configs={**right, **wrong})])

    with pytest.raises(marq.ConfigError) as caught:
        await marq.Consumer("q", servers, prefix=prefix).start()

    text = str(caught.value)
    assert f"topic {name}: {setting} is {wrong[setting]}, but marq needs {needed}" in text
    assert f"--entity-name {name} --add-config {setting}={needed}" in text


async def test_definitions_need_a_topic_of_one_partition(servers, prefix, names, admin) -> None:
    right = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"}
    await admin.create_topics([NewTopic(names.queues, 2, 1, topic_configs=right)])

    with pytest.raises(marq.ConfigError, match=f"topic {names.queues} has 2 partitions, but marq needs 1"):
        await ensure_topics(settings(servers, prefix))


async def test_more_copies_than_brokers_is_a_clear_error(servers, prefix) -> None:
    with pytest.raises(marq.ConfigError, match="MARQ_REPLICATION_FACTOR"):
        await ensure_topics(settings(servers, prefix, replication_factor=3))
