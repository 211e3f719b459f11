#!/usr/bin/env bash
# Shows that a cancelled AIOConsumer.poll() takes the next message, loses it, and that its offset is committed.
#
# confluent-kafka 2.16.1 (its asyncio consumer, and its mock cluster), aiokafka 0.14.0 (for comparison). The consumers
# have their defaults, so they commit automatically. A task waits for a message and is cancelled, as asyncio.timeout()
# and asyncio.wait_for() do. Then a message arrives, and the task asks again; five times.
# Expected: a cancelled call has taken nothing, as in aiokafka, so that the next call returns the message.
# Seen: the call runs in a thread, which the cancellation does not reach. That thread takes the next message, moves the
# consumer's position and stores its offset for the next commit, but its result goes to no one. The next call waits for
# the thread, and gets nothing. consume() loses messages in the same way. No error says so, and no restart delivers the
# messages again. A message queue has to give the timeout to poll() itself, and must not cancel it. The class describes
# its thread pool, but not what a cancellation does.
# Output seen:
#   poll() with its own timeout: received 6 of 6 messages, committed offset 6
#   poll() cancelled: received 1 of 6 messages, committed offset 6
#   consume() cancelled: received 1 of 6 messages, committed offset 6
#   aiokafka's getmany() cancelled: received 6 of 6 messages, committed offset 6
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'confluent-kafka==2.16.1' 'aiokafka==0.14.0'
cat >main.py <<'PYTHON'
import asyncio, sys
from importlib.metadata import version
from aiokafka import AIOKafkaConsumer
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.aio import AIOConsumer

CALLS, SHORT_S, LONG_S = 5, 0.3, 3.0
print(*(f"{name} {version(name)}" for name in ("confluent-kafka", "aiokafka")))
mock = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "127.0.0.1:1", "log_level": 0})
servers = ",".join(f"{b.host}:{b.port}" for b in mock.list_topics(timeout=10).brokers.values())
client = {"bootstrap.servers": servers, "log_level": 0}
producer = Producer(client)

def send(topic, value):
    producer.produce(topic, value, partition=0)
    producer.flush()

async def by_itself(receive):
    """Let a call end at its own timeout."""
    return await receive(SHORT_S)

async def by_cancellation(receive):
    """Cancel a call that would wait for longer."""
    try:
        async with asyncio.timeout(SHORT_S):
            return await receive(LONG_S)
    except TimeoutError:
        return []

async def received(topic, receive, end_call):
    """Send a message after each call that ends without one, and receive it with another call; return all values."""
    send(topic, b"first")
    values = []
    while not values:
        values = await receive(LONG_S)
    for number in range(CALLS):
        values += await end_call(receive)
        send(topic, b"%d" % number)
        values += await receive(LONG_S)
    return values

async def with_confluent(topic, end_call, batches=False):
    consumer = AIOConsumer({**client, "group.id": topic, "auto.offset.reset": "earliest"})
    await consumer.subscribe([topic])
    async def receive(seconds):
        messages = await consumer.consume(CALLS, seconds) if batches else [await consumer.poll(seconds)]
        return [message.value() for message in messages if message]
    values = await received(topic, receive, end_call)
    await consumer.close()
    return values

async def with_aiokafka(topic, end_call):
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=servers, group_id=topic, auto_offset_reset="earliest")
    await consumer.start()
    async def receive(seconds):
        batches = await consumer.getmany(timeout_ms=int(seconds * 1000))
        return [message.value for batch in batches.values() for message in batch]
    values = await received(topic, receive, end_call)
    await consumer.stop()
    return values

async def main():
    cases = {
        "poll() with its own timeout": ("a", with_confluent("a", by_itself)),
        "poll() cancelled": ("b", with_confluent("b", by_cancellation)),
        "consume() cancelled": ("c", with_confluent("c", by_cancellation, batches=True)),
        "aiokafka's getmany() cancelled": ("d", with_aiokafka("d", by_cancellation)),
    }
    seen = []
    for case, (topic, reading) in cases.items():
        count = len(await reading)
        reader = Consumer({**client, "group.id": topic})
        committed = reader.committed([TopicPartition(topic, 0)], timeout=10)[0].offset
        print(f"{case}: received {count} of {CALLS + 1} messages, committed offset {committed}")
        seen.append((count, committed))
    return seen

sys.exit(asyncio.run(main()) != [(6, 6), (1, 6), (1, 6), (6, 6)])
PYTHON
venv/bin/python main.py
