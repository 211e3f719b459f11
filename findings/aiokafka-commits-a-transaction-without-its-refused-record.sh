#!/usr/bin/env bash
# Shows that aiokafka commits a transaction although the broker has refused one of its records.
#
# Kafka 4.4.0 (broker from Maven), aiokafka 0.14.0, confluent-kafka 2.16.1 (librdkafka, for comparison). A transaction
# writes a debit to one topic and a credit to another, and the second topic refuses its record. For throughput, the
# program does not await the futures that send() returns, but relies on the end of the transaction.
# Expected: commit_transaction() sends all records, raises the error and requires an abort, as in librdkafka and Java.
# Seen: the commit succeeds, and a read_committed consumer gets the debit alone. Only the future of the refused record
# has the error, and asyncio reports it when the future is deleted, after the commit. In aiokafka, an error of the
# coordinator ends a transaction, but a refused batch does not. A message queue must await the future of each record
# before it commits.
# Output seen:
#   aiokafka: compact: committed; small: committed; read: debit debit
#   librdkafka: compact: INVALID_RECORD, abort required; small: MSG_SIZE_TOO_LARGE, abort required; read: nothing
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
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
PROPERTIES
java -cp 'jars/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'jars/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >main.py <<'PYTHON'
import asyncio, logging, sys
from importlib.metadata import version
from aiokafka import AIOKafkaProducer
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

SERVERS = sys.argv[1]
REFUSED = {"compact": (None, b"credit"), "small": (b"key", bytes(2000))}  # Each topic refuses this key and value.
logging.disable()
print("Kafka 4.4.0 aiokafka", version("aiokafka"), "confluent-kafka", version("confluent-kafka"))
client = {"bootstrap.servers": SERVERS, "log_level": 0}
admin = AdminClient(client)
admin.list_topics(timeout=60)
topics = [NewTopic("compact", 1, 1, config={"cleanup.policy": "compact"}),
          NewTopic("small", 1, 1, config={"max.message.bytes": "1000"}),
          NewTopic("by-aiokafka", 1, 1), NewTopic("by-librdkafka", 1, 1)]
for created in admin.create_topics(topics).values():
    created.result()

async def by_aiokafka():
    seen = {}
    async with AIOKafkaProducer(bootstrap_servers=SERVERS, transactional_id="a") as producer:
        for topic, (key, value) in REFUSED.items():
            try:
                async with producer.transaction():
                    await producer.send("by-aiokafka", b"debit")
                    await producer.send(topic, value, key=key)
                seen[topic] = "committed"
            except Exception as error:
                seen[topic] = type(error).__name__
    return seen

def by_librdkafka():
    seen = {}
    producer = Producer({**client, "transactional.id": "b"})
    producer.init_transactions(60)
    for topic, (key, value) in REFUSED.items():
        producer.begin_transaction()
        producer.produce("by-librdkafka", b"debit")
        producer.produce(topic, value, key=key)
        try:
            producer.commit_transaction(60)
            seen[topic] = "committed"
        except KafkaException as raised:
            error = raised.args[0]
            seen[topic] = error.name() + (", abort required" if error.txn_requires_abort() else "")
            producer.abort_transaction(60)
    return seen

def read(topic):
    consumer = Consumer({**client, "group.id": "reader", "isolation.level": "read_committed",
                         "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, 0, 0)])
    values = []
    while (message := consumer.poll(60)) is not None and message.error() is None:
        values.append(message.value().decode())
    assert message is not None, "no end of partition"
    consumer.close()
    return values

seen = []
for name, outcome in (("aiokafka", asyncio.run(by_aiokafka())), ("librdkafka", by_librdkafka())):
    seen.append((outcome, read(f"by-{name}")))
    print(f"{name}: {'; '.join(f'{topic}: {what}' for topic, what in outcome.items())};",
          "read:", *(seen[-1][1] or ["nothing"]))
sys.exit(seen != [
    ({"compact": "committed", "small": "committed"}, ["debit", "debit"]),
    ({"compact": "INVALID_RECORD, abort required", "small": "MSG_SIZE_TOO_LARGE, abort required"}, []),
])
PYTHON
venv/bin/python main.py "127.0.0.1:$port"
