#!/usr/bin/env bash
# Shows that FastStream on confluent-kafka commits a message that it has nacked, if another partition makes progress.
#
# Kafka 4.4.0 (broker from Maven), FastStream 0.7.8 with confluent-kafka 2.16.1 (librdkafka), and with aiokafka 0.14.0
# (for comparison). A handler with AckPolicy.NACK_ON_ERROR fails for the message of partition 0, because a service is
# down. It succeeds for the message of partition 1. Then the worker is restarted, and the service is up again.
# Expected: FastStream rewinds partition 0 to the message that failed, and delivers it again, also after the restart. A
# comment in its nack() says why: "so none of them is committed past an unprocessed message".
# Seen: the running worker does deliver it again. But each success calls commit() without offsets. In aiokafka, that
# commits the positions, which the rewind has moved back. In librdkafka, it commits the stored offsets: the next offset
# after the last message that the client has returned, for all partitions. seek() does not change them. So a success in
# partition 1 commits the message of partition 0 while it still fails. After the restart, no worker gets it, and no
# error says so. A message queue on librdkafka has to commit the offsets of messages that it has processed, never those
# that the client has stored.
# Output seen:
#   aiokafka: committed offsets 0 and 1; after the restart: first third
#   confluent-kafka: committed offsets 1 and 1; after the restart: third
set -euo pipefail
folder=$(mktemp -d) broker=
trap '[ -z "$broker" ] || { kill -9 "$broker" && wait "$broker" || :; }; rm -rf "$folder"' EXIT
cd "$folder" && python3 -m venv venv
venv/bin/pip install --quiet 'faststream[kafka,confluent]==0.7.8' 'aiokafka==0.14.0' 'confluent-kafka==2.16.1'
cat >pom.xml <<'XML'
<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>x</groupId>
  <artifactId>broker</artifactId><version>1</version><packaging>pom</packaging><dependencies><dependency>
  <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>4.4.0</version>
  </dependency></dependencies></project>
XML
mvn -q -B dependency:copy-dependencies -DoutputDirectory=jars >/dev/null
free_port='import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'
port=$(python3 -c "$free_port") controller=$(python3 -c "$free_port")
cat >broker.properties <<PROPERTIES
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:$controller
listeners=PLAINTEXT://127.0.0.1:$port,CONTROLLER://127.0.0.1:$controller
controller.listener.names=CONTROLLER
log.dirs=$folder/data
offsets.topic.replication.factor=1
group.initial.rebalance.delay.ms=0
PROPERTIES
java -cp 'jars/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'jars/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >main.py <<'PYTHON'
import asyncio, contextlib, sys, time
from importlib.metadata import version
import faststream.confluent, faststream.kafka
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from faststream import AckPolicy

SERVER, LIMIT_S, QUIET_S = sys.argv[1], 60, 5
BACK_ENDS = {"aiokafka": faststream.kafka.KafkaBroker, "confluent-kafka": faststream.confluent.KafkaBroker}
print("Kafka 4.4.0", *(f"{name} {version(name)}" for name in ("faststream", *BACK_ENDS)))
client = {"bootstrap.servers": SERVER, "log_level": 0}
admin, producer = AdminClient(client), Producer(client)
admin.list_topics(timeout=LIMIT_S)

def send(topic, partition, value):
    producer.produce(topic, value, partition=partition)
    producer.flush()

def committed(topic):
    """Return the committed offsets of both partitions."""
    reader = Consumer({**client, "group.id": topic})
    offsets = reader.committed([TopicPartition(topic, partition) for partition in (0, 1)], timeout=10)
    reader.close()
    return [partition.offset for partition in offsets]

async def until(condition):
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            sys.exit("timed out")
        await asyncio.sleep(0.1)

@contextlib.asynccontextmanager
async def worker(back_end, topic, service_is_up):
    """Run a worker; yield the values that it has processed, and those for which its handler has failed."""
    processed, failed = [], []
    broker = back_end(SERVER, logger=None)
    @broker.subscriber(topic, group_id=topic, auto_offset_reset="earliest", ack_policy=AckPolicy.NACK_ON_ERROR)
    async def handle(value: str):
        if value == "first" and not service_is_up:
            await asyncio.sleep(0.1)
            failed.append(value)
            raise ConnectionError("the service is down")
        processed.append(value)
    async with broker:
        await broker.start()
        yield processed, failed

async def restart(topic, back_end):
    """Restart a worker while a message fails; return the committed offsets, and the values that the next one gets."""
    admin.create_topics([NewTopic(topic, 2, 1)])[topic].result()
    send(topic, 0, "first")
    async with worker(back_end, topic, service_is_up=False) as (processed, failed):
        await until(lambda: len(failed) >= 3)
        send(topic, 1, "second")
        await until(lambda: processed == ["second"] and committed(topic)[1] == 1)
    offsets = committed(topic)
    send(topic, 1, "third")
    async with worker(back_end, topic, service_is_up=True) as (processed, failed):
        await until(lambda: "third" in processed)
        await asyncio.sleep(QUIET_S)
    return offsets, sorted(processed)

async def main():
    seen = {}
    for name, back_end in BACK_ENDS.items():
        offsets, values = seen[name] = await restart("with-" + name, back_end)
        print(f"{name}: committed offsets {offsets[0]} and {offsets[1]}; after the restart: {' '.join(values)}")
    return seen == {"aiokafka": ([0, 1], ["first", "third"]), "confluent-kafka": ([1, 1], ["third"])}

sys.exit(not asyncio.run(main()))
PYTHON
venv/bin/python main.py "127.0.0.1:$port"
