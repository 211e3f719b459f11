"""A process on its own terminal, as a user operates it: waits for output and presses keys."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

CTRL_C = "\x03"
LIMIT_S = 180.0
#: Far above what an end takes, also on a starved machine.
AGAIN_S, ATTEMPTS = 15.0, 4
_ROWS = 24
#: Control sequences for the cursor and colours.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: Opened by the first process of a session, a terminal becomes that from which Ctrl-C comes. Tests that were started in
#: the background ignore Ctrl-C, and so would this process.
_TAKE = """
import os, signal, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """``shown`` is all that it has shown."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], directory: Path, columns: int = 80
    ) -> None:
        self.shown = ""
        self._seen = 0
        self._fd, other = pty.openpty()
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TAKE, *command],
            cwd=directory, env={**environment, "TERM": "xterm"}, stdin=other, stdout=other, stderr=other,
            start_new_session=True,
        )  # fmt: skip
        os.close(other)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)

    def shows(self, text: str) -> None:
        """Wait until it shows a text, after all that was waited for before."""
        until = time.monotonic() + LIMIT_S
        while (found := self.shown.find(text, self._seen)) < 0:
            assert self._more(until), f"{text!r} was not shown: {self.shown!r}"
        self._seen = found + len(text)

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def interrupted(self) -> int:
        """Press Ctrl-C until the process ends, as people do; return its exit code.

        Python misses a signal that comes while it is about to wait for input, until the next one.
        """
        for _ in range(ATTEMPTS):
            self.press(CTRL_C)
            until = time.monotonic() + AGAIN_S
            while self._more(until):
                pass
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(max(0.0, until - time.monotonic()))
        raise AssertionError(f"it did not end: {self.shown!r}")

    @property
    def lines(self) -> list[str]:
        """What was shown, without colours and movements of the cursor."""
        return _ESCAPES.sub("", self.shown).replace("\r", "\n").split("\n")

    def _more(self, until: float) -> bool:
        """Read on; return whether there is more to come."""
        ready, _, _ = select.select([self._fd], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:
            # Linux raises this when the other end is closed.
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)
