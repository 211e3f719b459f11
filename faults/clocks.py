"""Processes whose wall clock is wrong, from their start on or all of a sudden; their monotonic clock goes on as it is.

Debian's libfaketime is loaded into them and reads from a file by how much; whoever has the clock changes the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from faults.errors import ConditionError

#: Where Debian, Ubuntu and Fedora put it. The variant for programs with threads.
LIBRARIES = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib*/faketime/libfaketimeMT.so.1")

#: Within this time a move counts.
MOVE_SECONDS = 1


class Clock:
    """The wall clock of all processes that are started with `environment`; right until `move()`.

    Raises:
        ConditionError: libfaketime is not installed.
    """

    def __init__(self, file: Path, libraries: Sequence[str] = LIBRARIES) -> None:
        self._file = file
        self._library = _find(libraries)
        self.move(0)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            # How often the file is read. At each look at the clock would be 5 us a look, and a JVM looks often.
            "FAKETIME_CACHE_DURATION": str(MOVE_SECONDS),
            # Durations are measured by the monotonic clock, which no machine sets.
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            # Switched off: with it, which is the default here, a JVM's timed waits return at once or never.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }

    def move(self, seconds: float) -> None:
        """Put the clock this much before the machine's, or behind it if negative; not relative to earlier moves."""
        new = self._file.with_name(f"{self._file.name}.{os.getpid()}.new")
        new.write_text(f"{seconds:+f}\n", encoding="ascii")
        new.replace(self._file)  # never seen half written


def _find(patterns: Sequence[str]) -> Path:
    for pattern in patterns:
        for found in sorted(Path("/").glob(pattern.lstrip("/"))):
            return found
    raise ConditionError(
        f"moving a process's clock needs libfaketime, which is not at {' or '.join(patterns)}: apt-get install faketime"
    )
