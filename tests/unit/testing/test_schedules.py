"""Schedules in memory: they send as virtual time passes, and the broker does not wait for the last one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pytest

import marq
from marq.testing import Broker, Unfinished

DAILY = {"queue": "reports", "cron": "0 9 * * *", "value": "daily"}


async def test_a_schedule_of_the_settings_sends_as_time_passes() -> None:
    async with Broker(schedules={"daily": DAILY}) as broker:
        await broker.advance(timedelta(days=30))

        messages = broker.messages("reports")
        assert len(messages) == 30
        assert all((message.sent_at.hour, message.sent_at.minute) == (9, 0) for message in messages)
        assert [schedule.name for schedule in broker.schedules.list()] == ["daily"]


@dataclass
class Report:
    day: str
    rows: list[int]


async def test_a_schedule_sends_typed_values_with_a_type() -> None:
    seen: list[object] = []

    @marq.handler("reports", type="report")
    async def report(value: Report, message: marq.Message[Report]) -> None:
        seen.append((value, message.type, message.headers))

    table = {"day": "monday", "rows": [1, 2]}
    daily = {"queue": "reports", "cron": "@daily", "type": "report", "value": table, "headers": {"tenant": "a"}}
    async with Broker(schedules={"daily": daily}) as broker:
        # when: a second one is defined at run time, with a value of the handler's type
        defined = await broker.schedules.define(
            "hourly", queue="reports", cron="@hourly", type="report", value=Report("last", [3])
        )
        assert (defined.value, defined.type) == ('{"day":"last","rows":[3]}', "report")
        async with broker.worker(report):
            await broker.advance(timedelta(days=1))

    headers = {"tenant": b"a"}
    assert (Report("monday", [1, 2]), "report", headers) in seen
    assert (Report("last", [3]), "report", {}) in seen


async def test_a_value_that_json_does_not_have_is_refused() -> None:
    async with Broker() as broker:
        with pytest.raises(marq.ConfigError, match=r"schedule 'daily': value: expected text, or .*: JSON has no set"):
            await broker.schedules.define("daily", queue="reports", cron="@daily", value={1, 2})
        with pytest.raises(marq.ConfigError, match="type: a type's name must not be empty"):
            await broker.schedules.define("daily", queue="reports", cron="@daily", type="")


async def test_a_drained_queue_may_have_a_schedule() -> None:
    seen: list[bytes] = []

    @marq.handler("reports")
    async def handle(message: marq.Message) -> None:
        seen.append(message.value)

    async with Broker(schedules={"daily": DAILY}) as broker, broker.producer() as producer:
        await producer.send("reports", b"now")
        await producer.send("reports", b"later", delay=5)
        await broker.run(handle)

        assert b"later" in seen
        await producer.send("reports", b"again")
        with pytest.raises(Unfinished):
            await broker.drain("reports", limit=0.1)


async def test_a_consumer_that_waits_gets_the_message_of_its_time() -> None:
    async with Broker(schedules={"daily": DAILY}) as broker, broker.consumer("reports") as consumer:
        [message] = await consumer.receive(wait=timedelta(days=1))
        assert message.value == b"daily"
        await message.ack()


def test_invalid_schedules_are_rejected() -> None:
    with pytest.raises(marq.ConfigError, match="schedule 'daily': cron is missing"):
        Broker(schedules={"daily": {"queue": "reports"}})
