"""OpenTelemetry spans: what is told of a message from its send on, through delay and redelivery."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import marq
from marq import tracing
from marq.testing import Broker
from tests.unit.testing.handling import handling

QUEUE = "emails"


class Spans:
    """All that were ended so far."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def spans() -> Iterator[Spans]:
    spans = Spans()
    tracing.instrument(spans.provider)
    yield spans
    tracing.uninstrument()


def trace_of(span: ReadableSpan) -> int:
    return span.get_span_context().trace_id


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


async def test_sends_to_a_handler_name_its_queue(spans: Spans) -> None:
    @marq.handler(QUEUE)
    async def handle(text: str) -> None: ...

    async with Broker() as broker, broker.producer() as producer:
        await handle.send("one")
        await producer.send_many(handle, ["two"])
        await broker.run(handle)

    for name in (f"send {QUEUE}", f"process {QUEUE}"):
        assert [span.attributes and span.attributes["messaging.destination.name"] for span in spans.named(name)] == [
            QUEUE,
            QUEUE,
        ]


async def test_a_delayed_message_that_fails_once_is_processed_in_the_trace_of_its_sender(spans: Spans) -> None:
    calls: list[int] = []

    @marq.handler(QUEUE)
    async def handle(message: marq.Message) -> None:
        calls.append(message.attempt)
        if message.attempt == 1:
            raise ValueError("text that belongs to nobody else")

    async with Broker() as broker, broker.producer() as producer, broker.worker(handle):
        await producer.send(QUEUE, b"payload-of-the-message", delay=60)
        await broker.advance(60)
        await broker.advance(3_600)

    assert calls == [1, 2]
    [sent] = spans.named(f"send {QUEUE}")
    first, second = spans.named(f"process {QUEUE}")
    [released], [acked] = spans.named(f"release {QUEUE}"), spans.named(f"ack {QUEUE}")
    assert {trace_of(span) for span in (sent, first, released, second, acked)} == {trace_of(sent)}
    for span in (first, second):
        assert span.kind is SpanKind.CONSUMER
        assert parent_of(span) == sent.get_span_context().span_id
        assert [link.context.span_id for link in span.links] == [sent.get_span_context().span_id]
    assert parent_of(acked) == second.get_span_context().span_id
    assert (first.status.status_code, second.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert dict(sent.attributes or {})["marq.delay"] == 60
    assert dict(first.attributes or {}) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": QUEUE,
        "messaging.message.id": dict(sent.attributes or {})["messaging.message.id"],
        "messaging.destination.partition.id": "0",
        "messaging.kafka.offset": dict(first.attributes or {})["messaging.kafka.offset"],
        "marq.attempt": 1,
        "error.type": "ValueError",
    }
    # Nothing of what was sent, nor of the text of an error, which may quote it.
    told = "".join(span.to_json() for span in spans.all())
    assert "payload-of" not in told
    assert "belongs to nobody" not in told


async def test_only_a_message_that_has_a_record_is_given_its_place(spans: Spans) -> None:
    async with Broker() as broker, broker.producer() as producer:
        await producer.send(QUEUE, b"at", at=broker.now + timedelta(hours=1))
        await producer.send(QUEUE, b"delay", delay=timedelta(hours=1))
        await producer.send(QUEUE, b"once", deduplication_id="order-1")
        await producer.send(QUEUE, b"now")

    names = [set(span.attributes or {}) for span in spans.named(f"send {QUEUE}")]
    assert all("messaging.message.id" in attributes for attributes in names)
    place = {"messaging.destination.partition.id", "messaging.kafka.offset"}
    assert [attributes & place for attributes in names] == [set(), set(), set(), place]


async def test_a_batch_is_linked_to_the_senders_of_its_messages(spans: Spans) -> None:
    async with Broker() as broker, broker.producer() as producer, broker.consumer(QUEUE) as consumer:
        await producer.send(QUEUE, b"one")
        await producer.send_many(QUEUE, [b"two", b"three"])
        messages = await consumer.receive(max_messages=10)
        messages += await consumer.receive(max_messages=10) if len(messages) < 3 else []
        await consumer.ack(messages)

    senders = {span.get_span_context().span_id for span in spans.named(f"send {QUEUE}")}
    received = spans.named(f"receive {QUEUE}")
    assert {link.context.span_id for span in received for link in span.links} == senders
    assert sum(count(span) for span in received) == 3
    [acked] = spans.named(f"ack {QUEUE}")
    assert acked.kind is SpanKind.CLIENT
    assert count(acked) == 3


def count(span: ReadableSpan) -> int:
    found: Any = dict(span.attributes or {})["messaging.batch.message_count"]
    return int(found)


async def test_what_is_done_by_hand_is_told_of_too(spans: Spans) -> None:
    async with Broker() as broker, broker.producer() as producer, broker.consumer(QUEUE) as consumer:
        await producer.send_many(QUEUE, [b"one", b"two", b"three"])
        seen = 0
        async for message in consumer:
            seen += 1
            if seen == 1:
                async with message:
                    await message.renew(60)
            elif seen == 2:
                with pytest.raises(ZeroDivisionError):
                    async with message:
                        raise ZeroDivisionError
            else:
                await message.reject("no good")
                break

    one, two = spans.named(f"process {QUEUE}")
    [renewed], [rejected] = spans.named(f"renew {QUEUE}"), spans.named(f"reject {QUEUE}")
    [released] = spans.named(f"release {QUEUE}")
    assert parent_of(renewed) == one.get_span_context().span_id
    assert parent_of(released) == two.get_span_context().span_id
    assert dict(two.attributes or {})["error.type"] == "ZeroDivisionError"
    assert dict(rejected.attributes or {})["messaging.operation.type"] == "settle"
    assert trace.get_current_span().get_span_context().is_valid is False


async def test_what_passes_a_message_on_is_its_own_sender(spans: Spans) -> None:
    async with Broker() as broker, broker.producer() as producer, broker.consumer(QUEUE) as consumer:

        async def forward(message: marq.Message) -> None:
            await producer.send("archive", message.value, headers=message.headers)
            done.set()

        done = asyncio.Event()
        await producer.send(QUEUE, b"one", headers={"tenant": b"acme"})
        running = asyncio.create_task(consumer.run(forward))
        await done.wait()
        await consumer.stop()
        await running
        [copy] = broker.messages("archive")

    [sent], [passed_on] = spans.named(f"send {QUEUE}"), spans.named("send archive")
    assert trace_of(passed_on) == trace_of(sent)
    assert copy.headers["tenant"] == b"acme"
    assert f"{passed_on.get_span_context().span_id:016x}".encode() in (copy.headers["traceparent"] or b"")


async def test_a_handler_that_rejects_is_told_of_as_such(spans: Spans) -> None:
    @marq.handler(QUEUE)
    async def handle(message: marq.Message) -> None:
        raise marq.Reject("no good")

    async with Broker() as broker, broker.producer() as producer:
        await producer.send(QUEUE, b"one")
        await broker.run(handle)

    [processed], [rejected] = spans.named(f"process {QUEUE}"), spans.named(f"reject {QUEUE}")
    assert dict(processed.attributes or {})["marq.outcome"] == "reject"
    assert dict(rejected.attributes or {})["messaging.operation.name"] == "reject"
    assert trace_of(rejected) == trace_of(processed)
    assert spans.named(f"release {QUEUE}") == []


async def test_a_block_in_a_handler_is_not_a_second_process(spans: Spans) -> None:
    @marq.handler(QUEUE)
    async def handle(message: marq.Message) -> None:
        async with message:
            pass

    async with Broker() as broker, broker.producer() as producer:
        await producer.send(QUEUE, b"one")
        await broker.run(handle)

    assert len(spans.named(f"process {QUEUE}")) == 1


async def test_plain_functions_are_told_of_from_their_threads(spans: Spans) -> None:
    done, loop, current = asyncio.Event(), asyncio.get_running_loop(), []

    def handle(message: marq.Message) -> None:
        current.append(trace.get_current_span())
        loop.call_soon_threadsafe(done.set)
        raise marq.Retry(delay=60)

    async with Broker() as broker, broker.producer() as producer, handling(broker.consumer(QUEUE), handle):
        await producer.send(QUEUE, b"one")
        await done.wait()

    [span] = spans.named(f"process {QUEUE}")
    assert dict(span.attributes or {})["marq.outcome"] == "retry"
    assert span.status.status_code is StatusCode.UNSET
    assert [attached.get_span_context() for attached in current] == [span.get_span_context()]


async def test_a_call_with_a_list_is_one_span_that_is_linked_to_the_senders(spans: Spans) -> None:
    done, sizes = asyncio.Event(), []

    async def handle(messages: list[marq.Message]) -> None:
        sizes.append(len(messages))
        if sum(sizes) == 2:
            done.set()

    async with Broker() as broker, broker.producer() as producer, broker.consumer(QUEUE) as consumer:
        await producer.send(QUEUE, b"one")
        await producer.send(QUEUE, b"two")
        running = asyncio.create_task(consumer.run_batch(handle))
        await done.wait()
        await consumer.stop()
        await running

    processed = spans.named(f"process {QUEUE}")
    assert len(processed) == len(sizes)
    senders = {span.get_span_context().span_id for span in spans.named(f"send {QUEUE}")}
    assert {link.context.span_id for span in processed for link in span.links} == senders


async def test_a_handler_that_loses_its_lease_is_cancelled_in_its_span(spans: Spans) -> None:
    begun, attempts = asyncio.Event(), []

    async def handle(message: marq.Message) -> None:
        attempts.append(message.attempt)
        begun.set()
        if message.attempt == 1:
            await asyncio.Event().wait()

    async with (
        Broker() as broker,
        broker.producer() as producer,
        handling(broker.consumer(QUEUE, lease=30, max_lease=30), handle),
    ):
        await producer.send(QUEUE, b"one")
        await begun.wait()
        await broker.advance(30, settle=False)
        await broker.drain(QUEUE)

    assert attempts == [1, 2]
    lost, done = spans.named(f"process {QUEUE}")
    assert dict(lost.attributes or {})["error.type"] == "CancelledError"
    assert (lost.status.status_code, done.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)


def test_a_synchronous_producer_sends_in_the_span_of_its_caller(spans: Spans) -> None:
    tracer = spans.provider.get_tracer("test")
    broker = Broker()
    with marq.SyncProducer(broker.address) as producer, tracer.start_as_current_span("request") as request:
        producer.send(QUEUE, b"one")
    broker.close()

    [sent] = spans.named(f"send {QUEUE}")
    assert parent_of(sent) == request.get_span_context().span_id


async def test_nothing_is_left_of_it(spans: Spans) -> None:
    tracing.uninstrument()

    async with Broker() as broker, broker.producer() as producer:
        await producer.send(QUEUE, b"one")
        [message] = broker.messages(QUEUE)

    assert message.headers == {}
    assert spans.all() == []
