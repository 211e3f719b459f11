"""Uses an endpoint as programs with dramatiq-sqs do: retries, delays, dead letters, and a worker that stops.

Variables: ENDPOINT, a URL. Prints one line of JSON with the number of deleted messages per queue. Fails on the first
difference.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from typing import Any

import dramatiq
from dramatiq_sqs import SQSBroker

TASKS = 20
DELAY_S = 3
LIMIT_S = 120


class Enqueued(dramatiq.Middleware):
    """Counts messages, retries among them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def after_enqueue(self, broker: dramatiq.Broker, message: Any, delay: int | None) -> None:
        self.counts[message.queue_name] += 1


def new_broker(*middleware: dramatiq.Middleware) -> SQSBroker:
    return SQSBroker(
        namespace="dramatiq",
        dead_letter=True,
        visibility_timeout=60,
        tags={"client": "dramatiq"},
        middleware=list(middleware),
        endpoint_url=os.environ["ENDPOINT"],
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
    )


enqueued = Enqueued()
broker = new_broker(dramatiq.middleware.Retries(min_backoff=1000, max_backoff=2000), enqueued)
dramatiq.set_broker(broker)

#: The attempts of each task, and the time of the last one.
attempts: Counter[str] = Counter()
handled_s: dict[str, float] = {}


@dramatiq.actor(queue_name="tasks", max_retries=3)
def work(name: str) -> None:
    attempts[name] += 1
    if name == "fails once" and attempts[name] == 1:
        raise ValueError("on purpose")
    handled_s[name] = time.monotonic()


@dramatiq.actor(queue_name="tasks", max_retries=1)
def fail(name: str) -> None:
    attempts[name] += 1
    raise ValueError("on purpose")


def check_worker() -> None:
    names = [f"task {number} é🚀" for number in range(TASKS)]
    for name in [*names, "fails once"]:
        work.send(name)
    fail.send("fails always")
    sent_s = time.monotonic()
    work.send_with_options(args=("delayed",), delay=DELAY_S * 1000)
    worker = dramatiq.Worker(broker, worker_threads=4, worker_timeout=1000)
    worker.start()
    try:
        until = time.monotonic() + LIMIT_S
        while len(handled_s) < TASKS + 2 or attempts["fails always"] < 2:
            assert time.monotonic() < until, f"not within {LIMIT_S} s: {attempts}"
            time.sleep(0.05)
        # Until the queue's numbers of messages are all 0.
        broker.join("tasks", timeout=LIMIT_S)
    finally:
        worker.stop()
    expected = {**dict.fromkeys([*names, "delayed"], 1), "fails once": 2, "fails always": 2}
    assert attempts == expected, attempts
    assert handled_s["delayed"] - sent_s >= DELAY_S, handled_s["delayed"] - sent_s
    [dead] = broker.dead_letter_queues["tasks"].receive_messages(WaitTimeSeconds=20, MaxNumberOfMessages=10)
    dead.delete()


def check_stop() -> None:
    """What a worker has received when it stops goes back to the queue."""
    # Not the broker of the worker, which also consumes queues that are declared after its stop.
    broker = new_broker()
    broker.declare_queue("stopped")
    for number in range(3):
        broker.enqueue(dramatiq.Message("stopped", "work", (number,), {}, {}))
    consumer = broker.consume("stopped", prefetch=10, timeout=5000)
    message = take(consumer)
    consumer.requeue([message])
    consumer.close()
    consumer = broker.consume("stopped", prefetch=10, timeout=5000)
    numbers = set()
    for _ in range(3):
        message = take(consumer)
        numbers.add(message.args[0])
        consumer.ack(message)
    assert numbers == {0, 1, 2}, numbers
    consumer.close()


def take(consumer: dramatiq.Consumer) -> Any:
    until = time.monotonic() + LIMIT_S
    while (message := next(consumer)) is None:
        assert time.monotonic() < until, f"no message within {LIMIT_S} s"
    return message


check_worker()
check_stop()
assert broker.sqs.meta.client.list_queue_tags(QueueUrl=broker.queues["tasks"].url)["Tags"] == {"client": "dramatiq"}
# Each task once, and two retries.
assert enqueued.counts == {"tasks": TASKS + 3 + 2}, enqueued.counts
sys.stdout.write(json.dumps({"dramatiq_tasks": TASKS + 3 + 2, "dramatiq_tasks_dlq": 1, "dramatiq_stopped": 3}))
