"""What is sent arrives as it was sent, and what can't be sent is refused before anything is."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

import marq
from tests.conformance.backend import Backend
from tests.conformance.receiving import nothing_comes, take, take_one

#: A broker's default limit, less the room that redelivery needs.
LARGEST = 1_048_588 - 1_024


async def test_a_message_is_what_was_sent(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue, lease=30) as consumer:
        receipt = await backend.producer.send(queue, b"\x00value", headers={"tenant": b"acme", "empty": None})

        message = await take_one(consumer)

        assert (message.queue, message.value, message.body) == (queue, b"\x00value", b"\x00value")
        assert message.headers == {"tenant": b"acme", "empty": None}
        assert message.id == receipt.id == f"{backend.names.messages}/{message.partition}/{message.offset}"
        assert (message.attempt, message.key) == (1, None)
        assert isinstance(message.token, str)
        assert 0 < len(message.token) < 200
        assert receipt.queue == queue
        assert abs(message.sent_at - datetime.now(UTC)) < timedelta(minutes=10)
        assert timedelta(0) < message.lease_expires_at - message.sent_at < timedelta(minutes=10)
        await message.ack()


async def test_receipts_come_in_the_order_of_the_values(backend: Backend) -> None:
    queue, values = backend.new_name(), [b"%d" % number for number in range(50)]
    async with backend.consumer(queue) as consumer:
        receipts = await backend.producer.send_many(queue, values, headers=[("n", b"1"), ("n", b"2")])

        messages = {message.id: message for message in await take(consumer, 50)}

        assert [messages[receipt.id].value for receipt in receipts] == values
        assert {message.headers["n"] for message in messages.values()} == {b"2"}
        await consumer.ack(messages.values())


async def test_headers_sent_as_text_arrive_as_bytes(backend: Backend) -> None:
    queue, headers = backend.new_name(), {"tenant": "Zoë", "id": b"\xff", "empty": None}
    async with backend.consumer(queue) as consumer:
        await backend.producer.send(queue, b"one", headers=headers)
        await backend.producer.send(queue, b"later", headers=headers, delay=0.1)
        await backend.producer.send_many(queue, [b"many"], headers=headers.items())

        messages = await take(consumer, 3)

        assert {message.value for message in messages} == {b"one", b"later", b"many"}
        for message in messages:
            assert message.headers == {"tenant": "Zoë".encode(), "id": b"\xff", "empty": None}
        await consumer.ack(messages)


async def test_an_empty_send_many_sends_nothing(backend: Backend) -> None:
    assert await backend.producer.send_many(backend.new_name(), []) == []


async def test_a_message_to_several_queues_is_one_of_its_own_in_each(backend: Backend) -> None:
    one, other = backend.new_name(), backend.new_name()
    async with backend.consumer(one) as first, backend.consumer(other) as second:
        receipts = await backend.producer.send([one, other], b"both")

        messages = [await take_one(first), await take_one(second)]

        assert [receipt.queue for receipt in receipts] == [one, other]
        assert [message.id for message in messages] == [receipt.id for receipt in receipts]
        assert [message.value for message in messages] == [b"both", b"both"]
        await messages[0].reject("of one only")
        await messages[1].ack()
    await backend.statistics(one, dead_lettered=1)
    await backend.statistics(other, acked=1)


async def test_what_is_refused_says_why_and_nothing_is_sent(backend: Backend) -> None:
    queue, producer = backend.new_name(), backend.producer
    async with backend.consumer(queue) as consumer:
        with pytest.raises(TypeError, match=f"queue '{queue}', item 1: a value must be bytes, not str"):
            await producer.send_many(queue, [b"good", "bad"])
        with pytest.raises(TypeError, match="must be bytes, not dict"):
            await producer.send(queue, {"a": 1})
        with pytest.raises(marq.ConfigError, match=r"'marq-id'.*are reserved"):
            await producer.send(queue, b"x", headers={"marq-id": b"1"})
        with pytest.raises(marq.ConfigError, match="expected a value of type str, bytes or None, not int"):
            await producer.send(queue, b"x", headers={"a": 7})  # type: ignore[dict-item]
        with pytest.raises(marq.ConfigError, match="twice"):
            await producer.send([queue, queue], b"x")
        with pytest.raises(marq.ConfigError, match="must not be empty"):
            await producer.send([queue, ""], b"x")
        with pytest.raises(marq.ConfigError, match="is empty"):
            await producer.send([], b"x")
        with pytest.raises(marq.ConfigError, match=r"call it for each|send\(queues, value\)"):
            await producer.send_many([queue], [b"x"])  # type: ignore[arg-type]

        await producer.send(queue, b"good")
        assert [message.value for message in await take(consumer)] == [b"good"]


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201, "\ud800"])
async def test_names_that_are_not_allowed(backend: Backend, name: str) -> None:
    with pytest.raises(marq.ConfigError, match="queue"):
        await backend.producer.send(name, b"x")
    with pytest.raises(marq.ConfigError, match="queue"):
        backend.consumer(name)
    with pytest.raises(marq.ConfigError, match="group"):
        backend.consumer(group=name)


async def test_a_message_that_is_too_large_is_not_sent_and_the_largest_survives_redelivery(backend: Backend) -> None:
    queue = backend.new_name()
    room = LARGEST - len(queue)
    with pytest.raises(marq.MessageTooLarge, match=f"queue '{queue}'"):
        await backend.producer.send(queue, b"x" * (room + 1))
    with pytest.raises(marq.MessageTooLarge, match="item 1"):
        await backend.producer.send_many(queue, [b"x", b"x" * (room + 1)])
    async with backend.consumer(queue) as consumer:
        await backend.producer.send(queue, b"x" * room)

        await (await take_one(consumer)).release(0)
        again = await take_one(consumer)

        assert (again.attempt, len(again.value)) == (2, room)
        await again.ack()


async def test_values_of_a_codec_and_what_it_can_not_decode_becomes_a_dead_letter(backend: Backend) -> None:
    queue = backend.new_name()
    async with (
        backend.new_producer(codec=marq.JSON) as producer,
        backend.consumer(queue, codec=marq.JSON) as consumer,
    ):
        await producer.send(queue, {"to": "ä"})
        with pytest.raises(TypeError, match="JSON has no set"):
            await producer.send(queue, {"not", "json"})

        message = await take_one(consumer)

        assert (message.value, message.body) == ({"to": "ä"}, '{"to":"ä"}'.encode())
        await message.ack()
        await backend.producer.send(queue, b"{secret")
        async with await take_one(consumer) as message:
            message.value  # noqa: B018

    [letter] = await backend.dead_letters(queue)
    assert letter.body == b"{secret"
    assert letter.reason.startswith("the value (7 bytes) is not JSON")


async def test_values_of_a_pydantic_model(backend: Backend) -> None:
    pydantic = pytest.importorskip("pydantic")
    order = pydantic.create_model("Order", number=(int, ...))
    queue, codec = backend.new_name(), marq.Model(order)
    async with backend.new_producer(codec=codec) as producer, backend.consumer(queue, codec=codec) as consumer:
        await producer.send(queue, order(number=7))
        await backend.producer.send(queue, b'{"number": "x"}')

        for message in await take(consumer, 2):
            async with message:
                assert message.value == order(number=7)

    [letter] = await backend.dead_letters(queue)
    assert letter.reason == "the value (15 bytes) is not a valid Order: number: int_parsing"


async def test_records_of_any_program_are_messages(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        await backend.produce(backend.names.messages, b"not ours", key=b"somebody else's")
        await backend.produce(backend.names.messages, b"not ours either")
        ids = [
            await backend.produce(backend.names.messages, b"ours", queue.encode(), [("a", b"1"), ("a", b"2")]),
            await backend.produce(backend.names.messages, None, queue.encode()),
        ]

        messages = await take(consumer, 2)

        assert [(message.id, message.body) for message in messages] == list(zip(ids, [b"ours", b""], strict=True))
        assert messages[0].headers == {"a": b"2"}
        for message in messages:
            await message.release(0)
        again = {message.id: message for message in await take(consumer, 2)}
        assert [again[identity].body for identity in ids] == [b"ours", b""]
        await consumer.ack(again.values())
    topic = backend.names.messages
    records = [each for each in await backend.records(topic) if each.key == queue.encode()]
    copies = [each for each in records if f"{topic}/{each.partition}/{each.offset}" not in ids]
    assert {each.value for each in copies} == {b"ours", None}, "a record without a value stays one"
    assert [pair for each in copies if each.value for pair in each.headers][:2] == [("a", b"1"), ("a", b"2")]


async def test_a_message_that_its_topic_would_not_take_back_becomes_a_dead_letter(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        # It fits, but not with the headers of a redelivery.
        sent = await backend.produce(backend.names.messages, b"x" * (LARGEST + 900 - len(queue)), queue.encode())
        await (await take_one(consumer)).release(0)

        [letter] = await backend.dead_letters(queue)

    assert (letter.id, letter.attempt, len(letter.body)) == (sent, 1, LARGEST + 900 - len(queue))
    assert letter.reason.startswith("too large for the messages topic with the headers")


async def test_namespaces_do_not_see_each_other(backend: Backend) -> None:
    queue, elsewhere = backend.new_name(), {"prefix": backend.new_name("other")}
    async with (
        backend.new_producer(**elsewhere) as producer,
        backend.consumer(queue, **elsewhere) as there,
        backend.consumer(queue) as here,
    ):
        await producer.send(queue, b"there")
        await backend.producer.send(queue, b"here")

        assert [message.value for message in await take(here)] == [b"here"]
        assert [message.value for message in await take(there)] == [b"there"]
        await nothing_comes(backend, here, there)


async def test_a_client_that_is_not_started_says_so(backend: Backend) -> None:
    producer, consumer = backend.new_producer(), backend.consumer("queue")
    with pytest.raises(marq.MarqError, match="the producer is not started"):
        await producer.send("queue", b"x")
    with pytest.raises(marq.MarqError, match="not started"):
        await consumer.receive()
    await producer.stop()
    await consumer.stop()


async def test_a_producer_may_be_started_and_stopped_again(backend: Backend) -> None:
    producer = backend.new_producer()
    for _ in range(2):
        await producer.start()
        await producer.start()
        await producer.send(backend.new_name(), b"x")
        await producer.stop()
        await producer.stop()


async def test_a_thread_without_an_event_loop_sends_with_the_synchronous_producer(backend: Backend) -> None:
    queue = backend.new_name()

    def send() -> list[str]:
        with marq.SyncProducer(**backend.client) as producer:
            receipts = [producer.send(queue, b"one"), *producer.send_many(queue, [b"two", b"three"])]
            return [receipt.id for receipt in receipts]

    async with backend.consumer(queue) as consumer:
        ids = await asyncio.to_thread(send)

        messages = await take(consumer, 3)

        assert {message.id for message in messages} == set(ids)
        await consumer.ack(messages)
