"""A read of a topic that does not come to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest
from aiokafka import TopicPartition

import marq
from marq.kafka import log_reader
from marq.kafka.log_reader import LogReader
from marq.kafka.records import Records
from marq.settings.client import ClientSettings
from marq.wire.markers import Source
from tests.unit.client.fakes import FakeRecord

DEAD = Source("dead", 0)


class Stuck(LogReader):
    """A log of which nothing comes."""

    def seek(self, positions: Mapping[Source, int | None]) -> None: ...

    async def poll(self, wait_s: float = 0) -> dict[Source, Records]:
        await asyncio.sleep(0.01)
        return {}

    async def positions(self) -> dict[Source, int]:
        return {DEAD: 3}


async def test_a_read_that_gets_no_records_ends_with_an_error() -> None:
    settings = replace(ClientSettings.read("localhost:1"), request_timeout_ms=100)
    reader = Stuck(settings, committed=True)

    with pytest.raises(marq.BrokerUnavailable, match=r"while reading dead/0 at 3 of 7: .* or the topic was deleted"):
        await anext(reader.read({DEAD: range(7)}))


async def test_a_copied_dead_letter_is_read_as_a_new_message_except_in_the_dead_letter_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`peek`, replays, purges and pages must see the message that a consumer would receive."""
    settings = ClientSettings.read("localhost:1")
    names = settings.names
    headers = (("a", b"1"), ("marq-id", b"orders/0/7"), ("marq-attempt", b"2"), ("marq-dead-lettered-at", b"9"))
    topics = [names.messages, "orders", names.dead_letters, names.markers]

    async def fetched(*_: object) -> dict[Source, Records]:
        return {Source(topic, 0): Records.of([FakeRecord(0, headers=headers)]) for topic in topics}

    monkeypatch.setattr(log_reader, "fetch_records", fetched)
    monkeypatch.setattr(LogReader, "_running", lambda _: None)

    reader = LogReader(settings, committed=True)
    reader._sources = {TopicPartition(topic, 0): Source(topic, 0) for topic in topics}

    read = await reader.poll()

    seen = {source.topic: records[0].headers for source, records in read.items()}
    assert seen == {
        names.messages: headers[:1],
        "orders": headers[:1],
        names.dead_letters: headers,
        names.markers: headers,
    }
