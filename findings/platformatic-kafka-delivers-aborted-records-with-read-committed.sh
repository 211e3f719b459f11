#!/usr/bin/env bash
# Shows that @platformatic/kafka delivers records of aborted transactions, although it reads with READ_COMMITTED.
#
# Kafka 4.4.0 (broker from Maven), @platformatic/kafka 2.12.1 on Node 24.6.0, confluent-kafka 2.16.1 (librdkafka, to
# write, and for comparison). One producer writes a topic with one partition, and aborts some of its transactions.
# Expected: the consumer skips all aborted records. READ_COMMITTED is its default, and its page on transactions says
# that it reads only messages from committed transactions.
# Seen: for each fetch, the consumer keeps one aborted range per producer, from the last aborted transaction that the
# broker lists to the last abort marker. If two transactions of one producer were aborted, it delivers the records of
# the first. It also ignores a range whose marker is not in the same fetch, so it delivers most of an aborted
# transaction that is larger than maxBytes. One aborted transaction in one fetch, as in a simple test, is skipped. If a
# worker of a message queue aborts twice before a consumer reads, for example in its retries, the consumer processes
# messages that were never sent.
# Output seen:
#   one aborted: librdkafka: first 1, end 1; @platformatic/kafka: first 1, end 1
#   two aborted: librdkafka: first 1, end 1; @platformatic/kafka: first 1, aborted-1 1, end 1
#   one aborted, above maxBytes: librdkafka: first 1, end 1; @platformatic/kafka: first 1, aborted-1 29, end 1
set -euo pipefail
folder=$(mktemp -d) broker=
trap '[ -z "$broker" ] || { kill -9 "$broker" && wait "$broker" || :; }; rm -rf "$folder"' EXIT
cd "$folder" && python3 -m venv venv && venv/bin/pip install --quiet 'confluent-kafka==2.16.1'
npm install --silent --no-audit --no-fund node@24.6.0 @platformatic/kafka@2.12.1 >/dev/null
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
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
PROPERTIES
java -cp 'jars/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'jars/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >main.mjs <<'JAVASCRIPT'
import { Consumer } from "@platformatic/kafka"

const [server, topic, maxBytes] = process.argv.slice(2)
const consumer = new Consumer({ groupId: topic, clientId: "reader", bootstrapBrokers: [server] })
const options = { mode: "earliest", autocommit: false, maxBytes: Number(maxBytes) }
const stream = await consumer.consume({ topics: [topic], ...options })
for await (const message of stream) {
  const name = message.value.toString().trimEnd()
  console.log(name)
  if (name === "end") break
}
await consumer.close(true)
JAVASCRIPT
cat >main.py <<'PYTHON'
import subprocess, sys
from collections import Counter
from importlib.metadata import version
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

SERVER, NODE = sys.argv[1], "node_modules/.bin/node"
BATCHES, BATCH_BYTES = 30, 100_000
print("Kafka 4.4.0 @platformatic/kafka 2.12.1 Node", subprocess.check_output([NODE, "--version"], text=True).strip(),
      "confluent-kafka", version("confluent-kafka"))
client = {"bootstrap.servers": SERVER, "log_level": 0}
admin = AdminClient(client)
admin.list_topics(timeout=60)

def write(topic, aborted, batches=1, size=0):
    """Write a committed transaction, some that are aborted, and a committed one; flush after each record."""
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result()
    producer = Producer({**client, "transactional.id": topic})
    producer.init_transactions()
    for name in ("first", *(f"aborted-{number + 1}" for number in range(aborted)), "end"):
        producer.begin_transaction()
        for _ in range(batches if name.startswith("aborted") else 1):
            producer.produce(topic, name.ljust(size))
            producer.flush()
        producer.abort_transaction() if name.startswith("aborted") else producer.commit_transaction()

def read_librdkafka(topic):
    consumer = Consumer({**client, "group.id": "reader", "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    names = []
    while "end" not in names:
        names.append(consumer.poll(timeout=60).value().decode().rstrip())
    consumer.close()
    return Counter(names)

def read_platformatic(topic, max_bytes):
    output = subprocess.check_output([NODE, "main.mjs", SERVER, topic, str(max_bytes)], text=True, timeout=120)
    return Counter(output.split())

write("one", aborted=1)
write("two", aborted=2)
write("large", aborted=1, batches=BATCHES, size=BATCH_BYTES)
committed, default, results = Counter(["first", "end"]), 50 << 20, []
for case, topic, max_bytes in (("one aborted", "one", default), ("two aborted", "two", default),
                               ("one aborted, above maxBytes", "large", 1 << 20)):
    both = read_librdkafka(topic), read_platformatic(topic, max_bytes)
    texts = [", ".join(f"{name} {count}" for name, count in names.items()) for names in both]
    print(f"{case}: librdkafka: {texts[0]}; @platformatic/kafka: {texts[1]}")
    results.append(both)
(one, two, large) = results
as_seen = (one == (committed, committed) and two == (committed, committed + Counter(["aborted-1"]))
           and large[0] == committed and large[1] > committed and large[1]["aborted-1"] >= BATCHES / 2)
sys.exit(not as_seen)
PYTHON
venv/bin/python main.py "127.0.0.1:$port"
