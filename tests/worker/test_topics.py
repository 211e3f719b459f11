"""The topics that only workers need, and workers that refuse to start, each with one sentence.

The topics of clients are in tests/client/test_topics.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
from aiokafka.admin import NewTopic

from marq.kafka.topics import ensure_topics
from marq.settings.client import ClientSettings
from marq.wire.errors import ConfigError
from marq.wire.names import ENVELOPE_ROOM_BYTES, Names
from marq_worker.broker import EmbeddedBroker
from tests.worker.harness import Namespace, Worker, admin

Make = Callable[..., Worker]
LIMIT = 1_048_588
ROOM = LIMIT + ENVELOPE_ROOM_BYTES
CHANGELOG = {"cleanup.policy": "compact", "max.message.bytes": str(ROOM), "delete.retention.ms": "604800000"}


def settings_of(broker: EmbeddedBroker, names: Names, **options: int) -> ClientSettings:
    return ClientSettings.read(broker.bootstrap_servers, {"prefix": names.prefix, **options}, environment={})  # type: ignore[typeddict-item]


async def make_topic(broker: EmbeddedBroker, name: str, count: int, config: Mapping[str, str]) -> None:
    async with admin(broker.bootstrap_servers) as client:
        await client.create_topics([NewTopic(name, count, 1, topic_configs=dict(config))])


async def test_missing_topics_are_created_with_the_settings_that_marq_needs(
    broker: EmbeddedBroker, names: Names
) -> None:
    await ensure_topics(settings_of(broker, names, partitions=3, markers_partitions=2), changelog=True)

    counts = {names.messages: 3, names.markers: 2, names.changelog: 2, names.dead_letters: 3, names.quarantine: 1}
    counts[names.queues] = 1
    async with Namespace(broker.bootstrap_servers, names) as namespace:
        found = {topic: len(await namespace.producer.partitions_for(topic)) for topic in counts}
        configs = {topic: await namespace.config(topic) for topic in counts}
    assert found == counts
    limits = {topic: int(config["max.message.bytes"]) for topic, config in configs.items()}
    assert limits.pop(names.messages) == LIMIT
    assert limits.pop(names.queues) == LIMIT
    assert min(limits.values()) >= ROOM
    assert configs[names.markers]["message.timestamp.type"] == "LogAppendTime"
    assert configs[names.markers]["retention.ms"] == str(7 * 24 * 3600 * 1000)
    assert configs[names.dead_letters]["retention.ms"] == "-1"
    assert configs[names.queues]["cleanup.policy"] == "compact"
    assert configs[names.queues]["message.timestamp.type"] == "LogAppendTime"
    assert configs[names.changelog]["cleanup.policy"] == "compact"
    assert configs[names.changelog]["delete.retention.ms"] == str(7 * 24 * 3600 * 1000)


async def test_a_changelog_with_another_number_of_partitions_is_refused(broker: EmbeddedBroker, names: Names) -> None:
    await make_topic(broker, names.changelog, 5, CHANGELOG)

    with pytest.raises(ConfigError, match=f"topic {names.changelog} has 5 partitions and {names.markers} has 2"):
        await ensure_topics(settings_of(broker, names, markers_partitions=2), changelog=True)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"cleanup.policy": "delete"}, "cleanup.policy is delete, but marq needs compact"),
        ({"delete.retention.ms": "1000"}, "delete.retention.ms is 1000, but marq needs 604800000"),
        ({"max.message.bytes": "1000"}, f"max.message.bytes is 1000, but marq needs {ROOM}"),
    ],
    ids=["not compacted", "forgets deletions", "too small"],
)
async def test_a_changelog_that_could_lose_rows_is_refused(
    broker: EmbeddedBroker, names: Names, config: Mapping[str, str], said: str
) -> None:
    await make_topic(broker, names.changelog, 4, {**CHANGELOG, **config})

    with pytest.raises(ConfigError, match=re.escape(f"topic {names.changelog}: {said}")):
        await ensure_topics(settings_of(broker, names), changelog=True)


# --- workers that refuse to start -------------------------------------------------------------------------------------


async def refused(worker: Worker) -> str:
    """Start a worker that must refuse; return the one sentence it says."""
    code = await worker.start().ended()
    log = worker.log()
    sentences = re.findall(r"^marq: (.*)$", log, re.MULTILINE)
    assert code not in (0, None), log
    assert len(sentences) == 1, log
    assert "Traceback" not in log
    return sentences[0]


async def test_a_markers_topic_without_log_append_time_is_refused_with_the_command_that_changes_it(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = new_worker()
    await make_topic(broker, worker.names.markers, 2, {"max.message.bytes": str(ROOM)})

    assert await refused(worker) == (
        f"topic {worker.names.markers}: message.timestamp.type is CreateTime, but marq needs LogAppendTime. Change it "
        f"with: kafka-configs.sh --bootstrap-server {broker.bootstrap_servers} --alter --entity-type topics "
        f"--entity-name {worker.names.markers} --add-config message.timestamp.type=LogAppendTime"
    )


@pytest.mark.parametrize(
    ("queues", "environment", "said"),
    [
        ("", {"MARQ_SESSION_TIMEOUT": "soon"}, "MARQ_SESSION_TIMEOUT"),
        ("[queues.emails]\nmax_attemps = 3", {}, "FILE: [queues.emails]: max_attemps: unknown key"),
        (
            '[queues.emails]\nhandler = "nowhere_to_be_found:handle"',
            {},
            "queue 'emails': its handler 'nowhere_to_be_found:handle' can't be imported: there is no such module",
        ),
        ("", {"MARQ_WEB_BIND": "0.0.0.0"}, "MARQ_WEB_OPERATORS=NAME:PASSWORD"),
        ("", {"MARQ_DATA_DIR": "/dev/null/data"}, "MARQ_DATA_DIR /dev/null/data: can't be written"),
        (
            "",
            {"MARQ_BOOTSTRAP_SERVERS": "127.0.0.1:1", "MARQ_CONNECT_TIMEOUT": "1"},
            "no Kafka broker could be used at 127.0.0.1:1 within 1 s",
        ),
    ],
    ids=["setting", "queue", "handler", "open to anybody", "directory", "broker"],
)
async def test_a_wrong_setting_is_named(
    new_worker: Make, queues: str, environment: Mapping[str, str], said: str
) -> None:
    worker = new_worker(queues=queues, environment=environment)

    assert said.replace("FILE", str(worker.directory / "queues.toml")) in await refused(worker)
