"""Shows the dead letters of a queue, and why they died: ``python -m examples.dead_letters QUEUE``."""
# ruff: noqa: T201 - printing is what an example is for

import asyncio
import os
import sys

from aiokafka import AIOKafkaConsumer

SERVERS = os.environ.get("MARQ_BOOTSTRAP_SERVERS", "127.0.0.1:9092")
TOPIC = os.environ.get("MARQ_PREFIX", "marq") + ".dead-letters"


async def main(queue: str) -> None:
    # A topic like any other, read by an ordinary Kafka consumer; without a group it leaves no trace.
    async with AIOKafkaConsumer(TOPIC, bootstrap_servers=SERVERS, auto_offset_reset="earliest") as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        while any([await consumer.position(partition) < end for partition, end in ends.items()]):
            for letters in (await consumer.getmany(timeout_ms=500)).values():
                for letter in letters:
                    if letter.key == queue.encode():
                        show(letter.value, dict(letter.headers))


def show(value: bytes | None, headers: dict[str, bytes]) -> None:
    print(headers["marq-id"].decode(), value, "died:", headers["marq-reason"].decode())
    if "marq-error" in headers:
        print("  its last error was", headers["marq-error"].decode())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
