"""The SQS endpoint: the cost of its calls and of idle polls, and the latency of messages at a steady rate."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from lab.bench.client import QUEUE, percentiles, say
from lab.bench.suite import Bar, Bench, BenchRow, Measurements
from lab.program import RunError, Worker, ask
from lab.resources import Meter
from marq_worker.broker.ports import free_port

CLIENTS, PACED, POLLS = "8 clients", "500/s", "500 idle polls"
#: Messages per call; the longest wait of a poll, which returns as soon as there is a message.
BATCH, POLL_S = 10, 1
#: The wait of an idle poll: SQS's longest.
LONG_POLL_S = 20


def _endpoint(bench: Bench) -> tuple[Worker, str]:
    """Start a worker that is tracker and endpoint, and make a queue; return the worker and the queue's URL."""
    port = free_port("127.0.0.1")
    worker = bench.worker(MARQ_ROLES="tracker,web,sqs", MARQ_SQS_PORT=str(port))
    client = _sqs(f"http://127.0.0.1:{port}")
    return worker, client.create_queue(QueueName=QUEUE, Attributes={"VisibilityTimeout": "30"})["QueueUrl"]


def _sqs(endpoint: str) -> Any:
    import boto3
    from botocore.config import Config

    keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any", "region_name": "us-east-1"}
    return boto3.client("sqs", endpoint_url=endpoint, config=Config(read_timeout=60), **keys)


class _SqsQueue:
    """A queue, through boto3."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = _sqs(url.rsplit("/", 2)[0])

    def send(self, bodies: list[str]) -> None:
        entries = [{"Id": str(index), "MessageBody": body} for index, body in enumerate(bodies)]
        self._check(self._client.send_message_batch(QueueUrl=self._url, Entries=entries))

    def receive(self, wait_s: int) -> list[dict[str, Any]]:
        answer = self._client.receive_message(QueueUrl=self._url, MaxNumberOfMessages=BATCH, WaitTimeSeconds=wait_s)
        messages: list[dict[str, Any]] = answer.get("Messages", [])
        return messages

    def delete(self, messages: list[dict[str, Any]]) -> None:
        if messages:
            handles = [message["ReceiptHandle"] for message in messages]
            entries = [{"Id": str(index), "ReceiptHandle": handle} for index, handle in enumerate(handles)]
            self._check(self._client.delete_message_batch(QueueUrl=self._url, Entries=entries))

    @staticmethod
    def _check(answer: dict[str, Any]) -> None:
        if failed := answer.get("Failed"):
            raise SystemExit(f"bench: the endpoint refused {failed}")


# --- clients ----------------------------------------------------------------------------------------------------------

COUNT, WARM_ROUNDS = 8, 3
#: CPU time of endpoint, tracker and broker for each message, which clients send, receive and delete.
CPU_US = 200.0


def rounds(url: str, count: int, size: int) -> None:
    """Send ``count`` messages in batches, and receive and delete as many batches; again for each signal."""
    queue = _SqsQueue(url)
    body = "x" * size
    queue.receive(0)
    deleted = 0
    while True:
        say(deleted=deleted)
        sys.stdin.readline()
        for _ in range(count // BATCH):
            queue.send([body] * BATCH)
            messages = queue.receive(POLL_S)
            queue.delete(messages)
            deleted += len(messages)


def clients(bench: Bench) -> Measurements:
    share = max(10, bench.size.messages // COUNT // 10 * 10)
    worker, url = _endpoint(bench)
    children = bench.clients(*[(rounds, url, share, bench.size.value_bytes)] * COUNT)

    def run() -> int:
        return sum(answer["deleted"] for answer in ask(*children))

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
#: Time from the start signal until the first message is due.
AHEAD_S = 0.5


def paced(url: str, rate: float, count: int, burst: int) -> None:
    """Send messages at a steady rate, ``burst`` per call. Each contains the time when it should have been sent."""
    queue = _SqsQueue(url)
    say(ready=True)
    sys.stdin.readline()
    # Not at the same time as other senders.
    start_s = time.monotonic() + AHEAD_S + random.uniform(0, burst / rate)
    for number in range(0, count, burst):
        due_s = start_s + number / rate
        time.sleep(max(0.0, due_s - time.monotonic()))
        queue.send([str(due_s)] * burst)
    say(sent=count)


def timed(url: str, unmeasured_s: float) -> None:
    """Receive and delete messages of `paced` until none comes; report how long after those times they arrived."""
    queue = _SqsQueue(url)
    queue.receive(0)
    say(ready=True)
    sys.stdin.readline()
    first_s, received, milliseconds = 0.0, 0, []
    # The first messages may take longer, because the sender begins after the receivers.
    while messages := queue.receive(POLL_S if received else LONG_POLL_S):
        now_s = time.monotonic()
        first_s, received = first_s or now_s, received + len(messages)
        if now_s - first_s > unmeasured_s:
            milliseconds += [(now_s - float(message["Body"])) * 1000 for message in messages]
        queue.delete(messages)
    say(received=received, milliseconds=milliseconds)


def steady(bench: Bench) -> Measurements:
    worker, url = _endpoint(bench)
    receiving, sending = (timed, url, UNMEASURED_S), (paced, url, RATE / SENDERS, RATE // SENDERS * SECONDS, BURST)
    children = bench.clients(*[receiving] * RECEIVERS, *[sending] * SENDERS)
    receivers, senders = children[:RECEIVERS], children[RECEIVERS:]
    meter = Meter({"worker": [worker.pid], "broker": [bench.broker_pid]})
    for receiver in receivers:
        receiver.go()
    ask(*senders)
    cores = meter.cores()
    answers = [child.read() for child in receivers]
    if (received := sum(answer["received"] for answer in answers)) != RATE * SECONDS:
        raise RunError(f"{RATE * SECONDS} sent, {received} received: not a valid run")
    return {**percentiles([ms for answer in answers for ms in answer["milliseconds"]]), **cores}


# --- idle polls -------------------------------------------------------------------------------------------------------

IDLE_POLLS, IDLE_SECONDS = 500, 20.0
IDLE_PERCENT = 1.0


async def idle_polls(url: str, polls: int) -> None:
    """Keep this number of long polls of an empty queue open, until the row ends this process."""
    body = json.dumps({"QueueUrl": url, "WaitTimeSeconds": LONG_POLL_S})
    headers = {"X-Amz-Target": "AmazonSQS.ReceiveMessage", "Content-Type": "application/x-amz-json-1.0"}
    timeout, connector = ClientTimeout(total=None), TCPConnector(limit=0)
    async with ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as tasks:

        async def poll() -> None:
            # Spread over the time of a poll, as those of independent clients are.
            await asyncio.sleep(random.uniform(0, LONG_POLL_S))
            while True:
                async with session.post(url.rsplit("/", 2)[0], data=body, headers=headers) as response:
                    response.raise_for_status()
                    await response.read()

        for _ in range(polls):
            tasks.create_task(poll())
        await asyncio.sleep(LONG_POLL_S + 1)
        say(ready=True)


def idle(bench: Bench) -> Measurements:
    worker, url = _endpoint(bench)
    time.sleep(2)
    without = worker.core_percent(IDLE_SECONDS)
    bench.clients((idle_polls, url, IDLE_POLLS))
    # Rounded, because a difference of floats such as 1.0000000000000009 would miss a bar of 1.
    polls = round(worker.core_percent(IDLE_SECONDS) - without, 6)
    return {"polls_core_percent": polls, "without_core_percent": without}


SQS = BenchRow(
    "sqs",
    f"{COUNT} boto3 clients send, receive and delete in batches of 10; {RATE} messages/s; {IDLE_POLLS} idle polls",
    {CLIENTS: clients, PACED: steady, POLLS: idle},
    lambda medians: [
        Bar(f"SQS, {CLIENTS}: CPU per message of worker and broker", medians[CLIENTS]["served_us"], CPU_US, "µs"),
        Bar(f"SQS, {PACED}: send to receive, p99", medians[PACED]["p99_ms"], P99_MS, "ms"),
        Bar(f"SQS, {POLLS}: share of a core", medians[POLLS]["polls_core_percent"], IDLE_PERCENT, "%"),
    ],
    runs=3,
    warm=0,
    of_messages=0.05,
)
