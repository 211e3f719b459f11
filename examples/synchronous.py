"""Sends from several threads, without an event loop: ``python -m examples.synchronous QUEUE COUNT``."""
# ruff: noqa: T201 - printing is what an example is for

import sys
from concurrent.futures import ThreadPoolExecutor

import marq


def main(queue: str, count: int) -> None:
    # One producer for the whole process: messages that threads send at the same time share batches.
    with marq.SyncProducer(codec=marq.JSON) as producer:

        def send(number: int) -> str:
            return producer.send(queue, {"number": number, "square": number**2}).id

        with ThreadPoolExecutor(8) as threads:
            ids = set(threads.map(send, range(count)))
        print("sent", len(ids), "from threads")
        # Each of these queues gets the message and a receipt.
        for receipt in producer.send([queue, f"{queue}-audit"], {"done": count}):
            print("sent", receipt.queue, receipt.id)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
