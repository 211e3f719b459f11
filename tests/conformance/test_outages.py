"""Floods of errors: a backoff for each exception class, and the circuit breaker of a queue."""

from __future__ import annotations

import asyncio

import marq
from tests.conformance.backend import Backend, Stored
from tests.conformance.receiving import take_one
from tests.conformance.test_handlers import running


async def test_a_backoff_may_be_a_list_of_delays(backend: Backend) -> None:
    queue, waits = backend.new_name(), []
    async with backend.consumer(queue) as consumer:
        await backend.define(queue, backoff=[0.8, 0, 0.4])
        await backend.producer.send(queue, b"x")
        message = await take_one(consumer)
        for _ in range(4):
            begun_s = backend.now_s()
            await message.release()
            message = await take_one(consumer)
            waits.append(backend.now_s() - begun_s)
        await message.ack()

    assert waits[0] > 0.75
    assert min(waits[2:]) > 0.35
    await backend.statistics(queue, acked=1, released=4)


async def test_an_exception_has_the_backoff_of_its_class_or_none(backend: Backend) -> None:
    queue, seen = backend.new_name(), []
    errors = {"ConnectionError": [0.8], "LookupError": "reject", "KeyError": [0]}
    await backend.queues.change(queue, errors=errors, backoff={"base": 600})

    async def handle(message: marq.Message) -> None:
        seen.append((message.value, message.attempt, backend.now_s()))
        if message.attempt == 1:
            raise {b"refused": ConnectionRefusedError, b"key": KeyError, b"index": IndexError}[message.value]("why")

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(handle)):
        await backend.producer.send_many(queue, [b"refused", b"key", b"index"])
        await backend.until(lambda: len(seen) == 5)
        [letter] = await backend.dead_letters(queue)

    times = {(value, attempt): at_s for value, attempt, at_s in seen}
    assert times[b"refused", 2] - times[b"refused", 1] > 0.75
    assert {value for value, attempt in times if attempt == 2} == {b"refused", b"key"}
    assert (letter.body, letter.attempt, letter.reason) == (b"index", 1, "IndexError: why")
    await backend.statistics(queue, acked=2, dead_lettered=1, released=2)


async def test_an_outage_sends_a_queue_with_a_breaker_to_no_dead_letters(backend: Backend) -> None:
    queue, up, done, calls, states = backend.new_name(), True, set(), 0, set()
    await backend.queues.change(
        queue, max_attempts=2, backoff=[0.05], breaker={"failure_rate": 0.5, "window": 5, "reset_timeout": 0.3}
    )

    async def handle(message: marq.Message) -> None:
        nonlocal calls
        calls += 1
        states.add(consumer.breakers[queue])
        if not up:
            raise ConnectionError("the downstream is away")
        done.add(message.value)

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(handle, concurrency=4)):
        await backend.producer.send_many(queue, [b"before-%d" % number for number in range(20)])
        await backend.until(lambda: len(done) == 20)
        assert consumer.breakers == {queue: "closed"}
        up = False
        await backend.producer.send_many(queue, [b"during-%d" % number for number in range(20)])
        await backend.until(lambda: consumer.breakers[queue] == "open")
        before, began_s = calls, backend.now_s()
        # Each pause lets one message through.
        await backend.until(lambda: calls >= before + 3)
        pauses, tried = (backend.now_s() - began_s) / 0.3, calls - before
        up = True
        await backend.until(lambda: len(done) == 40 and consumer.breakers[queue] == "closed")
        await backend.statistics(queue, acked=40, dead_lettered=0)

    assert tried <= pauses + 4, "more than one message for each pause, and those that ran when it opened"
    assert states == {"closed", "half-open"}


async def dead(backend: Backend, queue: str) -> list[Stored]:
    return [each for each in await backend.records(backend.names.dead_letters) if each.key == queue.encode()]


async def test_a_message_that_fails_while_others_succeed_dies_with_a_breaker_too(backend: Backend) -> None:
    queue = await backend.new_queue(max_attempts=2, backoff=[0.1], breaker={"window": 10, "reset_timeout": 0.3})
    attempts, good = [], []

    async def handle(message: marq.Message) -> None:
        if message.value == b"bad":
            attempts.append(message.attempt)
            raise ValueError("no such user")
        good.append(message.value)

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(handle)):
        await backend.producer.send(queue, b"bad")
        while 2 not in attempts or not await dead(backend, queue):
            good.clear()
            await backend.producer.send_many(queue, [b"good"] * 10)
            await backend.until(lambda: len(good) == 10)
            await backend.advance(0.1)
        [letter] = await backend.dead_letters(queue)

    assert letter.error == "ValueError: no such user"
    # A failure does not count as an attempt if nothing has succeeded since the previous failure.
    assert sorted(set(attempts)) == [1, 2]


async def test_the_other_queues_of_a_group_go_on_while_the_breaker_of_one_is_open(backend: Backend) -> None:
    group, done = backend.new_name("group"), []
    good = await backend.new_queue("good", group=group)
    breaker = {"window": 4, "reset_timeout": 600}
    bad = await backend.new_queue("bad", group=group, breaker=breaker, max_attempts=2, backoff=[0])

    async def handle(message: marq.Message) -> None:
        if message.queue == bad:
            raise ConnectionError("away")
        done.append(message.value)

    consumer = backend.consumer(group=group)
    async with running(consumer, lambda: consumer.run(handle)):
        await backend.producer.send_many(bad, [b"x"] * 20)
        await backend.until(lambda: consumer.breakers == {bad: "open"})
        await backend.producer.send_many(bad, [b"y"] * 10)
        await backend.producer.send_many(good, [b"z"] * 10)
        await backend.until(lambda: len(done) == 10)

    await backend.statistics(good, acked=10)
    assert not await dead(backend, bad)


async def test_messages_that_wait_for_their_turns_go_on_when_an_open_breaker_is_removed(backend: Backend) -> None:
    queue, up, done, began, fail = backend.new_name(), False, set(), 0, asyncio.Event()
    breaker = {"failure_rate": 0.5, "window": 2, "reset_timeout": 3_000}
    settings = {"limits": {"concurrency": 3}, "partitions": 1, "max_attempts": 9, "backoff": [600]}
    await backend.queues.change(queue, **settings, breaker=breaker)

    async def handle(message: marq.Message) -> None:
        nonlocal began
        began += 1
        await fail.wait()
        if not up:
            raise ConnectionError("the downstream is away")
        done.add(message.value)

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(handle, concurrency=10)):
        await backend.producer.send_many(queue, [b"%d" % number for number in range(40)])
        await backend.until(lambda: began == 3)
        # The others are acquired meanwhile, and wait for their turns.
        await backend.advance(0.5)
        fail.set()
        await backend.until(lambda: consumer.breakers[queue] == "open")
        await backend.advance(1)
        up = True
        await backend.define(queue, breaker=False)
        await backend.until(lambda: len(done) > 0)
