"""Records that a test writes before something happens to a broker, and reads afterwards."""

from __future__ import annotations

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from marq_worker.broker import EmbeddedBroker

LIMIT_SECONDS = 120.0


async def send(broker: EmbeddedBroker, topic: str, value: bytes) -> None:
    async with AIOKafkaProducer(bootstrap_servers=broker.bootstrap_servers) as producer:
        await producer.send_and_wait(topic, value)


async def first_value(broker: EmbeddedBroker, topic: str) -> bytes | None:
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest")
    async with consumer:
        value: bytes | None = (await consumer.getone()).value
        return value
