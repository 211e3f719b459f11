#!/usr/bin/env bash
# Shows that Faust calls on_window_close for the windows of one partition only, and deletes those of all others.
#
# Kafka 4.4.0 (broker from Maven), faust-streaming 0.15.3, mode-streaming 0.7.1, aiokafka 0.14.0, confluent-kafka 2.16.1
# (to send). Four customers send messages for 12 s. One worker counts them in windows of 2 s, for each customer, as one
# does to bill them, and gets the count of each window in on_window_close. First, the customers share one partition.
# Then each has one of four partitions, all owned by the same worker.
# Expected: on_window_close gets each window of each customer once, with its count.
# Seen: with one partition, it does. With four, it gets the windows of one customer. The windows of the other three are
# deleted from the table without a call, an error or a log line. To ignore late windows, the table remembers the start
# of the last window that it has closed, but it does so once for all partitions. Its cleanup goes through one partition
# after the other. After the first one, the window of the same time counts as closed in the others. The partition of the
# first message comes first. Tests with one partition pass, and with more workers, less is missing. A job that bills by
# windows has to read the counts from the table before they expire.
# Output seen:
#   1 partition: 28 windows counted, 28 closed, of 4 of 4 customers
#   4 partitions: 28 windows counted, 7 closed, of 1 of 4 customers
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
PROPERTIES
java -cp 'jars/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'jars/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >shop.py <<'PYTHON'
import json, os
import faust

WINDOW_S, EXPIRES_S, PARTITIONS = 2, 1, int(os.environ["PARTITIONS"])
TOPIC, REPORT = f"sent{PARTITIONS}", f"report{PARTITIONS}.json"
app = faust.App(f"shop{PARTITIONS}", broker=f"kafka://{os.environ['SERVER']}", topic_partitions=PARTITIONS,
                topic_disable_leader=True, broker_session_timeout=10, broker_heartbeat_interval=1,
                table_cleanup_interval=1)
counted, closed = {}, []

async def on_window_close(key, count):
    customer, (start, _) = key
    closed.append([customer, start, count])

counts = app.Table("counts", default=int, partitions=PARTITIONS, on_window_close=on_window_close)
windows = counts.tumbling(WINDOW_S, expires=EXPIRES_S)

@app.agent(app.topic(TOPIC, key_type=str, value_type=str, key_serializer="raw", value_serializer="raw"))
async def count(stream):
    async for event in stream.events():
        windows[event.key] += 1
        start = event.message.timestamp // WINDOW_S * WINDOW_S
        counted[event.key, start] = counted.get((event.key, start), 0) + 1

@app.timer(0.5)
async def report():
    with open(f"{REPORT}.new", "w") as file:
        json.dump([[[*key, count] for key, count in counted.items()], closed, len(counts)], file)
    os.replace(f"{REPORT}.new", REPORT)
PYTHON
cat >main.py <<'PYTHON'
import json, os, subprocess, sys, time
from contextlib import suppress
from importlib.metadata import version
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

CUSTOMERS, SECONDS, LIMIT_S = "abcd", 12, 120
names = ("faust-streaming", "mode-streaming", "aiokafka", "confluent-kafka")
print("Kafka 4.4.0", *(f"{name} {version(name)}" for name in names))
client = {"bootstrap.servers": os.environ["SERVER"], "log_level": 0}
admin, producer = AdminClient(client), Producer(client)
admin.list_topics(timeout=60)

def reported(partitions, condition):
    """Return what the worker has counted, what it has closed and its number of rows, once they meet the condition."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        with suppress(OSError), open(f"report{partitions}.json") as file:
            counted, closed, rows = json.load(file)
            if condition(counted, rows):
                return counted, closed
        time.sleep(0.2)
    sys.exit(f"{partitions} partitions: not reported in {LIMIT_S} s")

def run(partitions):
    """Run a worker while customers send messages to this number of partitions; return what it counted and closed."""
    topic = f"sent{partitions}"
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result()
    with open(f"worker{partitions}.log", "w") as log:
        worker = subprocess.Popen([sys.executable, "-m", "faust", "-A", "shop", "worker", "--without-web"],
                                  env=os.environ | {"PARTITIONS": str(partitions)}, stdout=log, stderr=log)
    try:
        reported(partitions, lambda counted, rows: True)
        sent, end = 0, time.monotonic() + SECONDS
        while time.monotonic() < end:
            for number, customer in enumerate(CUSTOMERS):
                producer.produce(topic, b"message", key=customer, partition=number % partitions)
                sent += 1
            producer.flush()
            time.sleep(0.5)
        return reported(partitions, lambda counted, rows: sum(window[2] for window in counted) == sent and not rows)
    finally:
        worker.kill()
        worker.wait()

as_seen = {1: len(CUSTOMERS), 4: 1}
for partitions in as_seen:
    counted, closed = map(sorted, run(partitions))
    customers = {customer for customer, _, _ in closed}
    print(f"{partitions} partition{'s' * (partitions > 1)}: {len(counted)} windows counted, {len(closed)} closed, of",
          f"{len(customers)} of {len(CUSTOMERS)} customers")
    if len(customers) != as_seen[partitions] or closed != [window for window in counted if window[0] in customers]:
        sys.exit(1)
PYTHON
SERVER="127.0.0.1:$port" PARTITIONS=1 venv/bin/python main.py
