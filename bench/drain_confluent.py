"""One process of a confluent-kafka consumer group: the practical limit for a Python consumer of the same topic."""

from __future__ import annotations

import json
import resource
import sys
import time

from confluent_kafka import Consumer

from bench.load import check


def main(servers: str, topic: str, count: int) -> None:
    begun = time.perf_counter()
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"{topic}-confluent",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    seen: list[bytes] = []
    first = 0.0
    while len(seen) < count:
        messages = consumer.consume(num_messages=4_000, timeout=1.0)
        if not messages:
            continue
        if not seen:
            first = time.perf_counter()
        seen += [message.value() for message in messages]
        consumer.commit(asynchronous=True)
    consumer.commit(asynchronous=False)
    ended = time.perf_counter()
    used = resource.getrusage(resource.RUSAGE_SELF)
    consumer.close()
    check(seen, count)
    figures = {
        "rate": count / (ended - first),
        "startup_seconds": first - begun,
        "cpu_seconds": used.ru_utime + used.ru_stime,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
