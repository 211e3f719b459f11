"""What Spark's Java process writes to standard error: held back until it has started, passed on from then on."""

from __future__ import annotations

import os
import re
import sys
import threading
from types import TracebackType
from typing import Self

from pipeline.sentences import one_line

#: Kept for the sentence that says why it did not start.
KEPT_BYTES = 65_536
#: Java says so at each start of Spark: of a module that Spark asks for, and of options that the user set.
_NO_NEWS = re.compile(rb"(?:WARNING: Using incubator modules: |(?:NOTE: )?Picked up \w+: )[^\n]*\n")
_BEFORE = re.compile(r"(?:Exception in thread \S+|Caused by:|Error:|error:) ")
_TELLING = ("Error occurred", "Invalid ", "Unrecognized ")


class JavaErrors:
    """A pipe from Java; while the context is open, what comes is kept."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        self._kept = bytearray()
        self._lock = threading.Lock()
        self._starting = True
        self._thread = threading.Thread(target=self._forward, name="spark-stderr", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_write_end()
        with self._lock:
            self._starting = False
            if error is None:
                _write(_NO_NEWS.sub(b"", bytes(self._kept)))

    def sentence(self) -> str:
        """Return the line that tells most of why Java ended; it has ended."""
        self._close_write_end()
        self._thread.join(timeout=5)
        with self._lock:
            text = _NO_NEWS.sub(b"", bytes(self._kept)).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines()]
        telling = [line for line in lines if line.startswith(_TELLING) or _BEFORE.match(line)] or list(
            filter(None, lines)
        )
        return one_line(_BEFORE.sub("", telling[0], count=1)) if telling else ""

    def _close_write_end(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def _forward(self) -> None:
        while chunk := os.read(self._read_end, 65_536):
            with self._lock:
                if self._starting:
                    self._kept += chunk[: KEPT_BYTES - len(self._kept)]
                else:
                    _write(chunk)
        os.close(self._read_end)


def _write(chunk: bytes) -> None:
    try:
        sys.stderr.write(chunk.decode(errors="replace"))
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # nobody reads it any more
