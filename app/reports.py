"""Reports of a handlers process to its worker: circuit breakers, messages in flight, and that its event loop runs.

The process writes lines of JSON into a pipe, and the worker shows the last one. It writes a line at least every
``REPEAT_SECONDS``, so a longer silence means that a handler blocks the event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any

#: How often a process looks whether there is something new.
LOOK_SECONDS = 0.5
#: An unchanged report is repeated after this long.
REPEAT_SECONDS = 1.0
#: A reader notes each period of this length without a report.
SILENCE_SECONDS = 2.0
#: Longer ones could be torn apart, for a pipe keeps only writes together that are short.
_MAX_BYTES = 4_096


class Reporter:
    """The end that writes; a reader that is gone or slow holds up nobody."""

    def __init__(self, pipe: int) -> None:
        # What handlers start must not hold the pipe open for itself.
        os.set_inheritable(pipe, False)
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._last = b""
        self._last_s = float("-inf")

    def tell(self, report: dict[str, Any]) -> None:
        """Write a report if it differs from the last one, or if that one is ``REPEAT_SECONDS`` old."""
        line = json.dumps(report).encode() + b"\n"
        now_s = time.monotonic()
        if line == self._last and now_s - self._last_s < REPEAT_SECONDS:
            return
        if len(line) > _MAX_BYTES:
            # Keep the former report; without any line the worker would assume that the event loop is blocked.
            line = b"{}\n"
        try:
            os.write(self._pipe, line)
        except (BlockingIOError, BrokenPipeError):
            return
        self._last, self._last_s = line, now_s


async def reports(pipe: int, silence_s: float = SILENCE_SECONDS) -> AsyncIterator[dict[str, Any] | None]:
    """Read reports until the process has ended; yield None for each ``silence_s`` without one. Closes the pipe.

    Silence is measured while this event loop runs, so a worker that was suspended does not count it.
    """
    lines = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(pipe, "rb", buffering=0)
    )
    try:
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    line = await lines.readline()
            except TimeoutError:
                yield None
                continue
            if not line:
                return
            yield json.loads(line)
    finally:
        transport.close()
