#!/usr/bin/env bash
# Shows that a Kafka share group loses dead letters if a rejected record is almost as large as its topic allows.
#
# Kafka 4.4.0 (broker from Maven), confluent-kafka 2.16.1 (ShareConsumer). The group has a dead-letter queue (KIP-1191)
# and errors.deadletterqueue.copy.record.enable. All size limits have their defaults. The consumer rejects all records
# of one poll, and commit_sync() reports no error.
# Expected: one dead letter with a value per record. What a topic has accepted fits into a topic with the same limit.
# Seen: the broker adds about 200 bytes of headers. If a record exceeds the limit only because of them, the broker does
# not leave its value out, as it does with a record that is far too large. The write fails, and with it the dead
# letters of all records after it in the same acknowledgement. The broker logs "proceeding to ARCHIVED regardless", and
# the group never delivers these records again. Dead letters are not compressed, so a record of 3 MB from a producer
# that compresses is too large, too: its dead letter has no value. A message queue on share groups has to give its
# dead-letter topics a larger max.message.bytes than its messages.
# Output seen:
#   26 small records: 26 rejected, 26 dead letters, 26 with a value
#   the sixth has 1048448 bytes: 26 rejected, 5 dead letters, 5 with a value
#   the sixth has 3000000 bytes, compressed: 26 rejected, 26 dead letters, 25 with a value
#   the sixth has 1048448 bytes, larger limit for dead letters: 26 rejected, 26 dead letters, 26 with a value
set -euo pipefail
folder=$(mktemp -d) broker=
trap '[ -z "$broker" ] || { kill -9 "$broker" && wait "$broker" || :; }; rm -rf "$folder"' EXIT
cd "$folder" && python3 -m venv venv
venv/bin/pip install --quiet 'confluent-kafka==2.16.1'
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
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
PROPERTIES
java -cp 'jars/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'jars/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >main.py <<'PYTHON'
import os, sys, time
from importlib.metadata import version
from confluent_kafka import AcknowledgeType, Consumer, Producer, ShareConsumer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

LIMIT, RECORDS, BEFORE = 1_048_588, 26, 5  # The default of message.max.bytes.
print("Kafka 4.4.0 confluent-kafka", version("confluent-kafka"))
client = {"bootstrap.servers": sys.argv[1], "log_level": 0}
admin = AdminClient(client)
admin.list_topics(timeout=60)

def reject(name, sixth, compression="none", **settings):
    """Reject all records of a topic; return their number, the number of dead letters, and of those with a value."""
    dead_letters = "dlq." + name
    settings = {"errors.deadletterqueue.group.enable": "true", **settings}
    for created in admin.create_topics([NewTopic(name, 1, 1), NewTopic(dead_letters, 1, 1, config=settings)]).values():
        created.result()
    group = ConfigResource(ConfigResource.Type.GROUP, name)
    for option, value in (("share.auto.offset.reset", "earliest"), ("errors.deadletterqueue.topic.name", dead_letters),
                          ("errors.deadletterqueue.copy.record.enable", "true")):
        group.add_incremental_config(ConfigEntry(option, value, incremental_operation=AlterConfigOpType.SET))
    admin.incremental_alter_configs([group])[group].result()
    errors = []
    producer = Producer({**client, "linger.ms": 500, "message.max.bytes": 10_000_000, "compression.type": compression})
    for value in [b"small"] * BEFORE + [sixth] + [b"small"] * (RECORDS - BEFORE - 1):
        producer.produce(name, value, on_delivery=lambda error, _: errors.append(error) if error else None)
    producer.flush()
    consumer = ShareConsumer({**client, "group.id": name, "share.acknowledgement.mode": "explicit"})
    consumer.subscribe([name])
    polled, limit = [], time.monotonic() + 60
    while not polled and time.monotonic() < limit:
        polled = list(consumer.poll(timeout=1.0))
    for message in polled:
        consumer.acknowledge(message, AcknowledgeType.REJECT)
    errors += [error for error in consumer.commit_sync().values() if error]
    assert not errors, errors
    reader = Consumer({**client, "group.id": "reader"})
    reader.assign([TopicPartition(dead_letters, 0, 0)])
    values, limit = [], time.monotonic() + 20
    while len(values) < RECORDS and time.monotonic() < limit:
        if (message := reader.poll(1.0)) is not None and message.error() is None:
            values.append(message.value())
    again = list(consumer.poll(timeout=3.0))
    assert not again, "the group delivers rejected records again"
    reader.close(), consumer.close()
    return len(polled), len(values), sum(1 for value in values if value)

full = os.urandom(LIMIT - 140)
seen = {
    f"{RECORDS} small records": reject("small", b"small"),
    f"the sixth has {len(full)} bytes": reject("full", full),
    "the sixth has 3000000 bytes, compressed": reject("compressed", bytes(3_000_000), "zstd"),
    f"the sixth has {len(full)} bytes, larger limit for dead letters":
        reject("larger", full, **{"max.message.bytes": str(2 * LIMIT)}),
}
for case, (rejected, letters, values) in seen.items():
    print(f"{case}: {rejected} rejected, {letters} dead letters, {values} with a value")
all_kept = (RECORDS, RECORDS, RECORDS)
sys.exit([*seen.values()] != [all_kept, (RECORDS, BEFORE, BEFORE), (RECORDS, RECORDS, RECORDS - 1), all_kept])
PYTHON
venv/bin/python main.py "127.0.0.1:$port"
