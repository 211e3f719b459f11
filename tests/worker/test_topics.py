"""The topics of an installation: made as they must be where they are missing, refused where they differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from aiokafka.admin import NewTopic

from broker import EmbeddedBroker
from marq.core.errors import ConfigError
from marq.core.names import ENVELOPE_ROOM_BYTES, Names
from marq.settings import ClientSettings
from marq.topics import ensure_topics
from tests.worker.harness import Installation, Worker, admin

Make = Callable[..., Worker]
LIMIT = 1_048_588
ROOM = LIMIT + ENVELOPE_ROOM_BYTES
MARKERS = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(ROOM)}


async def refused(worker: Worker) -> str:
    """Start a worker that must refuse; return the one sentence it says."""
    code = await worker.start().ended()
    log = worker.log()
    sentences = re.findall(r"^marq: (.*)$", log, re.MULTILINE)
    assert code not in (0, None), log
    assert len(sentences) == 1, log
    assert "Traceback" not in log
    return sentences[0]


async def make_topic(broker: EmbeddedBroker, name: str, count: int, config: Mapping[str, str]) -> None:
    async with admin(broker.bootstrap_servers) as client:
        await client.create_topics([NewTopic(name, count, 1, topic_configs=dict(config))])


async def test_missing_topics_are_made_with_the_settings_that_marq_needs(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = await new_worker(environment={"MARQ_PARTITIONS": "3", "MARQ_MARKERS_PARTITIONS": "2"}).start().ready()
    names = worker.names

    async with Installation(broker.bootstrap_servers, names) as marq:
        found = {
            topic: (len(await marq.producer.partitions_for(topic)), await marq.config(topic))
            for topic in (
                names.messages,
                names.markers,
                names.changelog,
                names.dead_letters,
                names.quarantine,
                names.queues,
            )
        }

    limits = {topic: int(config["max.message.bytes"]) for topic, (_, config) in found.items()}
    assert limits.pop(names.messages) == LIMIT
    assert limits.pop(names.queues) == LIMIT
    assert min(limits.values()) >= ROOM
    assert {topic: count for topic, (count, _) in found.items()} == {
        names.messages: 3,
        names.markers: 2,
        names.changelog: 2,
        names.dead_letters: 3,
        names.quarantine: 1,
        names.queues: 1,
    }
    assert found[names.markers][1]["message.timestamp.type"] == "LogAppendTime"
    assert found[names.markers][1]["retention.ms"] == str(7 * 24 * 3600 * 1000)
    assert found[names.dead_letters][1]["retention.ms"] == "-1"
    assert found[names.queues][1]["cleanup.policy"] == "compact"
    assert found[names.queues][1]["message.timestamp.type"] == "LogAppendTime"
    assert found[names.changelog][1]["cleanup.policy"] == "compact"
    assert found[names.changelog][1]["delete.retention.ms"] == str(7 * 24 * 3600 * 1000)


async def test_a_markers_topic_without_log_append_time_is_refused(new_worker: Make, broker: EmbeddedBroker) -> None:
    worker = new_worker()
    await make_topic(broker, worker.names.markers, 2, {"max.message.bytes": str(ROOM)})

    sentence = await refused(worker)

    assert sentence == (
        f"topic {worker.names.markers}: message.timestamp.type is CreateTime, but marq needs LogAppendTime. Change it "
        f"with: kafka-configs.sh --bootstrap-server {broker.bootstrap_servers} --alter --entity-type topics "
        f"--entity-name {worker.names.markers} --add-config message.timestamp.type=LogAppendTime"
    )


async def test_a_markers_topic_that_can_not_hold_every_message_is_refused(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = new_worker()
    config = {**MARKERS, "max.message.bytes": str(LIMIT)}
    await make_topic(broker, worker.names.markers, 2, config)

    sentence = await refused(worker)

    assert f"topic {worker.names.markers}: max.message.bytes is {LIMIT}, but marq needs {ROOM}" in sentence
    assert f"--add-config max.message.bytes={ROOM}" in sentence


async def test_a_changelog_with_another_number_of_partitions_is_refused(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = new_worker()
    config = {"cleanup.policy": "compact", "max.message.bytes": str(ROOM), "delete.retention.ms": "604800000"}
    await make_topic(broker, worker.names.changelog, 5, config)

    sentence = await refused(worker)

    assert f"topic {worker.names.changelog} has 5 partitions and {worker.names.markers} has 2" in sentence


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
    good = {"cleanup.policy": "compact", "max.message.bytes": str(ROOM), "delete.retention.ms": "604800000"}
    await make_topic(broker, names.changelog, 4, {**good, **config})
    settings = ClientSettings.read(broker.bootstrap_servers, {"prefix": names.prefix}, environment={})

    with pytest.raises(ConfigError, match=re.escape(f"topic {names.changelog}: {said}")):
        await ensure_topics(settings, changelog=True)


async def test_a_wrong_setting_of_the_worker_is_one_sentence_that_names_it(new_worker: Make) -> None:
    assert "MARQ_SESSION_TIMEOUT" in await refused(new_worker(environment={"MARQ_SESSION_TIMEOUT": "soon"}))


async def test_a_wrong_queue_definition_is_one_sentence_that_names_queue_and_key(new_worker: Make) -> None:
    sentence = await refused(new_worker(queues="[queues.emails]\nmax_attemps = 3\n"))

    assert "[queues.emails]: max_attemps: unknown key" in sentence


async def test_a_data_directory_that_can_not_be_written_is_one_sentence_that_names_the_setting(
    new_worker: Make, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")

    sentence = await refused(new_worker(data_directory=tmp_path / "file" / "data"))

    assert sentence.startswith(f"MARQ_DATA_DIR {tmp_path / 'file' / 'data'}: can't be written")
