"""What the page of a message reads of the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

import marq
from marq.kafka.topics import ensure_topics
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.marker_codec import encode
from marq.wire.markers import Release, Renew, Source
from marq.wire.names import markers_partition
from marq_worker.redaction import Redaction
from marq_worker.web.dashboard import timeline_reader
from marq_worker.web.dashboard.timeline_reader import TimelineReader

EVENTS = 20


class Story:
    """A message that was renewed and released again and again, and a reader of its page."""

    def __init__(self, settings: ClientSettings, markers_partitions: int) -> None:
        self._settings = settings
        self._partitions = markers_partitions
        self.id = ""

    async def write(self, producer: marq.Producer, servers: str) -> None:
        receipt = await producer.send("emails", b"hello")
        self.id, source = receipt.id, Source(receipt.topic, receipt.partition)
        markers = AIOKafkaProducer(bootstrap_servers=servers)
        await markers.start()
        offsets, partition = [receipt.offset], markers_partition(*source, self._partitions)
        release = Release("emails", 7, source, offsets, [0], counted=True, errors=[""])
        for _ in range(EVENTS // 2):
            for batch in (Renew("emails", 7, source, offsets, 30_000), release):
                await markers.send_and_wait(self._settings.names.markers, encode(batch), partition=partition)
        await markers.stop()

    async def read(self, message_id: str = "", since_ms: int | None = None) -> dict[str, Any]:
        async def consumers(queue: str) -> Mapping[str, str]:
            return {}

        reader = TimelineReader(self._settings, Definitions(), self._partitions, Redaction(), consumers)
        return await reader.message(message_id or self.id, "emails", since_ms)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give reads more time: a busy machine must not cut them short."""
    monkeypatch.setattr(timeline_reader, "MAX_SECONDS", 60.0)


@pytest.fixture
async def story(producer: marq.Producer, servers: str, prefix: str) -> Story:
    settings = ClientSettings.read(servers, {"prefix": prefix})
    story = Story(settings, (await ensure_topics(settings)).markers_partitions)
    await story.write(producer, servers)
    return story


async def test_a_message_and_all_of_its_markers_are_read(story: Story) -> None:
    page = await story.read()

    assert (page["id"], page["known"], page["forms"][0]["text"]) == (story.id, True, "hello")
    assert len(page["events"]) == EVENTS
    assert page["cut_ms"] is None


@pytest.mark.parametrize(
    ("limit", "value", "least"),
    [("MAX_RECORDS", 10, 10), ("MAX_BYTES", 200, 1), ("MAX_EVENTS", 10, 10), ("MAX_SECONDS", 0.0, 0)],
)
async def test_a_read_that_reaches_a_limit_says_where_it_ended(
    story: Story, monkeypatch: pytest.MonkeyPatch, limit: str, value: float, least: int
) -> None:
    with monkeypatch.context() as limited:
        limited.setattr(timeline_reader, "_AT_ONCE", 5)
        limited.setattr(timeline_reader, limit, value)
        page = await story.read()

    assert least <= len(page["events"]) < EVENTS
    assert page["cut_ms"] >= page["sent_ms"] - 60_000
    assert (await story.read(since_ms=page["cut_ms"]))["cut_ms"] is None


async def test_a_place_without_a_record_or_outside_the_namespace_shows_nothing(story: Story) -> None:
    topic, partition, _ = story.id.rsplit("/", 2)

    for place in (f"{topic}/{partition}/999", f"{topic}/999/0", "elsewhere/0/0"):
        page = await story.read(place)
        assert (page["known"], page["sent"], page["forms"]) == (False, None, [])
