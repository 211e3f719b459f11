"""The SQS endpoint of real workers, used by boto3 and by raw HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio
from aiohttp import ClientSession

import marq
from marq_worker.broker.embedded import EmbeddedBroker
from tests.worker.conftest import client_of
from tests.worker.harness import Namespace, Worker, eventually
from tests.worker.sqs_clients import Fifo, Sqs, another_endpoint, endpoint, raw_poll, receive_count

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUEUES = """
[queues.handled]
handler = "handlers_of_the_test:coroutine"

[queues.defined]
"""


def first_received_ms(message: dict[str, Any]) -> int:
    return int(message["Attributes"]["ApproximateFirstReceiveTimestamp"])


def sent_ms(message: dict[str, Any]) -> int:
    return int(message["Attributes"]["SentTimestamp"])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def worker(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    async with endpoint(broker, tmp_path_factory.mktemp("worker"), QUEUES) as worker:
        yield worker


@pytest.fixture
def sqs(worker: Worker) -> Sqs:
    return Sqs(worker)


async def test_a_message_is_sent_received_and_deleted(worker: Worker, sqs: Sqs) -> None:
    await sqs("create_queue", QueueName="one", Attributes={"VisibilityTimeout": "60"}, tags={"team": "a"})
    attributes = {
        "text": {"DataType": "String", "StringValue": "hällo"},
        "number": {"DataType": "Number.int", "StringValue": "5"},
        "bytes": {"DataType": "Binary", "BinaryValue": b"\x00\xff"},
    }
    sent = await sqs("send_message", "one", MessageBody="bödy", MessageAttributes=attributes)

    [message] = await sqs.receive("one")

    assert message["MessageId"] == sent["MessageId"] == str(UUID(sent["MessageId"]))
    assert message["Body"] == "bödy"
    assert message["MD5OfBody"] == sent["MD5OfMessageBody"] == hashlib.md5("bödy".encode()).hexdigest()
    assert message["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
    assert message["MessageAttributes"] == attributes
    assert message["Attributes"]["ApproximateReceiveCount"] == "1"
    assert await sqs("receive_message", "one") | {"ResponseMetadata": 0} == {"ResponseMetadata": 0}
    await sqs.delete("one", message)
    await eventually(lambda: worker.queue("one"), lambda found: found.get("acked") == 1 and not found["in_flight"])
    assert (await sqs("list_queue_tags", "one"))["Tags"] == {"team": "a"}


async def test_the_visibility_timeout_ends_is_changed_and_ended(sqs: Sqs) -> None:
    await sqs("create_queue", QueueName="visible", Attributes={"VisibilityTimeout": "5"})
    await sqs("send_message", "visible", MessageBody="x", DelaySeconds=1)

    [first] = await sqs.receive("visible")
    [second] = await sqs.receive("visible", VisibilityTimeout=600)
    await sqs("change_message_visibility", "visible", ReceiptHandle=second["ReceiptHandle"], VisibilityTimeout=1)
    [third] = await sqs.receive("visible", VisibilityTimeout=600)
    await sqs("change_message_visibility", "visible", ReceiptHandle=third["ReceiptHandle"], VisibilityTimeout=0)
    [fourth] = await sqs.receive("visible")

    received = [first, second, third, fourth]
    assert [message["Attributes"]["ApproximateReceiveCount"] for message in received] == ["1", "2", "3", "4"]
    assert {message["MessageId"] for message in received} == {str(UUID(first["MessageId"]))}
    assert first_received_ms(second) == first_received_ms(third) == first_received_ms(fourth)
    # The endpoint acquires a message before it answers.
    assert sent_ms(first) + 1_000 <= first_received_ms(second) <= first_received_ms(first)
    late = {"ReceiptHandle": first["ReceiptHandle"], "VisibilityTimeout": 5}
    code = await sqs.refused("change_message_visibility", "visible", **late)
    assert code == "AWS.SimpleQueueService.MessageNotInflight"
    await sqs.delete("visible", fourth)


async def test_a_message_that_is_deleted_too_late_does_not_come_again(worker: Worker, sqs: Sqs) -> None:
    await sqs("create_queue", QueueName="late", Attributes={"VisibilityTimeout": "5"})
    await sqs("send_message", "late", MessageBody="x")
    [message] = await sqs.receive("late")
    await eventually(lambda: worker.queue("late"), lambda found: found.get("redelivered") == 1)

    await sqs.delete("late", message)

    assert "Messages" not in await sqs("receive_message", "late", WaitTimeSeconds=2)
    await eventually(lambda: worker.queue("late"), lambda found: not found["in_flight"] and found["acked"] == 1)


async def test_entries_of_a_batch_fail_one_by_one(sqs: Sqs) -> None:
    await sqs("create_queue", QueueName="batch")
    entries = [{"Id": "good", "MessageBody": "x"}, {"Id": "bad", "MessageBody": "\x01"}]
    sent = await sqs("send_message_batch", "batch", Entries=entries)
    [message] = await sqs.receive("batch")
    entries = [{"Id": "good", "ReceiptHandle": message["ReceiptHandle"]}, {"Id": "bad", "ReceiptHandle": "nonsense"}]
    changed = await sqs(
        "change_message_visibility_batch", "batch", Entries=[entry | {"VisibilityTimeout": 600} for entry in entries]
    )
    deleted = await sqs("delete_message_batch", "batch", Entries=entries)

    for answer in (sent, changed, deleted):
        assert [entry["Id"] for entry in answer["Successful"]] == ["good"]
        assert [entry["Id"] for entry in answer["Failed"]] == ["bad"]
    assert deleted["Failed"][0]["Code"] == "ReceiptHandleIsInvalid"


async def test_a_batch_may_be_larger_than_the_largest_message(sqs: Sqs) -> None:
    await sqs("create_queue", QueueName="large")
    bodies = [name * 262_144 for name in "abcd"]
    attributes = await sqs("get_queue_attributes", "large", AttributeNames=["MaximumMessageSize"])

    entries = [{"Id": body[0], "MessageBody": body} for body in bodies]
    sent = await sqs("send_message_batch", "large", Entries=entries)
    received = await sqs.receive("large", 4)

    assert int(attributes["Attributes"]["MaximumMessageSize"]) < sum(map(len, bodies))
    assert [entry["Id"] for entry in sent["Successful"]] == [*"abcd"]
    assert sorted(message["Body"] for message in received) == bodies
    await sqs.delete("large", *received)


async def test_delays_of_queue_and_message(sqs: Sqs) -> None:
    await sqs("create_queue", QueueName="delayed", Attributes={"DelaySeconds": "900"})
    for body, delay in (("queue's", None), ("none", 0), ("own", 1)):
        await sqs("send_message", "delayed", MessageBody=body, **({} if delay is None else {"DelaySeconds": delay}))

    received = {message["Body"]: message for message in await sqs.receive("delayed", 2)}

    assert received.keys() == {"none", "own"}
    assert first_received_ms(received["own"]) >= sent_ms(received["own"]) + 1_000

    async def delayed() -> str:
        name = "ApproximateNumberOfMessagesDelayed"
        return (await sqs("get_queue_attributes", "delayed", AttributeNames=[name]))["Attributes"][name]

    await eventually(delayed, lambda count: count == "1")


async def test_marq_and_sqs_exchange_messages(worker: Worker, sqs: Sqs) -> None:
    client = client_of(worker)
    await sqs("create_queue", QueueName="both")
    async with marq.Producer(**client) as producer, marq.Consumer("both", **client) as consumer:
        await sqs("send_message", "both", MessageBody="x", MessageAttributes={
            "tenant": {"DataType": "String", "StringValue": "acme"},
        })  # fmt: skip
        [message] = await consumer.receive(wait=30)
        assert (message.value, message.headers) == (b"x", {"tenant": b"acme"})
        await message.ack()
        await consumer.stop()
        await producer.send("both", b"\xff\x00", headers={"tenant": "acme", "raw": b"\xff"})
        [received] = await sqs.receive("both")

    assert received["Body"] == "/wA="
    assert received["MessageAttributes"]["Marq.BodyEncoding"]["StringValue"] == "base64"
    assert received["MessageAttributes"]["tenant"]["StringValue"] == "acme"
    assert received["MessageAttributes"]["raw"]["BinaryValue"] == b"\xff"
    await sqs.delete("both", received)


async def test_a_handler_gets_messages_of_sqs_and_only_it(worker: Worker, sqs: Sqs) -> None:
    await sqs("send_message", "handled", MessageBody="x")

    assert await sqs.refused("receive_message", "handled") == "AWS.SimpleQueueService.UnsupportedOperation"
    await eventually(lambda: worker.queue("handled"), lambda found: found.get("acked") == 1)
    assert await sqs.refused("delete_queue", "handled") == "AWS.SimpleQueueService.UnsupportedOperation"


async def test_messages_received_too_often_move_to_the_dead_letter_queue(sqs: Sqs) -> None:
    await sqs("create_queue", QueueName="dlq")
    arn = (await sqs("get_queue_attributes", "dlq", AttributeNames=["QueueArn"]))["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 2})
    await sqs("create_queue", QueueName="failing", Attributes={"VisibilityTimeout": "5", "RedrivePolicy": policy})
    await sqs("send_message", "failing", MessageBody="x")
    for count in ("1", "2"):
        [message] = await sqs.receive("failing")
        assert message["Attributes"]["ApproximateReceiveCount"] == count

    assert "Messages" not in await sqs("receive_message", "failing", WaitTimeSeconds=8)
    [dead] = await sqs.receive("dlq")

    assert (dead["Body"], dead["Attributes"]["DeadLetterQueueSourceArn"]) == ("x", arn.replace("dlq", "failing"))
    sources = await sqs("list_dead_letter_source_queues", "dlq")
    assert [url.rpartition("/")[2] for url in sources["queueUrls"]] == ["failing"]
    missing = policy.replace(":dlq", ":missing")
    refused = await sqs.refused("set_queue_attributes", "failing", Attributes={"RedrivePolicy": missing})
    assert refused == "InvalidParameterValue"


async def test_messages_that_are_too_old_for_their_queue_are_deleted(worker: Worker, sqs: Sqs) -> None:
    long_ago_ms = round(time.time() * 1000) - 7_200_000
    for queue, attributes in (("brief", {"MessageRetentionPeriod": "60"}), ("default", {})):
        await sqs("create_queue", QueueName=queue, Attributes=attributes)
    async with Namespace(worker.environment["MARQ_BOOTSTRAP_SERVERS"], worker.names) as namespace:
        for queue in ("brief", "default"):
            await namespace.producer.send_and_wait(
                worker.names.messages, b"old", key=queue.encode(), timestamp_ms=long_ago_ms
            )
            await sqs("send_message", queue, MessageBody="new")

    received: set[str] = set()

    async def polled() -> dict[str, Any]:
        received.update([message["Body"] for message in (await sqs("receive_message", "brief")).get("Messages", [])])
        return await worker.queue("brief")

    await eventually(polled, lambda found: received and found.get("acked") == 1)
    assert received == {"new"}
    assert {message["Body"] for message in await sqs.receive("default", 2)} == {"old", "new"}


async def test_queues_are_listed_changed_purged_and_deleted(sqs: Sqs) -> None:
    for name in ("life-a", "life-b", "life-c"):
        await sqs("create_queue", QueueName=name)
    first = await sqs("list_queues", QueueNamePrefix="life-", MaxResults=2)
    rest = await sqs("list_queues", QueueNamePrefix="life-", MaxResults=2, NextToken=first["NextToken"])
    names = [url.rpartition("/")[2] for url in first["QueueUrls"] + rest["QueueUrls"]]
    assert names == ["life-a", "life-b", "life-c"]
    assert "NextToken" not in rest
    await sqs("set_queue_attributes", "life-a", Attributes={"VisibilityTimeout": "90", "MessageRetentionPeriod": "60"})
    attributes = (await sqs("get_queue_attributes", "life-a", AttributeNames=["All"]))["Attributes"]
    assert (attributes["VisibilityTimeout"], attributes["MessageRetentionPeriod"]) == ("90", "60")
    assert attributes["ApproximateNumberOfMessages"] == "0"
    assert await sqs.refused("create_queue", QueueName="life-a", Attributes={"VisibilityTimeout": "5"}) == (
        "QueueAlreadyExists"
    )
    await sqs("tag_queue", "life-a", Tags={"a": "1", "b": "2"})
    await sqs("untag_queue", "life-a", TagKeys=["a"])
    assert (await sqs("list_queue_tags", "life-a"))["Tags"] == {"b": "2"}

    await sqs("send_message", "life-a", MessageBody="purged")
    await sqs("purge_queue", "life-a")
    assert "Messages" not in await sqs("receive_message", "life-a", WaitTimeSeconds=1)

    await sqs("send_message", "life-b", MessageBody="gone")
    await sqs("delete_queue", "life-b")
    assert await sqs.refused("send_message", "life-b", MessageBody="x") == "AWS.SimpleQueueService.NonExistentQueue"
    assert await sqs.refused("create_queue", QueueName="life-b") == "AWS.SimpleQueueService.QueueDeletedRecently"


async def test_an_unfinished_message_blocks_its_group_and_no_other(worker: Worker) -> None:
    fifo = Fifo(worker, "groups.fifo")
    await fifo.create(VisibilityTimeout="60")
    await fifo.send("a", "a1", "a2", "a3")
    await fifo.send("b", "b1")

    first = await fifo.take(2)
    assert set(first) == {"a1", "b1"}
    assert first["a1"]["Attributes"]["MessageGroupId"] == "a"
    await fifo.nothing_comes()
    await fifo.end(first["a1"])
    second = await fifo.take()
    assert set(second) == {"a2"}
    await fifo.end(second["a2"], first["b1"])
    # Deleting twice is no error.
    await fifo.end(second["a2"])
    third = await fifo.take()
    assert set(third) == {"a3"}
    await fifo.end(*third.values())
    await eventually(lambda: worker.queue("groups.fifo"), lambda found: found["acked"] == 4 and not found["in_flight"])


async def test_a_long_poll_ends_with_the_first_message(sqs: Sqs) -> None:
    await sqs("create_queue", QueueName="long")
    await sqs("receive_message", "long", WaitTimeSeconds=5)  # the consumer has started
    began_s, wait_s = time.monotonic(), 20
    poll = asyncio.create_task(sqs("receive_message", "long", WaitTimeSeconds=wait_s))
    await asyncio.sleep(1)
    await sqs("send_message", "long", MessageBody="x")

    answer = await poll

    assert [message["Body"] for message in answer["Messages"]] == ["x"]
    assert time.monotonic() - began_s < wait_s


async def test_a_client_that_hangs_up_takes_no_message_with_it(worker: Worker, sqs: Sqs) -> None:
    await sqs("create_queue", QueueName="hung", Attributes={"VisibilityTimeout": "600"})
    await sqs("receive_message", "hung", WaitTimeSeconds=3)
    poll = asyncio.create_task(raw_poll(sqs, "hung"))
    await asyncio.sleep(1)
    poll.cancel()
    await asyncio.gather(poll, return_exceptions=True)
    await sqs("send_message", "hung", MessageBody="x")

    [message] = await sqs.receive("hung")

    assert message["Attributes"]["ApproximateReceiveCount"] == "1"


async def test_permissions_and_signatures(worker: Worker, sqs: Sqs) -> None:
    orders = Sqs(worker, "ORDERS")
    for name in ("orders-a", "secret"):
        await sqs("create_queue", QueueName=name)
    await orders("send_message", "orders-a", MessageBody="x")
    assert await orders.receive("orders-a")

    assert await orders.refused("send_message", "secret", MessageBody="x") == "AccessDenied"
    assert await orders.refused("delete_queue", "orders-a") == "AccessDenied"
    assert await orders.refused("create_queue", QueueName="other") == "AccessDenied"
    listed = await orders("list_queues")
    assert [url.rpartition("/")[2] for url in listed["QueueUrls"]] == ["orders-a"]
    assert await Sqs(worker, "ORDERS", "wrong" * 5).refused("list_queues") == "SignatureDoesNotMatch"
    assert await Sqs(worker, "NOBODY").refused("list_queues") == "InvalidClientTokenId"
    # A redrive policy would send for the client.
    policy = json.dumps({"deadLetterTargetArn": "arn:aws:sqs:us-east-1:000000000000:secret", "maxReceiveCount": 1})
    team = Sqs(worker, "TEAM")
    for operation, which in (
        ("set_queue_attributes", {"queue": "orders-a"}),
        ("create_queue", {"QueueName": "orders-b"}),
    ):
        assert await team.refused(operation, Attributes={"RedrivePolicy": policy}, **which) == "AccessDenied"
    # A handle of one queue does not open another one.
    await sqs("send_message", "secret", MessageBody="x")
    [message] = await sqs.receive("secret")
    foreign = message["ReceiptHandle"]
    assert await orders.refused("delete_message", "orders-a", ReceiptHandle=foreign) == "ReceiptHandleIsInvalid"


async def test_other_requests_are_refused_in_the_form_that_clients_read(sqs: Sqs) -> None:
    async with ClientSession() as session:
        async with session.get(f"{sqs.url}/healthz") as response:
            assert response.status == 200
        async with session.post(sqs.url, data={"Action": "ListQueues"}) as response:
            assert (response.status, response.content_type) == (400, "text/xml")
        async with session.post(sqs.url, data=b"{}", headers={"X-Amz-Target": "AmazonSQS.ListQueues"}) as response:
            assert response.status == 403
            assert response.headers["x-amzn-query-error"] == "MissingAuthenticationToken;Sender"
        async with session.get(sqs.url) as response:
            assert response.status == 400
        async with session.post(f"{sqs.url}/marq/receive", json={"queue": "one", "most": 1, "wait": 0}) as response:
            assert response.status == 403


# --- several endpoints ------------------------------------------------------------------------------------------------


async def test_each_endpoint_finds_the_messages_of_all_and_takes_over_for_a_killed_one(
    worker: Worker, sqs: Sqs
) -> None:
    async with another_endpoint(worker) as second:
        other = Sqs(second)
        await sqs("create_queue", QueueName="shared", Attributes={"VisibilityTimeout": "5"})
        # Both endpoints are members of the queue's group, but only one is polled.
        await asyncio.gather(*[client("receive_message", "shared", WaitTimeSeconds=6) for client in (sqs, other)])
        bodies = {f"{number}" for number in range(40)}
        for body in sorted(bodies):
            await sqs("send_message", "shared", MessageBody=body)
        received = [*(await sqs.receive_each("shared", bodies, VisibilityTimeout=600)).values()]
        # A handle is valid at every endpoint.
        await other.delete("shared", *received[:20])
        await sqs.delete("shared", *received[20:])

        for body in sorted(bodies):
            await sqs("send_message", "shared", MessageBody=body)
        taken = await other.receive("shared", 5)
        second.kill()

        # What the killed endpoint had acquired but not committed can come twice: its leases end before the takeover.
        again = await sqs.receive_each("shared", bodies, VisibilityTimeout=600)
        assert all(receive_count(again[message["Body"]]) > receive_count(message) for message in taken)
