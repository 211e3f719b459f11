"""Pipes between a worker and its handler processes: reports to the worker, its questions, and its end.

A process writes reports (circuit breakers, messages in flight) as lines of JSON into a pipe, at least one every
``REPEAT_SECONDS``. A longer silence therefore means that a handler is blocking the event loop; the process's watchdog,
a thread, then reports which one.

The worker asks questions over a socket, which a thread of the process answers, so that it does so even then. The end of
that socket is the end of the worker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
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

#: How long to wait for an answer, less than another worker waits for ours; and its maximum size.
ANSWER_LIMIT_S, MAX_ANSWER_BYTES = 0.4, 1 << 20


class Questions:
    """The worker's end of the socket over which it asks one process."""

    def __init__(self) -> None:
        self._own, self.theirs = socket.socketpair()
        self._own.setblocking(False)
        self._opening: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] | None = None
        self._asking = asyncio.Lock()
        self._number = 0

    async def ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer; None if there is none in time, because the process has ended, starts, or was stopped."""
        async with self._asking:
            self._number += 1
            with suppress(TimeoutError, OSError, ValueError):
                async with asyncio.timeout(ANSWER_LIMIT_S):
                    return await self._answer({**question, "number": self._number})
        return None

    async def _answer(self, question: dict[str, Any]) -> dict[str, Any] | None:
        if self._opening is None:
            self._opening = asyncio.ensure_future(asyncio.open_connection(sock=self._own, limit=MAX_ANSWER_BYTES))
        # If this call times out first, the opening continues: cancelling it would close the socket for good.
        reader, writer = await asyncio.shield(self._opening)
        if writer.is_closing():
            return None
        writer.write(json.dumps(question).encode() + b"\n")
        await writer.drain()
        while line := await reader.readline():
            answer: dict[str, Any] = json.loads(line)
            # Otherwise it is the late answer to an earlier question.
            if answer["number"] == question["number"]:
                return answer
        return None

    def close(self) -> None:
        """Close both ends: the process ends, if it has not done so yet."""
        self.theirs.close()
        if self._opening is None:
            self._own.close()
        else:
            # Cancelling it while it opens would also cancel the tasks that wait for an answer.
            self._opening.add_done_callback(_close)


def _close(opening: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[1].close()


Answer = Callable[[dict[str, Any]], dict[str, Any]]


def follow_parent(pipe: int, stop_limit_s: float, answer: Answer) -> None:
    """Answer the parent's questions, in a thread; stop this process within the limit when it is gone.

    That also works after a kill -9: the socket's other end is closed.
    """
    # Processes that handlers start must not inherit the socket and hold it open.
    os.set_inheritable(pipe, False)
    # A thread: a handler may block the event loop.
    threading.Thread(target=_wait, args=(pipe, stop_limit_s, answer), name="marq-parent", daemon=True).start()


def _wait(pipe: int, stop_limit_s: float, answer: Answer) -> None:
    # A parent that closes the socket with an answer unread resets it; one that dies may have written half a question.
    with suppress(OSError, ValueError), socket.socket(fileno=pipe) as parent, parent.makefile("rb") as questions:
        for line in questions:
            question = json.loads(line)
            try:
                told = answer(question)
            except Exception:  # the next question may be answered, and the end of this thread would end the process
                log.exception("a question of the worker was not answered")
                told = {}
            parent.sendall(json.dumps({**told, "number": question["number"]}, ensure_ascii=False).encode() + b"\n")
    log.error("the worker that started this process has died: stopping")
    # Handlers may finish, and prefetched messages are released.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(stop_limit_s)
    os._exit(1)
