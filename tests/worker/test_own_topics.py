"""Queues with a topic of their own when that topic, or the setting, goes away; and what pages show of topics.

How such queues are sent to, received and redelivered is in tests/conformance/test_own_topics.py.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlencode

import pytest
import pytest_asyncio
from aiohttp import ClientSession
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import RecordsToDelete

import marq
from marq.client.receipt import Receipt
from marq.wire.markers import Acquire, LeftPayloads, Source
from marq.wire.names import log_name
from marq_worker.broker import EmbeddedBroker
from tests.worker.conftest import client_of
from tests.worker.handling import Handlers
from tests.worker.harness import LIMIT_SECONDS, Namespace, Worker, admin, delete_topic, eventually, make_topic, take
from tests.worker.shell import Shell

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def topic(namespace: Namespace, queues: marq.Queues, queue: str) -> AsyncIterator[str]:
    """The topic of the test's queue."""
    name = f"{namespace.names.prefix}-{queue}"
    await make_topic(namespace.bootstrap_servers, name, 3)
    await queues.change(queue, topic=name)
    yield name
    # A topic that no longer exists would end other clients.
    await queues.reset(queue)


async def test_a_page_shows_records_of_queues_and_of_no_other_topic(
    namespace: Namespace, shared_worker: Worker, topic: str
) -> None:
    other = f"{namespace.names.prefix}-salaries"
    await make_topic(namespace.bootstrap_servers, other, 1)
    for name in (topic, other):
        await namespace.producer.send_and_wait(name, b"payload-of-somebody", partition=0)

    # The worker hears of the queue's topic a moment later.
    await eventually(
        lambda: shared_worker.page(f"/api/message?id={topic}/0/0"), lambda page: "payload-of-somebody" in page[1]
    )
    status, text = await shared_worker.page(f"/api/message?id={other}/0/0")
    assert (status, "payload-of-somebody" in text) == (200, False)


@pytest.mark.parametrize("how", ["deleted", "compacted", "reset"])
async def test_a_message_outlives_its_topic(
    namespace: Namespace, shared_worker: Worker, queues: marq.Queues, topic: str, queue: str, how: str
) -> None:
    await namespace.producer.send_and_wait(topic, b"value", key=b"customer")
    async with marq.Consumer(queue, **client_of(shared_worker), lease=600) as consumer:
        [message] = await consumer.receive(1, wait=LIMIT_SECONDS)
        if how == "deleted":
            await namespace.copied(topic)
            await delete_topic(namespace.bootstrap_servers, topic)
        elif how == "compacted":
            await namespace.alter(topic, {"cleanup.policy": "compact"})
        else:
            await queues.reset(queue)
        await message.release(0)

        [again] = await consumer.receive(1, wait=LIMIT_SECONDS)
        await again.ack()

    assert (again.value, again.key, again.attempt, again.id) == (b"value", b"customer", 2, message.id)


async def test_a_message_whose_record_was_removed_becomes_a_dead_letter_and_others_go_on(
    namespace: Namespace, shared_worker: Worker, topic: str, queue: str
) -> None:
    """Its consumer died, and retention was faster than the worker. A fetch there returns a later record."""
    first = await namespace.producer.send_and_wait(topic, b"removed", partition=0)
    later = await namespace.producer.send_and_wait(topic, b"kept", partition=0)
    async with admin(namespace.bootstrap_servers) as client:
        await client.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=later.offset)})

    columns = LeftPayloads([first.timestamp, later.timestamp])
    offsets = [first.offset, later.offset]
    await namespace.mark(Acquire(queue, 1, Source(topic, 0), offsets, 200, offsets[0], columns))

    # No consumer reads the queue: it would deliver the record, too.
    await eventually(
        lambda: shared_worker.queue(queue), lambda found: (found.get("gone"), found.get("redelivered")) == (1, 1)
    )
    [again] = [record for record in await namespace.records(namespace.names.messages) if record.key == queue.encode()]
    assert (again.value, dict(again.headers)["marq-attempt"]) == (b"kept", b"2")
    [dead] = [
        record for record in await namespace.records(namespace.names.dead_letters) if record.key == queue.encode()
    ]
    place = f"{topic}/0/{first.offset}"
    reason = f"lost, because the record is gone: {place} was removed before the tracker could copy it"
    headers = dict(dead.headers)
    assert (dead.value, headers["marq-reason"].decode(), headers["marq-id"].decode()) == (None, reason, place)
    assert f"record {place} was removed before its payload was copied" in shared_worker.log()
    async with Shell(shared_worker) as shell:
        assert f"1 message was {reason}" in (await shell("check", code=None)).out


async def test_log_pages_and_check_tell_that_a_topic_was_created_again(
    namespace: Namespace, shared_worker: Worker, topic: str, queue: str
) -> None:
    async with marq.Consumer(queue, **client_of(shared_worker), lease=600) as consumer:
        for value in (b"former", b"new"):
            await namespace.producer.send_and_wait(topic, value, partition=0)
            [message] = await consumer.receive(1, wait=LIMIT_SECONDS)
            assert message.value == value
            await message.ack()
            if value == b"former":
                await delete_topic(namespace.bootstrap_servers, topic)
                await make_topic(namespace.bootstrap_servers, topic, 3)
    sentence = f"its topic {topic} was deleted and created again, noticed "

    await eventually(lambda: shared_worker.page("/"), lambda page: f"Queue {queue}: {sentence}" in page[1])

    assert f"queue {queue}: topic {topic} was deleted and created again" in shared_worker.log()
    async with Shell(shared_worker) as shell:
        # Any code: on a slow machine, queues of other tests have had no consumer for too long.
        assert f"queue {queue}: {sentence}" in (await shell("check", code=None)).out


async def test_a_purge_skips_no_record_of_a_topic_that_is_created_again(
    namespace: Namespace, shared_worker: Worker, topic: str, queue: str
) -> None:
    for number in range(3):
        await namespace.producer.send_and_wait(topic, b"former %d" % number, partition=0)
    async with Shell(shared_worker) as shell:
        assert "3 messages purged" in (await shell("purge", queue, "--yes")).out
    await delete_topic(namespace.bootstrap_servers, topic)
    await make_topic(namespace.bootstrap_servers, topic, 3)

    for number in range(2):
        await namespace.producer.send_and_wait(topic, b"new %d" % number, partition=0)

    async with marq.Consumer(queue, **client_of(shared_worker), lease=600) as consumer:
        messages = await take(consumer, 2)
        assert {message.value for message in messages} == {b"new 0", b"new 1"}
        await consumer.ack(messages)


async def test_a_replay_and_a_purge_know_messages_of_both_topics(
    namespace: Namespace, shared_worker: Worker, queues: marq.Queues, topic: str, queue: str
) -> None:
    await queues.change(queue, backoff=[0.1])
    for key in (b"first", queue.encode(), None):
        await namespace.producer.send_and_wait(topic, b"value", key=key, partition=1)
    async with marq.Consumer(queue, **client_of(shared_worker), lease=600) as consumer:
        [first, *others] = await take(consumer, 3)
        await consumer.ack(others)
        await first.release()
        [again] = await take(consumer, 1)
        await again.ack()
        async with Shell(shared_worker) as shell:
            done = await shell.json("replay", queue, "--since", "1h", "--yes")
        replayed = await take(consumer, 3)
        await consumer.ack(replayed)

    assert (done["messages"], done["earlier_records"]) == (3, 1)
    assert {message.key for message in replayed} == {b"first", queue.encode(), None}
    await namespace.producer.send_and_wait(topic, b"unread", partition=0)
    await namespace.producer.send_and_wait(namespace.names.messages, b"unread", key=queue.encode())
    async with Shell(shared_worker) as shell:
        purged = await shell.json("purge", queue, "--yes")
    assert purged["waiting"] == 2
    assert len([record for record in await namespace.records(topic) if record.partition == 1]) == 3


@pytest_asyncio.fixture(loop_scope="session")
async def other(queues: marq.Queues, topic: str, queue: str) -> AsyncIterator[str]:
    """Another queue with the topic of the test's queue."""
    name = f"{queue}-too"
    await queues.change(name, topic=topic)
    yield name
    await queues.reset(name)


async def test_pages_and_commands_concern_the_message_of_one_queue_of_a_topic(
    namespace: Namespace, shared_worker: Worker, topic: str, queue: str, other: str
) -> None:
    async def story(number: int, **parameters: str) -> dict[str, Any]:
        status, text = await shared_worker.page(f"/api/message?{urlencode({'id': ids[number], **parameters})}")
        return {"status": None} if status != 200 else dict(json.loads(text))

    async def statuses(number: int) -> list[str]:
        return [(await story(number, queue=name))["status"] for name in (queue, other)]

    async def act(action: str, message_id: str) -> str:
        form = {"queue": queue, "id": message_id, "confirmed": "yes"}
        async with (
            ClientSession() as session,
            session.post(f"{shared_worker.url}/actions/{action}", data=form, allow_redirects=False) as answer,
        ):
            return answer.headers["Location"]

    ids = [f"{topic}/0/{number}" for number in range(2)]
    for _ in ids:
        await namespace.producer.send_and_wait(topic, b"value", partition=0)
    async with (
        marq.Consumer(queue, **client_of(shared_worker), lease=600) as first,
        marq.Consumer(other, **client_of(shared_worker), lease=600) as second,
    ):
        for consumer in (first, second):
            messages = {message.id: message for message in await take(consumer, 2)}
            await messages[ids[0]].release(600)
        await eventually(lambda: statuses(0), lambda found: found == ["delayed until its redelivery"] * 2)
        await eventually(lambda: statuses(1), lambda found: found == ["in flight"] * 2)

        assert await act("cancel", ids[0]) == "/?did=cancel&done=1&late=0"
        assert await act("cancel", ids[0]) == "/?did=cancel&done=0&late=1"
        await eventually(lambda: statuses(0), lambda found: found == ["cancelled", "delayed until its redelivery"])
        # A RENEW says that user code has the message, if that takes a while.
        stories = [
            [event["kind"] for event in (await story(0, queue=name))["events"] if event["kind"] != "RENEW"]
            for name in (queue, other)
        ]
        assert (stories[0][:2], stories[0][-1]) == (["ACQUIRE", "RELEASE"], "ANSWERED")
        assert stories[1] == ["ACQUIRE", "RELEASE"]
        several = await story(0)
        assert (several["status"], several["queues"], several["events"]) == ("several queues", [queue, other], [])

        assert await act("release", ids[1]) == "/?did=release&done=1&late=0"
        [again] = await take(first, 1)
        assert (again.id, await statuses(1)) == (ids[1], ["in flight", "in flight"])
        place = Receipt.of((await story(1, queue=other))["now"]["place"])
        # It names the incarnation of the topic, too.
        assert (log_name(place.topic), place.topic == topic, place.offset) == (topic, False, 1)
        await again.ack()

        async with Shell(shared_worker) as shell:
            assert "not waiting" in (await shell("deliver-now", ids[0], "--queue", queue, code=1)).out
            assert (await shell("deliver-now", ids[0], "--queue", other)).out == f"{ids[0]}: due now\n"
        [again] = await take(second, 1)
        assert (again.id, again.attempt) == (ids[0], 2)
        await again.ack()


async def test_a_handler_gets_no_records_of_aborted_transactions_and_they_do_not_count_as_waiting(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker, handlers: Handlers
) -> None:
    topic = f"own-{uuid.uuid4().hex}"
    await make_topic(broker.bootstrap_servers, topic, 1)
    settings = f'[queues.orders]\nhandler = "handlers_of_the_test:coroutine"\ntopic = "{topic}"\n'
    worker = await new_worker(queues=settings, environment=handlers.environment).start().ready()
    program = AIOKafkaProducer(bootstrap_servers=broker.bootstrap_servers, transactional_id=topic)
    await program.start()
    try:
        for value, end in ((b"aborted", program.abort_transaction), (b"committed", program.commit_transaction)) * 2:
            await program.begin_transaction()
            await program.send_and_wait(topic, value, partition=0)
            await end()
    finally:
        await program.stop()

    await eventually(lambda: worker.queue("orders"), lambda found: (found.get("acked"), found.get("waiting")) == (2, 0))
    assert [note["value"] for note in await handlers.noted("orders")] == ["committed"] * 2
