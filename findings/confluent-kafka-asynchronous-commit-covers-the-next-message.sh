#!/usr/bin/env bash
# Shows that commit(asynchronous=True) mostly commits the next message, too, so that a crash loses it.
#
# confluent-kafka 2.16.1 (and its mock cluster). A worker with enable.auto.commit=False polls a message, processes it
# for some milliseconds, and calls commit(asynchronous=True) without arguments.
# Expected: the commit covers the messages that poll() had returned when commit() was called.
# Seen: commit() only queues a request. A thread of librdkafka reads the stored offsets later, and the next poll() is
# often faster: it takes a prefetched message from memory and stores its offset. So most commits cover the message that
# the worker is still processing. If the worker is killed then, its successor starts behind this message. The group
# behaves as if it committed before processing. AIOConsumer.commit() is asynchronous by default, too: to await it is not
# to wait for the commit, and some of its commits are ahead. If the last commit is synchronous, as before a shutdown, it
# often raises _NO_OFFSET, since the commit before it has already covered its message. The documentation says that
# commit() uses the offsets of the assignment, but not when it reads them. Issue 4534 of librdkafka supposes such a
# race, but its author could not reproduce it. A message queue must pass the message or offsets to commit().
# Output seen:
#   commit(asynchronous=True): 193 of 200 commits cover a message that was not processed at the call
#   commit(message, asynchronous=True): 0 of 200 commits cover a message that was not processed at the call
#   AIOConsumer, await commit(): commit 34 covers a message that was not processed at the call
#   worker 1 killed in its message 6: processed 1-5, the successor gets 7-10
#   asynchronous commit, then synchronous commit: KafkaError _NO_OFFSET in pair 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'confluent-kafka==2.16.1'
cat >main.py <<'PYTHON'
import asyncio, os, signal, subprocess, sys, time
from importlib.metadata import version
from confluent_kafka import OFFSET_STORED, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.aio import AIOConsumer

COMMITS, AIO_COMMITS, WORKERS, PAIRS, PROCESSING_S, LIMIT_S = 200, 5000, 20, 200, 0.005, 60

def settings(servers, topic, **more):
    return {"bootstrap.servers": servers, "group.id": topic, "enable.auto.commit": False, "log_level": 0,
            "auto.offset.reset": "earliest", **more}

def send(servers, topic, count):
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    for number in range(1, count + 1):
        producer.produce(topic, b"%d" % number, partition=0)
    producer.flush()

def receive(consumer):
    end = time.monotonic() + LIMIT_S
    while (message := consumer.poll(1.0)) is None or message.error():
        if time.monotonic() > end:
            sys.exit("timed out")
    return message

def plain(consumer, message):
    consumer.commit(asynchronous=True)

def with_message(consumer, message):
    consumer.commit(message, asynchronous=True)

def ahead(servers, topic, commit):
    """Process and commit messages one by one; return the number of commits that cover a later message."""
    send(servers, topic, COMMITS + 1)
    committed = []
    def on_commit(error, partitions):
        committed.append(max(partition.offset for partition in partitions))  # Negative if there was nothing to commit.
    consumer = Consumer(settings(servers, topic, on_commit=on_commit))
    consumer.subscribe([topic])
    processed = []
    while len(processed) < COMMITS:
        message = receive(consumer)
        time.sleep(PROCESSING_S)
        processed.append(message.offset() + 1)
        commit(consumer, message)
    end = time.monotonic() + LIMIT_S
    while len(committed) < COMMITS and time.monotonic() < end:
        consumer.poll(0.1)  # For the callbacks; a message that it returns is not committed.
    consumer.close()
    assert len(committed) == COMMITS, f"{len(committed)} of {COMMITS} commits"
    return sum(offset > position for position, offset in zip(processed, committed))

async def first_ahead_with_asyncio(servers, topic):
    """Return the number of the first commit of AIOConsumer that covers a later message."""
    send(servers, topic, AIO_COMMITS)
    processed, committed = [], []
    async def on_commit(error, partitions):
        committed.append(max(partition.offset for partition in partitions))
    consumer = AIOConsumer(settings(servers, topic, on_commit=on_commit))
    await consumer.subscribe([topic])
    end = time.monotonic() + LIMIT_S
    found = None
    while found is None and len(processed) < AIO_COMMITS and time.monotonic() < end:
        message = await consumer.poll(1.0)
        if message and not message.error():
            processed.append(message.offset() + 1)
            await consumer.commit()
        pairs = enumerate(zip(processed, committed), 1)
        found = next((number for number, (position, offset) in pairs if offset > position), None)
    await consumer.close()
    return found

def work(servers, topic, last):
    """Run in a process of its own: print each processed message, and be killed while processing the last one."""
    consumer = Consumer(settings(servers, topic))
    consumer.subscribe([topic])
    for number in range(1, last + 1):
        message = receive(consumer)
        time.sleep(PROCESSING_S if number < last else 1.0)
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)
        print(message.value().decode(), flush=True)
        consumer.commit(asynchronous=True)

def kill_workers(servers):
    """Kill workers until one loses a message; return what it has processed and what its successor receives."""
    for number in range(1, WORKERS + 1):
        topic = f"killed-{number}"
        send(servers, topic, 10)
        worker = subprocess.run([sys.executable, __file__, servers, topic, "6"], stdout=subprocess.PIPE, text=True)
        assert worker.returncode == -signal.SIGKILL, worker.returncode
        processed = [int(line) for line in worker.stdout.split()]
        successor = Consumer(settings(servers, topic))
        successor.assign([TopicPartition(topic, 0, OFFSET_STORED)])
        received = []
        while not received or received[-1] < 10:
            received.append(int(receive(successor).value()))
        successor.close()
        if len(processed) + len(received) < 10:
            print(f"worker {number} killed in its message 6: processed {processed[0]}-{processed[-1]},",
                  f"the successor gets {received[0]}-{received[-1]}")
            return processed, received

def first_error(servers, topic):
    """Commit messages in pairs, asynchronously and synchronously; return the first error and the pair's number."""
    send(servers, topic, 2 * PAIRS)
    consumer = Consumer(settings(servers, topic))
    consumer.subscribe([topic])
    for number in range(1, PAIRS + 1):
        receive(consumer)
        consumer.commit(asynchronous=True)
        receive(consumer)
        time.sleep(10 * PROCESSING_S)
        try:
            consumer.commit(asynchronous=False)
        except KafkaException as error:
            consumer.close()
            return error.args[0], number
    return None, 0

def main():
    print("confluent-kafka", version("confluent-kafka"))
    mock = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    servers = ",".join(f"{b.host}:{b.port}" for b in mock.list_topics(timeout=10).brokers.values())
    counts = {
        "commit(asynchronous=True)": ahead(servers, "a", plain),
        "commit(message, asynchronous=True)": ahead(servers, "b", with_message),
    }
    for call, count in counts.items():
        print(f"{call}: {count} of {COMMITS} commits cover a message that was not processed at the call")
    with_asyncio = asyncio.run(first_ahead_with_asyncio(servers, "d"))
    print(f"AIOConsumer, await commit(): commit {with_asyncio} covers a message that was not processed at the call")
    lost = kill_workers(servers)
    error, pair = first_error(servers, "e")
    print(f"asynchronous commit, then synchronous commit: KafkaError {error and error.name()} in pair {pair}")
    implicit, explicit = counts.values()
    return (implicit > COMMITS / 10 and explicit == 0 and with_asyncio is not None
            and lost == ([1, 2, 3, 4, 5], [7, 8, 9, 10])
            and error is not None and error.code() == KafkaError._NO_OFFSET)

if len(sys.argv) > 1:
    work(sys.argv[1], sys.argv[2], int(sys.argv[3]))
else:
    sys.exit(not main())
PYTHON
venv/bin/python main.py
