#!/usr/bin/env bash
# Shows that cancelling one AIOProducer.produce() loses messages that other tasks have already handed to the producer.
#
# confluent-kafka 2.16.1 (its asyncio producer, and its mock cluster). batch_size is 4, and four tasks send a message
# each, to four partitions. The fourth task is cancelled in produce(), as asyncio.timeout() does, or a web server whose
# client disconnects.
# Expected: at most the fourth message is lost. The others are in the producer's buffer, and flush() sends them.
# Seen: the call that fills the buffer sends it for all tasks, one batch per topic and partition, and waits after each.
# It empties the buffer first, and fills it again after an Exception, but CancelledError is not one. Only the first
# batch is sent. flush() and close() report nothing, and the futures of the other two tasks are never done. A message
# queue that confirms a message when its future is done loses nothing, but its callers wait forever. It has to call
# produce() in asyncio.shield(), or from one task.
# Output seen:
#   nothing cancelled: 4 of 4 futures done, 4 messages written, flush() returned 0
#   fourth produce() cancelled: 1 of 3 futures done, 1 messages written, flush() returned 0
#   fourth produce() cancelled, in shield(): 3 of 3 futures done, 4 messages written, flush() returned 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'confluent-kafka==2.16.1'
cat >main.py <<'PYTHON'
import asyncio, sys
from contextlib import suppress
from importlib.metadata import version
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.aio import AIOProducer

TASKS = 4  # The mock cluster's topics have four partitions.
print("confluent-kafka", version("confluent-kafka"))
mock = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "127.0.0.1:1", "log_level": 0})
servers = ",".join(f"{b.host}:{b.port}" for b in mock.list_topics(timeout=10).brokers.values())
reader = Consumer({"bootstrap.servers": servers, "group.id": "reader", "log_level": 0})

async def send(topic, cancel, guard=lambda call: call):
    producer = AIOProducer({"bootstrap.servers": servers, "log_level": 0}, batch_size=TASKS, buffer_timeout=0)
    async def produce(partition):
        return await guard(producer.produce(topic, b"message", partition=partition))
    futures = [await asyncio.create_task(produce(partition)) for partition in range(TASKS - 1)]
    last = asyncio.create_task(produce(TASKS - 1))
    if cancel:
        while len(producer) == TASKS - 1:  # Until produce() has begun to send the buffer.
            await asyncio.sleep(0)
        last.cancel()
    with suppress(asyncio.CancelledError):
        futures.append(await last)
    left = await producer.flush()
    await producer.close()
    done, _ = await asyncio.wait(futures, timeout=5)
    written = sum(reader.get_watermark_offsets(TopicPartition(topic, p), timeout=10)[1] for p in range(TASKS))
    return len(done), len(futures), written, left

async def main():
    seen = {
        "nothing cancelled": await send("a", cancel=False),
        "fourth produce() cancelled": await send("b", cancel=True),
        "fourth produce() cancelled, in shield()": await send("c", cancel=True, guard=asyncio.shield),
    }
    for case, (done, futures, written, left) in seen.items():
        print(f"{case}: {done} of {futures} futures done, {written} messages written, flush() returned {left}")
    return [*seen.values()]

sys.exit(asyncio.run(main()) != [(4, 4, 4, 0), (1, 3, 1, 0), (3, 3, 4, 0)])
PYTHON
venv/bin/python main.py
