"""Limits, fairness and priorities: how many messages run at a time, how many begin, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack

import pytest

import marq
from tests.conformance.backend import Backend
from tests.conformance.receiving import nothing_comes, running, take, take_one


class Watched:
    """A handler that notes how many of its calls run at a time, in all and for each value; it holds each for a while.

    ``together``: how many messages of a value have to run at a time before the first of them ends.
    """

    def __init__(self, backend: Backend, hold_s: float = 0.05, together: Mapping[bytes, int] | None = None) -> None:
        self.now_s, self.hold_s = backend.now_s, hold_s
        self.together = {value: (count, asyncio.Event()) for value, count in (together or {}).items()}
        self.running = Counter[bytes]()
        self.most, self.most_of_key = 0, Counter[bytes]()
        self.done: list[bytes] = []
        self.begun_s: list[float] = []

    async def __call__(self, message: marq.Message) -> None:
        self.begun_s.append(self.now_s())
        value = message.value
        self.running[value] += 1
        self.most = max(self.most, self.running.total())
        self.most_of_key[value] = max(self.most_of_key[value], self.running[value])
        try:
            if value in self.together:
                count, all_run = self.together[value]
                if self.running[value] == count:
                    all_run.set()
                await all_run.wait()
            await asyncio.sleep(self.hold_s)
        finally:
            self.running[value] -= 1
        self.done.append(value)


async def test_a_queue_runs_no_more_messages_than_its_limit(backend: Backend) -> None:
    queue = await backend.new_queue(limits={"concurrency": 3}, partitions=1)
    await backend.producer.send_many(queue, [b"x"] * 20)
    watched, consumer = Watched(backend, together={b"x": 3}), backend.consumer(queue)

    async with running(consumer, lambda: consumer.run(watched, concurrency=20)):
        await backend.until(lambda: len(watched.done) == 20)

    assert watched.most == 3
    await backend.statistics(queue, acked=20, redelivered=0)


async def test_each_key_has_its_own_limit_and_stops_no_other(backend: Backend) -> None:
    queue = await backend.new_queue(limits={"per_key": {"concurrency": 2}})
    for key in ("a", "b", "c"):
        await backend.producer.send_many(queue, [key.encode()] * 6, ordering_key=key)
    await backend.producer.send_many(queue, [b"none"] * 6)
    watched, consumer = Watched(backend, together={b"none": 3}), backend.consumer(queue)

    async with running(consumer, lambda: consumer.run(watched, concurrency=50)):
        await backend.until(lambda: len(watched.done) == 24)

    assert max(watched.most_of_key[key] for key in (b"a", b"b", b"c")) <= 2
    assert watched.most_of_key[b"none"] > 2
    await backend.statistics(queue, acked=24, redelivered=0)


async def test_a_key_may_be_the_value_of_a_header(backend: Backend) -> None:
    queue = await backend.new_queue(limits={"per_key": {"concurrency": 1}}, key="header:tenant", partitions=1)
    for tenant in ("a", "b"):
        await backend.producer.send_many(queue, [tenant.encode()] * 4, headers={"tenant": tenant})
    await backend.producer.send_many(queue, [b"none"] * 4)
    watched, consumer = Watched(backend, together={b"none": 2}), backend.consumer(queue)

    async with running(consumer, lambda: consumer.run(watched, concurrency=50)):
        await backend.until(lambda: len(watched.done) == 12)

    assert (watched.most_of_key[b"a"], watched.most_of_key[b"b"]) == (1, 1)
    assert watched.most_of_key[b"none"] > 1


async def test_a_message_that_waits_for_its_retry_does_not_stop_its_key(backend: Backend) -> None:
    queue = await backend.new_queue(limits={"per_key": {"concurrency": 1}}, backoff=[2])
    for value in (b"1", b"2", b"3"):
        await backend.producer.send(queue, value, ordering_key="a")
    async with backend.consumer(queue) as consumer:
        first = await take_one(consumer)
        await nothing_comes(backend, consumer)
        await first.release(delay=2)

        second = await take_one(consumer)
        await nothing_comes(backend, consumer)
        assert (first.value, second.value) == (b"1", b"2")
        await second.ack()

        last = [await take_one(consumer)]
        await last[0].ack()
        last.append(await take_one(consumer))
        await last[1].ack()

    assert {(message.value, message.attempt) for message in last} == {(b"1", 2), (b"3", 1)}
    await backend.statistics(queue, acked=3, released=1, redelivered=1)


async def test_a_message_whose_lease_ended_is_delivered_again_and_counts_until_then(backend: Backend) -> None:
    queue = await backend.new_queue(limits={"concurrency": 1}, partitions=1, lease=2)
    await backend.producer.send_many(queue, [b"1", b"2"])
    async with AsyncExitStack() as stack:
        former = backend.consumer(queue)
        await former.start()
        first = await take_one(former)
        # As if its process were killed: the lease ends, and nothing is released.
        await former.stop(release=False)
        consumer = await stack.enter_async_context(backend.consumer(queue, lease=60))

        received = [await take_one(consumer)]
        await nothing_comes(backend, consumer)
        await received[0].ack()
        received.append(await take_one(consumer))
        await received[1].ack()

    assert first.value == b"1"
    assert Counter(message.value for message in received) == {b"1": 1, b"2": 1}
    await backend.statistics(queue, acked=2)


async def test_messages_begin_at_the_rate_of_their_queue(backend: Backend) -> None:
    queue = await backend.new_queue(limits={"rate": "2/s"}, partitions=1)
    await backend.producer.send_many(queue, [b"x"] * 7)
    watched, consumer = Watched(backend, 0), backend.consumer(queue)

    async with running(consumer, lambda: consumer.run(watched, concurrency=20)):
        await backend.until(lambda: len(watched.done) == 7)

    # Half a second after each other, which is 3 s; but on a busy machine, the first handler may read the clock late.
    assert watched.begun_s[-1] - watched.begun_s[0] >= 2
    await backend.statistics(queue, acked=7, redelivered=0)


async def test_limits_change_while_consumers_run(backend: Backend) -> None:
    queue = await backend.new_queue(limits={"concurrency": 1}, partitions=1)
    await backend.producer.send_many(queue, [b"x"] * 10)
    async with backend.consumer(queue) as consumer:
        messages = [await take_one(consumer)]
        await nothing_comes(backend, consumer)

        await backend.define(queue, limits={"concurrency": 4})
        while len(messages) < 4:
            messages += await take(consumer)
        await nothing_comes(backend, consumer)
        await backend.define(queue, limits={})
        while len(messages) < 10:
            messages += await take(consumer)
        await consumer.ack(messages)
    await backend.statistics(queue, acked=10, redelivered=0)


async def test_an_ordered_queue_gets_limits_while_its_consumers_run(backend: Backend) -> None:
    queue = await backend.new_queue(ordering="key", partitions=1)
    watched, consumer = Watched(backend, together={b"x": 2}), backend.consumer(queue)

    async with running(consumer, lambda: consumer.run(watched, concurrency=20)):
        await backend.define(queue, limits={"concurrency": 2})
        for number in range(12):
            await backend.producer.send(queue, b"x", ordering_key=str(number))
        await backend.until(lambda: len(watched.done) == 12)

    assert watched.most == 2
    await backend.statistics(queue, acked=12, redelivered=0)


async def test_a_queue_gets_limits_while_consumers_of_its_group_run(backend: Backend) -> None:
    group = backend.new_name("group")
    await backend.new_queue(ordering="key", group=group)
    queue = await backend.new_queue(group=group, partitions=1)
    watched, consumer = Watched(backend, together={b"x": 2}), backend.consumer(group=group)

    async with running(consumer, lambda: consumer.run(watched, concurrency=20)):
        await backend.define(queue, limits={"concurrency": 2})
        await backend.producer.send_many(queue, [b"x"] * 12)
        await backend.until(lambda: len(watched.done) == 12)

    assert watched.most == 2
    await backend.statistics(queue, acked=12, redelivered=0)


async def test_a_queue_that_is_paused_gives_no_turns(backend: Backend) -> None:
    queue, count = await backend.new_queue(limits={"concurrency": 2}, fair=True, partitions=1), 600
    watched, consumer = Watched(backend), backend.consumer(queue)

    async with running(consumer, lambda: consumer.run(watched, concurrency=20)):
        # They take 15 s: even on a busy machine, the consumer hears of the pause before.
        await backend.producer.send_many(queue, [b"x"] * count)
        await backend.until(lambda: len(watched.done) >= 2)
        await backend.define(queue, paused=True)
        before = len(watched.begun_s)
        await backend.advance(3)
        begun, most = len(watched.begun_s), watched.most
        await backend.define(queue, paused=False, limits={})
        await backend.until(lambda: len(watched.done) == count)

    assert begun == before < count
    assert most <= 2
    await backend.statistics_of_open(queue, acked=count)


async def test_a_fair_queue_takes_no_room_of_another_queue_of_its_group(backend: Backend) -> None:
    group = backend.new_name("group")
    fair = await backend.new_queue(fair=True, group=group)
    plain = await backend.new_queue(group=group)
    watched = Watched(backend, 0.001)
    async with backend.consumer(group=group, max_in_flight=50) as consumer:
        await backend.producer.send_many(plain, [b"plain"] * 500)
        await backend.producer.send_many(fair, [b"fair"] * 10)
        messages = await take(consumer)
        assert consumer._running is not None
        assert consumer._running.receiver.prefetch.in_flight <= 50
        await consumer.ack(messages)
        running_task = asyncio.create_task(consumer.run(watched, concurrency=5))
        await backend.until(lambda: len(watched.done) + len(messages) == 510)
        running_task.cancel()
        await asyncio.wait([running_task])


async def test_a_retry_waits_for_the_rate_as_other_messages_do(backend: Backend) -> None:
    queue = await backend.new_queue(limits={"rate": "1/s"}, partitions=1, backoff=[0], max_attempts=4)
    begun_s = []

    async def fail(message: marq.Message) -> None:
        begun_s.append(backend.now_s())
        raise ValueError("no")

    await backend.producer.send(queue, b"x")
    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(fail)):
        await backend.until(lambda: len(begun_s) == 4)

    # A second after each other, which is 3 s; but on a busy machine, the first handler may read the clock late.
    assert begun_s[-1] - begun_s[0] >= 2
    [dead] = await backend.dead_letters(queue)
    assert dead.value == b"x"


async def test_limits_of_a_queue_with_messages_are_lifted_and_not_removed(backend: Backend) -> None:
    queue = await backend.new_queue(limits={"concurrency": 1}, partitions=1)
    await backend.producer.send_many(queue, [b"1", b"2"])
    async with backend.consumer(queue) as consumer:
        first = await take_one(consumer)

        with pytest.raises(marq.ConfigError, match=r"limits can't be removed .* limits = \{\}"):
            await backend.queues.change(queue, limits=False)

        await first.ack()
        await (await take_one(consumer)).ack()
    await backend.statistics(queue, acked=2)


async def test_a_tenant_with_many_messages_does_not_delay_another(backend: Backend) -> None:
    queue = await backend.new_queue(fair=True, partitions=1)
    await backend.producer.send_many(queue, [b"big"] * 500, ordering_key="big")
    watched, consumer, go_on = Watched(backend, 0.02), backend.consumer(queue), asyncio.Event()

    async def handle(message: marq.Message) -> None:
        if len(watched.done) >= 20:
            await go_on.wait()
        await watched(message)

    async with running(consumer, lambda: consumer.run(handle, concurrency=4)):
        await backend.until(lambda: len(watched.done) >= 20)
        await backend.producer.send_many(queue, [b"small"] * 3, ordering_key="small")
        # Until the consumer has read them, which takes its time on a busy machine.
        assert consumer._running is not None
        turns = consumer._running.receiver.ordering.turns[queue]
        await backend.until(lambda: b"small" in {busy.key for busy in turns.busy_keys(backend.now_s())})
        began = len(watched.done)
        go_on.set()
        await backend.until(lambda: watched.done.count(b"small") == 3)
        passed = len(watched.done) - began
        await backend.until(lambda: len(watched.done) == 503)

    # Those that had their turns, and about every other one after that.
    assert passed < 100
    await backend.statistics(queue, acked=503, redelivered=0)


async def test_urgent_messages_come_before_thousands_of_others_of_their_group(backend: Backend) -> None:
    group = backend.new_name("group")
    urgent = await backend.new_queue(priority=9, group=group)
    bulk = await backend.new_queue(priority=1, group=group)
    await backend.producer.send_many(bulk, [b"bulk"] * 3_000)
    watched, consumer = Watched(backend, 0.005), backend.consumer(group=group, max_in_flight=100)

    async with running(consumer, lambda: consumer.run(watched, concurrency=4)):
        await backend.until(lambda: len(watched.done) >= 20)
        await backend.producer.send_many(urgent, [b"urgent"] * 10)
        began = len(watched.done)
        await backend.until(lambda: watched.done.count(b"urgent") == 10)
        passed = len(watched.done) - began
        await backend.until(lambda: len(watched.done) == 3_010)

    # Those that had their turns while the urgent ones were sent and read.
    assert passed < 1_500
    await backend.statistics(bulk, acked=3_000, redelivered=0)


async def test_a_fair_queue_gets_a_priority_while_its_consumer_waits(backend: Backend) -> None:
    queue = await backend.new_queue(fair=True, partitions=1)
    async with backend.consumer(queue) as consumer:
        await backend.producer.send(queue, b"1")
        await (await take_one(consumer)).ack()

        await backend.define(queue, fair=True, priority=9)
        await backend.producer.send(queue, b"2")

        await (await take_one(consumer)).ack()
    await backend.statistics(queue, acked=2, redelivered=0)


async def test_a_queue_of_a_lower_priority_never_stands_still(backend: Backend) -> None:
    group = backend.new_name("group")
    high = await backend.new_queue(priority=5, group=group)
    low = await backend.new_queue(priority=2, group=group)
    await backend.producer.send_many(high, [b"high"] * 400)
    await backend.producer.send_many(low, [b"low"] * 100)
    watched, consumer = Watched(backend, 0.001), backend.consumer(group=group)

    async with running(consumer, lambda: consumer.run(watched, concurrency=1)):
        await backend.until(lambda: watched.done.count(b"high") == 400)
        between = watched.done.count(b"low")
        await backend.until(lambda: len(watched.done) == 500)

    assert 20 <= between <= 80
    await backend.statistics(low, acked=100, redelivered=0)


async def test_ordering_and_limits_go_together(backend: Backend) -> None:
    queue = await backend.new_queue(ordering="key", limits={"concurrency": 2}, partitions=1)
    for number in range(12):
        await backend.producer.send(queue, b"%d" % number, ordering_key=str(number % 4))
    watched, consumer = Watched(backend), backend.consumer(queue)

    async with running(consumer, lambda: consumer.run(watched, concurrency=20)):
        await backend.until(lambda: len(watched.done) == 12)

    assert watched.most <= 2
    for key in range(4):
        assert [int(value) for value in watched.done if int(value) % 4 == key] == [key, key + 4, key + 8]
    await backend.statistics(queue, acked=12, redelivered=0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"limits": {"concurrency": 0}}, "limits.concurrency: expected a whole number from 1"),
        ({"limits": {"rate": 10}}, 'limits.rate: expected a number from 1 to 1000000 and a unit, such as "200/s"'),
        ({"limits": {"per_key": {"rate": "-1/s"}}}, "limits.per_key.rate: expected a number"),
        ({"limits": {"per_kye": {}}}, "limits.per_kye: unknown key; did you mean 'per_key'?"),
        ({"limits": 5}, "limits: expected false or a table like"),
        ({"fair": "yes"}, "fair: expected true or false"),
        ({"fair": True, "key": "tenant"}, 'key: expected "ordering" for the ordering key, or "header:NAME"'),
        ({"key": "header:tenant"}, "has no effect without limits, fair or priority"),
        ({"priority": 0}, "priority: expected a whole number from 1 to 9, or false, not 0"),
        ({"priority": "high"}, "priority: expected a whole number from 1 to 9, or false, not 'high'"),
        ({"priority": 3, "delivery": "at-most-once"}, "cannot be combined with priority"),
        ({"limits": {}, "delivery": "at-most-once"}, "cannot be combined with limits"),
        ({"fair": True, "expires_after": 60}, "cannot be combined with fair: set expires_after = false"),
        ({"ordering": "key", "limits": {"per_key": {"concurrency": 2}}}, "2 (changed at run time) cannot be above 1"),
        ({"ordering": "key", "fair": True, "key": "header:tenant"}, "goes by the ordering key"),
    ],
)
async def test_bad_settings_are_refused_with_a_sentence(
    backend: Backend, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(marq.ConfigError) as refused:
        await backend.queues.change(backend.new_name(), **settings)  # type: ignore[arg-type]

    assert said in str(refused.value)
