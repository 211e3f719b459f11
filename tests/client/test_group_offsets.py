"""Offsets of a group without members: as aiokafka's own, and given up without a trace."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import GroupCoordinatorNotAvailableError, GroupLoadInProgressError, NotCoordinatorForGroupError

from marq.kafka.committed_offsets import commit_offsets, committed_offsets, log_ends
from marq.kafka.connection import admin_client
from marq.kafka.topics import ensure_topics
from marq.settings.client import ClientSettings
from marq.wire.markers import Source
from tests.worker.harness import eventually


async def test_what_is_committed_is_what_others_find(servers, prefix, names) -> None:
    await ensure_topics(ClientSettings.read(servers, {"prefix": prefix, "partitions": 3}, environment={}))
    partitions = [TopicPartition(names.messages, number) for number in range(3)]
    async with AIOKafkaConsumer(
        bootstrap_servers=servers, group_id=names.backlog, enable_auto_commit=False
    ) as consumer:
        consumer.assign(partitions)
        assert await committed_offsets(consumer, partitions) == {}

        async def committed() -> bool:
            try:
                await commit_offsets(consumer, {partitions[0]: 0, partitions[2]: 7})
            except (GroupLoadInProgressError, GroupCoordinatorNotAvailableError, NotCoordinatorForGroupError):
                return False  # the broker has just created its topic of offsets, whose partitions do not lead yet
            return True

        await eventually(committed)
        assert await committed_offsets(consumer, partitions) == {partitions[0]: 0, partitions[2]: 7}
        assert [await consumer.committed(partition) for partition in partitions] == [0, None, 7]


async def test_a_commit_that_is_given_up_leaves_nothing_behind(servers, prefix, names, monkeypatch) -> None:
    partition = TopicPartition(names.messages, 0)
    await ensure_topics(ClientSettings.read(servers, {"prefix": prefix}, environment={}))
    async with AIOKafkaConsumer(
        bootstrap_servers=servers, group_id=names.backlog, enable_auto_commit=False
    ) as consumer:
        consumer.assign([partition])
        await committed_offsets(consumer, [partition])

        async def never(*_: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(consumer._coordinator, "_send_req", never)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await commit_offsets(consumer, {partition: 1})

        assert not [task for task in asyncio.all_tasks() if "commit_offsets" in repr(task.get_coro())]


async def test_ends_of_logs_are_those_of_partitions_that_exist(servers, prefix, names) -> None:
    settings = ClientSettings.read(servers, {"prefix": prefix, "partitions": 3}, environment={})
    await ensure_topics(settings)
    async with AIOKafkaProducer(bootstrap_servers=servers) as producer:
        for _ in range(2):
            await producer.send_and_wait(names.messages, b"v", partition=1)
    here = [Source(names.messages, number) for number in range(3)]

    async with admin_client(settings) as admin:
        ends = await log_ends(admin, [*here, Source(names.messages, 3), Source(f"{prefix}-missing", 0)])

    assert ends == dict(zip(here, [0, 2, 0], strict=True))
