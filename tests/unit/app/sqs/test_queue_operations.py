"""Operations on queues by clients whose keys allow only some of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from marq.testing import Broker
from marq_worker.sqs.access_keys import Grant, Key
from marq_worker.sqs.aws_json import Call
from marq_worker.sqs.counts import MessageCounts
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.move_operations import MoveOperations
from marq_worker.sqs.operations import Operations
from marq_worker.sqs.queue_operations import QueueOperations
from marq_worker.sqs.sqs_queues import Directory

URL = "http://127.0.0.1:9324"
REDRIVE = '{"deadLetterTargetArn": "arn:aws:sqs:us-east-1:000000000000:dead", "maxReceiveCount": 3}'


@pytest.fixture
async def operations() -> AsyncIterator[Operations]:
    async with Broker() as broker:
        directory = Directory(broker.queues, 1_000_000)
        unused: Any = None
        await directory.create("dead", {}, {})
        for name in ("orders-a", "orders-b", "secret"):
            await directory.create(name, {"RedrivePolicy": REDRIVE}, {})
        yield Operations(
            QueueOperations(directory, unused, unused, unused, no_messages),
            unused,
            MoveOperations(directory, unused, unused, unused),
            directory,
            1_000_000,
        )


async def no_messages(queue: str) -> MessageCounts:
    return MessageCounts(known=True)


def urls(answer: Mapping[str, Any], member: str) -> list[str]:
    return [url.removeprefix(f"{URL}/000000000000/") for url in answer[member]]


async def test_a_client_sees_only_queues_for_which_its_key_allows_an_action(operations: Operations) -> None:
    key = Key(
        "ORDERS", "s" * 20, [Grant(queues="orders-*", actions=["send"]), Grant(queues="dead", actions=["receive"])]
    )
    sources = Call("ListDeadLetterSourceQueues", {"QueueUrl": f"{URL}/000000000000/dead"})
    page = Call(sources.operation, {**sources.parameters, "MaxResults": 1})

    assert urls(await operations.answer(Call("ListQueues", {}), key, URL), "QueueUrls") == [
        "dead",
        "orders-a",
        "orders-b",
    ]
    assert urls(await operations.answer(sources, key, URL), "queueUrls") == ["orders-a", "orders-b"]
    assert await operations.answer(page, key, URL) == {
        "queueUrls": [f"{URL}/000000000000/orders-a"],
        "NextToken": "orders-a",
    }
    following = Call(page.operation, {**page.parameters, "NextToken": "orders-a"})
    assert await operations.answer(following, key, URL) == {"queueUrls": [f"{URL}/000000000000/orders-b"]}


async def test_a_client_of_an_endpoint_without_keys_sees_all_queues(operations: Operations) -> None:
    sources = Call("ListDeadLetterSourceQueues", {"QueueUrl": f"{URL}/000000000000/dead"})

    assert urls(await operations.answer(sources, None, URL), "queueUrls") == ["orders-a", "orders-b", "secret"]


@pytest.mark.parametrize("name", ["All", "ALL", "all", ".*", "*"])
async def test_every_name_for_all_attributes_returns_all_of_a_queue(operations: Operations, name: str) -> None:
    call = Call("GetQueueAttributes", {"QueueUrl": f"{URL}/000000000000/dead", "AttributeNames": [name]})

    attributes = (await operations.answer(call, None, URL))["Attributes"]

    assert {"VisibilityTimeout", "QueueArn", "ApproximateNumberOfMessages"} <= attributes.keys()


async def test_a_refusal_does_not_repeat_a_long_name(operations: Operations) -> None:
    key = Key("ORDERS", "s" * 20, [Grant(queues="orders-*", actions=["send"])])

    with pytest.raises(SqsError) as caught:
        await operations.answer(Call("GetQueueUrl", {"QueueName": "x" * 1_000_000}), key, URL)

    assert caught.value.shape == "AccessDenied"
    assert len(caught.value.message) < 200
