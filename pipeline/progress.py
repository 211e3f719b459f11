"""How far a job is: one line that is written over on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

#: Between two lines where they are not written over.
_QUIET_S = 10.0
_SMOOTH_S = 0.1
#: To the beginning of the line, which is emptied.
_CLEAR = "\r\x1b[K"


class Progress:
    """Says how many of how many, and how many a second; on standard error, so that output stays what was asked for."""

    def __init__(self, doing: str, of: int, before: int = 0) -> None:
        self._doing = doing
        self._of = of
        self._before = before
        self._terminal = sys.stderr.isatty()
        self._began_s = time.monotonic()
        # A short job has nothing to tell where each line stays.
        self._next_s = self._began_s + (0.0 if self._terminal else _QUIET_S)

    def tell(self, done: int, more: str = "") -> None:
        """Say how far it is, unless that was just said."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (_SMOOTH_S if self._terminal else _QUIET_S)
        rate = (done - self._before) / max(now_s - self._began_s, 0.001)
        line = f"{self._doing} {done:,} of {self._of:,} ({rate:,.0f} a second){more}"
        _write(f"{_CLEAR}{line}" if self._terminal else f"{line}\n")

    def end(self) -> None:
        """Leave the line free for what comes next."""
        if self._terminal:
            _write(_CLEAR)


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
