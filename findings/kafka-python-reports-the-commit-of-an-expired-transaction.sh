#!/usr/bin/env bash
# Shows that kafka-python reports the commit of a transaction that the broker has aborted because of its timeout.
#
# Kafka 4.4.0 (broker from Maven), kafka-python 3.0.12, confluent-kafka 2.16.1 (librdkafka, for comparison). A
# transaction writes a debit, and the broker acknowledges it. Then the program stalls for longer than
# transaction_timeout_ms (a slow database, a suspended container). It writes a credit, which is still in its linger time
# when commit_transaction() flushes it. The broker looks for expired transactions every 0.5 s (default: 10 s).
# Expected: commit_transaction() raises an error, as in librdkafka, and as in kafka-python without the credit.
# Seen: the broker refuses the credit with INVALID_PRODUCER_EPOCH. kafka-python recovers with a new epoch, and forgets
# which partitions belong to the transaction. It then takes the pending commit for one of an empty transaction, and
# reports success without a request to the broker. The acknowledged debit is lost, too. The next transaction succeeds,
# so the program notices nothing. Only the credit's future has the error, and the log has an "Invalid transition". A
# worker that commits its input afterwards loses messages. It has to check the futures of all records after each commit.
# Output seen:
#   kafka-python, debit: commit raises ProducerFencedError, read_committed: nothing, next transaction fails
#   kafka-python, debit and credit: commit returns, read_committed: nothing, next transaction is committed
#   librdkafka, debit: commit raises _FENCED, read_committed: nothing, next transaction fails
#   librdkafka, debit and credit: commit raises _FENCED, read_committed: nothing, next transaction fails
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
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.abort.timed.out.transaction.cleanup.interval.ms=500
PROPERTIES
java -cp 'jars/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'jars/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >main.py <<'PYTHON'
import sys, time
from importlib.metadata import version
import confluent_kafka, kafka
from confluent_kafka.admin import AdminClient, NewTopic

SERVER, TIMEOUT_MS, LINGER_MS, LIMIT_S = sys.argv[1], 1000, 500, 60
print("Kafka 4.4.0", *(f"{name} {version(name)}" for name in ("kafka-python", "confluent-kafka")))
admin = AdminClient({"bootstrap.servers": SERVER, "log_level": 0})
admin.list_topics(timeout=60)

class KafkaPython:
    def __init__(self, topic):
        self.topic = topic
        self.producer = kafka.KafkaProducer(
            bootstrap_servers=SERVER, transactional_id=topic, transaction_timeout_ms=TIMEOUT_MS, linger_ms=LINGER_MS)
        self.producer.init_transactions()

    def send(self, value):
        return self.producer.send(self.topic, value)

    def flush(self):
        self.producer.flush()

class Librdkafka:
    def __init__(self, topic):
        self.topic = topic
        self.producer = confluent_kafka.Producer({
            "bootstrap.servers": SERVER, "transactional.id": topic, "transaction.timeout.ms": TIMEOUT_MS,
            "linger.ms": LINGER_MS, "log_level": 0})
        self.producer.init_transactions()

    def send(self, value):
        self.producer.produce(self.topic, value)

    def flush(self):
        self.producer.flush()

def name(error):
    return error.args[0].name() if isinstance(error, confluent_kafka.KafkaException) else type(error).__name__

def read_committed(topic, end):
    """Return the committed values below an offset."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": SERVER, "group.id": "reader", "log_level": 0,
                                         "isolation.level": "read_committed", "enable.partition.eof": True})
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    values, limit = [], time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        message = consumer.poll(1.0)
        if message is not None and message.error() is None:
            values.append(message.value().decode())
        elif message is not None and consumer.position([confluent_kafka.TopicPartition(topic, 0)])[0].offset >= end:
            break
    consumer.close()
    return values

def end_of(topic):
    place = confluent_kafka.TopicPartition(topic, 0)
    return admin.list_offsets({place: confluent_kafka.admin.OffsetSpec.latest()})[place].result().offset

def run(client, credit):
    topic = f"{client.__name__.lower()}-{credit}"
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result()
    worker = client(topic)
    worker.producer.begin_transaction()
    worker.send(b"debit")
    worker.flush()
    limit = time.monotonic() + LIMIT_S
    while end_of(topic) < 2 and time.monotonic() < limit:  # The debit, and the marker of the broker's abort.
        time.sleep(0.1)
    if credit:
        worker.send(b"credit")
    try:
        worker.producer.commit_transaction()
        committed = "returns"
    except Exception as error:
        committed = f"raises {name(error)}"
    values = read_committed(topic, 2)
    try:
        worker.producer.begin_transaction()
        worker.send(b"next")
        worker.producer.commit_transaction()
        later = "is committed"
    except Exception:
        later = "fails"
    return committed, values, later

results = {(client, credit): run(client, credit) for client in (KafkaPython, Librdkafka) for credit in (False, True)}
for (client, credit), (committed, values, later) in results.items():
    client_name = "kafka-python" if client is KafkaPython else "librdkafka"
    print(f"{client_name}, debit{' and credit' if credit else ''}: commit {committed},",
          f"read_committed: {' '.join(values) or 'nothing'}, next transaction {later}")
reported = results.pop((KafkaPython, True))
raised = [committed.startswith("raises") and values == [] and later == "fails"
          for committed, values, later in results.values()]
sys.exit(not (all(raised) and reported == ("returns", [], "is committed")))
PYTHON
venv/bin/python main.py "127.0.0.1:$port"
