#!/usr/bin/env bash
# Shows that Faust's windows relative_to_now() are in 1970, so a count per window is a count of all messages.
#
# Kafka 4.4.0 (broker from Maven), faust-streaming 0.15.3, mode-streaming 0.7.1, aiokafka 0.14.0, confluent-kafka 2.16.1
# (to send). A customer sends 48 messages, about four a second. An agent counts them in windows of 2 s, as for a rate
# limit: in a table relative_to_stream(), in one relative_to_now(), and in one relative_to_now() that expires after an
# hour. Tables are cleaned up every 5 s.
# Expected: all three have about eight messages in each window. relative_to_now() is documented as "time-relative to the
# system clock", and value() as the value of the window that this setting selects.
# Seen: both tables relative_to_now() have one window, from the first second of 1970. In an agent, "now" is the end of
# the latest window that the table has written in this partition, and 0 at first. So the first window is the one of
# 1970, and it never moves. Without expiry, a customer who has reached the limit stays limited for good. With expiry,
# that window is more than an hour old, so each cleanup deletes it. The window is then as long as
# table_cleanup_interval, by default 30 s, whatever its size is. Outside of an agent, "now" is the clock, so a web view
# or a timer that reads the count gets 0. A rate limit needs relative_to_stream(), or relative_to_field() with a time
# that the sender has set.
# Output seen:
#   relative_to_stream(): 11 windows of 2 s, at most 7 messages in one
#   relative_to_now(): only 1970-01-01 00:00:00 to 00:00:01.9, at most 48 messages; a timer reads 0
#   relative_to_now(), expires: only 1970-01-01 00:00:00 to 00:00:01.9, at most 14 messages; a timer reads 0
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

WINDOW_S = 2
app = faust.App("shop", broker=f"kafka://{os.environ['SERVER']}", topic_disable_leader=True, topic_partitions=1,
                broker_session_timeout=10, broker_heartbeat_interval=1, table_cleanup_interval=5)
tables = {name: app.Table(name, default=int, partitions=1) for name in ("stream", "now", "now-expires")}
windows = {
    "stream": tables["stream"].tumbling(WINDOW_S).relative_to_stream(),
    "now": tables["now"].tumbling(WINDOW_S).relative_to_now(),
    "now-expires": tables["now-expires"].tumbling(WINDOW_S, expires=3600).relative_to_now(),
}
counts = {name: [] for name in windows}  # The count that each message found.

@app.agent(app.topic("sent", key_type=str, value_type=str, key_serializer="raw", value_serializer="raw"))
async def count(stream):
    async for event in stream.events():
        for name, table in windows.items():
            table[event.key] += 1
            counts[name].append(table[event.key].value())

@app.timer(0.5)
async def report():
    rows = {name: [window for _, window in table] for name, table in tables.items()}
    outside = {name: windows[name]["a"].value() for name in ("now", "now-expires")}
    with open("report.json.new", "w") as file:
        json.dump([counts, rows, outside], file)
    os.replace("report.json.new", "report.json")
PYTHON
cat >main.py <<'PYTHON'
import json, os, subprocess, sys, time
from contextlib import suppress
from importlib.metadata import version
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

MESSAGES, WINDOW_OF_1970, LIMIT_S = 48, [0.0, 1.9], 120
names = ("faust-streaming", "mode-streaming", "aiokafka", "confluent-kafka")
print("Kafka 4.4.0", *(f"{name} {version(name)}" for name in names))
client = {"bootstrap.servers": os.environ["SERVER"], "log_level": 0}
admin, producer = AdminClient(client), Producer(client)
admin.list_topics(timeout=60)
admin.create_topics([NewTopic("sent", 1, 1)])["sent"].result()

def reported(number):
    """Return what the worker has reported after this number of messages."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        with suppress(OSError), open("report.json") as file:
            report = json.load(file)
            if len(report[0]["now"]) >= number:
                return report
        time.sleep(0.2)
    sys.exit(f"not reported in {LIMIT_S} s")

with open("worker.log", "w") as log:
    worker = subprocess.Popen([sys.executable, "-m", "faust", "-A", "shop", "worker", "--without-web"],
                              env=os.environ, stdout=log, stderr=log)
try:
    reported(0)
    for _ in range(MESSAGES):
        producer.produce("sent", b"message", key="a")
        producer.flush()
        time.sleep(0.25)
    counts, rows, outside = reported(MESSAGES)
finally:
    worker.kill()
    worker.wait()
most = {name: max(numbers) for name, numbers in counts.items()}
print(f"relative_to_stream(): {len(rows['stream'])} windows of 2 s, at most {most['stream']} messages in one")
for name, title in (("now", "relative_to_now()"), ("now-expires", "relative_to_now(), expires")):
    print(f"{title}: only 1970-01-01 00:00:00 to 00:00:01.9, at most {most[name]} messages;",
          f"a timer reads {outside[name]}")
sys.exit(not (len(rows["stream"]) >= 5 and most["stream"] < MESSAGES and rows["now"] == [WINDOW_OF_1970]
              and counts["now"] == list(range(1, MESSAGES + 1)) and rows["now-expires"] in ([], [WINDOW_OF_1970])
              and most["now-expires"] < MESSAGES and counts["now-expires"].count(1) > 1
              and outside == {"now": 0, "now-expires": 0}))
PYTHON
SERVER="127.0.0.1:$port" venv/bin/python main.py
