#!/usr/bin/env bash
# Shows that Celery on Kafka loses delayed and running tasks of a worker that ends, if it has finished another one.
#
# Kafka 4.4.0 (broker from Maven), celery 5.7.0, kombu 5.7.0, confluent-kafka 2.16.1. One worker consumes a queue, a
# topic with one partition. It gets a first task and finishes another one. Then it ends, and a new worker starts. The
# first task waits for its countdown, and the worker is restarted with SIGTERM. Or the first task runs with
# acks_late=True, and the worker is killed with SIGKILL.
# Expected: the new worker runs the first task, because the old one has not acknowledged it. Kafka commits offsets, not
# messages, so the transport cannot commit an offset after the first task before this one is done.
# Seen: to acknowledge a message, kombu calls commit() without an offset. This commits all messages that the consumer
# has polled, so the other task's acknowledgement covers the first task, too. The first task is lost, without an error
# or a log line. If the worker has finished no other task, the new one runs it. A retry in Celery is a task with a
# countdown, so a restart of a busy worker loses the retries that wait in it, and acks_late protects a task only until
# the worker finishes another one. Celery's page about Kafka and the limitations of kombu's transport do not mention
# this. A message queue on Kafka must not commit past an open message, or must store the state of messages elsewhere.
# Output seen:
#   restart, no other task: committed offset 0, done: first last
#   restart, another task is done: committed offset 2, done: last other
#   crash, no other task: committed offset 0, done: first last
#   crash, another task is done: committed offset 2, done: last other
set -euo pipefail
folder=$(mktemp -d) broker=
trap '[ -z "$broker" ] || { kill -9 "$broker" && wait "$broker" || :; }; rm -rf "$folder"' EXIT
cd "$folder" && python3 -m venv venv
venv/bin/pip install --quiet 'celery==5.7.0' 'kombu==5.7.0' 'confluent-kafka==2.16.1'
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
cat >shop.py <<'PYTHON'
import os, time
from celery import Celery

app = Celery("shop", broker=f"confluentkafka://{os.environ['SERVER']}")
app.conf.worker_enable_remote_control = False  # It needs fanout, which the transport does not support.
app.conf.broker_transport_options = {"wait_time_seconds": 1, "kafka_consumer_config": {"session.timeout.ms": 6000}}

def note(name):
    with open(os.environ["DONE"], "a") as done:
        done.write(f"{name}\n")

@app.task
def work(name):
    note(name)

@app.task(acks_late=True)
def work_for_long(name):
    time.sleep(10)
    note(name)
PYTHON
cat >main.py <<'PYTHON'
import os, signal, subprocess, sys, time
from importlib.metadata import version
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

SERVER = os.environ["SERVER"] = sys.argv[1]
DELAY_S, AFTER_S, LIMIT_S = 20, 25, 120
print("Kafka 4.4.0", *(f"{name} {version(name)}" for name in ("celery", "kombu", "confluent-kafka")))
for _ in range(60):
    try:
        AdminClient({"bootstrap.servers": SERVER, "log_level": 0}).list_topics(timeout=5)
        break
    except KafkaException:
        time.sleep(1)
from shop import work, work_for_long

def read(path):
    return open(path).read() if os.path.exists(path) else ""

def wait_for(text, path):
    end = time.monotonic() + LIMIT_S
    while text not in read(path):
        assert time.monotonic() < end, f"{path} has no {text}: {read(path)}"
        time.sleep(0.1)

def start(case, log):
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "-Q", case, "--concurrency", "2", "-l", "INFO",
               "--without-gossip", "--without-mingle", "--without-heartbeat"]
    with open(log, "w") as file:
        return subprocess.Popen(command, env=os.environ | {"DONE": f"{case}-done"}, stdout=file, stderr=file,
                                start_new_session=True)

def end(worker, number):
    os.killpg(worker.pid, number) if number == signal.SIGKILL else worker.send_signal(number)
    worker.wait()

def committed(case):
    consumer = Consumer({"bootstrap.servers": SERVER, "group.id": f"{case}-consumer-group", "log_level": 0})
    [partition] = consumer.committed([TopicPartition(case, 0)])
    consumer.close()
    return max(partition.offset, 0)

def run(case, task, countdown, other, number):
    """End a worker with the signal while its first task is open; return what is committed, and done by two workers."""
    done = f"{case}-done"
    worker = start(case, f"{case}-1")
    try:
        wait_for("ready.", f"{case}-1")
        task.apply_async(("first",), queue=case, countdown=countdown)
        if other:
            work.apply_async(("other",), queue=case)
            wait_for("other\n", done)
        wait_for(f"{task.name}[", f"{case}-1")
        time.sleep(2)  # The worker acknowledges the other task.
    finally:
        end(worker, number)
    offset = committed(case)
    assert "first" not in read(done), "The worker was too slow: it has done the first task before its end."
    work.apply_async(("last",), queue=case)
    worker = start(case, f"{case}-2")
    try:
        wait_for("last\n", done)
        time.sleep(AFTER_S)
    finally:
        end(worker, signal.SIGTERM)
    return offset, sorted(read(done).split())

results = []
for case, task, countdown, number in (("restart", work, DELAY_S, signal.SIGTERM),
                                      ("crash", work_for_long, None, signal.SIGKILL)):
    for other in (False, True):
        offset, done = run(f"{case}-{other}", task, countdown, other, number)
        print(f"{case}, {'another task is done' if other else 'no other task'}: committed offset {offset}, "
              f"done: {' '.join(done)}")
        results.append((offset, done))
sys.exit(results != 2 * [(0, ["first", "last"]), (2, ["last", "other"])])
PYTHON
venv/bin/python main.py "127.0.0.1:$port"
