#!/usr/bin/env bash
# Shows that two aiokafka consumers with the same group_instance_id keep taking the partition from each other.
#
# Kafka 4.4.0 (broker from Maven), aiokafka 0.14.0, confluent-kafka 2.16.1 (librdkafka, for comparison).
# Expected (KIP-345): the second consumer wins. The first gets FENCED_INSTANCE_ID, a fatal error, as in librdkafka.
# Seen: a heartbeat tells the first that its member id is unknown. aiokafka then joins again without a member id. The
# broker takes this for a restart and replaces the second consumer, which does the same. getmany() raises no error. At
# each turn, the new owner reads all uncommitted records again, here one. While two processes share an instance id (a
# pod and its replacement), they repeat each other's messages. A message queue must fence such a member itself.
# Output seen:
#   aiokafka: the only record was read 5 and 5 times, errors: none
#   librdkafka: the first got Fatal error: Broker: Static consumer fenced by other consumer with same group.instance.id
set -euo pipefail
folder=$(mktemp -d) broker=
trap '[ -z "$broker" ] || { kill -9 "$broker" && wait "$broker" || :; }; rm -rf "$folder"' EXIT
cd "$folder" && python3 -m venv venv && venv/bin/pip install --quiet 'aiokafka==0.14.0' 'confluent-kafka==2.16.1'
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
PROPERTIES
java -cp 'jars/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'jars/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >main.py <<'PYTHON'
import asyncio, logging, sys, time
from importlib.metadata import version
from aiokafka import AIOKafkaConsumer
from confluent_kafka import Consumer, KafkaError, Producer
SERVERS, TURNS, LIMIT = sys.argv[1], 5, time.monotonic() + 200
logging.getLogger("aiokafka").setLevel(logging.CRITICAL + 1)
print("Kafka 4.4.0 aiokafka", version("aiokafka"), "confluent-kafka", version("confluent-kafka"))
producer = Producer({"bootstrap.servers": SERVERS, "log_level": 0})
producer.produce("t", b"message")
producer.flush()
async def read(offsets):
    async with AIOKafkaConsumer("t", bootstrap_servers=SERVERS, group_id="a", group_instance_id="one",
                                auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
        while True:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                offsets += [record.offset for record in records]
async def by_aiokafka():
    first, second = [], []
    tasks = [asyncio.create_task(read(first))]
    while time.monotonic() < LIMIT and min(len(first), len(second)) < TURNS and not any(t.done() for t in tasks):
        if first and len(tasks) == 1:
            tasks.append(asyncio.create_task(read(second)))
        await asyncio.sleep(0.1)
    errors = [repr(task.exception()) for task in tasks if task.done()]  # The others are cancelled by asyncio.run().
    print(f"aiokafka: the only record was read {len(first)} and {len(second)} times, errors: {errors or 'none'}")
    return min(len(first), len(second)) >= TURNS and not errors
def by_librdkafka():
    options = {"bootstrap.servers": SERVERS, "group.id": "b", "group.instance.id": "one", "log_level": 0}
    first, second = Consumer(options), Consumer(options)
    first.subscribe(["t"])
    while time.monotonic() < LIMIT:
        if first.assignment():
            second.subscribe(["t"])
            second.poll(0.1)
        message = first.poll(0.1)
        if message is not None and message.error() and message.error().code() == KafkaError._FATAL:
            print("librdkafka: the first got", message.error().str().partition(": Fatal")[0])
            return "fenced" in message.error().str()
sys.exit(not (asyncio.run(by_aiokafka()) and by_librdkafka()))
PYTHON
venv/bin/python main.py "127.0.0.1:$port"
