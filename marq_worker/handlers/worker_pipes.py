"""Pipes between a worker and its handler processes: reports to the worker, and the end of the worker.

A process writes reports (circuit breakers, messages in flight) as lines of JSON into a pipe, at least one every
``REPEAT_SECONDS``. A longer silence therefore means that a handler is blocking the event loop; the process's watchdog,
a thread, then reports which one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

#: Interval to check for changes.
LOOK_SECONDS = 0.5
#: An unchanged report is repeated after this long.
REPEAT_SECONDS = 1.0
#: A reader notes each period of this length without a report.
SILENCE_SECONDS = 2.0
#: Maximum number of bytes of one read.
_READ_BYTES = 1 << 16


class Reporter:
    """The writing end; a reader that is gone or slow holds up nothing."""

    def __init__(self, pipe: int) -> None:
        # Processes that handlers start must not inherit the pipe and hold it open.
        os.set_inheritable(pipe, False)
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._last = b""
        self._last_s = float("-inf")
        #: The rest of the last report, for which the pipe had no room.
        self._unwritten = b""
        # The watchdog's thread writes, too.
        self._writing = threading.Lock()

    def tell(self, report: dict[str, Any]) -> None:
        """Write a report if it differs from the last one, or if that one is ``REPEAT_SECONDS`` old."""
        with self._writing:
            self._tell(report)

    def _tell(self, report: dict[str, Any]) -> None:
        if not self._unwritten:
            line, now_s = json.dumps(report, ensure_ascii=False).encode() + b"\n", time.monotonic()
            if line == self._last and now_s - self._last_s < REPEAT_SECONDS:
                return
            self._unwritten = self._last = line
            self._last_s = now_s
        with suppress(BlockingIOError, BrokenPipeError):
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._pipe, self._unwritten) :]


async def reports(pipe: int, silence_s: float = SILENCE_SECONDS) -> AsyncIterator[dict[str, Any] | None]:
    """Yield reports until the process has ended, and None for each ``silence_s`` without one. Closes the pipe.

    A partial report is yielded as an empty one. Silence is measured only while this event loop runs, so a suspended
    worker does not count it.
    """
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", buffering=0)
    )
    rest = b""
    try:
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    part = await reader.read(_READ_BYTES)
            except TimeoutError:
                yield None
                continue
            if not part:
                return
            *lines, rest = (rest + part).split(b"\n")
            for line in lines or [b"{}"]:
                yield json.loads(line)
    finally:
        transport.close()


log = logging.getLogger("marq.worker")


def follow_parent(pipe: int, stop_limit_s: float) -> None:
    """Stop this process within the limit when the pipe's last writer is gone: the parent, even after a kill -9."""
    # Processes that handlers start must not inherit the pipe and hold it open.
    os.set_inheritable(pipe, False)
    # A thread: a handler may block the event loop.
    threading.Thread(target=_wait, args=(pipe, stop_limit_s), name="marq-parent", daemon=True).start()


def _wait(pipe: int, stop_limit_s: float) -> None:
    while os.read(pipe, 1):
        pass
    log.error("the worker that started this process has died: stopping")
    # Handlers may finish, and prefetched messages are released.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(stop_limit_s)
    os._exit(1)
