"""Workers with endpoints for SQS, and clients of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from aiohttp import ClientSession
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from marq_worker.broker.embedded import EmbeddedBroker
from marq_worker.broker.ports import free_port
from tests.worker.handling import Handlers
from tests.worker.harness import Worker, eventually

SECRET = "s" * 20
KEYS = f"""
[keys.ORDERS]
secret = "{SECRET}"
allow = [{{ queues = "orders-*", actions = ["send", "receive"] }}]

[keys.TEAM]
secret = "{SECRET}"
allow = [{{ queues = "orders-*", actions = ["manage"] }}]

[keys.ADMIN]
secret = "{SECRET}"
allow = [{{ queues = "*", actions = ["send", "receive", "manage"] }}]
"""


class Sqs:
    """An endpoint's client of boto3, whose calls block only a thread."""

    def __init__(self, worker: Worker, key: str = "ADMIN", secret: str = SECRET, read_timeout: float = 60) -> None:
        self.url = f"http://127.0.0.1:{worker.environment['MARQ_SQS_PORT']}"
        self._client = boto3.client(
            "sqs",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            config=Config(retries={"max_attempts": 0}, read_timeout=read_timeout),
        )

    async def __call__(self, operation: str, queue: str | None = None, **parameters: Any) -> dict[str, Any]:
        if queue is not None:
            parameters["QueueUrl"] = f"{self.url}/000000000000/{queue}"
        answer: dict[str, Any] = await asyncio.to_thread(getattr(self._client, operation), **parameters)
        return answer

    async def refused(self, operation: str, queue: str | None = None, **parameters: Any) -> str:
        """Return the code of the error that a call meets."""
        with pytest.raises(ClientError) as caught:
            await self(operation, queue, **parameters)
        return str(caught.value.response["Error"]["Code"])

    async def receive(self, queue: str, count: int = 1, **parameters: Any) -> list[dict[str, Any]]:
        """Poll until this many messages have come."""
        messages: list[dict[str, Any]] = []
        deadline = time.monotonic() + 60
        while len(messages) < count:
            assert time.monotonic() < deadline, messages
            answer = await self(
                "receive_message", queue, MaxNumberOfMessages=10, WaitTimeSeconds=10, AttributeNames=["All"],
                MessageAttributeNames=["All"], **parameters,
            )  # fmt: skip
            messages += answer.get("Messages", [])
        return messages

    async def receive_each(self, queue: str, bodies: set[str], **parameters: Any) -> dict[str, dict[str, Any]]:
        """Poll until a message with each body has come; return the last one of each body."""
        messages: dict[str, dict[str, Any]] = {}
        while len(messages) < len(bodies):
            messages |= {message["Body"]: message for message in await self.receive(queue, **parameters)}
        assert messages.keys() == bodies
        return messages

    async def delete(self, queue: str, *messages: dict[str, Any]) -> None:
        for message in messages:
            await self("delete_message", queue, ReceiptHandle=message["ReceiptHandle"])


class Fifo(Sqs):
    """A client of one endpoint, for one FIFO queue."""

    def __init__(self, worker: Worker, queue: str, **options: Any) -> None:
        super().__init__(worker, **options)
        self.queue = queue

    async def create(self, **attributes: str) -> None:
        attributes = {"FifoQueue": "true", "ContentBasedDeduplication": "true", **attributes}
        await self("create_queue", QueueName=self.queue, Attributes=attributes)

    async def send(self, group: str, *bodies: str, **parameters: Any) -> list[dict[str, Any]]:
        return [
            await self("send_message", self.queue, MessageBody=body, MessageGroupId=group, **parameters)
            for body in bodies
        ]

    async def take(self, count: int = 1, **parameters: Any) -> dict[str, dict[str, Any]]:
        """Receive this many messages; return them by their bodies."""
        return {message["Body"]: message for message in await self.receive(self.queue, count, **parameters)}

    async def nothing_comes(self, wait_s: int = 1) -> None:
        assert "Messages" not in await self("receive_message", self.queue, WaitTimeSeconds=wait_s)

    async def end(self, *messages: dict[str, Any]) -> None:
        await self.delete(self.queue, *messages)

    async def hide(self, message: dict[str, Any], seconds: int) -> None:
        await self(
            "change_message_visibility", self.queue, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=seconds
        )


def receive_count(message: dict[str, Any]) -> int:
    return int(message["Attributes"]["ApproximateReceiveCount"])


def environment(directory: Path) -> dict[str, str]:
    handlers = Handlers(directory / "handlers")
    keys = directory / "keys.toml"
    keys.write_text(KEYS)
    return handlers.environment | {
        "MARQ_ROLES": "tracker,handlers,web,sqs",
        "MARQ_SQS_PORT": str(free_port("127.0.0.1")),
        "MARQ_SQS_KEYS": str(keys),
        "MARQ_SQS_SECRET": "x" * 32,
    }


@asynccontextmanager
async def endpoint(broker: EmbeddedBroker, directory: Path, queues: str = "") -> AsyncIterator[Worker]:
    """Run a worker with an endpoint and handlers."""
    with Worker(broker.bootstrap_servers, directory, queues=queues, environment=environment(directory)) as worker:
        yield await worker.ready(2)


@asynccontextmanager
async def another_endpoint(worker: Worker) -> AsyncIterator[Worker]:
    """Run another worker with the same settings, which is only an endpoint."""
    second = worker.again(MARQ_SQS_PORT=str(free_port("127.0.0.1")), MARQ_ROLES="sqs")
    second.web_port += 1
    with second:
        await eventually(lambda: answers(Sqs(second)))
        yield second


async def answers(sqs: Sqs) -> bool:
    try:
        return bool(await sqs("list_queues"))
    except Exception:
        return False


async def raw_poll(sqs: Sqs, queue: str) -> None:
    """Poll over a connection that is cut when the task is cancelled."""
    body = json.dumps({"QueueUrl": f"{sqs.url}/000000000000/{queue}", "WaitTimeSeconds": 20})
    headers = {"Content-Type": "application/x-amz-json-1.0", "X-Amz-Target": "AmazonSQS.ReceiveMessage"}
    request = AWSRequest("POST", f"{sqs.url}/", data=body, headers=headers)
    SigV4Auth(Credentials("ADMIN", SECRET), "sqs", "us-east-1").add_auth(request)
    async with (
        ClientSession() as session,
        session.post(f"{sqs.url}/", data=body, headers=dict(request.headers)) as response,
    ):
        await response.read()
