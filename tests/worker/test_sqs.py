"""The SQS endpoint of real workers, used by boto3 and by raw HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import boto3
import pytest
import pytest_asyncio
from aiohttp import ClientSession
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

import marq
from marq_worker.broker.embedded import EmbeddedBroker
from marq_worker.broker.ports import free_port
from tests.worker.handling import Handlers
from tests.worker.harness import Namespace, Worker, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

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
QUEUES = """
[queues.handled]
handler = "handlers_of_the_test:coroutine"

[queues.defined]
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


def first_received_ms(message: dict[str, Any]) -> int:
    return int(message["Attributes"]["ApproximateFirstReceiveTimestamp"])


def sent_ms(message: dict[str, Any]) -> int:
    return int(message["Attributes"]["SentTimestamp"])


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


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def worker(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    directory = tmp_path_factory.mktemp("worker")
    with Worker(broker.bootstrap_servers, directory, queues=QUEUES, environment=environment(directory)) as worker:
        yield await worker.ready(2)


@pytest.fixture
def sqs(worker: Worker) -> Sqs:
    return Sqs(worker)


@pytest.fixture
def client(worker: Worker) -> dict[str, Any]:
    return {"bootstrap_servers": worker.environment["MARQ_BOOTSTRAP_SERVERS"], "prefix": worker.names.prefix}


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


async def test_marq_and_sqs_exchange_messages(worker: Worker, sqs: Sqs, client: dict[str, Any]) -> None:
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
    worker: Worker, sqs: Sqs, new_worker: Callable[..., Worker]
) -> None:
    second = worker.again(MARQ_SQS_PORT=str(free_port("127.0.0.1")), MARQ_ROLES="sqs")
    second.web_port += 1
    other = Sqs(second)
    second.start()
    try:
        await eventually(lambda: answers(other))
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
    finally:
        second.close()


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
