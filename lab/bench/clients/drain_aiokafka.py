"""One process of an aiokafka consumer group: the client that Marq builds on, with offsets only."""

from __future__ import annotations

from aiokafka import AIOKafkaConsumer

from lab.bench.clients.client import call
from lab.bench.clients.drain_account import Received


async def main(servers: str, topic: str, count: int) -> None:
    received = Received(count)
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=servers,
        group_id=f"{topic}-aiokafka",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    await consumer.start()
    while not received.complete:
        fetched = await consumer.getmany(timeout_ms=1_000)
        if not fetched:
            continue
        for records in fetched.values():
            received.add(record.value for record in records)
        await consumer.commit()
    received.end()
    await consumer.stop()
    received.report()


if __name__ == "__main__":
    call(main)
