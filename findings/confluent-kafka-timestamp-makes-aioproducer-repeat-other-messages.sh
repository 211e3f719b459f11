#!/usr/bin/env bash
# Shows that one timestamp makes an AIOProducer write other messages again with each flush(), and others never.
#
# confluent-kafka 2.16.1 (its asyncio producer, and its mock cluster). The producer is idempotent and has the defaults
# of its buffer: 1000 messages, 1 s. A program sends three payments, an audit event with the timestamp of the event, and
# a refund. The description of produce() names the timestamp among its parameters.
# Expected: the event has this timestamp. If timestamps are not supported, produce() raises, as it does for headers.
# Seen: produce() accepts the timestamp. The buffer is sent in one batch per topic, and the batch with the timestamp
# raises NotImplementedError. Then the producer puts all batches back into its buffer, even those that it has sent. Each
# flush() raises the same error, but before that, it writes the payments again. Idempotence does not help, since they
# are new messages for librdkafka. The refund is behind the event, so it is never written. Without flush(), the timer of
# the buffer ends at the first error, with a log line. The futures of the payments are then never done, although the
# payments are written. Issue 2320 says that produce_batch() refuses timestamps, but mentions neither AIOProducer nor
# the repetitions. A message queue must not give timestamps to AIOProducer, and has to replace it if flush() raises.
# Output seen:
#   no timestamp, flush() 3 times: payments written 1 1 1 times, event 1, refund 1
#   timestamp, flush() 3 times: payments written 3 3 3 times, event 0, refund 0, NotImplementedError 3 times
#   no timestamp, 6 s: payments written 1 1 1 times, event 1, refund 1, done 5 of 5 futures
#   timestamp, 6 s: payments written 1 1 1 times, event 0, refund 0, done 1 of 5 futures
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'confluent-kafka==2.16.1'
cat >main.py <<'PYTHON'
import asyncio, logging, sys
from collections import Counter
from importlib.metadata import version
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.aio import AIOProducer

FLUSHES, WAIT_S, OCCURRED_MS = 3, 6.0, 1_700_000_000_000
PAYMENTS = b"payment 1", b"payment 2", b"payment 3"
print("confluent-kafka", version("confluent-kafka"))
logging.disable()
mock = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "127.0.0.1:1", "log_level": 0})
servers = ",".join(f"{b.host}:{b.port}" for b in mock.list_topics(timeout=10).brokers.values())
client = {"bootstrap.servers": servers, "log_level": 0}

def written(*topics):
    """Read the topics to their ends; return the number of times that each value is written."""
    reader = Consumer({**client, "group.id": "reader", "enable.partition.eof": True})
    topics = [reader.list_topics(topic, timeout=10).topics[topic] for topic in topics]
    open_partitions = {(topic.topic, partition) for topic in topics for partition in topic.partitions}
    reader.assign([TopicPartition(topic, partition, 0) for topic, partition in open_partitions])
    values = Counter()
    while open_partitions:
        if (message := reader.poll(10.0)) is None:
            sys.exit("no answer from the mock cluster")
        if message.error() is None:
            values[message.value()] += 1
        elif message.error().code() == KafkaError._PARTITION_EOF:
            open_partitions.discard((message.topic(), message.partition()))
    reader.close()
    return (*(values[payment] for payment in PAYMENTS), values[b"event"], values[b"refund"])

async def send(name, **timestamp):
    """Send all messages; return the producer and the futures."""
    producer = AIOProducer({**client, "enable.idempotence": True})
    futures = [await producer.produce(name + "payments", payment) for payment in PAYMENTS]
    futures.append(await producer.produce(name + "events", b"event", **timestamp))
    futures.append(await producer.produce(name + "refunds", b"refund"))
    return producer, futures

async def flushed(name, **timestamp):
    producer, futures = await send(name, **timestamp)
    errors = []
    for _ in range(FLUSHES):
        try:
            await producer.flush()
        except NotImplementedError as error:
            errors.append(error)
    await asyncio.sleep(1)
    return written(name + "payments", name + "events", name + "refunds"), len(errors)

async def waited(name, **timestamp):
    producer, futures = await send(name, **timestamp)
    await asyncio.sleep(WAIT_S)
    return written(name + "payments", name + "events", name + "refunds"), sum(future.done() for future in futures)

def text(payment1, payment2, payment3, event, refund):
    return f"payments written {payment1} {payment2} {payment3} times, event {event}, refund {refund}"

async def main():
    plain, plain_errors = await flushed("a")
    print(f"no timestamp, flush() {FLUSHES} times: {text(*plain)}")
    timed, timed_errors = await flushed("b", timestamp=OCCURRED_MS)
    print(f"timestamp, flush() {FLUSHES} times: {text(*timed)}, NotImplementedError {timed_errors} times")
    plain_wait, plain_done = await waited("c")
    print(f"no timestamp, {WAIT_S:g} s: {text(*plain_wait)}, done {plain_done} of 5 futures")
    timed_wait, timed_done = await waited("d", timestamp=OCCURRED_MS)
    print(f"timestamp, {WAIT_S:g} s: {text(*timed_wait)}, done {timed_done} of 5 futures")
    once = (1, 1, 1, 1, 1)
    return (plain, plain_errors, plain_wait, plain_done) == (once, 0, once, 5) and \
        (timed, timed_errors, timed_wait, timed_done) == ((3, 3, 3, 0, 0), FLUSHES, (1, 1, 1, 0, 0), 1)

sys.exit(not asyncio.run(main()))
PYTHON
venv/bin/python main.py
