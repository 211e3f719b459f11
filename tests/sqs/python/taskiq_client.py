"""Uses an endpoint as programs with taskiq-aio-sqs do: batches, retries, delays, heartbeats, FIFO, and a lost worker.

Variables: ENDPOINT, a URL. Prints one line of JSON with the number of deleted messages per queue. Fails on the first
difference.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from contextlib import aclosing, suppress

import boto3
from taskiq import AckableMessage, Context, SimpleRetryMiddleware, TaskiqDepends
from taskiq.api import run_receiver_task
from taskiq_aio_sqs import SQS_APPROXIMATE_RECEIVE_COUNT_LABEL, SQSBroker, SQSQueue

TASKS = 25
DELAY_S = 3
#: Longer than the visibility timeout: without the heartbeat, the task would run twice.
VISIBILITY_S, SLOW_S = 8, 12
LIMIT_S = 120

access = {"region_name": "us-east-1", "aws_access_key_id": "any", "aws_secret_access_key": "any"}
sqs = boto3.client("sqs", endpoint_url=os.environ["ENDPOINT"], **access)
sqs.create_queue(QueueName="taskiq", Attributes={"VisibilityTimeout": str(VISIBILITY_S)})
sqs.create_queue(QueueName="taskiq.fifo", Attributes={"FifoQueue": "true"})
lost = sqs.create_queue(QueueName="taskiq-lost", Attributes={"VisibilityTimeout": "2"})["QueueUrl"]

broker = (
    SQSBroker(
        "taskiq",
        endpoint_url=os.environ["ENDPOINT"],
        max_number_of_messages=10,
        use_task_id_for_deduplication=True,
        enable_batching=True,
        batch_timeout=0.2,
        enable_heartbeat=True,
        expose_message_metadata=True,
        **access,
    )
    .with_queues(SQSQueue(name="taskiq.fifo", is_fifo=True, wait_time_seconds=5, visibility_timeout=60))
    .with_middlewares(SimpleRetryMiddleware(default_retry_count=3))
)

attempts: Counter[str] = Counter()
receives: Counter[str] = Counter()
handled_s: dict[str, float] = {}
order: list[str] = []
all_handled = asyncio.Event()
CONTEXT = TaskiqDepends()


@broker.task(retry_on_error=True)
async def work(name: str, context: Context = CONTEXT) -> None:
    attempts[name] += 1
    receives[name] += int(context.message.labels[SQS_APPROXIMATE_RECEIVE_COUNT_LABEL])
    if name == "fails once" and attempts[name] == 1:
        raise ValueError("on purpose")
    if name == "slow":
        await asyncio.sleep(SLOW_S)
    handled_s[name] = time.monotonic()
    note_end()


@broker.task(queue="taskiq.fifo", group_id="one")
async def in_order(name: str) -> None:
    order.append(name)
    note_end()


def note_end() -> None:
    if len(handled_s) == TASKS + 3 and len(order) == 3:
        all_handled.set()


async def check_tasks() -> None:
    names = [f"task {number} é🚀" for number in range(TASKS)]
    for name in ["slow", *names, "fails once"]:
        await work.kiq(name)
    sent_s = time.monotonic()
    await work.kicker().with_labels(delay=DELAY_S).kiq("delayed")
    # The second one of a task has its id, so it is a duplicate.
    for name in ("created", "paid", "sent"):
        await in_order.kicker().with_task_id(name).kiq(name)
        await in_order.kicker().with_task_id(name).kiq(name)
    await asyncio.wait_for(all_handled.wait(), LIMIT_S)
    assert order == ["created", "paid", "sent"], order
    expected = {**dict.fromkeys([*names, "slow", "delayed"], 1), "fails once": 2}
    # A retry is a message of its own, so each was received once.
    assert attempts == receives == expected, (attempts, receives)
    assert handled_s["delayed"] - sent_s >= DELAY_S, handled_s["delayed"] - sent_s


async def check_lost_worker() -> None:
    """A message that a worker has not acknowledged comes again, and is gone after the acknowledgement."""
    sqs.send_message(QueueUrl=lost, MessageBody="message")
    worker = SQSBroker("taskiq-lost", endpoint_url=os.environ["ENDPOINT"], wait_time_seconds=5, **access)
    await worker.startup()
    messages: list[AckableMessage] = []
    async with asyncio.timeout(LIMIT_S), aclosing(worker.listen()) as listening:
        async for message in listening:
            messages.append(message)
            if len(messages) == 2:
                await message.ack()
                break
    await worker.shutdown()
    assert [message.ack.metadata.approximate_receive_count for message in messages] == [1, 2]
    assert len({message.ack.metadata.message_id for message in messages}) == 1


async def main() -> None:
    await broker.startup()
    receiving = asyncio.create_task(run_receiver_task(broker))
    await asyncio.gather(check_tasks(), check_lost_worker())
    receiving.cancel()
    with suppress(asyncio.CancelledError):
        await receiving
    await broker.shutdown()
    # A retry was sent once more.
    sys.stdout.write(json.dumps({"taskiq": TASKS + 4, "taskiq.fifo": 3, "taskiq-lost": 1}))


asyncio.run(main())
