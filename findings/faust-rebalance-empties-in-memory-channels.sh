#!/usr/bin/env bash
# Shows that Faust drops all values waiting in an app.channel() when another worker joins the group.
#
# faust-streaming 0.15.3, mode-streaming 0.7.1, aiokafka 0.14.0, confluent-kafka 2.16.1 (for its mock cluster).
# Expected: a rebalance clears the buffers of topics, because Kafka delivers those records again. It keeps the values of
# a channel that exists only in memory, because they cannot be read again.
# Seen: Faust also clears the channel, without a log line. The records behind the values are acknowledged and committed,
# because the agent that read them has continued. If one agent passes values to another through a channel, each
# scale-out loses messages. A task that waits for room in the channel gets a CancelledError, although no code cancelled
# it. A message queue must not acknowledge a message that it has only put into a channel.
# Output seen:
#   lost: 01 02 03 04 05 next committed offset: 20 interrupted while it waited for room: 06
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" && python3 -m venv venv
venv/bin/pip install -q 'faust-streaming==0.15.3' 'mode-streaming==0.7.1' 'aiokafka==0.14.0' 'confluent-kafka==2.16.1'
cat >shop.py <<'PYTHON'
import asyncio, os
import faust
app = faust.App("shop", broker=f"kafka://{os.environ['SERVERS']}", store="memory://", topic_disable_leader=True,
                broker_session_timeout=10, broker_heartbeat_interval=1, datadir=f"data-{os.getpid()}")
channel = app.channel(maxsize=5)
assignments = []
def note(word, value):
    print(value.decode(), file=open(word, "a"))
@app.on_partitions_assigned.connect
async def assigned(sender, assigned, **_):
    assignments.append(assigned)
@app.agent(app.topic("in", value_type=bytes, value_serializer="raw"))
async def reader(stream):
    async for value in stream:
        try:
            await channel.put(value)
        except asyncio.CancelledError:
            note("interrupted", value)
            raise
@app.agent(channel)
async def handler(stream):
    async for value in stream:
        while len(assignments) < int(os.environ["ASSIGNMENTS"]):  # The first worker waits for the second to join.
            await asyncio.sleep(0.1)
        note("handled", value)
PYTHON
cat >main.py <<'PYTHON'
import os, pathlib, subprocess, sys, time
from importlib.metadata import version
from confluent_kafka import Consumer, Producer, TopicPartition
print(*(f"{name} {version(name)}" for name in ("faust-streaming", "mode-streaming", "aiokafka", "confluent-kafka")))
kafka = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "127.0.0.1:1", "log_level": 0})
servers = ",".join(f"{b.host}:{b.port}" for b in kafka.list_topics(timeout=10).brokers.values())
sent = [f"{number:02}" for number in range(20)]
for value in sent:
    kafka.produce("in", value, partition=0)
kafka.flush()
group = Consumer({"bootstrap.servers": servers, "group.id": "shop", "log_level": 0})
def committed():
    return group.committed([TopicPartition("in", 0)], timeout=10)[0].offset
def words(name):
    return pathlib.Path(name).read_text().split()
def start_worker(assignments):
    return subprocess.Popen([sys.executable, "-m", "faust", "-A", "shop", "worker", "--without-web"], stderr=log,
                            stdout=log, env={**os.environ, "SERVERS": servers, "ASSIGNMENTS": assignments})
def wait(condition):
    limit = time.monotonic() + 120
    while not condition() and time.monotonic() < limit:
        time.sleep(0.2)
log = open("log", "w")
first = start_worker("2")
wait(lambda: committed() >= 6)  # 00 is being handled, 01 to 05 are in the channel, 06 waits for room.
second = start_worker("1")
wait(lambda: committed() == len(sent) and sent[-1] in words("handled"))
first.kill(), second.kill()
lost, interrupted = sorted(set(sent) - set(words("handled"))), words("interrupted")
print("lost:", *lost, "next committed offset:", committed(), "interrupted while it waited for room:", *interrupted)
sys.exit((lost, committed(), interrupted) != (["01", "02", "03", "04", "05"], len(sent), ["06"]))
PYTHON
touch handled interrupted
venv/bin/python main.py
