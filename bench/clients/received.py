"""What a consumer process of a measurement has received, and when: the same account for every system."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterable

from bench.load import check
from bench.processes import memory_bytes

#: Bytes of a value that are kept, which are its number.
NUMBER = slice(8)


class Received:
    """Begins when the process has imported all and prepared what is not the consumer's: its clock runs from then."""

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
        """Note that the first message is in hand; only the first call counts."""
        self._first = self._first or time.perf_counter()

    def add(self, values: Iterable[bytes]) -> None:
        self.begin()
        self.values += [value[NUMBER] for value in values]

    def end(self) -> None:
        """Note that all acknowledgements are durable."""
        self._ended = time.perf_counter()
        self._cpu_seconds = _cpu_seconds() - self._cpu_before
        self._peak_bytes = memory_bytes(os.getpid(), "VmHWM")

    def print(self) -> None:
        """Print the figures as JSON.

        Raises:
            SystemExit: a message is missing, or came twice.
        """
        check(self.values, self.count)
        figures = {
            "rate": self.count / (self._ended - self._first),
            "startup_seconds": self._first - self._begun,
            "cpu_seconds": self._cpu_seconds,
            "peak_bytes": self._peak_bytes,
            "ended_at": time.time() - (time.perf_counter() - self._ended),
        }
        print(json.dumps(figures))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
