"""Processes for ``bench.starts`` that are killed: a consumer, or somebody who leaves a transaction open."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import marq
from bench.load import QUEUE
from marq.core.marker_codec import encode
from marq.core.markers import Ack, Source
from marq.core.names import Names
from marq.settings import ClientSettings
from marq.topics import ensure_topics
from marq.transactions import MarkerTransactions

#: The least that brokers allow.
SESSION_TIMEOUT_S = 6.0
#: A machine that does other things, too, may let a start wait for long.
CONNECT_TIMEOUT_S = 180.0
#: The member whose transaction is left open.
DEAD_MEMBER = "dead"


async def consume(servers: str, prefix: str, start: str, lease: str, path: str) -> None:
    """Handle messages, and write number and attempt of each before it is acked."""
    seen = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def handler(message: marq.Message) -> None:
        os.write(seen, b"%s %d\n" % (message.value, message.attempt))

    options = {"prefix": prefix, "session_timeout": SESSION_TIMEOUT_S, "connect_timeout": CONNECT_TIMEOUT_S}
    async with marq.Consumer(QUEUE, servers, start=start, lease=float(lease), **options) as consumer:  # type: ignore[misc]
        await consumer.run(handler)


async def transactions(servers: str, prefix: str) -> MarkerTransactions:
    """Return the transactions of a member; one that starts ends what was open under the name."""
    settings = ClientSettings(servers, Names(prefix), connect_timeout_ms=int(CONNECT_TIMEOUT_S * 1000))
    limit = (await ensure_topics(settings)).markers_limit_bytes
    return MarkerTransactions(settings, limit, settings.names.start_id("bench", DEAD_MEMBER))


async def leave_open(servers: str, prefix: str) -> None:
    """Connect, wait for a line, open a transaction that has written to all markers partitions, and say so."""
    names = Names(prefix)
    producer = await (await transactions(servers, prefix))._running()
    partitions = await producer.partitions_for(names.markers)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await producer.begin_transaction()
    # Whatever it says: it is never committed.
    marker = encode(Ack("nobody", 1, Source(names.messages, 0), [0]))
    for partition in sorted(partitions):
        await producer.send_and_wait(names.markers, marker, partition=partition)
    print("open", flush=True)
    await asyncio.Event().wait()


def command(what: str, *arguments: str | Path) -> list[str]:
    """Return the command that runs one of these."""
    return [sys.executable, "-m", "bench.start_process", what, *map(str, arguments)]


if __name__ == "__main__":
    asyncio.run({"consume": consume, "leave_open": leave_open}[sys.argv[1]](*sys.argv[2:]))
