"""Tasks of the SQS endpoint on queues of a real broker: purges, deletions, and moves of dead letters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio

import marq
from marq_worker.broker.embedded import EmbeddedBroker
from tests.worker.conftest import client_of
from tests.worker.harness import Worker, eventually
from tests.worker.sqs_clients import Sqs, another_endpoint, endpoint

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.verify]

ARN = "arn:aws:sqs:us-east-1:000000000000:"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def worker(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    async with endpoint(broker, tmp_path_factory.mktemp("worker")) as worker:
        yield worker


@pytest.fixture
def sqs(worker: Worker) -> Sqs:
    return Sqs(worker)


async def pair(sqs: Sqs, source: str, dead: str) -> None:
    """Create a queue and its dead-letter queue."""
    await sqs("create_queue", QueueName=dead)
    policy = json.dumps({"deadLetterTargetArn": ARN + dead, "maxReceiveCount": 1})
    await sqs("create_queue", QueueName=source, Attributes={"RedrivePolicy": policy})


async def fill(worker: Worker, dead: str, source: str, count: int) -> set[str]:
    """Send dead letters as the endpoint moves them."""
    bodies = [f"{dead}-{number}" for number in range(count)]
    headers: Mapping[str, str] = {"tenant": "acme", "sqs-source": ARN + source}
    async with marq.Producer(**client_of(worker)) as producer:
        await asyncio.gather(*[producer.send(dead, body.encode(), headers=headers) for body in bodies])
    return set(bodies)


async def newest(sqs: Sqs, dead: str) -> dict[str, Any]:
    """Return the last move of a queue's messages."""
    task: dict[str, Any] = (await sqs("list_message_move_tasks", SourceArn=ARN + dead))["Results"][0]
    return task


async def ended(sqs: Sqs, dead: str) -> dict[str, Any]:
    return await eventually(lambda: newest(sqs, dead), lambda task: task["Status"] not in ("RUNNING", "CANCELLING"))


async def test_dead_letters_return_to_where_they_came_from(worker: Worker, sqs: Sqs) -> None:
    await pair(sqs, "back", "back-dead")
    bodies = await fill(worker, "back-dead", "back", 3)

    await sqs("start_message_move_task", SourceArn=ARN + "back-dead")
    messages = await sqs.receive("back", 3, VisibilityTimeout=600)
    task = await ended(sqs, "back-dead")

    assert {message["Body"] for message in messages} == bodies
    assert {message["Attributes"]["ApproximateReceiveCount"] for message in messages} == {"1"}
    assert messages[0]["MessageAttributes"]["tenant"]["StringValue"] == "acme"
    assert "DeadLetterQueueSourceArn" not in messages[0]["Attributes"]
    assert (task["Status"], task["ApproximateNumberOfMessagesMoved"]) == ("COMPLETED", 3)
    assert not {"TaskHandle", "DestinationArn", "FailureReason"} & task.keys()


async def test_a_move_is_limited_exclusive_and_cancelled(worker: Worker, sqs: Sqs) -> None:
    await pair(sqs, "slow", "slow-dead")
    await sqs("create_queue", QueueName="slow-target")
    await fill(worker, "slow-dead", "slow", 30)

    handle = (
        await sqs(
            "start_message_move_task",
            SourceArn=ARN + "slow-dead",
            DestinationArn=ARN + "slow-target",
            MaxNumberOfMessagesPerSecond=1,
        )
    )["TaskHandle"]
    running = await newest(sqs, "slow-dead")
    second = await sqs.refused("start_message_move_task", SourceArn=ARN + "slow-dead")
    first, *_ = await sqs.receive("slow-target")
    await sqs("cancel_message_move_task", TaskHandle=handle)
    cancelled = await ended(sqs, "slow-dead")

    assert (running["Status"], running["TaskHandle"], running["MaxNumberOfMessagesPerSecond"]) == ("RUNNING", handle, 1)
    assert second == "InvalidParameterValue"
    assert first["Body"].startswith("slow-dead-")
    assert cancelled["Status"] == "CANCELLED"
    assert 1 <= cancelled["ApproximateNumberOfMessagesMoved"] < 30
    assert await sqs.refused("cancel_message_move_task", TaskHandle=handle) == "InvalidParameterValue"


async def test_a_move_that_can_not_continue_fails_and_keeps_its_messages(worker: Worker, sqs: Sqs) -> None:
    await pair(sqs, "lost", "lost-dead")
    await sqs("send_message", "lost-dead", MessageBody="direct")

    await sqs("start_message_move_task", SourceArn=ARN + "lost-dead")
    task = await ended(sqs, "lost-dead")

    assert (task["Status"], task["FailureReason"]) == ("FAILED", "CouldNotDetermineMessageSource")
    [message] = await sqs.receive("lost-dead")
    assert (message["Body"], message["Attributes"]["ApproximateReceiveCount"]) == ("direct", "1")


async def test_moves_need_a_dead_letter_queue_and_permissions(worker: Worker, sqs: Sqs) -> None:
    await pair(sqs, "orders-x", "orders-x-dead")
    await sqs("create_queue", QueueName="foreign")
    team = Sqs(worker, "TEAM")
    start = "start_message_move_task"

    assert await sqs.refused(start, SourceArn=ARN + "missing") == "ResourceNotFoundException"
    assert await sqs.refused(start, SourceArn=ARN + "orders-x") == "InvalidParameterValue"
    assert await sqs.refused(start, SourceArn="nonsense") == "InvalidParameterValue"
    dead = ARN + "orders-x-dead"
    assert await sqs.refused(start, SourceArn=dead, DestinationArn=ARN + "missing") == "ResourceNotFoundException"
    assert await sqs.refused(start, SourceArn=dead, DestinationArn=dead) == "InvalidParameterValue"
    # It has "manage", but not "receive" and "send".
    assert await team.refused(start, SourceArn=dead) == "AccessDenied"
    assert (await team("list_message_move_tasks", SourceArn=dead)).get("Results", []) == []
    assert await team.refused("list_message_move_tasks", SourceArn=ARN + "foreign") == "AccessDenied"
    assert await sqs.refused("cancel_message_move_task", TaskHandle="nonsense") == "InvalidParameterValue"


async def test_a_purge_ends_all_messages_and_no_later_ones(worker: Worker, sqs: Sqs) -> None:
    await sqs("create_queue", QueueName="purged", Attributes={"VisibilityTimeout": "4"})
    for number in range(3):
        await sqs("send_message", "purged", MessageBody=f"waiting-{number}")
    await sqs("send_message", "purged", MessageBody="delayed", DelaySeconds=5)
    taken = await sqs.receive("purged")

    await sqs("purge_queue", "purged")
    again = await sqs.refused("purge_queue", "purged")
    await sqs("send_message", "purged", MessageBody="later")
    [message] = await sqs.receive("purged", VisibilityTimeout=600)

    assert taken
    assert again == "AWS.SimpleQueueService.PurgeQueueInProgress"
    assert message["Body"] == "later"
    # Those in flight and the delayed one would return by now.
    assert "Messages" not in await sqs("receive_message", "purged", WaitTimeSeconds=5)
    gauges = await worker.queue("purged")
    assert (gauges["in_flight"], gauges["waiting_for_delivery"]) == (1, 0)


async def test_a_deleted_queue_is_gone_at_once_and_for_good(worker: Worker, sqs: Sqs) -> None:
    await sqs("create_queue", QueueName="deleted", Attributes={"VisibilityTimeout": "600"})
    await sqs("send_message", "deleted", MessageBody="x")
    await sqs.receive("deleted")

    await sqs("delete_queue", "deleted")

    assert await sqs.refused("send_message", "deleted", MessageBody="x") == "AWS.SimpleQueueService.NonExistentQueue"
    assert await sqs.refused("create_queue", QueueName="deleted") == "AWS.SimpleQueueService.QueueDeletedRecently"
    await eventually(lambda: worker.queue("deleted"), lambda found: not found.get("in_flight"))


async def test_calls_are_measured(worker: Worker, sqs: Sqs) -> None:
    await sqs("create_queue", QueueName="measured")
    await sqs.refused("send_message", "measured", MessageBody="\x01")
    _, text = await worker.page("/metrics")

    assert 'marq_sqs_calls_total{code="OK",operation="CreateQueue"}' in text
    assert 'marq_sqs_calls_total{code="InvalidMessageContents",operation="SendMessage"} 1.0' in text


async def test_another_endpoint_continues_the_move_of_a_killed_one(worker: Worker, sqs: Sqs) -> None:
    await pair(sqs, "kill", "kill-dead")
    bodies = await fill(worker, "kill-dead", "kill", 60)
    async with another_endpoint(worker) as second:
        start = {"SourceArn": ARN + "kill-dead", "MaxNumberOfMessagesPerSecond": 10}
        await Sqs(second)("start_message_move_task", **start)
        received = {message["Body"] for message in await sqs.receive("kill", 5, VisibilityTimeout=600)}

        second.kill()

        while received != bodies:
            received |= {message["Body"] for message in await sqs.receive("kill", VisibilityTimeout=600)}
        assert (await ended(sqs, "kill-dead"))["Status"] == "COMPLETED"
