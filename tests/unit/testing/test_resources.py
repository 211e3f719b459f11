"""Lifespans and middleware around handlers on the broker in memory, and what a test overrides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import pytest

import marq
from marq.testing import Broker

QUEUE = "emails"


class Service(ModuleType):
    """A module with a handler, a lifespan and a middleware; ``journal`` has what happened."""

    def __init__(self, name: str = "service") -> None:
        super().__init__(name)
        self.journal: list[Any] = []
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()

        @marq.handler(QUEUE)
        async def handle(message: marq.Message) -> None:
            self.journal.append(("handle", message.value, message.state))
            self.begun.set()
            await self.gate.wait()

        @marq.lifespan
        async def resources() -> AsyncIterator[dict[str, object]]:
            self.journal.append("open")
            yield {"pool": "real"}
            self.journal.append(("close", self.acked()))

        @marq.middleware
        async def noting(message: marq.Message, call_next: marq.CallNext) -> None:
            self.journal.append("middleware")
            await call_next(message)

        self.handle, self.resources, self.noting = handle, resources, noting
        self.acked = lambda: 0


async def test_lifespans_and_middleware_of_a_module_surround_its_handlers_as_in_a_worker() -> None:
    service = Service()
    async with Broker() as broker, broker.producer() as producer:
        service.acked = lambda: len(broker.acked(QUEUE))
        await producer.send(QUEUE, b"x")

        await broker.run(service)

    assert service.journal == ["open", "middleware", ("handle", b"x", {"pool": "real"}), ("close", 1)]


async def test_a_stop_closes_resources_when_the_outcome_of_the_last_handler_is_durable() -> None:
    service = Service()
    service.gate.clear()
    async with Broker() as broker, broker.producer() as producer:
        service.acked = lambda: len(broker.acked(QUEUE))
        async with broker.worker(service):
            await producer.send(QUEUE, b"x")
            await service.begun.wait()
            service.gate.set()

    assert service.journal[-1] == ("close", 1)


async def test_a_module_may_have_only_lifespans_or_middleware() -> None:
    service, around = Service(), ModuleType("around")
    around.noting, around.resources = service.noting, service.resources  # type: ignore[attr-defined]

    async with Broker() as broker, broker.producer() as producer:
        await producer.send(QUEUE, b"x")
        await broker.run(service.handle, around)

    assert service.journal == ["open", "middleware", ("handle", b"x", {"pool": "real"}), ("close", 0)]


async def test_every_group_has_its_own_resources() -> None:
    service = Service()

    @marq.handler("reports", group="other")
    async def report(message: marq.Message) -> None: ...

    service.report = report  # type: ignore[attr-defined]
    async with Broker() as broker, broker.worker(service):
        pass

    assert service.journal == ["open", "open", ("close", 0), ("close", 0)]


async def test_an_override_replaces_what_a_lifespan_yields_without_running_it() -> None:
    service, other = Service(), ModuleType("other")

    @marq.lifespan
    async def others() -> AsyncIterator[dict[str, object]]:
        yield {"cache": "real"}

    other.others = others  # type: ignore[attr-defined]
    async with Broker() as broker, broker.producer() as producer:
        broker.override(service.resources, {"pool": "fake"})
        await producer.send(QUEUE, b"x")
        await broker.run(service, other)

    assert service.journal == ["middleware", ("handle", b"x", {"pool": "fake", "cache": "real"})]


async def test_only_lifespans_can_be_overridden() -> None:
    async with Broker() as broker:
        with pytest.raises(marq.ConfigError, match=r"expected a function with @marq\.lifespan"):
            broker.override(Service().handle, {})


async def test_an_error_of_a_lifespan_is_raised_and_leaves_nothing_running() -> None:
    service = Service()

    @marq.lifespan
    async def connecting() -> AsyncIterator[None]:
        raise ConnectionError("no answer")
        yield

    service.connecting = connecting  # type: ignore[attr-defined]
    async with Broker() as broker, broker.producer() as producer:
        await producer.send(QUEUE, b"x")
        with pytest.raises(marq.MarqError, match="connecting failed on startup"):
            await broker.run(service)
        assert len(broker.messages(QUEUE)) == 1

    assert service.journal == ["open"]


async def test_an_error_at_the_end_of_a_lifespan_is_raised_in_the_test() -> None:
    service = Service()

    @marq.lifespan
    async def disconnecting() -> AsyncIterator[None]:
        yield
        raise ConnectionError("no answer")

    service.disconnecting = disconnecting  # type: ignore[attr-defined]
    async with Broker() as broker, broker.producer() as producer:
        await producer.send(QUEUE, b"x")
        with pytest.raises(marq.MarqError, match="failed on shutdown"):
            await broker.run(service)
        assert len(broker.acked(QUEUE)) == 1
        # Another worker gets what comes later: the former one has left.
        del service.disconnecting  # type: ignore[attr-defined]
        await producer.send(QUEUE, b"y")
        await broker.run(service)
        assert len(broker.acked(QUEUE)) == 2


async def test_errors_of_middleware_are_raised_in_the_test_on_request() -> None:
    service = Service()

    @marq.middleware
    async def failing(message: marq.Message, call_next: marq.CallNext) -> None:
        raise KeyError("of the middleware")

    service.failing = failing  # type: ignore[attr-defined]
    async with Broker(queues={QUEUE: {"max_attempts": 1}}) as broker, broker.producer() as producer:
        await producer.send(QUEUE, b"x")
        with pytest.raises(KeyError, match=r"of the middleware"):
            await broker.run(service, raise_errors=True)


async def test_a_consumer_of_a_service_has_no_state() -> None:
    async with Broker() as broker, broker.producer() as producer, broker.consumer(QUEUE) as consumer:
        await producer.send(QUEUE, b"x")
        [message] = await consumer.receive()
        assert message.state is None
        await message.ack()
