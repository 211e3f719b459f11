"""Schedules: a message at each time of a cron expression, once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import marq
from tests.conformance.backend import Backend
from tests.conformance.receiving import nothing_comes, take

EACH_SECOND = "* * * * * *"
FAR = "0 0 1 1 *"


def times(messages: Sequence[marq.Message]) -> list[int]:
    """Return the scheduled times of messages, in seconds since the epoch."""
    return [int(message.id.rpartition("/")[2]) for message in messages]


def seconds(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


async def receive_missing(consumer: marq.Consumer, messages: list[marq.Message]) -> None:
    """Receive until no time is missing: waiting messages in different partitions may arrive in any order."""
    while len(messages) <= max(times(messages)) - min(times(messages)):
        messages += await take(consumer, 1)


def schedules_of(backend: Backend) -> marq.Schedules:
    """Return the schedules, through the backend's view of the queues."""
    return marq.Schedules.of(backend.queues)


async def none_waits(backend: Backend, consumer: marq.Consumer) -> None:
    """Receive what is on its way, and show that nothing follows; a schedule that ran would send each second."""
    for _ in range(5):
        messages = await consumer.receive(100, wait=1.5)
        if not messages:
            break
        await consumer.ack(messages)
    await nothing_comes(backend, consumer)
    assert not messages


async def test_each_second_has_its_message(backend: Backend) -> None:
    queue, name, schedules = backend.new_name(), backend.new_name("schedule"), schedules_of(backend)
    async with backend.consumer(queue) as consumer:
        began_s, headers = backend.now_s(), {"kind": "often"}
        # Without catch_up a tracker that is late by a second leaves a time out.
        await schedules.define(name, queue=queue, cron=EACH_SECOND, value="grüße", headers=headers, catch_up=True)

        messages = await take(consumer, 3)
        await receive_missing(consumer, messages)

        assert backend.now_s() - began_s >= 1.9
        await consumer.ack(messages)
        await schedules.remove(name)
    assert sorted(times(messages)) == seconds(min(times(messages)), len(messages))
    first = messages[0]
    assert first.id.startswith(f"~schedule/{name}/")
    assert (first.value, first.headers, first.attempt, first.queue) == ("grüße".encode(), {"kind": b"often"}, 1, queue)
    assert [int(message.sent_at.timestamp()) for message in messages] == times(messages)


async def test_a_changed_message_goes_on_where_the_former_one_was(backend: Backend) -> None:
    queue, name, schedules = backend.new_name(), backend.new_name("schedule"), schedules_of(backend)
    async with backend.consumer(queue) as consumer:
        await schedules.define(name, queue=queue, cron=EACH_SECOND, value="a", catch_up=True)
        messages = await take(consumer, 1)
        for value in ("b", "a", "c"):
            await schedules.change(name, value=value)
            messages += await take(consumer, 1)
        while messages[-1].value != b"c":
            messages += await take(consumer, 1)
        await receive_missing(consumer, messages)
        await consumer.ack(messages)
        await schedules.remove(name)
    assert sorted(times(messages)) == seconds(min(times(messages)), len(messages))


async def test_a_schedule_that_is_removed_or_switched_off_sends_nothing(backend: Backend) -> None:
    queue, name, schedules = backend.new_name(), backend.new_name("schedule"), schedules_of(backend)
    async with backend.consumer(queue) as consumer:
        await schedules.define(name, queue=queue, cron=EACH_SECOND)
        await consumer.ack(await take(consumer, 1))
        await schedules.change(name, enabled=False)
        await backend.seen_by_all()
        await none_waits(backend, consumer)

        await schedules.change(name, enabled=True)
        again = await take(consumer, 2)
        assert len(set(times(again))) == 2
        await consumer.ack(again)

        assert await schedules.remove(name) is True
        assert await schedules.remove(name) is False
        await backend.seen_by_all()
        await none_waits(backend, consumer)


async def test_a_time_may_be_cancelled_and_moved_as_any_delayed_message(backend: Backend) -> None:
    queue, name, schedules = backend.new_name(), backend.new_name("schedule"), schedules_of(backend)
    async with backend.consumer(queue) as consumer:
        await schedules.define(name, queue=queue, cron="*/12 * * * * *")
        [first] = await take(consumer, 1)
        place, _, time_s = first.id.rpartition("/")
        following = [f"{place}/{int(time_s) + step}" for step in (12, 24)]

        # The next message is written only after the previous one has ended.
        while not await backend.producer.cancel(following[0]):
            await backend.advance(0.05)
        while not await backend.producer.reschedule(following[1], delay=0):
            await backend.advance(0.05)
        [second] = await take(consumer, 1)

        assert second.id == following[1]
        await consumer.ack([first, second])
        await schedules.remove(name)


async def test_schedules_are_listed_with_all_that_holds(backend: Backend) -> None:
    name, schedules = backend.new_name("schedule"), schedules_of(backend)
    made = await schedules.define(name, queue="reports", cron=FAR, timezone="Europe/Berlin", headers={"a": "b"})

    assert schedules.get(name) == made
    assert made in schedules.list()
    assert (made.queue, made.cron, made.timezone, made.headers) == ("reports", FAR, "Europe/Berlin", (("a", "b"),))
    assert (made.value, made.enabled, made.catch_up) == ("", True, False)
    changed = await schedules.change(name, value="x", timezone=None)
    assert (changed.cron, changed.value, changed.timezone) == (FAR, "x", "UTC")
    await schedules.remove(name)
    assert schedules.get(name) is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"queue": "q"}, "schedule 's': cron is missing"),
        ({"cron": FAR}, "schedule 's': queue is missing"),
        ({"queue": "q", "cron": "every day"}, "schedule 's': cron: expected a cron expression of five fields"),
        ({"queue": "q", "cron": "61 * * * *"}, "schedule 's': cron: .* bad minute"),
        ({"queue": "q", "cron": "0 0 30 2 *"}, "schedule 's': cron:"),
        ({"queue": "q", "cron": FAR, "timezone": "Berlin"}, "schedule 's': timezone: 'Berlin' is unknown"),
        ({"queue": "q", "cron": FAR, "timezone": "../etc"}, "schedule 's': timezone: expected the name"),
        ({"queue": "", "cron": FAR}, "schedule 's': queue: a queue's name must not be empty"),
        ({"queue": "q", "cron": FAR, "value": b"x"}, "schedule 's': value: expected text"),
        ({"queue": "q", "cron": FAR, "value": "x" * 70_000}, "schedule 's': value: it has 70000 bytes"),
        ({"queue": "q", "cron": FAR, "headers": {"marq-id": "x"}}, "schedule 's': headers: marq-id: .* are reserved"),
        ({"queue": "q", "cron": FAR, "headers": {"a": 1}}, "schedule 's': headers: a: expected text"),
        (
            {"queue": "q", "cron": FAR, "headers": {"n" * 65_536: ""}},
            "schedule 's': headers: at most 100 headers with 65535 ",
        ),
        ({"queue": "q", "cron": FAR, "catch_up": 1}, "schedule 's': catch_up: expected true or false"),
    ],
)
async def test_invalid_schedules_are_rejected(backend: Backend, settings: dict[str, object], said: str) -> None:
    schedules = schedules_of(backend)

    with pytest.raises(marq.ConfigError, match=said):
        await schedules.define("s", **settings)  # type: ignore[arg-type]
    with pytest.raises(marq.ConfigError, match="expected the name of a schedule"):
        await schedules.define("a/b", queue="q", cron=FAR)
    with pytest.raises(marq.ConfigError, match="schedule 's' does not exist"):
        await schedules.change("s", value="x")
    with pytest.raises(TypeError, match="expression"):
        await schedules.define("s", queue="q", expression=FAR)  # type: ignore[call-arg]
    assert schedules.get("s") is None
