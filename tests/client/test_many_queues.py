"""A group of more queues than the metadata of an offset has room for, on a real broker."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

import marq
from marq.kafka.queue_positions import OffsetSnapshotLog
from marq.settings.client import ClientSettings
from marq.settings.definitions import layer_key
from marq.wire.names import Names
from tests.client.waiting import until

QUEUES = [f"tenant-{number:04}" for number in range(2_000)]
PARTITIONS = 2
#: Time in which no further message may arrive.
QUIET_S = 1.5

Seen = Counter[tuple[str, bytes]]


@asynccontextmanager
async def served(servers: str, prefix: str, seen: Seen) -> AsyncIterator[None]:
    """Serve the group, and ack all messages."""

    async def handle(message: marq.Message) -> None:
        seen[message.queue, message.value] += 1

    async with marq.Consumer(group="tenants", bootstrap_servers=servers, prefix=prefix) as consumer:
        running = asyncio.create_task(consumer.run(handler=handle))
        yield
    await running


async def send(producer: marq.Producer, queues: Sequence[str], value: bytes) -> Seen:
    await asyncio.gather(*[producer.send(queue, value) for queue in queues])
    return Counter({(queue, value): 1 for queue in queues})


async def snapshots_of(servers: str, prefix: str) -> list[str]:
    """Return the snapshot that each commit of the group names."""
    names, admin = Names(prefix), AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    partitions = [TopicPartition(names.messages, number) for number in range(PARTITIONS)]
    found = await admin.list_consumer_group_offsets(names.named_group("tenants"), partitions=partitions)
    await admin.close()
    return [json.loads(found[partition].metadata)["snapshot"] for partition in partitions]


async def test_two_thousand_queues_lose_and_double_nothing_while_queues_join_and_leave(
    servers: str, prefix: str
) -> None:
    seen, sent = Seen(), Seen()
    first, others = QUEUES[0], QUEUES[1:]
    options = {"prefix": prefix, "partitions": PARTITIONS}
    async with (
        marq.Queues(servers, **options) as queues,
        marq.Producer(servers, **options) as producer,
    ):
        await queues.publish({layer_key("change", queue): {"group": "tenants"} for queue in QUEUES})

        sent += await send(producer, QUEUES, b"before")
        async with served(servers, prefix, seen):
            await until(lambda: not sent - seen)
            await queues.change("joins", group="tenants")
            await queues.change(first, group=None)
            sent += await send(producer, [*others, "joins"], b"meanwhile")
            await send(producer, [first], b"meanwhile")
            await until(lambda: not sent - seen)
        await queues.change(first, group="tenants")
        async with served(servers, prefix, seen):
            sent += Counter({(first, b"meanwhile"): 1})
            sent += await send(producer, QUEUES, b"after a restart")
            await until(lambda: not sent - seen)
            await asyncio.sleep(QUIET_S)

    assert seen == sent
    named = await snapshots_of(servers, prefix)
    assert set(named) == set(await OffsetSnapshotLog(ClientSettings(servers, names=Names(prefix))).read(named))
