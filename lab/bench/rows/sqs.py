"""The SQS endpoint: the cost of its calls and of idle polls, and the latency of messages at a steady rate."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request

from lab.bench.clients.client import percentiles
from lab.bench.load import QUEUE
from lab.bench.suite import Bench, BenchRow, Limit, Measurements, limits
from lab.program import RunError, Worker
from lab.resources import Meter
from marq_worker.broker.ports import free_port

CLIENTS, PACED, POLLS = "8 clients", "500/s", "500 idle polls"


def _endpoint(bench: Bench) -> tuple[Worker, str]:
    """Start a worker that is tracker and endpoint, and make a queue; return the worker and the queue's URL."""
    prefix, port = bench.prefix(), free_port("127.0.0.1")
    asyncio.run(bench.make_topics(prefix))
    worker = bench.worker(prefix, MARQ_ROLES="tracker,web,sqs", MARQ_SQS_PORT=str(port))
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}",
        json.dumps({"QueueName": QUEUE, "Attributes": {"VisibilityTimeout": "30"}}).encode(),
        {"X-Amz-Target": "AmazonSQS.CreateQueue", "Content-Type": "application/x-amz-json-1.0"},
    )
    with urllib.request.urlopen(request) as answer:
        return worker, str(json.load(answer)["QueueUrl"])


# --- clients ----------------------------------------------------------------------------------------------------------

COUNT, WARM_ROUNDS = 8, 3
#: CPU time of endpoint, tracker and broker for each message, which clients send, receive and delete.
CPU_US = 200.0


def clients(bench: Bench) -> Measurements:
    share = max(10, bench.size.messages // COUNT // 10 * 10)
    worker, url = _endpoint(bench)
    children = [bench.client("sqs", "rounds", url, share, bench.size.value_bytes) for _ in range(COUNT)]

    def run() -> int:
        """Return how many messages were deleted until now."""
        for child in children:
            child.go()
        return sum(child.read()["deleted"] for child in children)

    for child in children:
        child.read()
    # Warm up: the broker's JVM is still compiling during the first rounds.
    for _ in range(WARM_ROUNDS):
        before = run()
    parts = {"clients": [child.pid for child in children], "worker": [worker.pid], "broker": [bench.broker_pid]}
    meter, began = Meter(parts), time.monotonic()
    messages = run() - before
    seconds, taken = time.monotonic() - began, meter.seconds()
    us = {f"{part}_us": taken_s / messages * 1e6 for part, taken_s in taken.items()}
    return {"messages_per_second": messages / seconds, **us, "served_us": us["worker_us"] + us["broker_us"]}


# --- a steady rate ----------------------------------------------------------------------------------------------------

#: Several senders, so that each has time for its calls.
RATE, BURST, SENDERS, RECEIVERS = 500, 10, 5, 4
SECONDS, UNMEASURED_S = 12, 4
P99_MS = 100.0


def paced(bench: Bench) -> Measurements:
    worker, url = _endpoint(bench)
    receivers = [bench.client("sqs", "timed", url, UNMEASURED_S) for _ in range(RECEIVERS)]
    sending = (url, RATE / SENDERS, RATE // SENDERS * SECONDS, BURST)
    senders = [bench.client("sqs", "paced", *sending) for _ in range(SENDERS)]
    for child in (*receivers, *senders):
        child.read()
    meter = Meter({"worker": [worker.pid], "broker": [bench.broker_pid]})
    for child in (*receivers, *senders):
        child.go()
    for child in senders:
        child.read()
    cores = meter.cores()
    answers = [child.read() for child in receivers]
    if (received := sum(answer["received"] for answer in answers)) != RATE * SECONDS:
        raise RunError(f"{RATE * SECONDS} sent, {received} received: not a valid run")
    return {**percentiles([ms for answer in answers for ms in answer["milliseconds"]]), **cores}


# --- idle polls -------------------------------------------------------------------------------------------------------

IDLE_POLLS, IDLE_SECONDS = 500, 20.0
IDLE_PERCENT = 1.0


def idle(bench: Bench) -> Measurements:
    worker, url = _endpoint(bench)
    time.sleep(2)
    without = _percent(worker)
    bench.client("sqs", "idle", url, IDLE_POLLS).read()
    return {"polls_core_percent": _percent(worker) - without, "without_core_percent": without}


def _percent(worker: Worker) -> float:
    """Return how much of a core a worker uses."""
    began_s = worker.cpu_seconds()
    time.sleep(IDLE_SECONDS)
    return 100 * (worker.cpu_seconds() - began_s) / IDLE_SECONDS


SQS = BenchRow(
    "sqs",
    f"{COUNT} boto3 clients send, receive and delete in batches of 10; {RATE} messages/s; {IDLE_POLLS} idle polls",
    {CLIENTS: clients, PACED: paced, POLLS: idle},
    limits(
        Limit(f"SQS, {CLIENTS}: CPU per message of worker and broker", CLIENTS, "served_us", CPU_US, "µs"),
        Limit(f"SQS, {PACED}: send to receive, p99", PACED, "p99_ms", P99_MS, "ms"),
        Limit(f"SQS, {POLLS}: share of a core", POLLS, "polls_core_percent", IDLE_PERCENT, "%"),
    ),
    runs=3,
    warm=0,
    of_messages=0.05,
)
