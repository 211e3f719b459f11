#!/usr/bin/env bash
# Shows that a stopped dramatiq Worker starts to consume queues that are declared after its stop.
#
# dramatiq 2.2.1 with its StubBroker, Python 3.11.
# Expected: after Worker.stop() has returned, the worker takes no messages.
# Seen: the worker stays registered as middleware of its broker. When an actor of a new queue is declared later, its
# after_declare_queue() starts consumer threads for that queue and its delay queue. One of them takes messages from the
# broker, and no worker thread is left to process them: on a real broker they are unacknowledged until their visibility
# timeout, or the end of the process. A program that stops a worker and goes on, such as a test or a reload, loses its
# messages for that time. It has to remove the worker's middleware from the broker.
# Output seen:
#   after the stop: 2 consumer threads of the stopped worker, 0 messages in the queue, 1 taken and not processed
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'dramatiq==2.2.1'
cat >main.py <<'PYTHON'
import os, sys, threading, time
from importlib.metadata import version
import dramatiq
from dramatiq.brokers.stub import StubBroker

print("dramatiq", version("dramatiq"))
broker = StubBroker()
dramatiq.set_broker(broker)
processed = []

@dramatiq.actor(queue_name="first")
def first():
    processed.append("first")

worker = dramatiq.Worker(broker, worker_timeout=100)
worker.start()
first.send()
broker.join("first", timeout=60_000)
worker.stop()
before = set(threading.enumerate())

@dramatiq.actor(queue_name="second")
def second():
    processed.append("second")

second.send()
until = time.monotonic() + 30
while broker.queues["second"].qsize() and time.monotonic() < until:
    time.sleep(0.1)
time.sleep(2)
started = [thread for thread in set(threading.enumerate()) - before if "Consumer" in type(thread).__name__]
left, taken = broker.queues["second"].qsize(), broker.queues["second"].unfinished_tasks
print(f"after the stop: {len(started)} consumer threads of the stopped worker, {left} messages in the queue,",
      f"{taken} taken and not processed")
sys.stdout.flush()
os._exit(not (processed == ["first"] and len(started) == 2 and left == 0 and taken == 1))
PYTHON
venv/bin/python main.py
