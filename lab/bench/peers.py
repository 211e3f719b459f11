"""Clients that drain a full queue in one process: Marq, and its peers.

All are measured in the same way. Each acknowledges, and works on several messages at a time if there is work to do.
"""

from __future__ import annotations

import asyncio
import importlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import marq
from lab.bench.client import NUMBER, QUEUE, ReceivedMessages, say, until_handled, values
from marq.consumer.consumer import DEFAULT_MAX_IN_FLIGHT


def drain(peer: str, servers: str, topic: str, count: int, ms: float, every: int, options: Sequence[Any]) -> None:
    """Drain a topic (of Marq, the queue with that prefix; of RabbitMQ, a queue), and report to the row.

    ``ms`` and ``every`` are those of :class:`lab.bench.client.ReceivedMessages`, ``options`` those of the peer.
    """
    library, consume = PEERS[peer]
    importlib.import_module(library)
    received = ReceivedMessages(count, ms, every)
    draining = consume(received, servers, topic, *options)
    if draining is not None:
        asyncio.run(draining)
    received.report()


# --- Marq -------------------------------------------------------------------------------------------------------------

#: Maximum messages per call of a ``run_batch`` handler.
BATCH_MESSAGES = 1_000
#: Messages in flight for each one being worked on, so that the next one is always ready.
HELD = 4


async def drain_marq(
    received: ReceivedMessages, servers: str, prefix: str, way: str, concurrency: int = 64, group: str | None = None
) -> None:
    """Drain a queue, or a named group, by ``run``, ``run_batch`` or ``async for … async with message``."""
    values, count, do, done = received.values, received.count, received.work, received.done

    async def look(message: marq.Message) -> None:
        if not values:
            received.begin()
        values.append(message.value[NUMBER])
        if len(values) >= count:
            done.set()

    async def work_on(message: marq.Message) -> None:
        received.begin()
        value = message.value
        await do(value)
        values.append(value[NUMBER])
        if len(values) >= count:
            done.set()

    async def take(messages: list[marq.Message]) -> None:
        received.add(message.value for message in messages)

    in_flight = max(DEFAULT_MAX_IN_FLIGHT, HELD * concurrency)
    queue = QUEUE if group is None else None
    async with marq.Consumer(queue, servers, prefix=prefix, group=group, max_in_flight=in_flight) as consumer:
        if way == "run":
            await until_handled(consumer, consumer.run(work_on if received.ms else look, concurrency=concurrency), done)
        elif way == "run_batch":
            running = consumer.run_batch(take, max_messages=BATCH_MESSAGES, concurrency=concurrency)
            await until_handled(consumer, running, done)
        else:
            async for message in consumer:
                async with message:
                    received.add((message.value,))
                if received.complete:
                    break
            await consumer.flush()
        received.end()


# --- aiokafka, on which Marq builds: offsets only ---------------------------------------------------------------------


async def drain_aiokafka(received: ReceivedMessages, servers: str, topic: str) -> None:
    from aiokafka import AIOKafkaConsumer

    group = {"group_id": f"{topic}-aiokafka", "auto_offset_reset": "earliest", "enable_auto_commit": False}
    async with AIOKafkaConsumer(topic, bootstrap_servers=servers, **group) as consumer:
        while not received.complete:
            if fetched := await consumer.getmany(timeout_ms=1_000):
                for records in fetched.values():
                    received.add(record.value for record in records)
                await consumer.commit()
        received.end()


# --- confluent-kafka, the practical limit for a Python consumer of the same topic: offsets only -----------------------

#: Maximum messages per call of `consume`: without work, and with work.
TAKEN, TAKEN_TO_WORK = 4_000, 1_000
#: Timeout of a call for messages, also while other messages are being worked on.
POLL_SECONDS, SHORT_SECONDS = 1.0, 0.01


def drain_confluent(received: ReceivedMessages, servers: str, topic: str, concurrency: int = 1) -> None:
    from confluent_kafka import Consumer, KafkaError, KafkaException

    group = {"group.id": f"{topic}-confluent", "auto.offset.reset": "earliest", "enable.auto.commit": False}
    consumer: Any = Consumer({"bootstrap.servers": servers, **group})
    consumer.subscribe([topic])
    if received.ms:
        asyncio.run(_work_in_order(consumer, received, concurrency))
    while not received.complete:
        if messages := consumer.consume(num_messages=TAKEN, timeout=POLL_SECONDS):
            received.add(message.value() for message in messages)
            # Waits for the last commit only, which covers all before it.
            try:
                consumer.commit(asynchronous=not received.complete)
            except KafkaException as error:
                # librdkafka ran the previous commit late, so it covered these offsets, too.
                if error.args[0].code() != KafkaError._NO_OFFSET:
                    raise
    received.end()
    consumer.close()


async def _work_in_order(consumer: Any, received: ReceivedMessages, concurrency: int) -> None:
    """Work on batches at the same time, and commit in order, like a program with independent messages and offsets."""
    from confluent_kafka import TopicPartition

    loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    taken = min(TAKEN_TO_WORK, concurrency)
    going: deque[tuple[asyncio.Task[None], list[Any]]] = deque()
    asked = 0

    async def do(messages: list[Any]) -> None:
        await asyncio.gather(*[received.work(message.value()) for message in messages])
        received.add(message.value() for message in messages)

    while going or not received.complete:
        if asked < received.count and len(going) * taken < concurrency:
            seconds = SHORT_SECONDS if going else POLL_SECONDS
            if messages := await loop.run_in_executor(thread, consumer.consume, taken, seconds):
                received.begin()
                asked += len(messages)
                going.append((asyncio.create_task(do(messages)), messages))
        else:
            await asyncio.wait([task for task, _ in going], return_when=asyncio.FIRST_COMPLETED)
        while going and going[0][0].done():
            task, messages = going.popleft()
            task.result()
            nexts = {(message.topic(), message.partition()): message.offset() + 1 for message in messages}
            offsets = [TopicPartition(*partition, offset) for partition, offset in nexts.items()]
            consumer.commit(offsets=offsets, asynchronous=bool(going) or asked < received.count)
    thread.shutdown()


# --- a native share group, by confluent-kafka's ShareConsumer: each message is acknowledged individually --------------

#: The highest number of messages in flight, per partition, that the broker accepts.
MAX_LOCKS = 10_000
#: Settings that remove the broker's delays and allow as many locked messages as possible.
SHARE_PROPERTIES = {
    "group.share.partition.max.record.locks": str(MAX_LOCKS),
    "group.share.max.partition.max.record.locks": str(MAX_LOCKS),
    # A member learns its partitions from heartbeats: with the defaults, 5 s and 1 s, the first message takes 5 s.
    "group.share.heartbeat.interval.ms": "100",
    "group.share.min.heartbeat.interval.ms": "100",
    "group.share.assignment.interval.ms": "0",
    "group.share.min.assignment.interval.ms": "0",
}
SHARE_POLL_SECONDS = 0.05
#: Tasks that work on the messages of a poll; more are slower.
TASKS = 10_000


def drain_share(received: ReceivedMessages, servers: str, topic: str, consumers: int = 1, polled: int = 40_000) -> None:
    """Drain with several consumers, each with a thread for its polls, or with one if there is no work."""
    from confluent_kafka import ShareConsumer

    group = f"{topic}-share"
    _begin_at_earliest(servers, group)
    received.restart()
    options = {"group.id": group, "share.acknowledgement.mode": "explicit", "max.poll.records": polled}
    members: list[Any] = [ShareConsumer({"bootstrap.servers": servers, **options}) for _ in range(consumers)]
    for member in members:
        member.subscribe([topic])
    if received.ms:
        asyncio.run(_work_on_polls(members, received))
    else:
        while not received.complete:
            if messages := members[0].poll(POLL_SECONDS):
                received.add(_value_of(message) for message in messages)
                _acknowledge(members[0], messages)
        members[0].commit_sync()
    received.end()
    for member in members:
        member.close()


def _begin_at_earliest(servers: str, group: str) -> None:
    """Let the group begin at the earliest message; only the broker can set this for a share group."""
    from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType  # type: ignore[attr-defined]  # not marked as exports

    entry = ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": servers})
    for answer in admin.incremental_alter_configs([resource]).values():
        answer.result()


def _value_of(message: Any) -> bytes:
    """Return its value; raise KafkaException if the message stands for an error."""
    from confluent_kafka import KafkaException

    if message.error() is not None:
        raise KafkaException(message.error())
    value: bytes = message.value()
    return value


def _acknowledge(member: Any, messages: list[Any]) -> None:
    for message in messages:
        member.acknowledge(message)
    member.commit_async()


async def _work_on_polls(members: list[Any], received: ReceivedMessages) -> None:
    """Work on the messages of a poll at the same time, because all must be acknowledged before the next poll."""

    async def serve(member: Any) -> None:
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1)
        while not received.complete:
            seconds = SHARE_POLL_SECONDS if received.values else POLL_SECONDS
            if messages := await loop.run_in_executor(thread, member.poll, seconds):
                received.begin()
                waiting = map(_value_of, messages)
                await asyncio.gather(*[take(waiting) for _ in range(min(len(messages), TASKS))])
                await loop.run_in_executor(thread, _acknowledge, member, messages)
        await loop.run_in_executor(thread, member.commit_sync)
        thread.shutdown()

    async def take(waiting: map[bytes]) -> None:
        for value in waiting:
            await received.work(value)
            received.values.append(value[NUMBER])

    await asyncio.gather(*map(serve, members))


# --- a quorum queue of RabbitMQ, by aio-pika: an ack for each message -------------------------------------------------

#: Messages sent at a time; the broker confirms each.
WINDOW = 1_000
_QUORUM: dict[str, Any] = {"durable": True, "arguments": {"x-queue-type": "quorum"}}


async def fill_rabbitmq(url: str, queue: str, count: int, size: int) -> None:
    import aio_pika

    async with await aio_pika.connect_robust(url) as connection:
        channel = await connection.channel()
        await channel.declare_queue(queue, **_QUORUM)
        for start in range(0, count, WINDOW):
            chosen = values(start, min(start + WINDOW, count), size)
            sent = [aio_pika.Message(value, delivery_mode=aio_pika.DeliveryMode.PERSISTENT) for value in chosen]
            await asyncio.gather(*[channel.default_exchange.publish(message, queue) for message in sent])
    say(messages=count)


async def drain_rabbitmq(received: ReceivedMessages, url: str, name: str, prefetch: int) -> None:
    """Drain with a handler, which runs in a task per message, with up to ``prefetch`` messages without an ack."""
    import aio_pika

    async def handler(message: Any) -> None:
        received.begin()
        await received.work(message.body)
        received.values.append(message.body[NUMBER])
        await message.ack()
        if received.complete:
            received.done.set()

    async with await aio_pika.connect_robust(url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=prefetch)
        queue = await channel.declare_queue(name, **_QUORUM)
        consumer = await queue.consume(handler)
        await received.done.wait()
        # The broker answers in order, so all acks arrived before this.
        await queue.cancel(consumer)
        received.end()
        await queue.delete(if_unused=False, if_empty=False)


#: The library that is imported before the clock starts, and the function that drains; it may be a coroutine function.
PEERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "marq": ("marq.consumer.consumer", drain_marq),
    "aiokafka": ("aiokafka", drain_aiokafka),
    "confluent": ("confluent_kafka", drain_confluent),
    "share": ("confluent_kafka.admin", drain_share),
    "rabbitmq": ("aio_pika", drain_rabbitmq),
}
