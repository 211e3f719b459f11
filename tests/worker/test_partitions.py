"""Queues that live on some partitions, with a real worker: it places them, sends copies there, and reads there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment

import marq
from marq.settings.definitions import placement_key
from marq.settings.placements import Placement, subset
from marq.wire.names import Names
from tests.worker.handling import Handlers
from tests.worker.harness import Worker, admin, eventually, take

pytestmark = pytest.mark.verify

PARTITIONS = 8
QUEUES = """
[queues.few]
partitions = 2
backoff = { base = 0.1, factor = 1, max = 0.1, jitter = false }

[queues.handled]
partitions = 1
handler = "handlers_of_the_test:coroutine"
"""


def of(queue: str, count: int) -> tuple[int, ...]:
    found = subset(queue, PARTITIONS, count)
    assert found is not None
    return found


@pytest.fixture
async def queues(servers: str, prefix: str) -> AsyncIterator[marq.Queues]:
    async with marq.Queues(servers, prefix=prefix, partitions=PARTITIONS, markers_partitions=2) as queues:
        # Drained long ago: a worker takes a minute for that.
        settled = Placement(of("handled", 1), of("handled", 1))
        await queues.replace({placement_key("handled"): settled.document()})
        yield queues


@pytest.fixture
async def worker(
    servers: str, names: Names, queues: marq.Queues, tmp_path: Path, handlers: Handlers
) -> AsyncIterator[Worker]:
    with Worker(servers, tmp_path, prefix=names.prefix, queues=QUEUES, environment=handlers.environment) as worker:
        yield await worker.ready()


async def read_by(servers: str, group: str) -> list[int]:
    """Return the partitions that the members of a group are assigned."""
    async with admin(servers) as client:
        [response] = await client.describe_consumer_groups([group])
    [(_, _, _, _, _, members, *_)] = response.groups
    # Of each: its id, its client's id, its host, metadata, and its assignment.
    assignments = [ConsumerProtocolMemberAssignment.decode(member[4]) for member in members if member[4]]
    return sorted(partition.partition for assignment in assignments for partition in assignment.partitions())


async def test_a_worker_places_queues_and_sends_copies_and_reads_for_handlers_where_they_live(
    servers: str, names: Names, queues: marq.Queues, worker: Worker, handlers: Handlers
) -> None:
    async def placed() -> object:
        return queues.definitions.placement("few")

    await eventually(placed, lambda placement: placement == Placement(of("few", 2), None))
    async with (
        marq.Producer(servers, prefix=names.prefix) as producer,
        marq.Consumer("few", servers, prefix=names.prefix) as consumer,
    ):
        await producer.send_many("few", [b"%d" % number for number in range(40)])
        await producer.send_many("handled", [b"%d" % number for number in range(10)])
        first = await take(consumer, 40)
        await asyncio.gather(*[message.release() for message in first])
        second = await take(consumer, 40)

        assert {message.partition for message in first} == set(of("few", 2))
        assert {message.partition for message in second} == set(of("few", 2))
        assert {message.attempt for message in second} == {2}
        await handlers.has_noted("handled", 10)
        group = names.named_group("handlers")
        await eventually(lambda: read_by(servers, group), lambda found: found == list(of("handled", 1)))

        await queues.change("handled", partitions="all")
        await eventually(lambda: read_by(servers, group), lambda found: found == list(range(PARTITIONS)))
        async with AIOKafkaProducer(bootstrap_servers=servers) as plain:
            for partition in range(PARTITIONS):
                await plain.send_and_wait(names.messages, b"plain", b"handled", partition=partition)
        noted = await handlers.has_noted("handled", 10 + PARTITIONS)
    # The handlers went on in the same process.
    assert len({line["worker"] for line in noted}) == 1
    assert Counter(line["value"] for line in noted) == {**{str(number): 1 for number in range(10)}, "plain": PARTITIONS}
