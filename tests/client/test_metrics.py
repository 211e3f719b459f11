"""Prometheus metrics of a service's clients and handlers."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

import marq
from marq.metrics import ClientCollector, HandlerMetrics
from marq.testing import Broker
from marq.testing.cluster import MemoryWriter
from tests.unit.testing.handling import handling


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


async def test_what_clients_hold_and_have_sent(registry: CollectorRegistry) -> None:
    async with Broker() as broker, broker.producer() as producer, broker.consumer("emails") as consumer:
        registry.register(ClientCollector(producer, consumer))
        await producer.send("emails", b"one")
        await producer.send_many("emails", [b"two", b"three"])
        [first, *_] = await consumer.receive(max_messages=1)

        assert registry.get_sample_value("marq_producer_messages_sent_total") == 3
        assert registry.get_sample_value("marq_consumer_messages_processing", {"consumer": "emails"}) == 1
        await first.ack()

    assert registry.get_sample_value("marq_consumer_messages_in_flight", {"consumer": "emails"}) is None


async def test_a_message_with_a_deduplication_id_counts_as_sent_unless_it_is_delayed(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Broker() as broker, broker.producer() as producer:
        registry.register(ClientCollector(producer))
        await producer.send("emails", b"one", deduplication_id="a")
        await producer.send_many("emails", [b"two", b"three"], deduplication_ids=["b", "b"])
        await producer.send("emails", b"later", deduplication_id="c", delay=60)
        await producer.send("emails", b"later", delay=60)

        async def refuse(*_: object) -> list[int]:
            raise marq.BrokerUnavailable("no answer")

        monkeypatch.setattr(MemoryWriter, "write", refuse)
        for delay in (None, 60):
            with pytest.raises(marq.BrokerUnavailable):
                await producer.send("emails", b"four", deduplication_id="d", delay=delay)

    assert registry.get_sample_value("marq_producer_messages_sent_total") == 3
    assert registry.get_sample_value("marq_producer_messages_failed_total") == 1


async def test_a_consumer_that_stops_during_a_scrape_does_not_break_it(registry: CollectorRegistry) -> None:
    class Stopping(marq.Consumer):
        """Is stopped by another thread right after its first look."""

        looks = 0

        @property
        def in_flight(self) -> int | None:
            self.looks += 1
            return 1 if self.looks == 1 else None

        processing = in_flight

    async with Broker() as broker:
        registry.register(ClientCollector(Stopping("emails", broker.address)))

    assert registry.get_sample_value("marq_consumer_messages_in_flight", {"consumer": "emails"}) in {None, 1}


async def test_consumers_of_one_queue_are_one_series(registry: CollectorRegistry) -> None:
    async with Broker() as broker, broker.producer() as producer:
        broker.define("emails", breaker={"window": 1})
        async with broker.consumer("emails") as one, broker.consumer("emails") as other:
            registry.register(ClientCollector(one, other))
            for partition in range(2):
                await producer.send_many("emails", [b"x"] * (20 + partition))
            held = await one.receive(max_messages=2) + await other.receive(max_messages=1)

            samples = [
                (sample.name, *sample.labels.values()) for family in registry.collect() for sample in family.samples
            ]
            assert len(samples) == len(set(samples))
            assert registry.get_sample_value("marq_consumer_messages_processing", {"consumer": "emails"}) == len(held)
            assert {one.processing, other.processing} == {1, 2}

            async def fail(_: marq.Message) -> None:
                raise OSError("down")

            await asyncio.gather(*(message.release() for message in held))
            running = asyncio.create_task(one.run(fail))
            await broker.settle()
            assert (one.breakers, other.breakers) == ({"emails": "open"}, {"emails": "closed"})
            assert registry.get_sample_value("marq_consumer_breaker_open", {"queue": "emails"}) == 1
            await one.stop()
            await running


async def test_handlers_are_measured_by_outcome(registry: CollectorRegistry) -> None:
    metrics, seen = HandlerMetrics(registry), asyncio.Queue[bytes]()

    @marq.handler("emails", concurrency=1)
    async def handle(message: marq.Message) -> None:
        seen.put_nowait(message.value)
        if message.value == b"bad":
            raise marq.Reject("bad")

    async with (
        Broker() as broker,
        broker.producer() as producer,
        handling(broker.consumer("emails"), handle, middleware=[metrics]),
    ):
        await producer.send_many("emails", [b"good", b"bad"])
        assert {await seen.get(), await seen.get()} == {b"good", b"bad"}

    def calls(outcome: str) -> float | None:
        labels = {"queue": "emails", "outcome": outcome}
        return registry.get_sample_value("marq_process_duration_seconds_count", labels)

    assert (calls("done"), calls("reject")) == (1, 1)
    assert registry.get_sample_value("marq_wait_duration_seconds_count", {"queue": "emails"}) == 2


async def test_a_measured_handler_gets_its_value_decorated_or_not(registry: CollectorRegistry) -> None:
    metrics, seen = HandlerMetrics(registry), []

    async def handle(amounts: list[int]) -> None:
        seen.append(amounts)

    @marq.handler("emails")
    async def decorated(amounts: list[int]) -> None:
        seen.append(amounts)

    async with Broker() as broker, broker.producer() as producer:
        for function in (decorated, handle):
            await producer.send(decorated, [1, 2])
            async with handling(broker.consumer("emails"), function, middleware=[metrics]):
                await broker.drain("emails")

    assert seen == [[1, 2], [1, 2]]


async def test_plain_functions_are_measured_in_their_threads(registry: CollectorRegistry) -> None:
    metrics, done = HandlerMetrics(registry), asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle(message: marq.Message) -> None:
        loop.call_soon_threadsafe(done.set)
        raise marq.Retry(delay=60)

    async with (
        Broker() as broker,
        broker.producer() as producer,
        handling(broker.consumer("emails"), handle, middleware=[metrics]),
    ):
        await producer.send("emails", b"one")
        await done.wait()

    labels = {"queue": "emails", "outcome": "retry"}
    assert registry.get_sample_value("marq_process_duration_seconds_count", labels) == 1


def test_other_objects_than_clients_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"expected marq\.Consumer or marq\.Producer"):
        ClientCollector("emails")  # type: ignore[arg-type]
