"""Purges or replays, each in a process that ends by kill -9 after a given number of durable records.

``python -m tests.worker.dying SERVERS PREFIX purge|replay QUEUE…``: of the first queue after one record, of the second
after two, and so on; that of the last one comes to its end. Prints the exit codes as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from aiokafka import AIOKafkaProducer

from marq.admin import purge as purging
from marq.admin import replay as replaying
from marq.settings.client import ClientOptions, ClientSettings

#: Options of clients: many of them share a busy machine.
PATIENT: ClientOptions = {"connect_timeout": 60, "request_timeout": 60}
#: So that few messages take several records.
PIECE = 2


def die_after(records: int) -> None:
    """Let this process die when this many sends are durable, before the caller learns of the last one."""
    left = records

    def dying(name: str) -> None:
        plain = getattr(AIOKafkaProducer, name)

        async def send(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            future = await plain(*arguments, **options)
            await asyncio.wait([future])
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return future

        setattr(AIOKafkaProducer, name, send)

    for call in ("send", "send_batch"):
        dying(call)


def identity_of(queue: str) -> str:
    """The id of a queue's replay."""
    return f"id-{queue}"


async def run(settings: ClientSettings, what: str, queue: str) -> None:
    if what == "purge":
        await purging.purge(settings, queue)
    else:
        await replaying.replay(settings, queue, replaying.Start(time_ms=0), identity=identity_of(queue))


def main(servers: str, prefix: str, what: str, *queues: str) -> None:
    settings = ClientSettings.read(servers, {"prefix": prefix, **PATIENT}, environment={})
    replaying.MAX_MESSAGES = PIECE
    children = []
    for records, queue in enumerate(queues, start=1):
        child = os.fork()
        if not child:
            if records < len(queues):
                die_after(records)
            asyncio.run(run(settings, what, queue))
            os._exit(0)
        children.append(child)
    sys.stdout.write(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))


if __name__ == "__main__":
    main(*sys.argv[1:])
