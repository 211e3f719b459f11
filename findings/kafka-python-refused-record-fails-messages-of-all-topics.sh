#!/usr/bin/env bash
# Shows that kafka-python fails all messages of a producer, even written ones, if one topic refuses one record.
#
# Kafka 4.4.0 (broker from Maven), kafka-python 3.0.12, confluent-kafka 2.16.1 (librdkafka, for comparison). A program
# has one producer with the defaults (idempotent since 3.0) for two topics. It sends orders without waiting for each,
# and one record without a key to a compacted topic, which refuses it with INVALID_RECORD.
# Expected: the future of the refused record has the error, and all orders are written, as with librdkafka, and with
# kafka-python without idempotence.
# Seen: kafka-python treats each error that it cannot retry as fatal for an idempotent producer. The sender then fails
# all pending messages of all topics with the error of the refused record, which names the other topic. This includes
# batches that are already on their way: the broker writes them, but their futures say that they were refused as
# invalid. A program that sends these messages again duplicates them. Each later send() fails in the same way, until the
# producer is replaced. A comment in the source says that such a producer only fails the batch, and the documentation
# mentions fatal errors only for transactions. aiokafka loses only the partition of the refused record. A service that
# shares one producer among its topics stops sending because of one record. A message queue must replace its producer
# after such an error, and cannot trust the errors of its other messages.
# Output seen:
#   kafka-python: orders acknowledged 6, failed 994 with InvalidRecordError of profiles, 3 of them written (round 5)
#   kafka-python: the next order fails with InvalidRecordError of profiles
#   kafka-python without idempotence: orders acknowledged 1000, failed 0; the next order is written
#   librdkafka: orders acknowledged 1000, failed 0; the next order is written
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
PROPERTIES
java -cp 'jars/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'jars/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >main.py <<'PYTHON'
import logging, sys
from concurrent.futures import Future
from importlib.metadata import version
import confluent_kafka, kafka
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

SERVER, ORDERS, REFUSED_AFTER, SIZE, ROUNDS, LIMIT_S = sys.argv[1], 1000, 200, 5000, 40, 60
logging.disable()
print("Kafka 4.4.0", *(f"{name} {version(name)}" for name in ("kafka-python", "confluent-kafka")))
client = {"bootstrap.servers": SERVER, "log_level": 0}
admin = AdminClient(client)
admin.list_topics(timeout=LIMIT_S)

class KafkaPython:
    def __init__(self, **settings):
        self.producer = kafka.KafkaProducer(bootstrap_servers=SERVER, **settings)

    def send(self, topic, value, key=None):
        return self.producer.send(topic, value, key=key)

    def close(self):
        self.producer.close(timeout=5)

class Librdkafka:
    def __init__(self):
        self.producer = confluent_kafka.Producer({**client, "enable.idempotence": True})

    def send(self, topic, value, key=None):
        future = Future()
        def report(error, message):
            future.set_exception(KafkaException(error)) if error else future.set_result(message)
        self.producer.produce(topic, value, key, on_delivery=report)
        return future

    def close(self):
        self.producer.flush(LIMIT_S)

def written(topic):
    """Return the orders in the topic."""
    reader = confluent_kafka.Consumer({**client, "group.id": "reader", "enable.partition.eof": True})
    reader.assign([TopicPartition(topic, 0, 0)])
    numbers = set()
    while (message := reader.poll(LIMIT_S)) is not None and message.error() is None:
        numbers.add(int(message.value()))
    assert message is not None, "no end of partition"
    reader.close()
    return numbers

def run(name, producer, flush=lambda: None):
    """Send orders and the refused record; return the orders acknowledged, failed and written, and the errors' texts."""
    orders, profiles = f"orders-{name}", f"profiles-{name}"
    topics = [NewTopic(orders, 1, 1), NewTopic(profiles, 1, 1, config={"cleanup.policy": "compact"})]
    for created in admin.create_topics(topics).values():
        created.result()
    futures = {}
    for number in range(ORDERS):
        if number == REFUSED_AFTER:
            refused = producer.send(profiles, b"profile without a key")
        futures[number] = producer.send(orders, str(number).encode().ljust(SIZE))
    flush()
    def outcome(future):
        try:
            future.result(LIMIT_S) if isinstance(future, Future) else future.get(LIMIT_S)
        except Exception as error:
            return f"{type(error).__name__} of profiles" if profiles in str(error) else repr(error)
    results = {number: outcome(future) for number, future in futures.items()}
    assert outcome(refused) is not None, "the record without a key is not refused"
    following = producer.send(orders, str(ORDERS).encode())
    flush()
    following_error = outcome(following)
    producer.close()
    failed = {number for number in results if results[number]}
    errors = {result for result in results.values() if result}
    return set(results) - failed, failed, written(orders), errors, following_error

def compare(name, case, *arguments):
    acknowledged, failed, in_topic, _, following_error = run(case, *arguments)
    print(f"{name}: orders acknowledged {len(acknowledged)}, failed {len(failed)}; the next order",
          following_error or "is written")
    return (len(acknowledged), len(failed), len(in_topic), following_error) == (ORDERS, 0, ORDERS + 1, None)

def main():
    for number in range(1, ROUNDS + 1):
        acknowledged, failed, in_topic, errors, following_error = run(f"a{number}", KafkaPython())
        if failed & in_topic:
            break
    print(f"kafka-python: orders acknowledged {len(acknowledged)}, failed {len(failed)} with", *errors, end=", ")
    print(f"{len(failed & in_topic)} of them written (round {number})")
    print("kafka-python: the next order fails with", following_error)
    librdkafka = Librdkafka()
    others = [compare("kafka-python without idempotence", "b", KafkaPython(enable_idempotence=False)),
              compare("librdkafka", "c", librdkafka, librdkafka.close)]
    error = "InvalidRecordError of profiles"
    return all(others) and errors == {error} and following_error == error and bool(failed & in_topic)

sys.exit(not main())
PYTHON
venv/bin/python main.py "127.0.0.1:$port"
