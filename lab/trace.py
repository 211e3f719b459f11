"""``make trace``: which files of marq one message visits, from send to acknowledgement, in the in-memory broker.

Counts the calls of one second in which one message is sent, received, handled and acknowledged, with the consumer and
the tracker of the in-memory broker running. :mod:`marq.testing` itself is left out. Prints one line of JSON for a plain
queue, one whose first attempt fails, and one with ordering; with ``--files`` also the files.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import cache
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import marq
from marq.testing import Broker

ROOT = Path(marq.__file__).parent
#: How long after the acknowledgement calls are still counted: the tracker folds it then.
AFTER_S = 0.1


@cache
def _file(path: str) -> str:
    """Return a file's path in marq, or "" if it is elsewhere or belongs to marq.testing."""
    name = Path(path).relative_to(ROOT).as_posix() if Path(path).is_relative_to(ROOT) else ""
    return "" if name.startswith("testing/") else name


async def traced(*, ordered: bool = False, fails: bool = False) -> list[str]:
    """Return the files of all calls of functions of marq for one message."""
    settings: dict[str, Any] = {"ordering": "key"} if ordered else {}
    options: dict[str, Any] = {"ordering_key": "a"} if ordered else {}
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (file := _file(frame.f_code.co_filename)):
            calls.append(file)

    async with Broker() as broker:
        broker.define("work", **settings)
        done = asyncio.Event()

        async def handle(message: marq.Message) -> None:
            if fails and message.attempt == 1:
                raise marq.Retry(delay=0)
            done.set()

        async with broker.producer() as producer, broker.consumer("work") as consumer:
            running = asyncio.create_task(consumer.run(handle))
            # What happens once is not part of it: joining, resuming the source, first connections.
            for profile in (None, note):
                done.clear()
                sys.setprofile(profile)
                await producer.send("work", b"one", **options)
                await done.wait()
                await asyncio.sleep(AFTER_S)
            sys.setprofile(None)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    return calls


def main() -> None:
    for name, options in {"plain": {}, "retried": {"fails": True}, "ordered": {"ordered": True}}.items():
        calls = asyncio.run(traced(**options))
        files, changes = sorted({*calls}), len(list(groupby(calls)))
        print(json.dumps({"message": name, "files": len(files), "calls": len(calls), "changes": changes}))
        if "--files" in sys.argv:
            print("\n".join(f"    {calls.count(file):5} {file}" for file in files))


if __name__ == "__main__":
    main()
