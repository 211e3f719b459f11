"""Settings of queues, changed while everything runs."""

from __future__ import annotations

from datetime import timedelta

import pytest

import marq
from marq.settings.queue import QueueSettings
from marq.wire.markers import Fact
from tests.conformance.backend import Backend
from tests.conformance.receiving import nothing_comes, take, take_one


async def test_a_change_is_known_at_once_to_its_author_and_soon_to_all(backend: Backend) -> None:
    queue, heard = backend.new_name(), []
    async with marq.Queues(**backend.client) as others:
        stop_listening = others.listen(lambda: heard.append(others[queue].lease))

        settings = await backend.queues.change(queue, lease=timedelta(seconds=5), max_attempts=3)

        assert settings == backend.queues[queue]
        assert (settings.lease, settings.max_attempts) == (5, 3)
        await backend.until(lambda: others[queue].lease == 5)
        assert heard[-1] == 5
        stop_listening()

        assert (await backend.queues.change(queue, lease=None)).max_attempts == 3
        assert (await others.reset(queue)).max_attempts == QueueSettings().max_attempts


async def test_changed_settings_count_for_consumers_and_trackers(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        await backend.define(queue, lease=50, max_attempts=1, backoff={"base": 0, "jitter": False})
        await backend.producer.send(queue, b"x")

        message = await take_one(consumer)

        assert message.lease_expires_at - message.sent_at > timedelta(seconds=45)
        await message.release()
    [letter] = await backend.dead_letters(queue)
    assert letter.reason.startswith("1 of 1 attempts used")


async def test_a_change_counts_for_messages_in_flight_and_not_for_those_that_wait(backend: Backend) -> None:
    queue = await backend.new_queue(max_attempts=5, backoff=[2_000])

    async def told_of(count: int) -> None:
        while sum(len(fact.offsets) for fact in await backend.markers(Fact) if fact.queue == queue) < count:
            await backend.advance(0.02)

    async with backend.consumer(queue) as consumer:
        # All in one partition, whose markers are read in order.
        for number in range(5):
            await backend.produce(backend.names.messages, b"%d" % number, queue.encode())
        waits, witness, last, again, dropped = sorted(await take(consumer, 5), key=lambda message: message.offset)
        await waits.release()
        await witness.release(0)
        await (await take_one(consumer)).ack()

        await backend.define(queue, max_attempts=1)
        await last.release(0)
        await told_of(2)
        await backend.define(queue, max_attempts=5, backoff=[0])
        await again.release()
        message = await take_one(consumer)
        assert message.id == again.id
        await message.ack()
        await backend.define(queue, dead_letter=False)
        await dropped.reject()
        await told_of(4)
        # What waits keeps the time that it was given.
        await nothing_comes(backend, consumer)

    [letter] = [each for each in await backend.records(backend.names.dead_letters) if each.key == queue.encode()]
    assert dict(letter.headers)["marq-id"] == last.id.encode()


async def test_wrong_settings_are_named_and_nothing_is_changed(backend: Backend) -> None:
    queue = backend.new_name()
    for wrong, said in (
        ({"lease": 0}, "lease: expected a number of seconds above 0"),
        ({"max_attempts": "3"}, "max_attempts: expected a whole number"),
        ({"backoff": {"bas": 1}}, r"backoff\.bas: unknown key"),
        ({"topic": backend.names.markers}, "belongs to marq"),
    ):
        with pytest.raises(marq.ConfigError, match=f"queue '{queue}'.*{said}"):
            await backend.queues.change(queue, **wrong)  # type: ignore[arg-type]

    assert backend.queues[queue] == backend.queues["nobody-defined-this"]


async def test_an_undefined_queue_has_the_defaults(backend: Backend) -> None:
    defaults = backend.queues[backend.new_name()]

    assert (defaults.lease, defaults.max_attempts, defaults.dead_letter) == (30, 5, True)
    assert (defaults.backoff["base"], defaults.backoff["jitter"]) == (0.2, False)
    assert backend.queues["two-attempts"].max_attempts == 2
