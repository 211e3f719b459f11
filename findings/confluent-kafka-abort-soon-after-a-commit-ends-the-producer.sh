#!/usr/bin/env bash
# Shows that aborting a transaction soon after a commit ends a transactional producer of librdkafka with a fatal error.
#
# Kafka 4.4.0 (broker from Maven), confluent-kafka 2.16.1 (librdkafka), kafka-python 3.0.12 and aiokafka 0.14.0 (for
# comparison). A worker commits a transaction for each message. The next message fails some milliseconds after the
# worker has produced its result, so the worker aborts that transaction.
# Expected: abort_transaction() succeeds, and the producer goes on, as with the other two clients.
# Seen: in some percent of the aborts, abort_transaction() raises INVALID_TXN_STATE as a fatal error. The broker answers
# a commit before it has written the markers to the partitions. Until then, it refuses the partitions of the next
# transaction with CONCURRENT_TRANSACTIONS, and the client retries. If the abort comes in between, librdkafka sends an
# EndTxn request, although the broker knows no partition of this transaction. For the broker, this is the abort of the
# transaction that it has just committed. The producer is then unusable: begin_transaction() raises the same error. With
# flush() before the abort, or if the first transaction was aborted, too, there is no error. The documentation asks
# programs to abort after each abortable error, but not to flush before. Issue 4849 of librdkafka has the same error
# directly after init_transactions(), without a cause. A message queue must replace its producer after such an error, or
# flush before each abort.
# Output seen:
#   librdkafka, commit, abort: 3 fatal errors in 31 rounds: INVALID_TXN_STATE, begin_transaction(): INVALID_TXN_STATE
#   librdkafka, commit, flush, abort: 0 errors in 40 rounds
#   librdkafka, abort, abort: 0 errors in 40 rounds
#   kafka-python, commit, abort: 0 errors in 40 rounds
#   aiokafka, commit, abort: 0 errors in 40 rounds
#   read_committed: only records of committed transactions
set -euo pipefail
folder=$(mktemp -d) broker=
trap '[ -z "$broker" ] || { kill -9 "$broker" && wait "$broker" || :; }; rm -rf "$folder"' EXIT
cd "$folder" && python3 -m venv venv
venv/bin/pip install --quiet 'confluent-kafka==2.16.1' 'kafka-python==3.0.12' 'aiokafka==0.14.0'
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
cat >main.py <<'PYTHON'
import asyncio, logging, sys, time
from importlib.metadata import version
import aiokafka, kafka
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

SERVER, ROUNDS, MOST_ROUNDS, ENOUGH_ERRORS, LIMIT_S = sys.argv[1], 40, 1500, 3, 60
PROCESSING_S = 0.002, 0.005, 0.01, 0.02  # In turn.
logging.disable()
print("Kafka 4.4.0", *(f"{name} {version(name)}" for name in ("confluent-kafka", "kafka-python", "aiokafka")))
client = {"bootstrap.servers": SERVER, "log_level": 0}
admin = AdminClient(client)
admin.list_topics(timeout=LIMIT_S)
admin.create_topics([NewTopic("t", 1, 1)])["t"].result()

def new_producer(name):
    producer = Producer({**client, "transactional.id": name}, logger=logging.getLogger())  # Logs nothing.
    producer.init_transactions(LIMIT_S)
    return producer

def librdkafka(name, rounds, enough=1, commit_first=True, flush=False):
    """Commit (or abort) a transaction and abort the next one, in each round; return the errors and the rounds."""
    producer, errors = new_producer(name), []
    for number in range(1, rounds + 1):
        producer.begin_transaction()
        producer.produce("t", b"committed" if commit_first else b"aborted")
        if commit_first:
            producer.commit_transaction(LIMIT_S)
        else:
            producer.flush()
            producer.abort_transaction(LIMIT_S)
        producer.begin_transaction()
        producer.produce("t", b"aborted")
        time.sleep(PROCESSING_S[number % len(PROCESSING_S)])
        if flush:
            producer.flush()
        try:
            producer.abort_transaction(LIMIT_S)
        except KafkaException as error:
            errors.append((error.args[0].name(), error.args[0].fatal(), next_error(producer)))
            if len(errors) == enough:
                break
            producer = new_producer(f"{name}-{number}")
    return errors, number

def next_error(producer):
    try:
        producer.begin_transaction()
    except KafkaException as error:
        return error.args[0].name()

def kafka_python():
    producer = kafka.KafkaProducer(bootstrap_servers=SERVER, transactional_id="kafka-python")
    producer.init_transactions()
    errors = []
    for number in range(ROUNDS):
        producer.begin_transaction()
        producer.send("t", b"committed")
        producer.commit_transaction()
        producer.begin_transaction()
        producer.send("t", b"aborted")
        time.sleep(PROCESSING_S[number % len(PROCESSING_S)])
        try:
            producer.abort_transaction()
        except kafka.errors.KafkaError as error:
            errors.append(error)
    producer.close()
    return errors

async def with_aiokafka():
    errors = []
    async with aiokafka.AIOKafkaProducer(bootstrap_servers=SERVER, transactional_id="aiokafka") as producer:
        for number in range(ROUNDS):
            await producer.begin_transaction()
            await producer.send("t", b"committed")
            await producer.commit_transaction()
            await producer.begin_transaction()
            await producer.send("t", b"aborted")
            await asyncio.sleep(PROCESSING_S[number % len(PROCESSING_S)])
            try:
                await producer.abort_transaction()
            except aiokafka.errors.KafkaError as error:
                errors.append(error)
    return errors

def read():
    """Return the set of all committed values."""
    reader = Consumer({**client, "group.id": "reader", "isolation.level": "read_committed",
                       "enable.partition.eof": True})
    reader.assign([TopicPartition("t", 0, 0)])
    values = set()
    while (message := reader.poll(LIMIT_S)) is not None and message.error() is None:
        values.add(message.value())
    assert message is not None, "no end of partition"
    reader.close()
    return values

errors, rounds = librdkafka("a", MOST_ROUNDS, enough=ENOUGH_ERRORS)
kinds = set(errors)
print(f"librdkafka, commit, abort: {sum(fatal for _, fatal, _ in errors)} fatal errors in {rounds} rounds:",
      *(f"{name}, begin_transaction(): {following}" for name, _, following in kinds))
others = {
    "librdkafka, commit, flush, abort": librdkafka("b", ROUNDS, flush=True)[0],
    "librdkafka, abort, abort": librdkafka("c", ROUNDS, commit_first=False)[0],
    "kafka-python, commit, abort": kafka_python(),
    "aiokafka, commit, abort": asyncio.run(with_aiokafka()),
}
for case, found in others.items():
    print(f"{case}: {len(found)} errors in {ROUNDS} rounds")
values = read()
print("read_committed:", "only records of committed transactions" if values == {b"committed"} else values)
sys.exit(not (len(errors) == ENOUGH_ERRORS and kinds == {("INVALID_TXN_STATE", True, "INVALID_TXN_STATE")}
              and not any(others.values()) and values == {b"committed"}))
PYTHON
venv/bin/python main.py "127.0.0.1:$port"
