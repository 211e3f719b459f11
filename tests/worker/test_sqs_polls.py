"""Many connections that poll two endpoints of one queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from marq_worker.broker.ports import free_port
from tests.worker.harness import Worker, eventually

pytestmark = pytest.mark.verify

CONNECTIONS, BATCHES, BATCH = 300, 300, 10
#: How long a poll waits, and the time limit of its answer on a busy machine.
WAIT_S, ANSWER_S = 5, 60
LIMIT_S = 240


class Endpoint:
    """Sends calls to one endpoint, each over a connection that no other call uses meanwhile."""

    def __init__(self, worker: Worker, session: ClientSession) -> None:
        self._url = f"http://127.0.0.1:{worker.environment['MARQ_SQS_PORT']}"
        self._session = session

    async def __call__(self, operation: str, **parameters: Any) -> Mapping[str, Any]:
        headers = {"Content-Type": "application/x-amz-json-1.0", "X-Amz-Target": f"AmazonSQS.{operation}"}
        parameters.setdefault("QueueUrl", f"{self._url}/000000000000/wide")
        async with self._session.post(f"{self._url}/", json=parameters, headers=headers) as response:
            answer: Mapping[str, Any] = await response.json(content_type=None)
            assert response.status == 200, answer
            return answer

    async def runs(self) -> bool:
        try:
            async with self._session.get(f"{self._url}/healthz") as response:
                return response.status == 200
        except ClientError:
            return False


async def test_each_message_is_received_once_and_each_poll_is_answered(new_worker: Callable[..., Worker]) -> None:
    roles = ("tracker,handlers,web,sqs", "sqs")
    first = new_worker(environment={"MARQ_ROLES": roles[0], "MARQ_SQS_PORT": str(free_port("127.0.0.1"))})
    await first.start().ready()
    second = new_worker(like=first, MARQ_ROLES=roles[1], MARQ_SQS_PORT=str(free_port("127.0.0.1")))
    second.web_port += 1
    second.start()
    expected = {f"{batch}-{number}" for batch in range(BATCHES) for number in range(BATCH)}
    received: Counter[str] = Counter()
    answers: Counter[int] = Counter()
    connector, timeout = TCPConnector(limit=0), ClientTimeout(total=ANSWER_S)
    async with ClientSession(connector=connector, timeout=timeout) as session:
        endpoints = [Endpoint(worker, session) for worker in (first, second)]

        async def poll(number: int) -> None:
            endpoint = endpoints[number % 2]
            while received.keys() != expected:
                answer = await endpoint("ReceiveMessage", MaxNumberOfMessages=10, WaitTimeSeconds=WAIT_S)
                answers[number] += 1
                messages = answer.get("Messages", ())
                received.update(message["Body"] for message in messages)
                for message in messages:
                    await endpoint("DeleteMessage", ReceiptHandle=message["ReceiptHandle"])

        async def send(batch: int) -> None:
            entries = [{"Id": f"{number}", "MessageBody": f"{batch}-{number}"} for number in range(BATCH)]
            assert "Failed" not in await endpoints[batch % 2]("SendMessageBatch", Entries=entries)

        for endpoint in endpoints:
            await eventually(endpoint.runs)
        await endpoints[0]("CreateQueue", QueueName="wide", Attributes={"VisibilityTimeout": "600"})
        async with asyncio.timeout(LIMIT_S):
            # Both join the queue's group, so that each has one of its two partitions.
            await asyncio.gather(*[endpoint("ReceiveMessage", WaitTimeSeconds=10) for endpoint in endpoints])
            polls = asyncio.gather(*map(poll, range(CONNECTIONS)))
            for batch in range(BATCHES):
                await send(batch)
            await polls

    assert set(received.values()) == {1}
    assert answers.keys() == set(range(CONNECTIONS))
    await eventually(
        lambda: first.queue("wide"), lambda found: found["acked"] == len(expected) and not found["in_flight"]
    )
