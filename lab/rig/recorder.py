"""Histories that outlive kill -9: each event is passed to the operating system before its writer continues."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lab.proof.history import Event
from lab.rig.program import Program
from lab.rig.starvation import Starvation, waited_s

#: Interval between two checks of the event loop, in seconds.
_CHECK_INTERVAL_S = 0.1


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


@asynccontextmanager
async def recorded_stalls(process: str, add: Callable[..., None], lease_s: float) -> AsyncIterator[None]:
    """Record a pause whenever this event loop waits for a CPU too long, until the context ends.

    Too long is a quarter of a lease at once, or half a lease within the duration of one lease.

    ``lease_s`` is the shortest lease of the messages that the process receives.
    """
    recording = asyncio.create_task(_record_stalls(process, add, lease_s))
    try:
        yield
    finally:
        recording.cancel()


async def _record_stalls(process: str, add: Callable[..., None], lease_s: float) -> None:
    starvation, total_s = Starvation(lease_s), 0.0
    while True:
        began_s, used_s, before_s = time.monotonic(), time.process_time(), waited_s()
        await asyncio.sleep(_CHECK_INTERVAL_S)
        now_s, after_s = time.monotonic(), waited_s()
        late_s = now_s - began_s - _CHECK_INTERVAL_S
        if before_s is None or after_s is None:
            # The time in which the process neither slept nor used a CPU. Without the kernel's count, a blocking call
            # looks like a wait.
            wait_s = max(late_s - (time.process_time() - used_s), 0.0)
        else:
            wait_s = after_s - before_s
        total_s += wait_s
        since_s = starvation.take(now_s, total_s)
        if since_s is None and is_stall(late_s, wait_s, lease_s):
            since_s = began_s
        if since_s is not None:
            add("invoke", "pause", target=process, at_ms=since_s * 1000)
            add("ok", "pause", target=process)


def is_stall(late_s: float, wait_s: float, lease_s: float) -> bool:
    """Whether a check of the event loop was so late that leases may have ended, and not by the process's own fault.

    If most of the delay was not a wait for a CPU (``wait_s``), the process blocked its own event loop, by computing or
    by a blocking call. That does not explain a duplicate.
    """
    return late_s > lease_s / 4 and wait_s > late_s / 2


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
