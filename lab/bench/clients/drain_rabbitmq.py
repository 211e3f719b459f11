"""One process that fills a quorum queue of RabbitMQ and drains it, with an ack for each message.

aio-pika runs the handler of each message in its own task, with up to ``prefetch`` messages without an ack.
"""

from __future__ import annotations

import asyncio

import aio_pika
from aio_pika.abc import AbstractIncomingMessage, AbstractRobustChannel

from lab.bench.clients.client import call
from lab.bench.clients.drain_account import NUMBER, Received, Work
from lab.bench.load import values

#: Messages sent at a time; the broker confirms each.
WINDOW = 1_000


async def fill(channel: AbstractRobustChannel, queue: str, count: int, size: int) -> None:
    exchange = channel.default_exchange
    for start in range(0, count, WINDOW):
        chosen = values(start, min(start + WINDOW, count), size)
        sent = [aio_pika.Message(value, delivery_mode=aio_pika.DeliveryMode.PERSISTENT) for value in chosen]
        await asyncio.gather(*[exchange.publish(message, queue) for message in sent])


async def main(url: str, name: str, count: int, size: int, work: Work, prefetch: int) -> None:
    async with await aio_pika.connect_robust(url) as connection:
        channel = await connection.channel()
        await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})
        await fill(channel, name, count, size)
    received = Received(count)
    async with await aio_pika.connect_robust(url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=prefetch)
        queue = await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})
        done = asyncio.Event()

        async def handler(message: AbstractIncomingMessage) -> None:
            received.begin()
            await work.do(message.body)
            received.values.append(message.body[NUMBER])
            await message.ack()
            if received.complete:
                done.set()

        consumer = await queue.consume(handler)
        await done.wait()
        # The broker answers in order, so all acks arrived before this.
        await queue.cancel(consumer)
        received.end()
        await queue.delete(if_unused=False, if_empty=False)
    received.report()


if __name__ == "__main__":
    call(main)
