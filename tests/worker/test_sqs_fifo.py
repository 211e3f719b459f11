"""FIFO queues of the SQS endpoint, and queues with fairness or limits: groups at every endpoint, used by boto3."""

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

import marq
from marq_worker.broker.embedded import EmbeddedBroker
from tests.worker.conftest import client_of
from tests.worker.harness import Worker, eventually
from tests.worker.sqs_clients import Fifo, another_endpoint, endpoint, raw_poll, receive_count

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.verify]

QUEUES = """
[queues."defined.fifo"]
ordering = "key"

[queues.ordered]
ordering = "key"

[queues."unordered.fifo"]

[queues.fair]
fair = true
partitions = 1

[queues.limited]
limits = { per_key = { concurrency = 1 } }
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def worker(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    async with endpoint(broker, tmp_path_factory.mktemp("worker"), QUEUES) as worker:
        yield worker


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def second(worker: Worker) -> AsyncIterator[Worker]:
    """Another worker, which is only an endpoint."""
    async with another_endpoint(worker) as second:
        yield second


async def test_a_message_comes_again_before_the_next_of_its_group(worker: Worker) -> None:
    fifo = Fifo(worker, "again.fifo")
    await fifo.create(VisibilityTimeout="2")
    await fifo.send("a", "a1", "a2")

    first = (await fifo.take())["a1"]
    second = (await fifo.take(VisibilityTimeout=600))["a1"]
    assert (receive_count(first), receive_count(second)) == (1, 2)
    # A handle of a former delivery ends nothing.
    expired = await fifo.refused("delete_message", "again.fifo", ReceiptHandle=first["ReceiptHandle"])
    assert expired == "InvalidParameterValue"
    await fifo.hide(second, 0)
    third = (await fifo.take(VisibilityTimeout=600))["a1"]
    await fifo.hide(third, 1)
    fourth = (await fifo.take(VisibilityTimeout=600))["a1"]
    assert (receive_count(third), receive_count(fourth)) == (3, 4)
    hidden = await fifo.refused(
        "change_message_visibility", "again.fifo", ReceiptHandle=third["ReceiptHandle"], VisibilityTimeout=9
    )
    assert hidden == "AWS.SimpleQueueService.MessageNotInflight"
    await fifo.end(fourth)
    [last] = (await fifo.take()).values()
    assert (last["Body"], receive_count(last)) == ("a2", 1)
    await fifo.end(last)


async def test_a_message_received_too_often_moves_and_its_group_goes_on(worker: Worker) -> None:
    fifo, dead = Fifo(worker, "failing.fifo"), Fifo(worker, "dead.fifo")
    await dead.create()
    await fifo("create_queue", QueueName="standard")
    arn = "arn:aws:sqs:us-east-1:000000000000:"
    policy = {"deadLetterTargetArn": f"{arn}dead.fifo", "maxReceiveCount": 1}
    await fifo.create(VisibilityTimeout="1", RedrivePolicy=json.dumps(policy))
    wrong = {"RedrivePolicy": json.dumps({**policy, "deadLetterTargetArn": f"{arn}standard"})}
    assert await fifo.refused("set_queue_attributes", "failing.fifo", Attributes=wrong) == "InvalidParameterValue"
    await fifo.send("a", "a1", "a2")
    assert set(await fifo.take()) == {"a1"}

    [following] = (await fifo.take(VisibilityTimeout=60)).values()
    [moved] = (await dead.take()).values()

    assert (following["Body"], moved["Body"]) == ("a2", "a1")
    assert moved["Attributes"]["MessageGroupId"] == "a"
    assert moved["Attributes"]["MessageDeduplicationId"] == hashlib.sha256(b"a1").hexdigest()
    assert moved["Attributes"]["DeadLetterQueueSourceArn"] == f"{arn}failing.fifo"
    await fifo.end(following)
    await dead.end(moved)


async def test_duplicates_are_dropped_within_a_group(worker: Worker) -> None:
    fifo = Fifo(worker, "once.fifo")
    await fifo.create(VisibilityTimeout="60")
    sent = await fifo.send("a", "x", "x", "y")
    sent += await fifo.send("a", "z", "z again", MessageDeduplicationId="1")
    await fifo.send("b", "x")

    received: list[dict[str, Any]] = []
    while len(received) < 4:
        received += (messages := await fifo.receive("once.fifo"))
        await fifo.end(*messages)
    await fifo.nothing_comes()

    of_group = [message for message in received if message["Attributes"]["MessageGroupId"] == "a"]
    assert [message["Body"] for message in of_group] == ["x", "y", "z"]
    assert [message["Body"] for message in received if message not in of_group] == ["x"]
    numbers = [message["Attributes"]["SequenceNumber"] for message in of_group]
    assert numbers == [sent[index]["SequenceNumber"] for index in (0, 2, 3)] == sorted(numbers)
    assert [message["MessageId"] for message in of_group] == [
        str(UUID(sent[index]["MessageId"])) for index in (0, 2, 3)
    ]
    ids = [message["Attributes"]["MessageDeduplicationId"] for message in of_group]
    assert ids == [hashlib.sha256(b"x").hexdigest(), hashlib.sha256(b"y").hexdigest(), "1"]
    counted = await eventually(lambda: worker.queue("once.fifo"), lambda found: found.get("deduplicated") == 2)
    assert counted["acked"] == 4


async def test_a_batch_keeps_the_order_of_its_entries_and_a_delay_that_of_the_sends(worker: Worker) -> None:
    fifo = Fifo(worker, "batch.fifo")
    await fifo.create(VisibilityTimeout="60", DelaySeconds="2")
    entries = [{"Id": f"{number}", "MessageBody": f"{number}", "MessageGroupId": "a"} for number in range(10)]
    began_s = time.monotonic()
    answer = await fifo("send_message_batch", "batch.fifo", Entries=entries)
    numbers = {entry["Id"]: entry["SequenceNumber"] for entry in answer["Successful"]}
    ascending = [numbers[f"{number}"] for number in range(10)]
    assert ascending == sorted(set(ascending))
    assert list(map(int, ascending)) == sorted(map(int, ascending))

    received = []
    for _ in range(10):
        [message] = (await fifo.take()).values()
        received.append(message["Body"])
        assert message["Attributes"]["SequenceNumber"] == numbers[message["Body"]]
        await fifo.end(message)

    assert received == [f"{number}" for number in range(10)]
    assert time.monotonic() - began_s >= 2


async def test_queues_of_marq_are_fifo_queues_by_ordering_and_name(worker: Worker) -> None:
    fifo = Fifo(worker, "defined.fifo")
    async with marq.Producer(**client_of(worker)) as producer:
        for value in (b"1", b"2"):
            await producer.send("defined.fifo", value, ordering_key="a")

    [first] = (await fifo.take()).values()
    assert (first["Body"], first["Attributes"]["MessageGroupId"]) == ("1", "a")
    await fifo.end(first)
    assert set(await fifo.take()) == {"2"}
    attributes = (await fifo("get_queue_attributes", "defined.fifo", AttributeNames=["All"]))["Attributes"]
    assert (attributes["FifoQueue"], attributes["DeduplicationScope"]) == ("true", "messageGroup")
    assert await fifo.refused("receive_message", "ordered") == "AWS.SimpleQueueService.UnsupportedOperation"
    assert await fifo.refused("get_queue_url", QueueName="unordered.fifo") == "AWS.SimpleQueueService.NonExistentQueue"


async def test_what_fifo_queues_refuse(worker: Worker) -> None:
    fifo = Fifo(worker, "refuses.fifo")
    unsupported = "AWS.SimpleQueueService.UnsupportedOperation"
    scope = {"FifoQueue": "true", "DeduplicationScope": "queue"}
    assert await fifo.refused("create_queue", QueueName="refuses.fifo", Attributes=scope) == unsupported
    await fifo.create(ContentBasedDeduplication="false")
    for parameters, code in (
        ({}, "MissingParameter"),
        ({"MessageGroupId": "a"}, "InvalidParameterValue"),
        ({"MessageGroupId": "a", "MessageDeduplicationId": "1", "DelaySeconds": 1}, "InvalidParameterValue"),
    ):
        assert await fifo.refused("send_message", "refuses.fifo", MessageBody="x", **parameters) == code


async def test_a_client_that_hangs_up_blocks_its_group_for_the_visibility_timeout_at_most(worker: Worker) -> None:
    visibility_s, rounds = 2, 12
    fifo = Fifo(worker, "hung.fifo")
    await fifo.create(VisibilityTimeout=f"{visibility_s}")
    await fifo.nothing_comes(3)  # the consumer has started
    for number in range(rounds):
        poll = asyncio.create_task(raw_poll(fifo, fifo.queue))
        await asyncio.sleep(0.05)
        await fifo.send(f"{number}", f"{number} first", f"{number} second")
        # Before, during and after the delivery.
        await asyncio.sleep(number * 0.01)
        poll.cancel()
        await asyncio.gather(poll, return_exceptions=True)
        hung_up_s = time.monotonic()

        [first] = (await fifo.take(VisibilityTimeout=600)).values()
        took_s = time.monotonic() - hung_up_s
        await fifo.end(first)
        [second] = (await fifo.take(VisibilityTimeout=600)).values()
        await fifo.end(second)

        assert [first["Body"], second["Body"]] == [f"{number} first", f"{number} second"]
        assert took_s < visibility_s + 15
        assert receive_count(second) == 1
    await eventually(lambda: worker.queue(fifo.queue), lambda found: found["acked"] == 2 * rounds)


async def test_a_purge_ends_messages_that_wait_behind_others(worker: Worker) -> None:
    fifo = Fifo(worker, "purged.fifo")
    await fifo.create(VisibilityTimeout="600")
    await fifo.send("a", "a1", "a2", "a3")
    await fifo.send("b", "b1", "b2")
    first = await fifo.take(2)
    await fifo.nothing_comes()  # The endpoint has read all of them.

    await fifo("purge_queue", "purged.fifo")
    await eventually(lambda: worker.queue("purged.fifo"), lambda found: not found["in_flight"])
    await fifo.send("a", "new")

    assert set(await fifo.take()) == {"new"}
    await fifo.nothing_comes()
    # Deleting a message that a purge has ended is not an error.
    await fifo.end(*first.values())


async def test_a_deleted_queue_leaves_nothing(worker: Worker) -> None:
    fifo = Fifo(worker, "deleted.fifo")
    await fifo.create(VisibilityTimeout="600")
    await fifo.send("a", "a1", "a2")
    await fifo.take()
    await fifo("delete_queue", "deleted.fifo")

    gone = "AWS.SimpleQueueService.NonExistentQueue"
    assert await fifo.refused("send_message", "deleted.fifo", MessageBody="x", MessageGroupId="a") == gone
    await eventually(lambda: worker.queue("deleted.fifo"), lambda found: not found["in_flight"])
    assert await fifo.refused("create_queue", QueueName="deleted.fifo", Attributes={"FifoQueue": "true"}) == (
        "AWS.SimpleQueueService.QueueDeletedRecently"
    )


async def test_dead_letters_return_to_their_groups(worker: Worker) -> None:
    fifo, dead = Fifo(worker, "source.fifo"), Fifo(worker, "letters.fifo")
    await dead.create()
    arn = "arn:aws:sqs:us-east-1:000000000000:"
    policy = json.dumps({"deadLetterTargetArn": f"{arn}letters.fifo", "maxReceiveCount": 1})
    await fifo.create(VisibilityTimeout="600", RedrivePolicy=policy)
    await fifo.send("a", "a1", "a2")
    for body in ("a1", "a2"):
        message = (await fifo.take())[body]
        await fifo.hide(message, 0)
    await fifo.nothing_comes()

    await fifo("start_message_move_task", SourceArn=f"{arn}letters.fifo")

    for body in ("a1", "a2"):
        message = (await fifo.take())[body]
        assert (receive_count(message), message["Attributes"]["MessageGroupId"]) == (1, "a")
        await fifo.end(message)


# --- several endpoints ------------------------------------------------------------------------------------------------


async def test_outcomes_reach_the_endpoint_that_holds_the_message(worker: Worker, second: Worker) -> None:
    one, other = Fifo(worker, "two.fifo"), Fifo(second, "two.fifo")
    await one.create(VisibilityTimeout="600")
    # Both are members of the queue's group, and the groups are in partitions of both.
    await asyncio.gather(*[endpoint("receive_message", "two.fifo", WaitTimeSeconds=5) for endpoint in (one, other)])
    groups = [f"g{number}" for number in range(8)]
    for group in groups:
        await one.send(group, f"{group}-1", f"{group}-2", f"{group}-3")

    first = await one.take(8)
    assert set(first) == {f"{group}-1" for group in groups}
    await other.end(*first.values())
    second_ones = await other.take(8)
    assert set(second_ones) == {f"{group}-2" for group in groups}
    for message in second_ones.values():
        await one.hide(message, 0)
    again = await one.take(8)
    assert {body: receive_count(message) for body, message in again.items()} == {f"{group}-2": 2 for group in groups}
    stale = [message["ReceiptHandle"] for message in second_ones.values()]
    for handle in stale:
        assert await other.refused("delete_message", "two.fifo", ReceiptHandle=handle) == "InvalidParameterValue"
    await one.end(*again.values())
    await other.end(*(await other.take(8)).values())
    await eventually(lambda: worker.queue("two.fifo"), lambda found: found["acked"] == 24 and not found["in_flight"])


async def test_sequence_numbers_increase_although_a_group_is_sent_through_several_endpoints(
    worker: Worker, second: Worker
) -> None:
    one, other = Fifo(worker, "numbered.fifo"), Fifo(second, "numbered.fifo")
    await one.create(VisibilityTimeout="600")
    numbers = {}
    for index in range(12):
        [sent] = await (one, other)[index % 2].send("a", f"{index}")
        numbers[f"{index}"] = sent["SequenceNumber"]

    assert list(numbers.values()) == sorted(set(numbers.values()))
    for index in range(12):
        first = (await one.take())[f"{index}"]
        await one.hide(first, 0)
        again = (await one.take())[f"{index}"]
        assert (receive_count(first), receive_count(again)) == (1, 2)
        for message in (first, again):
            assert message["Attributes"]["SequenceNumber"] == numbers[message["Body"]]
        await one.end(again)


async def test_groups_go_on_where_their_partitions_move_to(worker: Worker, second: Worker) -> None:
    one, other = Fifo(worker, "moved.fifo"), Fifo(second, "moved.fifo")
    await one.create(VisibilityTimeout="600")
    groups = [f"g{number}" for number in range(8)]
    for group in groups:
        await one.send(group, f"{group}-1", f"{group}-2")
    first = await one.take(8)

    # The other endpoint joins the queue's group, and gets one of the two partitions.
    await other.nothing_comes(6)
    await one.end(*first.values())
    following = await other.take(8)

    assert set(following) == {f"{group}-2" for group in groups}
    assert {receive_count(message) for message in following.values()} <= {1, 2}
    await other.end(*following.values())
    await eventually(lambda: worker.queue("moved.fifo"), lambda found: found["acked"] == 16 and not found["in_flight"])


# --- fairness and limits ----------------------------------------------------------------------------------------------


async def test_a_group_with_many_messages_does_not_delay_another_in_a_fair_queue(worker: Worker) -> None:
    fair = Fifo(worker, "fair")
    await fair.send("big", *[f"big {number}" for number in range(40)])
    received = list((await fair.take()).values())
    first = len(received)
    await fair.send("small", "small 0", "small 1", "small 2")
    await eventually(lambda: worker.queue("fair"), lambda found: found["in_flight"] == 43)

    while sum(message["Body"].startswith("small") for message in received) < 3:
        received += (await fair("receive_message", "fair", AttributeNames=["All"])).get("Messages", [])

    assert len(received) - first <= 10
    assert {message["Attributes"]["MessageGroupId"] for message in received} == {"big", "small"}
    assert all(receive_count(message) == 1 for message in received)
    handles = [
        {"Id": str(number), "ReceiptHandle": each["ReceiptHandle"]} for number, each in enumerate(received[first:])
    ]
    deleted = await fair("delete_message_batch", "fair", Entries=handles)
    assert len(deleted["Successful"]) == len(received) - first
    await fair.end(*received[:first])
    await fair.end(*(await fair.take(43 - len(received))).values())
    await eventually(lambda: worker.queue("fair"), lambda found: found["acked"] == 43 and not found["in_flight"])


async def test_a_limit_of_each_group_holds_for_clients_of_all_endpoints(worker: Worker, second: Worker) -> None:
    one, other = Fifo(worker, "limited"), Fifo(second, "limited")
    await one.send("a", "a1", "a2")
    await one.send("b", "b1")
    first = await one.take(2, VisibilityTimeout=600)
    assert first.keys() in ({"a1", "b1"}, {"a2", "b1"})
    await other.nothing_comes(2)

    again = next(message for body, message in first.items() if body.startswith("a"))
    await other.hide(again, 0)
    [came] = (await one.take(VisibilityTimeout=600)).values()
    stale = await other.refused("delete_message", "limited", ReceiptHandle=again["ReceiptHandle"])
    assert (came["Body"][0], stale) == ("a", "InvalidParameterValue")
    await other.end(came, first["b1"])
    [last] = (await other.take()).values()
    await one.end(last)

    assert {came["Body"], last["Body"]} == {"a1", "a2"}
    await eventually(lambda: worker.queue("limited"), lambda found: found["acked"] == 3 and not found["in_flight"])


async def test_a_queue_becomes_fair_while_clients_poll_it(worker: Worker) -> None:
    queue = Fifo(worker, "turns")
    await queue("create_queue", QueueName="turns")
    await queue("send_message", "turns", MessageBody="before")
    [before] = await queue.receive("turns")
    async with marq.Queues(**client_of(worker)) as queues:
        await queues.change("turns", fair=True)
    await queue.send("a", "after")

    [after] = await queue.receive("turns")

    assert (before["Body"], after["Body"]) == ("before", "after")
    await queue.end(before, after)
    await eventually(lambda: worker.queue("turns"), lambda found: found["acked"] == 2 and not found["in_flight"])
