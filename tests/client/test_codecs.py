"""Values on their way through a real broker: what is encoded here is decoded there, and what can't be is put away."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pydantic import BaseModel

import marq
from marq.core.markers import Reject
from tests.client.waiting import LIMIT_S, read_markers, until


class Email(BaseModel):
    to: str
    size: int = 0


@dataclass
class Order:
    number: int


async def test_values_come_back_as_they_were_sent(servers, prefix) -> None:
    sent = [{"a": [1, None, "ä"]}, "text", 5]
    async with (
        marq.Producer(servers, prefix=prefix, codec=marq.JSON) as producer,
        marq.Consumer("q", servers, prefix=prefix, codec=marq.JSON) as consumer,
    ):
        await producer.send_many("q", sent)
        await producer.send("q", Order(7))
        found: list[object] = []
        async for message in consumer:
            async with message:
                found.append(message.value)
            if len(found) == 4:
                break

    assert sorted(found, key=str) == sorted([*sent, {"number": 7}], key=str)


async def test_models_come_back_as_models(servers, prefix) -> None:
    codec = marq.Model(Email)
    async with (
        marq.Producer(servers, prefix=prefix, codec=codec) as producer,
        marq.Consumer("q", servers, prefix=prefix, codec=codec) as consumer,
    ):
        await producer.send("q", Email(to="eve@example.org", size=5))
        (message,) = await consumer.receive(1)
        await message.ack()

    assert message.value == Email(to="eve@example.org", size=5)
    assert message.body == b'{"to":"eve@example.org","size":5}'


async def test_what_can_not_be_decoded_becomes_a_dead_letter_and_does_not_disturb_the_others(
    servers, prefix, names
) -> None:
    handled: list[Email] = []
    asked: list[str] = []

    async def handle(message: marq.Message) -> None:
        asked.append(message.id)
        if len(asked) == 4:
            done.set()
        handled.append(message.value)

    done = asyncio.Event()
    async with marq.Producer(servers, prefix=prefix) as producer:
        await producer.send_many("q", [b"{", b'{"to": "a"}', b'{"size": "secret"}', b'{"to": "b"}'])
    async with marq.Consumer("q", servers, prefix=prefix, codec=marq.Model(Email), grace=5) as consumer:
        running = asyncio.create_task(consumer.run(handle, concurrency=1))
        await asyncio.wait_for(done.wait(), LIMIT_S)
        await until(lambda: consumer._running.flow.held == 0)
        await consumer.flush()
        await consumer.stop()
        await running

    rejects = [batch for batch in await read_markers(servers, names.markers) if isinstance(batch, Reject)]
    reasons = sorted(reason for batch in rejects for reason in batch.reasons)
    assert sorted(email.to for email in handled) == ["a", "b"]
    assert reasons == [
        "the value (1 bytes) is no Email: json_invalid",
        "the value (18 bytes) is no Email: to: missing; size: int_parsing",
    ]
