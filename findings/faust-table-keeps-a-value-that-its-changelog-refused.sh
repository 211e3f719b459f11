#!/usr/bin/env bash
# Shows that a Faust table keeps a value that its changelog topic has refused, and commits the event that made it.
#
# Kafka 4.4.0 (broker from Maven), faust-streaming 0.15.3, mode-streaming 0.7.1, aiokafka 0.14.0, rocksdict 0.3.29,
# confluent-kafka 2.16.1 (to write events). An agent appends documents of 300,000 bytes to a value. The app raises
# producer_max_request_size to 2 MB. Faust creates the changelog, with the broker's limit of 1 MiB for a record.
# Expected: the worker stops at the first value that is too large, and its event stays uncommitted. Faust's guide says
# that a changelog replay rebuilds the table "as it was before the fault".
# Seen: the worker logs a warning for each refused record, and goes on. Its table has the new value, and it commits the
# offsets of all events. A worker that rebuilds the table (a new disk, a rebalance) gets the last value that was small
# enough, and nothing delivers the missing documents again. With the default limit of the producer, which is below the
# broker's, the worker stops instead, so raising that one setting turns the stop into a silent loss. A message queue has
# to await the changelog's record before it commits the event.
# Output seen:
#   first worker: 5 documents of a, 1 of b; running; committed offset 6 of 6
#   a worker with an empty folder: 3 documents of a, 1 of b; 0 events delivered
set -euo pipefail
folder=$(mktemp -d) broker=
trap '[ -z "$broker" ] || { kill -9 "$broker" && wait "$broker" || :; }; rm -rf "$folder"' EXIT
cd "$folder" && python3 -m venv venv
venv/bin/pip install -q 'faust-streaming==0.15.3' 'mode-streaming==0.7.1' 'aiokafka==0.14.0' 'rocksdict==0.3.29' \
    'confluent-kafka==2.16.1'
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
PROPERTIES
java -cp 'jars/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'jars/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >shop.py <<'PYTHON'
import json, os
import faust

DOCUMENT_BYTES = 300_000
app = faust.App("shop", broker=f"kafka://{os.environ['SERVER']}", store="rocksdb://", datadir=os.environ["NAME"],
                topic_disable_leader=True, broker_session_timeout=10, broker_heartbeat_interval=1,
                producer_max_request_size=2_000_000)
table = app.Table("documents", default=str, partitions=1, options={"driver": "rocksdict", "block_cache_size": 1 << 20})
delivered = []

@app.agent(app.topic("in", key_type=str, value_type=str, key_serializer="raw", value_serializer="raw"))
async def collect(stream):
    async for key, value in stream.items():
        table[key] += value
        delivered.append(key)

@app.timer(0.5)
async def report():
    documents = {key: len(value) // DOCUMENT_BYTES for key, value in table.items()}
    with open(f"{os.environ['NAME']}.json", "w") as file:
        json.dump([documents, len(delivered)], file)
PYTHON
cat >main.py <<'PYTHON'
import json, os, subprocess, sys, time
from contextlib import contextmanager, suppress
from importlib.metadata import version
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from shop import DOCUMENT_BYTES

EVENTS, LIMIT_S = ["a"] * 5 + ["b"], 240
names = ("faust-streaming", "mode-streaming", "aiokafka", "rocksdict", "confluent-kafka")
print("Kafka 4.4.0", *(f"{name} {version(name)}" for name in names))
client = {"bootstrap.servers": os.environ["SERVER"], "log_level": 0}
admin, producer = AdminClient(client), Producer(client)
admin.list_topics(timeout=60)
admin.create_topics([NewTopic("in", 1, 1)])["in"].result()
for key in EVENTS:
    producer.produce("in", b"x" * DOCUMENT_BYTES, key=key)
producer.flush()

def committed():
    return Consumer({**client, "group.id": "shop"}).committed([TopicPartition("in", 0)], timeout=30)[0].offset

@contextmanager
def worker(name):
    """Run a worker with a folder of this name."""
    with open(f"{name}.log", "w") as log:
        process = subprocess.Popen([sys.executable, "-m", "faust", "-A", "shop", "worker", "--without-web"],
                                   env=os.environ | {"NAME": name}, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()

def reported(name, condition):
    """Return the documents of a worker's table and the events that it got, once they meet the condition."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        with suppress(OSError, ValueError), open(f"{name}.json") as file:
            documents, delivered = json.load(file)
            if condition(documents):
                return documents, delivered
        time.sleep(0.5)
    sys.exit(f"{name}: no table in {LIMIT_S} s")

def text(documents):
    return f"{documents['a']} documents of a, {documents['b']} of b"

with worker("first") as first:
    before, _ = reported("first", lambda documents: "b" in documents)
    end = time.monotonic() + LIMIT_S
    while committed() < len(EVENTS) and time.monotonic() < end:
        time.sleep(0.5)
    running, offset = first.poll() is None, committed()
state = "running" if running else "stopped"
print(f"first worker: {text(before)}; {state}; committed offset {offset} of {len(EVENTS)}")
with worker("second"):
    reported("second", lambda documents: "b" in documents)
    time.sleep(5)  # Time for events, if there were any.
    after, delivered = reported("second", lambda documents: "b" in documents)
print(f"a worker with an empty folder: {text(after)}; {delivered} events delivered")
as_seen = (dict(a=5, b=1), True, len(EVENTS), dict(a=3, b=1), 0)
sys.exit((before, running, offset, after, delivered) != as_seen)
PYTHON
SERVER="127.0.0.1:$port" NAME=main venv/bin/python main.py
