"""Python programs that a test runs, watches and kills."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from broker.process import WATCHDOG
from tests.worker.harness import ROOT, eventually


class Process:
    """``python ARGUMENTS``; what it prints goes to a file. It never outlives the test, nor pytest."""

    def __init__(self, arguments: Sequence[str], output: Path, environment: Mapping[str, str]) -> None:
        self.output = output
        with output.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=output.parent,
                env={**environment, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WATCHDOG), str(os.getpid()), str(self._process.pid)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def lines(self) -> list[str]:
        """What it has printed so far; a line that is still being written is left out."""
        return [line for line in self.output.read_text(errors="replace").splitlines(keepends=True) if line[-1] == "\n"]

    async def printed(self, count: int, limit: float = 40.0) -> list[str]:
        """Wait for so many lines, and return what there is."""

        async def lines() -> list[str]:
            assert self._process.poll() is None, f"ended with {self._process.returncode}:\n{self.output.read_text()}"
            return self.lines()

        return await eventually(lines, lambda found: len(found) >= count, limit=limit)

    async def ended(self, limit: float = 40.0) -> int:
        """Wait for its end; return the exit code."""

        async def code() -> int | None:
            return self._process.poll()

        found = await eventually(code, lambda code: code is not None, limit=limit)
        assert found is not None
        return found

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._watchdog.kill()
        self._watchdog.wait()
