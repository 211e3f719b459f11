"""Queues with ordering as operators see them: what pages, commands and metrics show, and what a replay delivers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaProducer

import marq
from tests.worker.conftest import client_of
from tests.worker.harness import LIMIT_SECONDS, Namespace, Worker, eventually, take
from tests.worker.shell import Shell

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_blocked_key_is_shown_until_its_first_message_ends(
    shared_worker: Worker, queues: marq.Queues, queue: str
) -> None:
    worker, address = shared_worker, f"/api/queues/{queue}"
    await queues.change(queue, ordering="key", backoff=[600])
    async with marq.Producer(**client_of(worker)) as producer, Shell(worker) as shell:
        blocking = await producer.send(queue, b"1", ordering_key="customer-42")
        await producer.send(queue, b"2", ordering_key="customer-42")
        async with marq.Consumer(queue, **client_of(worker)) as consumer:
            [message] = await consumer.receive(wait=LIMIT_SECONDS)
            story = json.loads((await worker.page(f"/api/message?id={message.id}"))[1])
            assert (story["status"], story["possible"], story["held"]) == ("in flight", [], True)
            with suppress(ValueError):
                async with message:
                    raise ValueError("no <address>")

            counted = await eventually(lambda: worker.queue(queue), lambda found: found.get("blocked_keys") == 1)
            assert (counted["in_flight"], counted["waiting_for_redelivery"]) == (1, 1)

            details = json.loads((await worker.page(address))[1])
            [key] = details["blocked_keys"]
            assert (key["key"], key["id"], key["attempt"]) == ("customer-42", blocking.id, 1)
            assert (key["error"], key["state"]) == ("ValueError: no <address>", "waiting_in_order")
            assert 500 < key["due_in_seconds"] <= 600
            page = (await worker.page(f"/queues/{queue}"))[1]
            assert re.search(r'<th scope="row">customer-42</th>', page)
            assert "ValueError: no &lt;address&gt;" in page
            story = json.loads((await worker.page(f"/api/message?id={blocking.id}"))[1])
            assert (story["ordering_key"], story["possible"]) == ("customer-42", ["deliver-now", "cancel"])
            assert story["status"] == "waits for its next attempt, ahead of later messages with its key"
            # A RENEW says that user code has the message, if that takes a while.
            kinds = [event["kind"] for event in story["events"] if event["kind"] != "RENEW"]
            assert kinds == ["ACQUIRE", "RELEASE"]
            assert f'marq_queue_blocked_keys{{queue="{queue}"}} 1.0' in (await worker.page("/metrics"))[1]

            told = await shell.json("queue", queue)
            assert (told["blocked_keys"]["count"], told["blocked_keys"]["complete"]) == (1, True)
            assert told["blocked_keys"]["first"][0]["key"] == "customer-42"
            shown = (await shell("queue", queue)).out
            assert "blocked keys: 1\n" in shown
            assert re.search(r"customer-42 +1 +[89] m .* ValueError: no <address>", shown)
            assert "blocked_keys" not in await shell.json("queue", "another")

            delayed = await shell.json("delayed", queue)
            assert [message["state"] for message in delayed["messages"]] == ["waiting_in_order"]

    # The second message was released when its consumer stopped, and blocks nothing.
    counted = await eventually(lambda: worker.queue(queue), lambda found: found.get("in_flight") == 0)
    assert (counted["blocked_keys"], counted["waiting_for_redelivery"]) == (1, 2)


async def test_a_key_that_its_first_message_blocks_for_good_waits_for_an_operator(
    shared_worker: Worker, queues: marq.Queues, queue: str
) -> None:
    worker = shared_worker
    await queues.change(queue, ordering="key", max_attempts=1, on_dead_letter="block")
    async with marq.Producer(**client_of(worker)) as producer, Shell(worker) as shell:
        blocking = await producer.send(queue, b"1", ordering_key="a")
        await producer.send(queue, b"2", ordering_key="a")
        async with marq.Consumer(queue, **client_of(worker)) as consumer:
            [message] = await take(consumer)
            await message.reject("bad")
            await eventually(lambda: worker.queue(queue), lambda found: found.get("blocked_keys") == 1)

            [key] = (await shell.json("queue", queue))["blocked_keys"]["first"]
            assert (key["waits_for_operator"], key["error"]) == (True, "bad")
            assert "(operator)" in (await shell("queue", queue)).out
            story = json.loads((await worker.page(f"/api/message?id={blocking.id}"))[1])
            assert story["status"] == "blocks its key until it is delivered now or cancelled"
            await shell.json("cancel", "--yes", blocking.id)

            [following] = await take(consumer)
            assert following.value == b"2"
            await following.ack()
    await eventually(lambda: worker.queue(queue), lambda found: found.get("blocked_keys") == 0)


async def test_messages_behind_a_blocked_key_do_not_wait_once_a_consumer_has_them(
    shared_worker: Worker, queues: marq.Queues, queue: str
) -> None:
    worker = shared_worker
    await queues.change(queue, ordering="key", backoff=[600])
    async with marq.Producer(**client_of(worker)) as producer, Shell(worker) as shell:
        for key, value in ("a", b"blocks"), ("b", b"done"), ("a", b"behind"):
            await producer.send(queue, value, ordering_key=key)
        async with marq.Consumer(queue, **client_of(worker)) as consumer:
            first = {message.value: message for message in await take(consumer, 2)}
            await first[b"done"].ack()
            await first[b"blocks"].release()
            await eventually(lambda: worker.queue(queue), lambda found: found.get("blocked_keys") == 1)

            peeked = await shell.json("peek", queue)
            purged = await shell.json("purge", queue, "--yes")

        assert peeked["messages"] == []
        # The consumer delivers the released message again, so it stays.
        assert (purged["waiting"], purged["redelivery"]) == (0, 0)


async def test_a_replay_delivers_the_messages_of_a_key_in_their_order(
    shared_worker: Worker, queues: marq.Queues, queue: str
) -> None:
    worker, values = shared_worker, [b"%d" % number for number in range(5)]
    await queues.change(queue, ordering="key")
    async with marq.Producer(**client_of(worker)) as producer, Shell(worker) as shell:
        await producer.send_many(queue, values, ordering_key="a")
        async with marq.Consumer(queue, **client_of(worker)) as consumer:
            for _ in values:
                [message] = await take(consumer)
                await message.ack()
            # Until its position is committed.
            await eventually(lambda: shell.json("replay", queue, "--since", "1h", "--dry-run"), _replays(len(values)))
            await shell.json("replay", queue, "--since", "1h", "--yes")

            again = []
            for _ in values:
                # One at a time: only the first message of the key is delivered.
                [message] = await consumer.receive(max_messages=5, wait=LIMIT_SECONDS)
                again.append(message.value)
                await message.ack()

    assert again == values


def _replays(count: int) -> Callable[[dict[str, Any]], bool]:
    return lambda found: found["messages"] == count


@pytest.mark.parametrize("running", [False, True], ids=["ordered", "becomes-ordered"])
async def test_an_aborted_message_is_not_delivered(
    namespace: Namespace, shared_worker: Worker, queues: marq.Queues, queue: str, running: bool
) -> None:
    """A tracker that dies in a transaction leaves such records. Its successor sends the messages again, later."""
    if not running:
        await queues.change(queue, ordering="key")
    async with marq.Consumer(queue, **client_of(shared_worker)) as consumer:
        await queues.change(queue, ordering="key")
        await eventually(lambda: _reads_committed(consumer))
        await _send_and_abort(namespace, queue, b"a@100", b"b@101")
        for value in (b"a@110", b"b@111"):
            await namespace.send(queue, value, headers=[("marq-ordering-key", b"k")])

        values = []
        for _ in range(2):
            [message] = await take(consumer, 1)
            values.append(message.value)
            await message.ack()

        assert values == [b"a@110", b"b@111"]
        assert await consumer.receive(wait=1) == []


async def _reads_committed(consumer: marq.Consumer) -> bool:
    running: Any = consumer._running
    return bool(running._reader._serving.ordered)


async def _send_and_abort(namespace: Namespace, queue: str, *values: bytes) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=namespace.bootstrap_servers, transactional_id=uuid4().hex)
    await producer.start()
    await producer.begin_transaction()
    for value in values:
        await producer.send_and_wait(
            namespace.names.messages, value, queue.encode(), partition=0, headers=[("marq-ordering-key", b"k")]
        )
    await producer.abort_transaction()
    await producer.stop()
