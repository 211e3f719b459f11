"""Sending with ordering keys: the header, the partition, and what is refused."""

from __future__ import annotations

import asyncio
import operator
from typing import Any

import pytest

import marq
from marq.producer.sending import default_partition
from marq.producer.shared import SharedProducer
from marq.settings.ordering_keys import partition_of
from tests.conformance.backend import Backend, Stored
from tests.conformance.receiving import nothing_comes, served, take
from tests.worker.harness import eventually

KEYS = ["customer-1", "customer-2", "customer-3", "customer-4", "customer-5", b"\x00\xff"]


def of(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


async def records(backend: Backend, queue: str, topic: str | None = None) -> list[Stored]:
    name = queue.encode()
    return [each for each in await backend.records(topic or backend.names.messages) if topic or each.key == name]


async def partitions(backend: Backend, queue: str) -> tuple[int, ...]:
    """The fixed partitions of a queue, which its first keyed message waits for."""
    async with marq.Queues(**backend.client) as queues:
        placement = queues.definitions.placement(queue)
    assert placement.takes_keys
    return placement.sends or ()


@pytest.mark.parametrize("settings", [{}, {"partitions": 1}])
async def test_a_key_travels_in_a_header_and_decides_the_partition(backend: Backend, settings: dict[str, Any]) -> None:
    queue = await backend.new_queue(ordering="key", **settings)

    receipts = [await backend.producer.send(queue, of(key), ordering_key=key) for key in KEYS]

    lives_on = await partitions(backend, queue)
    sent = await records(backend, queue)
    assert {each.value: each.headers for each in sent} == {of(key): (("marq-ordering-key", of(key)),) for key in KEYS}
    assert {each.value: each.partition for each in sent} == {of(key): partition_of(of(key), lives_on) for key in KEYS}
    assert [receipt.partition for receipt in receipts] == [partition_of(of(key), lives_on) for key in KEYS]


async def test_calls_of_one_producer_keep_their_order_even_before_the_queue_is_known(backend: Backend) -> None:
    queue = await backend.new_queue(ordering="key")
    async with backend.new_producer() as producer:
        calls = [
            producer.send_many(queue, [b"%d" % (number + item) for item in range(5)], ordering_key="k")
            if number % 50 == 0
            else producer.send(queue, b"%d" % number, ordering_key="k")
            for number in range(200)
            if number % 50 == 0 or number % 50 > 4
        ]
        await asyncio.gather(*calls)

    sent = await records(backend, queue)
    assert [int(each.value or b"") for each in sorted(sent, key=lambda each: each.offset)] == list(range(200))
    assert len({each.partition for each in sent}) == 1


@pytest.mark.parametrize("kind", [marq.Producer, SharedProducer])
async def test_many_messages_do_not_overtake_an_earlier_one(backend: Backend, kind: type[marq.Producer]) -> None:
    queue = await backend.new_queue(ordering="key")
    async with kind(**backend.client) as producer:
        await producer.send(queue, b"0", ordering_key="k")

        await asyncio.gather(
            # Without a key: while its batch is on the way, a shared producer waits for more messages.
            producer.send(queue, b"other"),
            producer.send(queue, b"1", ordering_key="k"),
            producer.send_many(queue, [b"2", b"3"], ordering_key="k"),
            producer.send(queue, b"4", ordering_key="k"),
        )

    sent = sorted(await records(backend, queue), key=lambda each: each.offset)
    assert [each.value for each in sent if each.headers] == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_message_without_a_key_has_no_header(backend: Backend) -> None:
    queue = await backend.new_queue(ordering="key")

    await backend.producer.send(queue, b"1")
    await backend.producer.send_many(queue, [b"2", b"3"])

    assert {each.value: each.headers for each in await records(backend, queue)} == {b"1": (), b"2": (), b"3": ()}


async def test_several_queues_get_the_key(backend: Backend) -> None:
    first, second = await backend.new_queue(ordering="key"), await backend.new_queue(ordering="key")

    await backend.producer.send([first, second], b"1", ordering_key="k", headers={"own": "x"})

    for queue in (first, second):
        [record] = await records(backend, queue)
        assert record.headers == (("own", b"x"), ("marq-ordering-key", b"k"))


async def test_a_delayed_message_goes_to_the_partition_of_its_key_when_it_is_due(backend: Backend) -> None:
    queue = await backend.new_queue(ordering="key")
    for key in KEYS:
        await backend.producer.send(queue, of(key), ordering_key=key, delay=0.1)

    async with backend.consumer(queue) as consumer:
        messages = await take(consumer, len(KEYS))
        await consumer.ack(messages)

    lives_on = await partitions(backend, queue)
    due = await records(backend, queue)
    assert {each.value: each.partition for each in due} == {of(key): partition_of(of(key), lives_on) for key in KEYS}
    assert all(("marq-ordering-key", each.value) in each.headers for each in due)


async def test_in_its_own_topic_the_key_is_the_record_key_as_of_any_kafka_producer(backend: Backend) -> None:
    topic = await backend.create_topic(3)
    queue = await backend.new_queue(ordering="key", topic=topic)

    for key in KEYS:
        await backend.producer.send(queue, of(key), ordering_key=key)
    await backend.producer.send_many(queue, [b"a", b"b"], ordering_key="many")
    with pytest.raises(marq.ConfigError, match="ordering_key cannot be combined with delay or deduplication_id in"):
        await backend.producer.send(queue, b"x", ordering_key="k", delay=1)

    sent = await records(backend, queue, topic)
    assert all(each.headers == () for each in sent)
    assert {(each.value, each.key, each.partition) for each in sent} == {
        *((of(key), of(key), default_partition(of(key), 3)) for key in KEYS),
        *((value, b"many", default_partition(b"many", 3)) for value in (b"a", b"b")),
    }


@pytest.mark.parametrize(
    ("key", "said"),
    [("", "the key is empty"), ("x" * 1025, "the key has 1025 bytes"), (7, "expected a key of type str or bytes")],
)
async def test_a_wrong_key_is_refused(backend: Backend, key: Any, said: str) -> None:
    queue = await backend.new_queue(ordering="key")

    for send in (backend.producer.send(queue, b"x", ordering_key=key),
                 backend.producer.send_many(queue, [b"x"], ordering_key=key)):  # fmt: skip
        with pytest.raises(marq.ConfigError, match=f"ordering_key: {said}"):
            await send


async def test_a_key_needs_a_queue_with_ordering(backend: Backend) -> None:
    queue = await backend.new_queue()

    for send in (backend.producer.send(queue, b"x", ordering_key="k"),
                 backend.producer.send([queue], b"x", ordering_key="k"),
                 backend.producer.send_many(queue, [b"x"], ordering_key="k")):  # fmt: skip
        with pytest.raises(marq.ConfigError, match=f'queue {queue!r}: ordering_key needs the setting ordering = "key"'):
            await send
    with pytest.raises(marq.ConfigError, match="reserved"):
        await backend.producer.send(queue, b"x", headers={"marq-ordering-key": "k"})


async def test_an_ordered_queue_with_messages_keeps_its_ordering_and_its_partitions(backend: Backend) -> None:
    queue = await backend.new_queue(ordering="key")
    await backend.producer.send(queue, b"x", ordering_key="k")

    for change in ({"ordering": "none"}, {"partitions": 1}, {"ordering": None}):
        with pytest.raises(
            marq.ConfigError, match=f"queue {queue!r}: (ordering|partitions) can't change while .*1 wait"
        ):
            await backend.queues.change(queue, **change)  # type: ignore[arg-type]
    with pytest.raises(marq.ConfigError, match="ordering can't change"):
        await backend.queues.reset(queue)
    async with backend.consumer(queue) as consumer:
        [message] = await take(consumer, 1)
        with pytest.raises(marq.ConfigError, match=r"partitions can't change while .*1 in flight"):
            await backend.queues.change(queue, partitions=1)
        await message.ack()
    await backend.statistics(queue, acked=1)

    assert (await backend.queues.change(queue, partitions=1)).partitions == 1
    assert (await backend.queues.change(queue, ordering="none", lease=5)).ordering == "none"


async def test_a_delayed_message_keeps_the_settings_that_decide_its_place(backend: Backend) -> None:
    queue = await backend.new_queue(ordering="key")
    receipt = await backend.producer.send(queue, b"x", ordering_key="k", delay=600)

    for change in ({"ordering": "none"}, {"partitions": 1}):
        with pytest.raises(marq.ConfigError, match=r"can't change while .*1 delayed"):
            await backend.queues.change(queue, **change)  # type: ignore[arg-type]
    await backend.producer.cancel(receipt)

    assert (await backend.queues.change(queue, partitions=1)).partitions == 1


async def test_messages_that_ended_behind_a_blocked_key_are_not_delivered_again_without_ordering(
    backend: Backend,
) -> None:
    log = backend.queues._follower._log
    queue = await backend.new_queue(ordering="key", max_attempts=1, on_dead_letter="block")
    blocking = await backend.producer.send(queue, b"blocks", ordering_key="k")
    for key in KEYS:
        await backend.producer.send(queue, b"ends", ordering_key=key)
    async with backend.consumer(queue) as consumer:
        for message in await take(consumer, 1 + len(KEYS)):
            await (message.reject("no") if message.value == b"blocks" else message.ack())
    await backend.statistics_of_open(queue, acked=len(KEYS))
    assert await backend.producer.cancel(blocking)
    await backend.statistics(queue, cancelled=1)

    unordered = {"ordering": "none", "on_dead_letter": None}
    with pytest.raises(marq.ConfigError, match=r"ordering can't change yet, because \d finished messages would be"):
        await backend.queues.change(queue, **unordered)  # type: ignore[arg-type]
    async with served(backend.consumer(queue)) as receiving:
        await backend.advance(backend.never_s)
        # Until the consumer has committed, the change is refused like the first one.
        await eventually(lambda: log.messages_of(queue, backend.queues.definitions), operator.not_)
    assert receiving.seen == []
    await backend.queues.change(queue, **unordered)  # type: ignore[arg-type]

    async with backend.consumer(queue) as consumer:
        await nothing_comes(backend, consumer)


async def test_settings_that_ordering_excludes_are_refused(backend: Backend) -> None:
    queue = await backend.new_queue(ordering="key")

    for change in ({"delivery": "at-most-once"}, {"delay": 5}, {"dead_letter": False, "on_dead_letter": "block"}):
        with pytest.raises(marq.ConfigError, match=f"queue {queue!r}: .* cannot be combined with o"):
            await backend.queues.change(queue, **change)  # type: ignore[arg-type]
    with pytest.raises(marq.ConfigError, match=r'on_dead_letter = "block" .* has no effect without ordering = "key"'):
        await backend.queues.change(backend.new_name(), on_dead_letter="block")
