#!/usr/bin/env bash
# Shows that with OpenTelemetry, a list of headers that a program reuses grows with each send, until sends are refused.
#
# opentelemetry-instrumentation-confluent-kafka and -aiokafka 0.66b1, opentelemetry-sdk 1.45.1, confluent-kafka 2.16.1
# (and its mock cluster), aiokafka 0.14.0. A producer sends all messages with the same list of one header.
# Expected: tracing adds one traceparent to each message, and leaves the caller's list as it is.
# Seen: the instrumentation appends to the list itself, so message n has n traceparents, and the bytes sent grow with
# the square of the number of messages. With message.max.bytes of 100,000, the producer refuses each message from number
# 1,470 on. A consumer's span is linked to the first traceparent only, so all messages are linked to the first send.
# Spring for Kafka repaired a similar fault (its issue 3786). A message queue has to pass a new list without a
# traceparent to each send.
# Output seen:
#   not traced: traceparents 0 in the first message, 0 in the last, 0 in the list; spans linked to 0 sends
#   traced, copies: traceparents 1 in the first message, 1 in the last, 0 in the list; spans linked to 100 sends
#   traced, one list: traceparents 1 in the first message, 100 in the last, 100 in the list; spans linked to 1 sends
#   traced, one list, at most 100000 bytes: message 1470 MSG_SIZE_TOO_LARGE
#   aiokafka, traced, one list: traceparents 100 in the list
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'opentelemetry-instrumentation-confluent-kafka==0.66b1' \
    'opentelemetry-instrumentation-aiokafka==0.66b1' 'opentelemetry-sdk==1.45.1' 'confluent-kafka==2.16.1' \
    'aiokafka==0.14.0'
cat >main.py <<'PYTHON'
import asyncio, sys
from importlib.metadata import version
from aiokafka import AIOKafkaProducer
from confluent_kafka import Consumer, KafkaException, Producer
from opentelemetry.instrumentation.aiokafka import AIOKafkaInstrumentor
from opentelemetry.instrumentation.confluent_kafka import ConfluentKafkaInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

SENDS, MAX_BYTES = 100, 100_000
names = ("opentelemetry-instrumentation-confluent-kafka", "opentelemetry-sdk", "confluent-kafka", "aiokafka")
print(*(f"{name} {version(name)}" for name in names))
mock = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "127.0.0.1:1", "log_level": 0})
servers = ",".join(f"{b.host}:{b.port}" for b in mock.list_topics(timeout=10).brokers.values())
client = {"bootstrap.servers": servers, "log_level": 0}
spans, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))

def traced(producer):
    return ConfluentKafkaInstrumentor.instrument_producer(producer, tracer_provider=provider)

def traceparents(headers):
    return sum(name == "traceparent" for name, _ in headers or ())

def with_confluent(topic, wrap, header_list):
    """Send messages and read them; return traceparents in the first and last message, and in the caller's list."""
    producer, headers = wrap(Producer(client)), [("type", b"order")]
    for _ in range(SENDS):
        producer.produce(topic, b"message", headers=header_list(headers), partition=0)
    producer.flush()
    consumer = ConfluentKafkaInstrumentor.instrument_consumer(
        Consumer({**client, "group.id": topic, "auto.offset.reset": "earliest"}), tracer_provider=provider)
    consumer.subscribe([topic])
    counts = []
    spans.clear()
    while len(counts) < SENDS:
        if message := consumer.poll(1.0):
            counts.append(traceparents(message.headers()))
    consumer.poll(0)  # Ends the span of the last message.
    linked = {link.context.span_id for span in spans.get_finished_spans() for link in span.links}
    consumer.close()
    return counts[0], counts[-1], traceparents(headers), len(linked)

def refused():
    """Return the number of the first message that the producer refuses."""
    producer, headers, number = traced(Producer({**client, "message.max.bytes": MAX_BYTES})), [("type", b"order")], 0
    while True:
        number += 1
        try:
            producer.produce("refused", b"message", headers=headers, partition=0)
        except KafkaException as error:
            return number, error.args[0].name()
        producer.flush()

async def with_aiokafka():
    AIOKafkaInstrumentor().instrument(tracer_provider=provider)
    producer, headers = AIOKafkaProducer(bootstrap_servers=servers), [("type", b"order")]
    await producer.start()
    for _ in range(SENDS):
        await producer.send_and_wait("aiokafka", b"message", headers=headers, partition=0)
    await producer.stop()
    return traceparents(headers)

seen = [with_confluent("plain", lambda producer: producer, lambda headers: headers),
        with_confluent("copies", traced, list), with_confluent("one-list", traced, lambda headers: headers)]
for case, (first, last, own, linked) in zip(("not traced", "traced, copies", "traced, one list"), seen):
    print(f"{case}: traceparents {first} in the first message, {last} in the last, {own} in the list; "
          f"spans linked to {linked} sends")
number, error = refused()
print(f"traced, one list, at most {MAX_BYTES} bytes: message {number} {error}")
own = asyncio.run(with_aiokafka())
print(f"aiokafka, traced, one list: traceparents {own} in the list")
as_seen = [(0, 0, 0, 0), (1, 1, 0, SENDS), (1, SENDS, SENDS, 1)], (1470, "MSG_SIZE_TOO_LARGE"), SENDS
sys.exit((seen, (number, error), own) != as_seen)
PYTHON
venv/bin/python main.py
