#!/usr/bin/env bash
# Shows that one record that a topic refuses ends an idempotent aiokafka producer for its partition.
#
# Kafka 4.4.0 (broker from Maven), aiokafka 0.14.0, confluent-kafka 2.16.1 (librdkafka, for comparison).
# Expected: a compacted topic refuses a record without a key with INVALID_RECORD (87); later records are written.
# Seen: aiokafka does not know code 87 and raises UnknownError (-1), as if the record might have been written. It has
# used up the record's sequence number, so the broker refuses all later batches of the partition with
# OUT_OF_ORDER_SEQUENCE_NUMBER (45) until the producer is replaced. librdkafka names the error and goes on with the next
# sequence number that the broker expects. A program that shares a producer must replace it after a refused record.
# Output seen:
#   aiokafka: offset 0, UnknownError -1, OutOfOrderSequenceNumber 45, OutOfOrderSequenceNumber 45
#   librdkafka: offset 1, INVALID_RECORD 87, offset 2, offset 3
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
import asyncio, logging, sys
from importlib.metadata import version
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from confluent_kafka import Producer
SERVERS = sys.argv[1]
logging.getLogger("aiokafka").setLevel(logging.CRITICAL + 1)
print("Kafka 4.4.0 aiokafka", version("aiokafka"), "confluent-kafka", version("confluent-kafka"))
async def by_aiokafka():
    for _ in range(60):
        admin = AIOKafkaAdminClient(bootstrap_servers=SERVERS)
        try:
            await admin.start()
            break
        except Exception:
            await asyncio.sleep(1)
    await admin.create_topics([NewTopic("t", 1, 1, topic_configs={"cleanup.policy": "compact"})])
    await admin.close()
    producer, seen = AIOKafkaProducer(bootstrap_servers=SERVERS, enable_idempotence=True), []
    await producer.start()
    for key in (b"k", None, b"k", b"k"):
        try:
            sent = await asyncio.wait_for(producer.send_and_wait("t", b"v", key=key), 20)
            seen.append(f"offset {sent.offset}")
        except Exception as error:
            seen.append(f"{type(error).__name__} {getattr(error, 'errno', '')}".strip())
    await asyncio.wait([asyncio.ensure_future(producer.stop())], timeout=5)
    print("aiokafka:", ", ".join(seen))
    return seen
def by_librdkafka():
    producer, seen = Producer({"bootstrap.servers": SERVERS, "enable.idempotence": True, "log_level": 0}), []
    for key in (b"k", None, b"k", b"k"):
        producer.produce("t", b"v", key=key, on_delivery=lambda error, sent: seen.append(
            f"{error.name()} {error.code()}" if error else f"offset {sent.offset()}"))
        producer.flush(20)
    print("librdkafka:", ", ".join(seen))
    return seen
ours = ["offset 0", "UnknownError -1", "OutOfOrderSequenceNumber 45", "OutOfOrderSequenceNumber 45"]
theirs = ["offset 1", "INVALID_RECORD 87", "offset 2", "offset 3"]
sys.exit((asyncio.run(by_aiokafka()), by_librdkafka()) != (ours, theirs))
PYTHON
venv/bin/python main.py "127.0.0.1:$port"
