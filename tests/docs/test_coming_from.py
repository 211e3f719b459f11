"""docs/comparisons.md: what it calls Marq's exists, and a topic can be taken over as it says."""

from __future__ import annotations

import re

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, OffsetAndMetadata, TopicPartition

import marq
import marq.testing
from marq.settings.client import ClientOptions
from marq.settings.definitions import DEFAULTS_KEY, layer_key
from marq.settings.queue import CHECKS
from marq.wire.names import Names
from marq_worker.config.settings import AppSettings
from tests.docs.pages import ROOT
from tests.worker.harness import make_topic

PAGE = (ROOT / "docs" / "comparisons.md").read_text(encoding="utf-8")
SPANS = set(re.findall(r"`([^`\n]+)`", PAGE))
OWNERS = {"consumer": marq.Consumer, "producer": marq.Producer, "message": marq.Message, "marq": marq}


NAMES = {found for span in SPANS for found in re.findall(rf"(?<![.\w])((?:{'|'.join(OWNERS)})\.\w+)\b", span)}
#: Begin names in Kafka.
PREFIXES = {"marq.queue", "marq.group"}


@pytest.mark.parametrize("name", sorted(NAMES - PREFIXES))
def test_what_it_says_of_marqs_own_objects_exists(name: str) -> None:
    owner, _, attribute = name.partition(".")

    assert hasattr(OWNERS[owner], attribute)


def test_its_settings_exist() -> None:
    variables = {name.lower() for span in SPANS for name in re.findall(r"MARQ_([A-Z_]*[A-Z])", span)}
    keys = {span.partition(" = ")[0] for span in SPANS if re.match(r"(lease|backoff|dead_letter|max_\w+) =", span)}

    assert variables <= AppSettings.model_fields.keys() | ClientOptions.__annotations__.keys()
    assert keys <= CHECKS.keys() | {"max_in_flight", "max_retries"}


async def test_a_topic_is_taken_over_from_an_offset(servers: str, names: Names) -> None:
    topic = f"{names.prefix}-orders"
    await make_topic(servers, topic, 1)
    async with AIOKafkaProducer(bootstrap_servers=servers) as plain:
        for value in (b"done before", b"still to be done"):
            await plain.send_and_wait(topic, value)
    # As kafka-consumer-groups.sh --reset-offsets does it: no member, no metadata.
    group = {"group_id": names.group("orders"), "enable_auto_commit": False}
    async with AIOKafkaConsumer(bootstrap_servers=servers, **group) as tool:
        tool.assign([TopicPartition(topic, 0)])
        await tool.commit({TopicPartition(topic, 0): OffsetAndMetadata(1, "")})
    async with marq.Queues(servers, prefix=names.prefix) as queues:
        await queues.publish({layer_key("file", "orders"): {"topic": topic}, DEFAULTS_KEY: {}})

    async with marq.Consumer("orders", servers, prefix=names.prefix) as consumer:
        messages = await consumer.receive()

    assert [message.value for message in messages] == [b"still to be done"]
