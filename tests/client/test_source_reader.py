"""Payloads are copied from the records of their messages, or the record is reported as removed."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewTopic, RecordsToDelete

import marq
from marq.core.storage.table_image import Place
from marq.kafka.connection import admin_client
from marq.kafka.topics import incarnations
from marq.settings.client import ClientSettings
from marq.wire.markers import Payload, Source
from marq.wire.names import Names
from marq_worker.owner import source_reader
from marq_worker.owner.source_reader import SourceReader, rounds
from tests.worker.harness import eventually

#: Not long ago: a broker would remove older records at its next check of retention.
SENT_MS = int(time.time() * 1000)


@asynccontextmanager
async def started(servers: str, prefix: str) -> AsyncIterator[SourceReader]:
    reader = SourceReader(ClientSettings.read(servers, {"prefix": prefix}, environment={}))
    yield reader
    await reader.stop()


@pytest.fixture
async def impatient(servers: str, prefix: str, producer: marq.Producer) -> AsyncIterator[SourceReader]:
    """A reader that gives up a source after STUCK_MS."""
    async with started(servers, prefix) as reader:
        yield reader


@pytest.fixture
async def reader(
    servers: str, prefix: str, producer: marq.Producer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SourceReader]:
    """A reader for sources that all answer, even if the machine is busy."""
    monkeypatch.setattr(source_reader, "STUCK_MS", 60_000)
    monkeypatch.setattr(source_reader, "MAX_S", 60.0)
    async with started(servers, prefix) as reader:
        yield reader


async def answered(reader: SourceReader, wanted: Mapping[Place, Payload], least: int = 1) -> dict[int, bytes | None]:
    """Copy until there are this many answers: a broker that stalls for STUCK_MS gives none."""

    async def copy() -> dict[int, bytes | None]:
        with suppress(marq.BrokerUnavailable):
            return values(await reader.copy(wanted))
        return {}

    return await eventually(copy, lambda found: len(found) >= least)


@pytest.fixture
async def plain(servers: str) -> AsyncIterator[AIOKafkaProducer]:
    async with AIOKafkaProducer(bootstrap_servers=servers, compression_type="gzip", linger_ms=20) as plain:
        yield plain


def left(queue: str, source: Source, *offsets: int, timestamp_ms: int = SENT_MS) -> dict[Place, Payload]:
    return {Place(queue, source, offset): Payload(timestamp_ms, 1, None, (), None, left=True) for offset in offsets}


def values(copied: Mapping[Place, Payload | None]) -> dict[int, bytes | None]:
    return {place.offset: payload and payload.value for place, payload in copied.items()}


async def create(servers: str, topic: str) -> Source:
    """Create a topic of a queue; return its partition, with the id of the topic."""
    settings = ClientSettings.read(servers, {}, environment={})
    async with admin_client(settings) as admin:
        await admin.create_topics([NewTopic(topic, 1, 1)])
    [name] = (await incarnations(settings, [topic])).values()
    assert name != topic
    return Source(name, 0)


async def fill(plain: AIOKafkaProducer, topic: str, count: int, key: bytes = b"emails") -> None:
    sent = [
        await plain.send(topic, b"%d" % n, key, 0, SENT_MS, [("tenant", b"acme"), ("marq-attempt", b"4")])
        for n in range(count)
    ]
    for each in sent:
        await each


async def test_payloads_are_those_of_the_records_at_the_offsets(
    reader: SourceReader, plain: AIOKafkaProducer, names: Names
) -> None:
    await fill(plain, names.messages, 2_000)
    source = Source(names.messages, 0)

    copied = await reader.copy(left("emails", source, 0, 1, 999, 1_999))

    headers = (("tenant", b"acme"), ("marq-attempt", b"4"))
    assert copied == {
        Place("emails", source, n): Payload(SENT_MS, 4, b"emails", headers, b"%d" % n) for n in (0, 1, 999, 1_999)
    }


@pytest.mark.parametrize(
    ("queue", "timestamp_ms"), [("emails", SENT_MS + 1), ("others", SENT_MS)], ids=["another time", "another queue"]
)
async def test_a_record_of_another_message_at_the_offset_does_not_count(
    reader: SourceReader, plain: AIOKafkaProducer, names: Names, queue: str, timestamp_ms: int
) -> None:
    """A topic that was created again has other records at the same offsets."""
    await fill(plain, names.messages, 2)
    source = Source(names.messages, 0)

    copied = await reader.copy(left(queue, source, 0, timestamp_ms=timestamp_ms))

    assert copied == {Place(queue, source, 0): None}


async def test_removed_records_are_told_from_later_ones(
    reader: SourceReader, plain: AIOKafkaProducer, servers: str, names: Names
) -> None:
    """A fetch at an offset that was removed returns later records."""
    await fill(plain, names.messages, 10)
    async with admin_client(ClientSettings.read(servers, {}, environment={})) as admin:
        await admin.delete_records({TopicPartition(names.messages, 0): RecordsToDelete(before_offset=6)})
    source = Source(names.messages, 0)

    copied = await reader.copy(left("emails", source, 2, 5, 6, 9))

    assert values(copied) == {2: None, 5: None, 6: b"6", 9: b"9"}


async def test_a_copy_ends_at_its_bytes_and_the_next_one_continues(
    reader: SourceReader, plain: AIOKafkaProducer, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_reader, "MAX_BYTES", 1)
    monkeypatch.setattr(source_reader, "GAP", 0)
    await fill(plain, names.messages, 9)
    wanted = left("emails", Source(names.messages, 0), 0, 4, 8)

    found: list[int] = []
    while wanted:
        copied = await reader.copy(wanted)
        assert None not in copied.values()
        found.append(len(copied))
        wanted = {place: payload for place, payload in wanted.items() if place not in copied}

    assert found == [1, 1, 1]


@pytest.mark.parametrize("topic_is", ["deleted", "shorter", "shorter, but long", "without the partition", "another"])
async def test_a_topic_must_be_missing_for_a_while_until_its_records_are_gone(
    impatient: SourceReader, plain: AIOKafkaProducer, servers: str, names: Names, prefix: str, topic_is: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A broker that has just started may not know a topic yet, and a new leader may not know its end.

    Messages of other topics do not wait for it.
    """
    monkeypatch.setattr(source_reader, "APART_S", 0.0)
    topic = f"{prefix}.theirs"
    source = Source(f"{topic}@0123456789ab", 0)
    if topic_is != "deleted":
        present = await create(servers, topic)
        await fill(plain, topic, 9 if topic_is == "another" else 3, b"any")
        if topic_is != "another":
            source = present
    if topic_is == "shorter, but long":
        # Reading it from its start takes longer than a copy may.
        monkeypatch.setattr(source_reader, "MAX_S", 0.0)
    if topic_is == "without the partition":
        source = source._replace(partition=2)
    await fill(plain, names.messages, 3)
    wanted = left("emails", source, 7) | left("emails", Source(names.messages, 0), 1)

    first = await answered(impatient, wanted)
    monkeypatch.setattr(source_reader, "ABSENT_S", 0.0)
    second = await answered(impatient, wanted, 2)

    assert first == {1: b"1"}
    assert second == {1: b"1", 7: None}


async def test_partitions_of_a_deleted_topic_are_gone_at_the_same_time(
    impatient: SourceReader, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_reader, "ABSENT_S", 0.0)
    first, second = (Source(f"{prefix}.theirs@0123456789ab", partition) for partition in range(2))

    copied = await impatient.copy(left("emails", first, 7) | left("emails", second, 8))

    assert values(copied) == {7: None, 8: None}


async def test_a_topic_that_grows_remains_too_short(
    reader: SourceReader, plain: AIOKafkaProducer, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was created again, and its senders have not stopped."""
    now_s = 0.0
    monkeypatch.setattr(source_reader, "monotonic", lambda: now_s)
    wanted = left("emails", Source(names.messages, 0), 70)
    for _ in range(2):
        await fill(plain, names.messages, 1)
        with pytest.raises(marq.BrokerUnavailable, match="ends before offset 70"):
            await reader.copy(wanted)
        now_s += source_reader.ABSENT_S / 2

    assert values(await reader.copy(wanted)) == {70: None}


async def test_a_topic_that_is_missing_does_not_hold_up_the_next_copies(
    impatient: SourceReader, plain: AIOKafkaProducer, names: Names, prefix: str, logged: Callable[[], list[str]]
) -> None:
    """They may be for another owner; the one whose copy fails reports the error."""
    missing = left("emails", Source(f"{prefix}.theirs@0123456789ab", 0), 7)
    with pytest.raises(marq.BrokerUnavailable, match=re.escape(f"{prefix}.theirs")):
        await impatient.copy(missing)

    assert await impatient.copy(missing) == {}
    assert logged() == []


async def test_a_source_that_does_not_answer_is_left_alone_for_a_while(
    impatient: SourceReader, plain: AIOKafkaProducer, names: Names, prefix: str, logged: Callable[[], list[str]]
) -> None:
    await fill(plain, names.messages, 3)
    missing = Source(f"{prefix}.theirs@0123456789ab", 0)
    messages = Source(names.messages, 0)

    first = await impatient.copy(left("emails", missing, 7) | left("emails", messages, 1))
    second = await impatient.copy(left("emails", missing, 7) | left("emails", messages, 2))

    assert (values(first), values(second)) == ({1: b"1"}, {2: b"2"})
    assert len([line for line in logged() if f"topic {prefix}.theirs, partition 0 can't be copied now" in line]) == 1


async def test_incarnations_of_a_topic_are_read_one_after_another(
    reader: SourceReader, plain: AIOKafkaProducer, servers: str, prefix: str
) -> None:
    """Both are the same partition, and only one of them still has its records."""
    topic = f"{prefix}.theirs"
    former, present = Source(f"{topic}@0123456789ab", 0), await create(servers, topic)
    await fill(plain, topic, 3, b"any")

    copied = await reader.copy(left("emails", former, 1, timestamp_ms=SENT_MS - 1) | left("emails", present, 1))

    assert {place.source: payload and payload.value for place, payload in copied.items()} == {
        former: None,
        present: b"1",
    }


async def test_an_end_that_was_too_low_for_a_moment_harms_nothing(
    impatient: SourceReader, plain: AIOKafkaProducer, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(plain, names.messages, 1)
    wanted = left("emails", Source(names.messages, 0), 1)
    with pytest.raises(marq.BrokerUnavailable):
        await impatient.copy(wanted)
    monkeypatch.setattr(source_reader, "ABSENT_S", 0.0)

    await fill(plain, names.messages, 2)

    assert await answered(impatient, wanted) == {1: b"0"}


async def test_records_of_an_own_topic_may_have_any_key_and_lose_copied_headers(
    reader: SourceReader, plain: AIOKafkaProducer, servers: str, prefix: str
) -> None:
    topic = f"{prefix}.theirs"
    source = await create(servers, topic)
    await fill(plain, topic, 2, b"customer-7")

    copied = await reader.copy(left("emails", source, 1))

    assert copied == {Place("emails", source, 1): Payload(SENT_MS, 1, b"customer-7", (("tenant", b"acme"),), b"1")}


def test_near_records_are_read_together_and_sources_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_reader, "GAP", 10)
    one, two = Source("t.messages", 0), Source("t.messages", 1)

    found = list(rounds({one: [30, 5, 15, 16], two: [7, 7], Source("t.messages@ab", 1): [6]}))

    assert found == [
        {one: range(5, 17), two: range(7, 8)},
        {one: range(30, 31), Source("t.messages@ab", 1): range(6, 7)},
    ]
