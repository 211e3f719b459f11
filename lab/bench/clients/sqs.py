"""Clients of the SQS endpoint: ``python -m lab.bench.clients.sqs FUNCTION ...``."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import boto3
from aiohttp import ClientSession, ClientTimeout, TCPConnector
from botocore.config import Config

from lab.bench.clients.client import call, say

#: Messages per call; the longest wait of a poll, which returns as soon as there is a message.
BATCH, POLL_S = 10, 1
#: Time from the start signal until the first paced message is due.
AHEAD_S = 0.5
#: The wait of an idle poll: SQS's longest.
LONG_POLL_S = 20


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


async def idle(url: str, polls: int) -> None:
    """Keep this number of long polls of an empty queue open, until the row ends this process."""
    address, name = url.rsplit("/", 2)[0], json.dumps({"QueueUrl": url, "WaitTimeSeconds": LONG_POLL_S})
    headers = {"X-Amz-Target": "AmazonSQS.ReceiveMessage", "Content-Type": "application/x-amz-json-1.0"}
    timeout, connector = ClientTimeout(total=None), TCPConnector(limit=0)
    async with ClientSession(timeout=timeout, connector=connector) as session:

        async def poll() -> None:
            # Spread over the time of a poll, as those of independent clients are.
            await asyncio.sleep(random.uniform(0, LONG_POLL_S))
            while True:
                async with session.post(address, data=name, headers=headers) as response:
                    response.raise_for_status()
                    await response.read()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(polls):
                tasks.create_task(poll())
            await asyncio.sleep(LONG_POLL_S + 1)
            say(ready=True)


class _SqsQueue:
    """A queue, through boto3."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = boto3.client(
            "sqs",
            endpoint_url=url.rsplit("/", 2)[0],
            region_name="us-east-1",
            aws_access_key_id="any",
            aws_secret_access_key="any",
            config=Config(read_timeout=60),
        )

    def send(self, bodies: list[str]) -> None:
        entries = [{"Id": str(index), "MessageBody": body} for index, body in enumerate(bodies)]
        self._check(self._client.send_message_batch(QueueUrl=self._url, Entries=entries))

    def receive(self, wait_s: int) -> list[dict[str, Any]]:
        answer = self._client.receive_message(QueueUrl=self._url, MaxNumberOfMessages=BATCH, WaitTimeSeconds=wait_s)
        messages: list[dict[str, Any]] = answer.get("Messages", [])
        return messages

    def delete(self, messages: list[dict[str, Any]]) -> None:
        if messages:
            entries = [
                {"Id": str(index), "ReceiptHandle": message["ReceiptHandle"]} for index, message in enumerate(messages)
            ]
            self._check(self._client.delete_message_batch(QueueUrl=self._url, Entries=entries))

    @staticmethod
    def _check(answer: dict[str, Any]) -> None:
        if failed := answer.get("Failed"):
            raise SystemExit(f"bench: the endpoint refused {failed}")


if __name__ == "__main__":
    call(rounds, paced, timed, idle)
