"""What a handlers process tells the worker that started it: the states of its queues' circuit breakers, as they change.

It writes lines of JSON into a pipe; the worker reads them and shows the last one.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

#: How often a process looks whether there is something new.
LOOK_SECONDS = 0.5
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

    def tell(self, report: dict[str, Any]) -> None:
        """Write a report if it is another one than the last."""
        line = json.dumps(report).encode() + b"\n"
        if line == self._last or len(line) > _MAX_BYTES:
            return
        try:
            os.write(self._pipe, line)
        except (BlockingIOError, BrokenPipeError):
            return
        self._last = line


async def reports(pipe: int) -> AsyncIterator[dict[str, Any]]:
    """Read what is told, until the process has ended; the pipe is closed then."""
    lines = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(pipe, "rb", buffering=0)
    )
    try:
        while line := await lines.readline():
            yield json.loads(line)
    finally:
        transport.close()
