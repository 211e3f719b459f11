"""Histories that outlive kill -9: each event is passed to the operating system before its writer continues."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proof.history import Event
from rig.program import Program


class Recorder:
    """Appends the events of one process to a file; ``at_ms`` is a clock that all processes of a machine share."""

    def __init__(self, process: str, path: Path) -> None:
        self.process = process
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, type_: str, op: str, **fields: Any) -> None:
        event = {"process": self.process, "type": type_, "op": op, "at_ms": time.monotonic() * 1000, **fields}
        os.write(self._file, json.dumps(event, separators=(",", ":")).encode() + b"\n")

    def die(self) -> None:
        """Record a kill and send kill -9 to this process."""
        self.add("info", "kill", target=self.process)
        os.kill(os.getpid(), signal.SIGKILL)


class Recorded(Program):
    """A program that writes a history next to its log; :func:`recorded` makes its command."""

    _bytes_read = 0

    @property
    def history(self) -> Path:
        return self.log_file.with_suffix(".jsonl")

    @property
    def doomed(self) -> bool:
        """Whether an option tells the program to kill itself."""
        return any(option.startswith("--die") for option in self.command)

    @property
    def has_killed_itself(self) -> bool:
        return self.doomed and not self.running and self.exit_code == -signal.SIGKILL

    def check(self) -> None:
        # Check first whether it runs, because it may die between the two checks.
        if not self.running and not self.has_killed_itself:
            super().check()

    def new_events(self) -> list[Event]:
        """Return the events since the last call."""
        if not self.history.exists():
            return []
        with self.history.open("rb") as file:
            file.seek(self._bytes_read)
            lines = file.read()
        # kill -9 may cut the last line short.
        lines = lines[: lines.rfind(b"\n") + 1]
        self._bytes_read += len(lines)
        return [json.loads(line) for line in lines.splitlines()]


def recorded(name: str, folder: Path, module: str, options: Sequence[str]) -> list[str]:
    """Return the command of a module that takes its name and the path of its history, then options."""
    return ["-m", module, name, str(folder / f"{name}.jsonl"), *options]
