"""A quorum queue of RabbitMQ by aio-pika, where there is a broker: each message by itself, and to the disk."""

from __future__ import annotations

from functools import partial

from bench.rabbitmq import rabbitmq
from bench.rows.drain import RUN, marq, of_client
from bench.suite import Bench, Figures, Row, measured

#: It takes so much longer that the others' number of messages would take minutes.
OF_MESSAGES = 0.1
RUNS = 3
PREFETCH = 2_000
QUORUM = "rabbitmq quorum queue"


def quorum_queue(bench: Bench, work: str = "0") -> Figures:
    size = bench.size
    with rabbitmq() as url:
        arguments = (url, bench.prefix(), str(size.messages), str(size.value_bytes), work, str(PREFETCH))
        return of_client(measured("bench.clients.drain_rabbitmq", *arguments))


RABBITMQ = Row(
    "rabbitmq",
    f"a full queue emptied by one process, and 10 ms of waiting for each message; prefetch and concurrency {PREFETCH}",
    {
        RUN: marq,
        QUORUM: quorum_queue,
        f"{RUN}, 10 ms": partial(marq, work="10", concurrency=PREFETCH),
        f"{QUORUM}, 10 ms": partial(quorum_queue, work="10"),
    },
    runs=RUNS,
    of_messages=OF_MESSAGES,
)
