#!/usr/bin/env bash
# Shows that kafka-python commits offsets of an aborted transaction together with the next transaction.
#
# Kafka 4.4.0 (broker from Maven), kafka-python 3.0.12, confluent-kafka 2.16.1 (librdkafka, for comparison). A worker
# has processed ten records of each of two partitions, when a second worker joins its group. The group refuses the
# offsets of its transaction, because they have the old generation, and the worker aborts. It keeps one partition,
# starts it again, and commits the offset of the first five records, with the new generation.
# Expected: the other partition has no offset, since only an aborted transaction contained one.
# Seen: kafka-python keeps the offsets of the refused request in a dictionary, which neither the error nor the abort
# clears. It adds the offsets of the next transaction, and sends all of them with the new generation. The broker accepts
# them, although the partition now belongs to the second worker. If that worker ends before its own commit, its
# successor starts after ten records, and no worker has committed their results. A rebalance during a transaction is
# enough. A message queue has to replace the producer after such an error.
# Output seen:
#   kafka-python: after the abort: own None, other None; after the commit: own 5, other 10
#   librdkafka: after the abort: own None, other None; after the commit: own 5, other None
set -euo pipefail
folder=$(mktemp -d) broker=
trap '[ -z "$broker" ] || { kill -9 "$broker" && wait "$broker" || :; }; rm -rf "$folder"' EXIT
cd "$folder" && python3 -m venv venv
venv/bin/pip install --quiet 'kafka-python==3.0.12' 'confluent-kafka==2.16.1'
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
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
PROPERTIES
java -cp 'jars/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'jars/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >main.py <<'PYTHON'
import sys, time
from importlib.metadata import version
import confluent_kafka, kafka
from confluent_kafka.admin import AdminClient, NewTopic

SERVER, PARTITIONS, LIMIT_S = sys.argv[1], (0, 1), 60
print("Kafka 4.4.0", *(f"{name} {version(name)}" for name in ("kafka-python", "confluent-kafka")))
admin = AdminClient({"bootstrap.servers": SERVER, "log_level": 0})
admin.list_topics(timeout=60)

class KafkaPython:
    """A worker: a consumer and a transactional producer of kafka-python."""

    refused = kafka.errors.KafkaError

    def __init__(self, topic, name):
        self.topic = topic
        self.producer = kafka.KafkaProducer(bootstrap_servers=SERVER, transactional_id=topic + name)
        self.producer.init_transactions()
        self.consumer = kafka.KafkaConsumer(bootstrap_servers=SERVER, group_id=topic, enable_auto_commit=False)
        self.consumer.subscribe([topic])

    def poll(self):
        self.consumer.poll(timeout_ms=200)
        return sorted(place.partition for place in self.consumer.assignment())

    def metadata(self):
        return self.consumer.group_metadata()

    def send_offsets(self, offsets, metadata):
        places = {kafka.TopicPartition(self.topic, partition): kafka.OffsetAndMetadata(offset, "", -1)
                  for partition, offset in offsets.items()}
        self.producer.send_offsets_to_transaction(places, metadata)

    def close(self):
        self.producer.close()
        self.consumer.close()

class Librdkafka:
    """The same with librdkafka."""

    refused = confluent_kafka.KafkaException

    def __init__(self, topic, name):
        self.topic = topic
        self.producer = confluent_kafka.Producer(
            {"bootstrap.servers": SERVER, "transactional.id": topic + name, "log_level": 0})
        self.producer.init_transactions()
        self.consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": SERVER, "group.id": topic, "enable.auto.commit": False, "log_level": 0})
        self.consumer.subscribe([topic])

    def poll(self):
        self.consumer.poll(0.2)
        return sorted(place.partition for place in self.consumer.assignment())

    def metadata(self):
        return self.consumer.consumer_group_metadata()

    def send_offsets(self, offsets, metadata):
        places = [confluent_kafka.TopicPartition(self.topic, *place) for place in offsets.items()]
        self.producer.send_offsets_to_transaction(places, metadata)

    def close(self):
        self.consumer.close()

def committed(topic):
    places = [confluent_kafka.TopicPartition(topic, partition) for partition in PARTITIONS]
    group, limit = confluent_kafka.ConsumerGroupTopicPartitions(topic, places), time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        places = admin.list_consumer_group_offsets([group], require_stable=True)[topic].result().topic_partitions
        if not any(place.error for place in places):  # The broker has written the end of the transaction.
            break
        time.sleep(0.1)
    return {place.partition: place.offset for place in places if place.offset >= 0}

def run(client):
    topic = client.__name__.lower()
    admin.create_topics([NewTopic(topic, len(PARTITIONS), 1)])[topic].result()
    limit = time.monotonic() + LIMIT_S
    first = client(topic, "first")
    while len(first.poll()) < len(PARTITIONS) and time.monotonic() < limit:
        pass
    old = first.metadata()
    second = client(topic, "second")
    while not (len(first.poll()) == len(second.poll()) == 1) and time.monotonic() < limit:
        pass
    (own,), (other,) = first.poll(), second.poll()
    first.producer.begin_transaction()
    try:
        first.send_offsets({own: 10, other: 10}, old)
    except client.refused:
        first.producer.abort_transaction()
    after_abort = committed(topic)
    first.producer.begin_transaction()
    first.send_offsets({own: 5}, first.metadata())
    first.producer.commit_transaction()
    after_commit = committed(topic)
    first.close(), second.close()
    return [(found.get(own), found.get(other)) for found in (after_abort, after_commit)]

results = {"kafka-python": run(KafkaPython), "librdkafka": run(Librdkafka)}
for client, offsets in results.items():
    texts = [f"after the {when}: own {own}, other {other}"
             for when, (own, other) in zip(("abort", "commit"), offsets)]
    print(f"{client}: {'; '.join(texts)}")
nothing = (None, None)
sys.exit(results != {"kafka-python": [nothing, (5, 10)], "librdkafka": [nothing, (5, None)]})
PYTHON
venv/bin/python main.py "127.0.0.1:$port"
