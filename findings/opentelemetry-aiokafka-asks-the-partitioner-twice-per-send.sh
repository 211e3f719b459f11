#!/usr/bin/env bash
# Shows that tracing an aiokafka producer with OpenTelemetry changes the partitions of its messages, here to one only.
#
# opentelemetry-instrumentation-aiokafka 0.66b1, opentelemetry-sdk 1.45.1, aiokafka 0.14.0, confluent-kafka 2.16.1 (for
# its mock cluster).
# Expected: an instrumentation observes calls and adds a header. It does not affect the choice of the partition.
# Seen: to name the partition in its span, it serializes key and value and calls the producer's partitioner. Then send()
# does both again. A partitioner with state advances twice per message. For example, users write a round-robin
# partitioner, because aiokafka has none. It then uses only one of two partitions, or two of four. The span names the
# partition that does not have the message. A message queue that distributes messages by round robin loses half of its
# parallelism when tracing is switched on.
# Output seen:
#   plain:  partitions {0: 10, 1: 10}, value serializer called 20 times
#   traced: partitions {1: 20}, value serializer called 40 times, partition in the spans {'0': 20}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'opentelemetry-instrumentation-aiokafka==0.66b1' 'opentelemetry-sdk==1.45.1' \
    'aiokafka==0.14.0' 'confluent-kafka==2.16.1'
cat >main.py <<'PYTHON'
import asyncio, itertools, sys
from collections import Counter
from importlib.metadata import version
from aiokafka import AIOKafkaProducer
from confluent_kafka import Producer
from opentelemetry.instrumentation.aiokafka import AIOKafkaInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

MESSAGES = 20
names = ("opentelemetry-instrumentation-aiokafka", "opentelemetry-sdk", "aiokafka", "confluent-kafka")
print(*(f"{name} {version(name)}" for name in names))
mock = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "127.0.0.1:1", "log_level": 0})
servers = ",".join(f"{b.host}:{b.port}" for b in mock.list_topics(timeout=10).brokers.values())

async def send():
    calls, turn = [], itertools.count()

    def round_robin(key, all_partitions, available):
        return next(turn) % 2  # The mock cluster's topics have four partitions; two are enough here.

    def serialize(value):
        calls.append(value)
        return value

    async with AIOKafkaProducer(
        bootstrap_servers=servers, partitioner=round_robin, value_serializer=serialize
    ) as producer:
        sent = [await producer.send_and_wait("t", b"message") for _ in range(MESSAGES)]
    return dict(sorted(Counter(metadata.partition for metadata in sent).items())), len(calls)

plain, plain_calls = asyncio.run(send())
print(f"plain:  partitions {plain}, value serializer called {plain_calls} times")
spans, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
AIOKafkaInstrumentor().instrument(tracer_provider=provider)
traced, traced_calls = asyncio.run(send())
named = dict(Counter(span.attributes["messaging.destination.partition.id"] for span in spans.get_finished_spans()))
print(f"traced: partitions {traced}, value serializer called {traced_calls} times, partition in the spans {named}")
sys.exit((plain, plain_calls, traced, traced_calls, named)
         != ({0: 10, 1: 10}, MESSAGES, {1: MESSAGES}, 2 * MESSAGES, {"0": MESSAGES}))
PYTHON
venv/bin/python main.py
