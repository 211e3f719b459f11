"""``make trace``: which files of marq one message visits, from send to acknowledgement, in the in-memory broker.

Counts the calls of one second in which one message is sent, received, handled and acknowledged, with the consumer and
the tracker of the in-memory broker running. :mod:`marq.testing` itself is left out. Prints one line of JSON for a plain
queue, one whose first attempt fails, and one with ordering; with ``--files`` also the files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import marq
from marq.testing import Broker

ROOT = Path(marq.__file__).parent
#: How long after the acknowledgement calls are still counted: the tracker folds it then.
AFTER_S = 0.1


class Trace:
    """The calls of functions of marq, and how often one file called another."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.changes = 0
        self._files: dict[CodeType, str | None] = {}
        self._last = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in self._files:
            self._files[code] = _file(code.co_filename)
        name = self._files[code]
        if name is not None:
            self.calls[name] += 1
            self.changes += name != self._last
            self._last = name


def _file(path: str) -> str | None:
    """Return a file's path in marq, or None if it is elsewhere or belongs to marq.testing."""
    try:
        name = Path(path).relative_to(ROOT).as_posix()
    except ValueError:
        return None
    return None if name.startswith("testing/") else name


async def traced(*, ordered: bool = False, fails: bool = False) -> Trace:
    """Trace one message."""
    settings: dict[str, Any] = {"ordering": "key"} if ordered else {}
    async with Broker() as broker:
        broker.define("work", **settings)
        done, seen, trace = asyncio.Event(), list[int](), Trace()

        async def handle(message: marq.Message) -> None:
            seen.append(message.attempt)
            if fails and message.attempt == 1:
                raise marq.Retry(delay=0)
            done.set()

        consumer = broker.consumer("work")
        async with broker.producer() as producer, consumer:
            running = asyncio.create_task(consumer.run(handle))
            # What happens once is not part of it: joining, resuming the source, first connections.
            await producer.send("work", b"before", **({"ordering_key": "a"} if ordered else {}))
            await done.wait()
            await asyncio.sleep(AFTER_S)
            done.clear()
            seen.clear()
            sys.setprofile(trace)
            try:
                await producer.send("work", b"one", **({"ordering_key": "a"} if ordered else {}))
                await done.wait()
                await asyncio.sleep(AFTER_S)
            finally:
                sys.setprofile(None)
            assert seen == ([1, 2] if fails else [1]), seen
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    return trace


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.trace", description=__doc__)
    parser.add_argument("--files", action="store_true", help="list the files with their calls")
    given = parser.parse_args()
    for name, options in {"plain": {}, "retried": {"fails": True}, "ordered": {"ordered": True}}.items():
        trace = asyncio.run(traced(**options))
        row = {"message": name, "files": len(trace.calls), "calls": trace.calls.total(), "changes": trace.changes}
        print(json.dumps(row))
        if given.files:
            print("\n".join(f"    {count:5} {file}" for file, count in sorted(trace.calls.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
