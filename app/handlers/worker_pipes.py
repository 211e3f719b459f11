"""Pipes between a worker and its handler processes: reports to the worker, and the end of the worker.

A process writes reports (circuit breakers, messages in flight) as lines of JSON into a pipe, at least one every
``REPEAT_SECONDS``. A longer silence therefore means that a handler is blocking the event loop. The breakers of a group
with many queues take several lines; all but the last one have ``more``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

#: Interval to check for changes.
LOOK_SECONDS = 0.5
#: An unchanged report is repeated after this long.
REPEAT_SECONDS = 1.0
#: A reader notes each period of this length without a report.
SILENCE_SECONDS = 2.0
#: In a pipe, only writes up to this size are atomic.
_MAX_BYTES = 4_096
#: Maximum number of circuit breakers in one line, so that it fits even with the longest queue names.
_BREAKERS_AT_ONCE = 7


class Reporter:
    """The writing end; a reader that is gone or slow holds up nothing."""

    def __init__(self, pipe: int) -> None:
        # Processes that handlers start must not inherit the pipe and hold it open.
        os.set_inheritable(pipe, False)
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._last: list[bytes] = []
        self._last_s = float("-inf")
        #: Lines of the last report for which the pipe had no room yet.
        self._unwritten: deque[bytes] = deque()

    def tell(self, report: dict[str, Any]) -> None:
        """Write a report if it differs from the last one, or if that one is ``REPEAT_SECONDS`` old."""
        if not self._unwritten:
            lines, now_s = _lines(report), time.monotonic()
            if lines == self._last and now_s - self._last_s < REPEAT_SECONDS:
                return
            self._unwritten.extend(lines)
            self._last, self._last_s = lines, now_s
        with suppress(BlockingIOError, BrokenPipeError):
            while self._unwritten:
                os.write(self._pipe, self._unwritten[0])
                self._unwritten.popleft()


def _lines(report: dict[str, Any]) -> list[bytes]:
    breakers = list(report.get("breakers", {}).items())
    starts = range(0, len(breakers), _BREAKERS_AT_ONCE)
    parts: list[dict[str, Any]] = [
        {"breakers": dict(breakers[start : start + _BREAKERS_AT_ONCE]), "more": True} for start in starts[:-1]
    ]
    if starts:
        report = {**report, "breakers": dict(breakers[starts[-1] :])}
    lines = [json.dumps(part, ensure_ascii=False).encode() + b"\n" for part in [*parts, report]]
    # Without any line the worker would assume that the event loop is blocked.
    return [line if len(line) <= _MAX_BYTES else b"{}\n" for line in lines]


async def reports(pipe: int, silence_s: float = SILENCE_SECONDS) -> AsyncIterator[dict[str, Any] | None]:
    """Yield reports until the process has ended, and None for each ``silence_s`` without one. Closes the pipe.

    An incomplete report is yielded as an empty one. Silence is measured only while this event loop runs, so a suspended
    worker does not count it.
    """
    lines = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(pipe, "rb", buffering=0)
    )
    breakers: dict[str, Any] = {}
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
            report = json.loads(line)
            breakers |= report.get("breakers", {})
            if "more" in report:
                yield {}
            elif "breakers" in report:
                yield {**report, "breakers": breakers}
                breakers = {}
            else:
                yield report
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
