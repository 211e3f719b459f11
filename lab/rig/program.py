"""A program of this checkout as a process: start, signal and end it, and read its log."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from marq_worker.broker.process import Process

ROOT = Path(__file__).resolve().parents[2]
LOG_TAIL_LINES = 15
STOP_SECONDS = 30.0


class RigError(Exception):
    """A program ended by itself, did not start, or was too slow; the text has the end of its log."""


class Program:
    """A command with a log; it never outlives this process.

    Args:
        name: name in error messages.
        command: the command; one that begins with an option runs with this Python.
        environment: variables on top of this process's.
        log_file: file for the output.
        directory: working directory.
        temporary: directories to delete if this process dies.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_file: Path,
        *,
        directory: Path = ROOT,
        temporary: Sequence[Path] = (),
    ) -> None:
        self.name = name
        self.command = [sys.executable, *command] if command[0].startswith("-") else list(command)
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self.log_file = log_file
        self.directory = directory
        #: True if this process ended it; see :meth:`check`.
        self.ended_by_us = False
        self._temporary = temporary
        self._process: Process | None = None

    def start(self) -> Self:
        assert self._process is None, f"{self.name} was started before"
        self._process = Process(
            self.command,
            self.log_file,
            directory=self.directory,
            environment=self.environment,
            temporary=self._temporary,
        )
        return self

    @property
    def process(self) -> Process:
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    @property
    def exit_code(self) -> int | None:
        return self.process.exit_code

    def check(self) -> None:
        """Raise RigError if the program ended by itself."""
        if not self.ended_by_us and not self.running:
            raise RigError(f"{self.name} ended by itself, exit code {self.exit_code}:\n{self.log_tail()}")

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.ended_by_us = True
        self.process.signal(signal.SIGTERM)

    def join(self, limit_seconds: float = STOP_SECONDS) -> None:
        """Wait for the end; kill -9 after the limit."""
        self.process.wait(limit_seconds)
        self.kill()

    def kill(self) -> None:
        """Send kill -9 to it and to the processes that it started. Idempotent."""
        self.ended_by_us = True
        if self._process is not None:
            self._process.kill()

    def kill_alone(self) -> None:
        """Send kill -9 to it, but not to the processes that it started."""
        self.ended_by_us = True
        self.process.signal(signal.SIGKILL)
        self.process.wait(STOP_SECONDS)

    def pause(self) -> None:
        """Send SIGSTOP."""
        self.process.pause()

    def resume(self) -> None:
        """Send SIGCONT."""
        if self._process is not None:
            self._process.resume()

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def log_tail(self) -> str:
        lines = self.log().strip().splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"the end of {self.name}'s log:", *[f"    {line}" for line in lines]])

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.terminate()
            self.join()
        self.kill()


def stop_all(programs: Sequence[Program]) -> None:
    """Send SIGTERM to all, then wait for each."""
    running = [program for program in programs if program.running]
    for program in running:
        program.terminate()
    for program in running:
        program.join()
