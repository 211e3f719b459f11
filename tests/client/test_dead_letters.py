"""Dead letters at a broker without a worker: new installations, brokers that go away."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaProducer

import marq
from broker.embedded import EmbeddedBroker
from marq.core.names import Names
from marq.letter_log import Stored
from marq.letter_survey import Survey


async def test_a_new_installation_has_no_dead_letters(servers: str) -> None:
    for _ in range(5):
        async with marq.DeadLetters(servers, prefix=f"t{uuid4().hex[:12]}") as letters:
            assert await letters.count() == []
            assert await letters.redrive("emails") == marq.Redriven(0)


async def test_a_broker_that_goes_away_is_said_within_the_limit() -> None:
    with EmbeddedBroker() as own:
        names = Names("shop")
        options = {"prefix": names.prefix, "request_timeout": 2}
        async with marq.DeadLetters(own.bootstrap_servers, **options) as letters:  # type: ignore[arg-type]
            async with AIOKafkaProducer(bootstrap_servers=own.bootstrap_servers) as producer:
                for number in range(3_000):
                    last = await producer.send(names.dead_letters, b"x" * 10_000, b"emails", partition=number % 4)
                await last
            seen = letters.peek("emails")
            await anext(seen)

            await asyncio.to_thread(own.stop)

            async with asyncio.timeout(120):
                with pytest.raises(marq.BrokerUnavailable):
                    async for _ in seen:
                        pass
                with pytest.raises(marq.BrokerUnavailable):
                    await letters.count()


class Stuck:
    """A log of which nothing comes."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...

    async def ranges(self) -> dict[int, range]:
        return {0: range(7)}

    def seek(self, positions: Mapping[int, int]) -> None: ...

    async def read(self) -> Sequence[Stored]:
        await asyncio.sleep(0.01)
        return []

    async def positions(self) -> dict[int, int]:
        return {0: 3}


async def test_who_reads_does_not_wait_for_ever() -> None:
    survey = Survey("dead", lambda queue, record: True)

    with pytest.raises(marq.BrokerUnavailable, match=r"nothing came for 0\.1 s of \{0: 3\}, and they end at \{0: 7\}"):
        await survey.make(Stuck(), 0.1)
