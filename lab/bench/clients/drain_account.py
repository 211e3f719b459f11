"""The account of a draining process, the same for every system: which messages it received and when."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from lab.bench.clients.client import say
from lab.bench.load import check
from lab.resources import memory_bytes

#: The bytes of a value that are kept: its number.
NUMBER = slice(8)


@dataclass(frozen=True)
class Work:
    """Work on messages: every ``every``-th one waits ``ms`` milliseconds, as if for a service's response."""

    ms: float = 0.0
    every: int = 1

    @classmethod
    def read(cls, text: str) -> Self:
        """Read ``10`` or ``500/100``."""
        ms, _, every = text.partition("/")
        return cls(float(ms), int(every or 1))

    async def do(self, value: bytes) -> None:
        if self.ms and int.from_bytes(value[:8], "big") % self.every == 0:
            await asyncio.sleep(self.ms / 1000)


NO_WORK = Work()


class Received:
    """Messages received so far; its clock starts when it is made, after all imports."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.values: list[bytes] = []
        self._cpu_before = _cpu_seconds()
        self._begun = time.perf_counter()
        self._first = self._ended = self._cpu_seconds = 0.0
        self._peak_bytes = 0

    @property
    def complete(self) -> bool:
        return len(self.values) >= self.count

    def begin(self) -> None:
        """Note that the first message has arrived; only the first call counts."""
        self._first = self._first or time.perf_counter()

    def add(self, values: Iterable[bytes]) -> None:
        self.begin()
        self.values += [value[NUMBER] for value in values]

    def end(self) -> None:
        """Note that all acknowledgements are durable."""
        self._ended = time.perf_counter()
        self._cpu_seconds = _cpu_seconds() - self._cpu_before
        self._peak_bytes = memory_bytes(os.getpid(), "VmHWM")

    def report(self) -> None:
        """Send the measurements to the row.

        Raises:
            SystemExit: a message is missing, or arrived twice.
        """
        check(self.values, self.count)
        say(
            rate=self.count / (self._ended - self._first),
            startup_seconds=self._first - self._begun,
            cpu_seconds=self._cpu_seconds,
            peak_bytes=self._peak_bytes,
            ended_at=time.time() - (time.perf_counter() - self._ended),
        )


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
