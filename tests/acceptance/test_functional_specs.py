"""What the tests of our two models assert, in our words: the 8 functional specs of kafka-mq-go and the 4 tests of kmq.

"Nothing comes" means here what it means there: a receive that waits for twice the lease returns without a message.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest

import marq
from tests.acceptance.receiving import LIMIT_SECONDS, finished, nothing_comes, receive, receive_one
from tests.worker.harness import Installation, Worker, eventually, header

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE = 3.0
QUEUES = """
[queues.four-times]
max_attempts = 4
"""

Make = Callable[..., marq.Consumer]


# --- kafka-mq-go ------------------------------------------------------------------------------------------------------


async def test_a_receive_that_ends_before_a_message_comes_gives_nothing_and_no_error(make_consumer: Make) -> None:
    async with make_consumer(lease=LEASE) as consumer:
        assert await consumer.receive(wait=0.1) == []


async def test_an_acked_message_never_comes_again(
    producer: marq.Producer, make_consumer: Make, worker: Worker, queue: str
) -> None:
    await producer.send(queue, b"payload")

    async with make_consumer(lease=LEASE) as consumer:
        message = await receive_one(consumer)
        await message.ack()
        await finished(worker, queue, acquired=1, acked=1)
        await nothing_comes(consumer, seconds=2 * LEASE)

    assert message.value == b"payload"
    assert (await worker.queue(queue))["redelivered"] == 0


async def test_a_rejected_message_never_comes_again_and_is_a_dead_letter(
    producer: marq.Producer, make_consumer: Make, worker: Worker, installation: Installation, queue: str
) -> None:
    receipt = await producer.send(queue, b"payload")

    async with make_consumer(lease=LEASE) as consumer:
        message = await receive_one(consumer)
        await message.reject("no use")
        await finished(worker, queue, rejected=1, dead=1)
        await nothing_comes(consumer, seconds=2 * LEASE)

    [letter] = [r for r in await installation.records(worker.names.dead_letters) if r.key == queue.encode()]
    assert letter.value == message.value == b"payload"
    assert header(letter)["marq-id"] == receipt.id.encode()
    assert header(letter)["marq-reason"] == b"no use"


async def test_a_released_message_comes_again_at_once_and_after_its_ack_never(
    producer: marq.Producer, make_consumer: Make, worker: Worker, queue: str
) -> None:
    await producer.send(queue, b"payload")

    # A lease that can't be what brings it back.
    async with make_consumer(lease=60) as consumer:
        first = await receive_one(consumer)
        await first.release(0)
        second = await receive_one(consumer, limit=2 * LEASE)
        await second.ack()
        await finished(worker, queue, acquired=2, acked=1, released=1)
        await nothing_comes(consumer, seconds=2 * LEASE)

    assert (first.attempt, second.attempt) == (1, 2)
    assert second.value == b"payload"
    assert second.id == first.id


async def test_two_consumers_share_what_one_producer_sends_and_each_gets_some(
    producer: marq.Producer, make_consumer: Make, worker: Worker, queue: str
) -> None:
    taken: list[list[bytes]] = [[], []]

    warming = 0

    async def serve(consumer: marq.Consumer, mine: list[bytes]) -> None:
        async for message in consumer:
            async with message:
                mine.append(message.value)

    async def both_have_some() -> bool:
        nonlocal warming
        warming += 2
        await producer.send_many(queue, [b"first"] * 2)
        return all(taken)

    # A short session is one whose members learn soon that another one has come.
    one, two = make_consumer(lease=LEASE, session_timeout=6), make_consumer(lease=LEASE, session_timeout=6)
    async with one, two, asyncio.TaskGroup() as serving:
        tasks = [serving.create_task(serve(*pair)) for pair in zip((one, two), taken, strict=True)]
        # From here on each of them has a partition.
        await eventually(both_have_some)
        for number in range(500):
            await producer.send(queue, b"%d" % number)
        await finished(worker, queue, acked=500 + warming, redelivered=0)
        for task in tasks:
            task.cancel()

    numbered = [[value for value in mine if value != b"first"] for mine in taken]
    assert sorted(map(int, [*numbered[0], *numbered[1]])) == list(range(500))
    assert all(numbered)


async def test_two_queues_on_one_topic_see_only_their_own(
    producer: marq.Producer, make_consumer: Make, worker: Worker, queue: str
) -> None:
    b, c = f"{queue}-b", f"{queue}-c"
    await producer.send(b, b"for b")
    await producer.send(c, b"for c")

    async with make_consumer(b, lease=LEASE) as of_b, make_consumer(c, lease=LEASE) as of_c:
        message_b, message_c = await receive_one(of_b), await receive_one(of_c)
        await message_b.ack()
        await message_c.ack()
        await asyncio.gather(*[finished(worker, name, acquired=1, acked=1) for name in (b, c)])
        await nothing_comes(of_b, of_c, seconds=2 * LEASE)

    assert (message_b.queue, message_b.value) == (b, b"for b")
    assert (message_c.queue, message_c.value) == (c, b"for c")


async def test_of_two_queues_one_acked_and_one_rejected_nothing_comes_again(
    producer: marq.Producer, make_consumer: Make, worker: Worker, queue: str
) -> None:
    b, c = f"{queue}-b", f"{queue}-c"
    await producer.send(b, b"for b")
    await producer.send(c, b"for c")

    async with make_consumer(b, lease=LEASE) as of_b, make_consumer(c, lease=LEASE) as of_c:
        await (await receive_one(of_b)).ack()
        await (await receive_one(of_c)).reject("no use")
        await asyncio.gather(finished(worker, b, acked=1, dead=0), finished(worker, c, acked=0, dead=1))
        await nothing_comes(of_b, of_c, seconds=2 * LEASE)


async def test_of_two_queues_what_one_releases_comes_again_to_it_alone(
    producer: marq.Producer, make_consumer: Make, worker: Worker, queue: str
) -> None:
    b, c = f"{queue}-b", f"{queue}-c"
    await producer.send(b, b"for b")
    await producer.send(c, b"for c")

    async with make_consumer(b, lease=LEASE) as of_b, make_consumer(c, lease=LEASE) as of_c:
        await (await receive_one(of_b)).release(0)
        await (await receive_one(of_c)).ack()
        again = await receive_one(of_b, limit=2 * LEASE)
        await again.ack()
        await asyncio.gather(finished(worker, b, acked=1, redelivered=1), finished(worker, c, acked=1, redelivered=0))
        await nothing_comes(of_b, of_c, seconds=2 * LEASE)

    assert (again.value, again.attempt) == (b"for b", 2)


# --- kmq --------------------------------------------------------------------------------------------------------------


async def test_messages_that_are_dropped_come_again_until_all_are_processed(
    producer: marq.Producer, make_consumer: Make, worker: Worker, queue: str
) -> None:
    chance = random.Random(21)
    await producer.send_many(queue, [b"%d" % number for number in range(21)])
    received: Counter[int] = Counter()
    processed: Counter[int] = Counter()

    async with make_consumer(lease=LEASE, max_lease=LEASE) as consumer:
        async with asyncio.timeout(LIMIT_SECONDS):
            while len(processed) < 21:
                for message in await consumer.receive(wait=1):
                    number = int(message.value)
                    received[number] += 1
                    # The first is always dropped once, whatever chance says.
                    if chance.random() < 0.2 or (number == 0 and message.attempt == 1):
                        continue
                    await message.ack(wait=False)
                    processed[number] += 1
        await finished(worker, queue, acked=21)

    assert sorted(processed) == list(range(21))
    assert received.total() > processed.total()
    assert processed.total() == 21


async def test_a_message_that_is_never_acked_comes_as_often_as_it_may_and_then_is_a_dead_letter(
    producer: marq.Producer, make_consumer: Make, worker: Worker, installation: Installation
) -> None:
    queue = "four-times"
    await producer.send_many(queue, [b"%d" % number for number in range(7)])
    received: Counter[int] = Counter()

    async with make_consumer(queue, lease=LEASE, max_lease=LEASE) as consumer:

        async def take() -> dict[str, int]:
            for message in await consumer.receive(wait=0.2):
                received[int(message.value)] += 1
                if int(message.value) % 3:
                    await message.ack(wait=False)
            return await worker.queue(queue)

        await eventually(take, lambda found: found.get("dead") == 3)
        await finished(worker, queue, acked=4, dead=3)

    assert received == {0: 4, 1: 1, 2: 1, 3: 4, 4: 1, 5: 1, 6: 4}
    letters = [r.value for r in await installation.records(worker.names.dead_letters) if r.key == queue.encode()]
    assert sorted(letters) == [b"0", b"3", b"6"]


async def test_of_messages_with_different_leases_only_those_come_whose_lease_is_over(
    producer: marq.Producer, make_consumer: Make, worker: Worker, queue: str
) -> None:
    await producer.send_many(queue, [b"short", b"long"])

    async with make_consumer(lease=LEASE, max_lease=LEASE) as consumer:
        held = {message.value: message for message in await receive(consumer, 2)}
        await held[b"long"].renew(LEASE * 6)
        again = await receive_one(consumer)
        still_held = await eventually(lambda: worker.queue(queue), lambda found: found["redelivered"])
        await again.ack()
        await held[b"long"].ack()
        await finished(worker, queue, acked=2, redelivered=1)

    assert again.value == b"short"
    assert (still_held["expired"], still_held["acked"]) == (1, 0)


async def test_messages_whose_leases_are_over_come_in_the_order_in_which_they_ended(
    producer: marq.Producer, make_consumer: Make, worker: Worker, queue: str
) -> None:
    await producer.send_many(queue, [b"0", b"1", b"2", b"3"])

    async with make_consumer(lease=LEASE, max_lease=LEASE) as consumer:
        held = {int(message.value): message for message in await receive(consumer, 4)}
        await asyncio.gather(held[0].renew(LEASE * 2.5), held[1].renew(LEASE * 2.5))
        again = []
        for _ in held:
            message = await receive_one(consumer)
            await message.ack()
            again.append(message.value)
        await finished(worker, queue, acked=4, redelivered=4)

    assert sorted(again[:2]) == [b"2", b"3"]
    assert sorted(again[2:]) == [b"0", b"1"]
