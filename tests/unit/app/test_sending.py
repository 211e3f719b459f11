"""Messages that operators send from pages: to a queue, and instead of a dead letter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

import marq
from marq.settings.client import ClientSettings
from marq.testing import Broker
from marq.wire.errors import BrokerUnavailable, ConfigError, MarqError
from marq.wire.record_headers import ordering_key
from marq_worker.redaction import Redaction
from marq_worker.web.dashboard.actor import Actor
from marq_worker.web.dashboard.sending import MAX_EDITED_BYTES, OperatorSender, read_headers


class Stage:
    """A broker in memory and a sender."""

    def __init__(self, broker: Broker, dead_letters: marq.DeadLetters) -> None:
        self.broker = broker
        self.dead_letters = dead_letters
        self.client = ClientSettings.read(broker.address, {}, owner="test")
        self.sender = self.sender_of()

    def sender_of(self, redact: Sequence[str] = ()) -> OperatorSender:
        return OperatorSender(self.client, self.dead_letters, Redaction(redact))

    async def dead(self, value: bytes, **options: Any) -> str:
        """Return the id of a dead letter of the queue ``orders``."""
        async with self.broker.producer() as producer, self.broker.consumer("orders") as consumer:
            await producer.send("orders", value, headers={"tenant": b"acme"}, **options)
            [message] = await consumer.receive(wait=60)
            await message.reject("no such customer")
            await self.broker.settle()
            return str(message.id)

    async def ordering_keys(self, queue: str) -> list[bytes | None]:
        """Receive all messages of a queue, and return their ordering keys."""
        async with self.broker.consumer(queue) as consumer:
            return [ordering_key(message._record.headers) for message in await consumer.receive(10, wait=60)]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with (
        Broker(queues={"orders": {"ordering": "key"}}) as broker,
        marq.DeadLetters(bootstrap_servers=broker.address) as dead_letters,
    ):
        yield Stage(broker, dead_letters)


async def test_a_message_is_sent_with_what_the_form_says(stage: Stage) -> None:
    form = {"value": "line\r\nother", "headers": "tenant: acme\r\n trace :a:b\r\n", "delay": "2m", "ordering_key": ""}

    told = await stage.sender.send("emails", form)

    [delayed] = stage.broker.delayed("emails")
    assert (delayed.body, delayed.headers) == (b"line\nother", {"tenant": b"acme", "trace": b"a:b"})
    # What is written to the audit log has no content.
    assert told == {"sent": delayed.id, "to": "emails", "bytes": 10}
    await stage.sender.send("orders", {"value": "", "ordering_key": "k"})
    assert await stage.ordering_keys("orders") == [b"k"]


async def test_a_message_is_sent_with_the_type_that_chooses_its_handler(stage: Stage) -> None:
    for message_type in ("", " welcome "):
        await stage.sender.send("emails", {"value": "Ann", "type": message_type})

    async with stage.broker.consumer("emails") as consumer:
        messages = await consumer.receive(10, wait=60)
    assert sorted(str(message.type) for message in messages) == ["None", "welcome"]


@pytest.mark.parametrize(
    ("form", "said"),
    [({"delay": "soon"}, "delay=soon"), ({"headers": "tenant"}, "expected `name: value`"),
     ({"headers": "marq-id: 1"}, "reserved"), ({"headers": "a: 1\na: 2"}, "each name once")],
)  # fmt: skip
async def test_what_can_not_be_sent_is_refused(stage: Stage, form: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await stage.sender.send("emails", form)

    assert stage.broker.messages("emails") == []


async def test_an_edited_dead_letter_is_a_new_message_with_its_headers_and_key_and_is_deleted(stage: Stage) -> None:
    identity = await stage.dead(b'{"customer": 7}\n', ordering_key="c7")
    assert await stage.sender.editable("orders", identity) == '{"customer": 7}\n'

    told = await stage.sender.resend("orders", identity, {"value": '{"customer": 8}'})

    [sent] = stage.broker.messages("orders")
    assert (sent.body, sent.headers) == (b'{"customer": 8}', {"tenant": b"acme"})
    assert (sent.id != identity, sent.attempt) == (True, 1)
    assert told == {"sent": sent.id, "to": "orders", "bytes": 15, "deleted": 1}
    assert stage.broker.dead_letters("orders") == []
    # A second click sends nothing.
    with pytest.raises(ConfigError, match="is not a dead letter of queue orders any more"):
        await stage.sender.resend("orders", identity, {"value": "again"})
    assert await stage.ordering_keys("orders") == [b"c7"]


async def test_an_edited_dead_letter_keeps_its_type_and_nothing_is_sent_without_a_value(stage: Stage) -> None:
    identity = await stage.dead(b"old", type="welcome")

    with pytest.raises(ConfigError, match="the form has no value, so nothing was sent"):
        await stage.sender.resend("orders", identity, {})
    await stage.sender.resend("orders", identity, {"value": "new"})

    async with stage.broker.consumer("orders") as consumer:
        [message] = await consumer.receive(wait=60)
    assert (message.type, message.body) == ("welcome", b"new")


async def test_an_edited_dead_letter_is_kept_and_sent_elsewhere_on_request(stage: Stage) -> None:
    identity = await stage.dead(b"old")

    told = await stage.sender.resend("orders", identity, {"value": "new", "to": "emails", "keep": "yes"})

    assert [message.body for message in stage.broker.messages("emails")] == [b"new"]
    assert [letter.id for letter in stage.broker.dead_letters("orders")] == [identity]
    assert told["to"] == "emails"


@pytest.mark.parametrize(
    ("value", "redact", "said"),
    [
        (b'{"card": "4111"}', ["card"], "MARQ_REDACT hides parts of it"),
        (b"not JSON", ["card"], "MARQ_REDACT hides parts of it"),
        (b"\xff", [], "not UTF-8"),
        (b"a\r\nb", [], "carriage returns"),
        (b"x" * (MAX_EDITED_BYTES + 1), [], "65,537 bytes"),
    ],
)
async def test_a_payload_that_a_page_would_change_or_must_not_show_is_not_edited(
    stage: Stage, value: bytes, redact: list[str], said: str
) -> None:
    identity, sender = await stage.dead(value), stage.sender_of(redact)

    with pytest.raises(ConfigError, match=said):
        await sender.editable("orders", identity)
    with pytest.raises(ConfigError, match=said):
        await sender.resend("orders", identity, {"value": "x"})

    assert stage.broker.messages("orders") == []
    assert await stage.sender_of(["other"]).editable("orders", await stage.dead(b'{"a": 1}')) == '{"a": 1}'


async def test_an_error_after_the_message_was_sent_names_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = await stage.dead(b"old")
    monkeypatch.setattr(stage.dead_letters, "delete", AsyncMock(side_effect=BrokerUnavailable("no broker")))

    with pytest.raises(MarqError, match=r"the message was sent as \S+, but it is unknown whether dead letter"):
        await stage.sender.resend("orders", identity, {"value": "new"})

    assert len(stage.broker.messages("orders")) == 1


async def test_a_schedule_is_run_besides_its_times(stage: Stage) -> None:
    await stage.broker.schedules.define(
        "daily", queue="reports", cron="0 9 * * *", value="grüße", headers={"kind": "report"}, type="yearly"
    )
    actor = Actor(stage.client, stage.dead_letters, stage.broker.queues, AsyncMock(), Mock(), stage.sender)

    told = await actor.run_schedule("daily")

    [sent] = stage.broker.messages("reports")
    assert (sent.body, sent.headers) == ("grüße".encode(), {"kind": b"report"})
    assert told == {"sent": sent.id, "to": "reports", "bytes": 7}
    async with stage.broker.consumer("reports") as consumer:
        assert [message.type for message in await consumer.receive(wait=60)] == ["yearly"]
    with pytest.raises(ConfigError, match="schedule 'hourly' does not exist"):
        await actor.run_schedule("hourly")


async def test_a_schedule_is_paused_and_resumed_by_undoing_the_change_where_that_suffices() -> None:
    daily = {"queue": "reports", "cron": "0 9 * * *"}
    async with Broker(schedules={"daily": daily, "off": daily | {"enabled": False}}) as broker:
        actor = Actor(Mock(), Mock(), broker.queues, AsyncMock(), Mock(), Mock())
        schedules = broker.queues.definitions.schedules

        await actor.switch_schedule("daily", enabled=False)
        paused = schedules.layer("schedule", "daily")
        await broker.advance(timedelta(days=2))
        sent_before = broker.messages("reports")
        await actor.switch_schedule("daily", enabled=True)
        await actor.switch_schedule("off", enabled=True)

        assert (paused, sent_before) == ({"enabled": False}, [])
        # marq.toml applies again.
        assert schedules.layer("schedule", "daily") is None
        assert schedules.layer("schedule", "off") == {"enabled": True}
        with pytest.raises(ConfigError, match="schedule 'never' does not exist"):
            await actor.switch_schedule("never", enabled=False)
        await broker.advance(timedelta(days=1))
        assert len(broker.messages("reports")) == 2


def test_headers_are_lines() -> None:
    assert read_headers("") == {}
    assert read_headers("a: b\r\n\r\nempty:\n") == {"a": "b", "empty": ""}
