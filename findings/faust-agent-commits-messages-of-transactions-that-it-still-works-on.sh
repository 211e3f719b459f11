#!/usr/bin/env bash
# Shows that a concurrent Faust agent commits messages that it still works on, most of all those of transactions.
#
# Kafka 4.4.0 (broker from Maven), faust-streaming 0.15.3, mode-streaming 0.7.1, aiokafka 0.14.0, confluent-kafka 2.16.1
# (to send). Each of three agents with concurrency=3 gets ten messages of its topic. One or two messages take long, the
# others are done at once. Then the worker is killed, and a second worker starts.
# Expected: the second worker gets the slow messages again. The default processing_guarantee is at_least_once, and the
# guide to streams says that a message is acknowledged, and can be committed, when its agent has finished it.
# Seen: one slow message is committed and lost (issue 606 of faust-streaming). If only the next offset to commit is
# missing, Faust takes it for a gap of the log. Two slow messages in a row are safe, because the gap is larger, but only
# until each message is sent in a transaction. Then both are lost. A transaction ends with a marker, which has an offset
# but is never delivered. Faust adds such gaps to the finished offsets, and takes the message behind a gap for a part of
# it. So the first message of each transaction is committed as soon as a later message is done. Compacted topics have
# gaps, too. A consumer that runs several messages of a partition at once has to remember each one that is not done.
# With Faust, use concurrency=1, or write an outcome for each message, as a message queue does.
# Output seen:
#   plain, one slow: 2 not done; committed offset 10 of 10; the next worker gets last
#   plain, two slow: 2 and 3 not done; committed offset 2 of 10; the next worker gets 2 3 4 5 6 7 8 9 last
#   transactions, two slow: 2 and 3 not done; committed offset 19 of 20; the next worker gets last
set -euo pipefail
folder=$(mktemp -d) broker=
trap '[ -z "$broker" ] || { kill -9 "$broker" && wait "$broker" || :; }; rm -rf "$folder"' EXIT
cd "$folder" && python3 -m venv venv
venv/bin/pip install -q 'faust-streaming==0.15.3' 'mode-streaming==0.7.1' 'aiokafka==0.14.0' 'confluent-kafka==2.16.1'
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
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
PROPERTIES
java -cp 'jars/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'jars/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >shop.py <<'PYTHON'
import asyncio, os
import faust

TOPICS = {"plain-one": ["2"], "plain-two": ["2", "3"], "transactions-two": ["2", "3"]}  # With their slow messages.
RUN = os.environ["RUN"]
app = faust.App("shop", broker=f"kafka://{os.environ['SERVER']}", topic_disable_leader=True, broker_commit_interval=0.5,
                broker_session_timeout=10, broker_heartbeat_interval=1)

def add_agent(name, slow):
    @app.agent(app.topic(name, value_type=str, value_serializer="raw"), name=name, concurrency=3)
    async def handle(stream):
        async for message in stream:
            if RUN == "first" and message in slow:
                await asyncio.Event().wait()
            with open(f"{RUN}.handled", "a") as file:
                print(name, message, file=file)

for name, slow in TOPICS.items():
    add_agent(name, slow)
PYTHON
cat >main.py <<'PYTHON'
import os, subprocess, sys, time
from contextlib import contextmanager
from importlib.metadata import version
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from shop import TOPICS

MESSAGES, LIMIT_S = [str(number) for number in range(10)], 120
names = ("faust-streaming", "mode-streaming", "aiokafka", "confluent-kafka")
print("Kafka 4.4.0", *(f"{name} {version(name)}" for name in names))
client = {"bootstrap.servers": os.environ["SERVER"], "log_level": 0}
admin = AdminClient(client)
admin.list_topics(timeout=60)
for created in admin.create_topics([NewTopic(topic, 1, 1) for topic in TOPICS]).values():
    created.result()
plain, transactional = Producer(client), Producer({**client, "transactional.id": "sender"})
transactional.init_transactions()

def send(topic, message):
    """Send a message to a topic, in a transaction of its own if the topic is meant for transactions."""
    if topic.startswith("plain"):
        plain.produce(topic, message)
        plain.flush()
        return
    transactional.begin_transaction()
    transactional.produce(topic, message)
    transactional.commit_transaction()

@contextmanager
def worker(run):
    with open(f"{run}.log", "w") as log:
        process = subprocess.Popen([sys.executable, "-m", "faust", "-A", "shop", "worker", "--without-web"],
                                   env=os.environ | {"RUN": run}, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()

def handled(run, expected):
    """Return the messages that a run has handled, by topic, once they include the expected ones."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        found = {topic: [] for topic in TOPICS}
        if os.path.exists(f"{run}.handled"):
            with open(f"{run}.handled") as file:
                for topic, message in map(str.split, file):
                    found[topic].append(message)
        if all(set(expected[topic]) <= set(found[topic]) for topic in TOPICS):
            return found
        time.sleep(0.2)
    sys.exit(f"{run}: not handled in {LIMIT_S} s")

def offsets():
    """Return the committed offset of each topic, and its end."""
    consumer = Consumer({**client, "group.id": "shop"})
    partitions = [TopicPartition(topic, 0) for topic in TOPICS]
    committed = {partition.topic: partition.offset for partition in consumer.committed(partitions, timeout=30)}
    return {topic: (committed[topic], consumer.get_watermark_offsets(TopicPartition(topic, 0))[1]) for topic in TOPICS}

for topic in TOPICS:
    for message in MESSAGES:
        send(topic, message)
with worker("first"):
    handled("first", {topic: sorted(set(MESSAGES) - set(slow)) for topic, slow in TOPICS.items()})
    time.sleep(5)  # Time for ten commits.
    committed = offsets()
for topic in TOPICS:
    send(topic, "last")
with worker("second"):
    received = handled("second", {topic: ["last"] for topic in TOPICS})
for topic, slow in TOPICS.items():
    offset, end = committed[topic]
    print(f"{topic.replace('-', ', ')} slow: {' and '.join(slow)} not done; committed offset {offset} of {end};",
          "the next worker gets", *received[topic])
as_seen = {"plain-one": (10, 10), "plain-two": (2, 10), "transactions-two": (19, 20)}
again = {topic: [*MESSAGES[2:], "last"] if topic == "plain-two" else ["last"] for topic in TOPICS}
sys.exit(not (committed == as_seen and {topic: sorted(messages) for topic, messages in received.items()} == again))
PYTHON
SERVER="127.0.0.1:$port" RUN=main venv/bin/python main.py
