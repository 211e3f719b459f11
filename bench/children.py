"""Processes of a row that work at the same time, and are told when to begin and to end."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from types import TracebackType
from typing import Any, Self

#: How long a process may take to say what it is asked for.
LIMIT_SECONDS = 180.0


class Child:
    """A module that runs as a process; it says JSON lines (:mod:`bench.clients.talk`), and ends with this."""

    def __init__(self, module: str, *arguments: object) -> None:
        self._module = module
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end of this
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def said(self, limit_seconds: float = LIMIT_SECONDS) -> dict[str, Any]:
        """Return the next thing that it says.

        Raises:
            SystemExit: it has ended, or says nothing within the limit.
        """
        try:
            line = self._lines.get(timeout=limit_seconds)
        except queue.Empty:
            raise SystemExit(f"bench: {self._module} has said nothing for {limit_seconds} s") from None
        if not line:
            self._process.wait()
            raise SystemExit(f"bench: {self._module} failed: {self._error_text()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def tell(self) -> None:
        """Let it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _error_text(self) -> str:
        length = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, length - 4_000))
        return self._errors.read().decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reading.join()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()
