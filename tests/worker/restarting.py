"""Messages that are half done when a worker ends, and the redeliveries by its successor."""

from __future__ import annotations

from tests.worker.harness import Namespace, Sent, eventually

#: A restart with the same instance id needs no rebalance: the successor does not wait for the end of a session.
STATIC = {"MARQ_INSTANCE_ID": "one"}


async def half_done(marq: Namespace, queue: str, *, lease: float) -> tuple[list[Sent], list[Sent]]:
    """Acquire 20 messages of each source partition, and acknowledge half of them; return both halves."""
    done: list[Sent] = []
    still_open: list[Sent] = []
    for partition in (0, 1):
        sent = await marq.send_many(queue, 20, partition=partition)
        await marq.acquire(*sent, lease=lease)
        # In a flush of its own: the ACQUIRE has left rows, and the ACKs delete them.
        last = await marq.ack(*sent[:10])
        await marq.applied(last)
        # RocksDB is written right after the changelog: once the next write is there, this one is on the disk too.
        finished = await marq.send(f"{queue} done", partition=partition)
        await marq.acquire(finished, lease=60)
        await marq.applied(await marq.ack(finished))
        done += [*sent[:10], finished]
        still_open += sent[10:]
    return done, still_open


async def came_back(marq: Namespace, queue: str, expected: list[Sent]) -> list[str]:
    """Wait for as many copies as expected; return the ids of all copies."""
    copies = await eventually(lambda: marq.copies(queue), lambda found: len(found) >= len(expected))
    return sorted(dict(record.headers)["marq-id"].decode() for record in copies)


async def witness(marq: Namespace, queue: str = "witness") -> None:
    """Wait for the redelivery of later messages: everything that was due before has been redelivered by then."""
    for partition in (0, 1):
        sent = await marq.send(queue, partition=partition)
        await marq.acquire(sent, lease=0.2)
        await eventually(lambda sent=sent: marq.copies_of(sent))


def ids(messages: list[Sent]) -> list[str]:
    return sorted(message.id for message in messages)
