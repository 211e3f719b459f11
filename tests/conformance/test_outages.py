"""Errors in floods: a backoff for each class of them, and the circuit breaker of a queue."""

from __future__ import annotations

import sys

import pytest

import marq
from tests.conformance.backend import Backend
from tests.conformance.receiving import take_one
from tests.conformance.test_handlers import running


async def test_a_backoff_may_be_a_list_of_delays(backend: Backend) -> None:
    queue, waits = backend.new_name(), []
    async with backend.consumer(queue) as consumer:
        await backend.queues.change(queue, backoff=[0.8, 0, 0.4])
        await backend.seen_by_all()
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
    await backend.figures(queue, acked=1, released=4)


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
    await backend.figures(queue, acked=2, dead=1, released=2)


async def test_an_outage_sends_a_queue_with_a_breaker_to_no_dead_letters(backend: Backend) -> None:
    queue, up, done, calls, states = backend.new_name(), True, set(), 0, set()
    await backend.queues.change(
        queue, max_attempts=2, backoff=[0.05], breaker={"failures": 0.5, "window": 5, "pause": 0.3}
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
        before = calls
        # Some pauses long, each of which lets one message through.
        await backend.advance(3)
        tried = calls - before
        up = True
        await backend.until(lambda: len(done) == 40 and consumer.breakers[queue] == "closed")
        await backend.figures(queue, acked=40, dead=0)

    assert 1 <= tried <= 14
    assert states == {"closed", "half-open"}


async def test_a_message_that_fails_while_others_succeed_dies_with_a_breaker_too(backend: Backend) -> None:
    queue, attempts = backend.new_name(), []
    await backend.queues.change(queue, max_attempts=2, backoff=[0.1], breaker={"window": 10, "pause": 0.3})
    await backend.seen_by_all()

    async def handle(message: marq.Message) -> None:
        if message.value == b"bad":
            attempts.append(message.attempt)
            raise ValueError("no such user")

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(handle)):
        await backend.producer.send(queue, b"bad")
        for _ in range(4):
            await backend.producer.send_many(queue, [b"good"] * 10)
            await backend.advance(1)
        [letter] = await backend.dead_letters(queue)

    assert letter.error == "ValueError: no such user"
    # Not counted where nothing has succeeded since the failure before.
    assert sorted(set(attempts)) == [1, 2]


async def test_the_other_queues_of_a_group_go_on_while_the_breaker_of_one_is_open(backend: Backend) -> None:
    group, bad, good, done = backend.new_name("group"), backend.new_name("bad"), backend.new_name("good"), []
    await backend.queues.change(good, group=group)
    await backend.queues.change(bad, group=group, breaker={"window": 4, "pause": 600}, max_attempts=2, backoff=[0])
    await backend.seen_by_all()

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

    await backend.figures(good, acked=10)
    assert not [each for each in await backend.records(backend.names.dead_letters) if each.key == bad.encode()]


async def test_a_consumer_of_a_queue_with_a_breaker_says_what_it_lacks(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = backend.new_name()
    await backend.queues.change(queue, breaker={})
    await backend.seen_by_all()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "interlock", None)
        consumer = backend.consumer(queue)
        with pytest.raises(marq.ConfigError, match=r"pip install 'marq\[breaker\]'"):
            await consumer.start()

    await backend.queues.change(queue, breaker=False)
    await backend.seen_by_all()
    async with consumer:
        assert consumer.breakers == {}
