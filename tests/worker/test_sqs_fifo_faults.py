"""FIFO queues while an endpoint is stopped and killed: no message is lost, and groups keep their order."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from marq_worker.broker.ports import free_port
from tests.worker.harness import Worker, eventually
from tests.worker.sqs_clients import Fifo, answers, environment, receive_count

pytestmark = pytest.mark.verify

GROUPS, MESSAGES, CLIENTS = 12, 16, 4
VISIBILITY_S = 4
LIMIT_S = 180.0
#: After this time the group has given the partitions to the other endpoint.
SESSION_S = 8


class Received(NamedTuple):
    """A delivery: when the call began and when it returned."""

    number: int
    attempt: int
    asked_s: float
    received_s: float


class History:
    """What clients saw of each group."""

    def __init__(self) -> None:
        self.received: dict[str, list[Received]] = {}
        #: When the first call began that could have ended a message, and which messages were deleted for sure.
        self.ending: dict[tuple[str, int], float] = {}
        self.deleted: set[tuple[str, int]] = set()
        self.given_back: set[tuple[str, int, int]] = set()
        #: Whether the tracker has counted the end of each message.
        self.over = False

    def check(self) -> None:
        for group, deliveries in self.received.items():
            for delivery in deliveries:
                for earlier in range(delivery.number):
                    ending_s = self.ending.get((group, earlier))
                    assert ending_s is not None, f"{group}: {delivery} came before {earlier} was deleted"
                    assert ending_s < delivery.received_s, f"{group}: {delivery} came before {earlier} was deleted"
            for former, later in itertools.pairwise(deliveries):
                if former.number == later.number and (group, former.number, former.attempt) not in self.given_back:
                    assert later.received_s - former.asked_s >= VISIBILITY_S - 0.05, f"{group}: {former}, {later}"
                    assert later.attempt > former.attempt, f"{group}: {former}, {later}"


def identity(message: dict[str, Any]) -> tuple[str, int, int]:
    """Return the group of a message, its number there, and its attempt."""
    return message["Attributes"]["MessageGroupId"], int(message["Body"]), receive_count(message)


class Client:
    """Receives, works, and deletes, each call at any endpoint."""

    def __init__(self, endpoints: list[Fifo], history: History, seed: int) -> None:
        self._endpoints = endpoints
        self._history = history
        self._random = random.Random(seed)

    async def run(self) -> None:
        while not self._history.over:
            asked_s = time.monotonic()
            answer = await self._call(
                "receive_message", MaxNumberOfMessages=3, WaitTimeSeconds=2, AttributeNames=["All"]
            )
            messages = (answer or {}).get("Messages", [])
            for message in messages:
                group, number, attempt = identity(message)
                delivery = Received(number, attempt, asked_s, time.monotonic())
                self._history.received.setdefault(group, []).append(delivery)
            for message in messages:
                await self._handle(message)

    async def _handle(self, message: dict[str, Any]) -> None:
        group, number, attempt = identity(message)
        fate = self._random.random()
        if fate < 0.03:
            # Its visibility timeout ends.
            return
        if fate < 0.06:
            self._history.given_back.add((group, number, attempt))
            await self._call("change_message_visibility", message, VisibilityTimeout=0)
            return
        # As a call without an answer may have ended the message, the first one counts.
        self._history.ending.setdefault((group, number), time.monotonic())
        while (deleted := await self._call("delete_message", message)) is None:
            pass
        if deleted:
            self._history.deleted.add((group, number))

    async def _call(
        self, operation: str, message: dict[str, Any] | None = None, **parameters: Any
    ) -> dict[str, Any] | None:
        """Return an answer, {} if the call is refused, and None if there was none."""
        if message is not None:
            parameters["ReceiptHandle"] = message["ReceiptHandle"]
        endpoint = self._random.choice(self._endpoints)
        try:
            return await endpoint(operation, endpoint.queue, **parameters)
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code in ("InvalidParameterValue", "AWS.SimpleQueueService.MessageNotInflight"):
                return {}
        except BotoCoreError:
            pass
        await asyncio.sleep(0.1)
        return None


def all_acked(statistics: dict[str, Any]) -> bool:
    return int(statistics.get("acked", 0)) >= GROUPS * MESSAGES


async def test_groups_keep_their_order_while_an_endpoint_is_stopped_and_killed(
    new_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    worker = await new_worker(environment=environment(tmp_path)).start().ready(2)
    port = str(free_port("127.0.0.1"))

    def start() -> Worker:
        second = new_worker(like=worker, MARQ_SQS_PORT=port, MARQ_ROLES="sqs")
        second.web_port += 1
        return second.start()

    second = start()
    one, other = Fifo(worker, "faults.fifo"), Fifo(second, "faults.fifo")
    await eventually(lambda: answers(other))
    await one.create(VisibilityTimeout=str(VISIBILITY_S))
    # Both are members of the queue's group before messages come.
    await asyncio.gather(*[endpoint("receive_message", "faults.fifo", WaitTimeSeconds=5) for endpoint in (one, other)])
    history = History()

    async def send() -> None:
        for number in range(MESSAGES):
            await asyncio.gather(*[
                one(
                    "send_message", "faults.fifo", MessageBody=f"{number}", MessageGroupId=f"g{group}",
                    MessageDeduplicationId=f"{number}",
                )
                for group in range(GROUPS)
            ])  # fmt: skip

    async def disturb() -> None:
        nonlocal second
        await eventually(deleted, lambda count: count > 40)
        second.pause()
        await asyncio.sleep(SESSION_S)
        second.resume()
        known = len(history.deleted)
        await eventually(deleted, lambda count: count > known + 40)
        second.kill()
        await asyncio.sleep(SESSION_S)
        second = start()

    async def deleted() -> int:
        return len(history.deleted)

    async def watch() -> None:
        # A call without an answer may delete a message after its repetition was refused.
        await eventually(lambda: worker.queue("faults.fifo"), all_acked, limit=LIMIT_S)
        history.over = True

    endpoints = [Fifo(server, "faults.fifo", read_timeout=4) for server in (worker, second)]
    clients = [Client(endpoints, history, seed) for seed in range(CLIENTS)]
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        tasks.create_task(watch())
        disturbing = tasks.create_task(disturb())
        for client in clients:
            tasks.create_task(client.run())
    assert disturbing.done()
    history.check()
    assert "Messages" not in await one("receive_message", "faults.fifo", WaitTimeSeconds=VISIBILITY_S + 2)
