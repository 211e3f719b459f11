"""Histories that outlive kill -9: each event is passed to the operating system before its writer continues."""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Recorder:
    """Appends the events of one process to a file; ``at_ms`` is a clock that all processes of a machine share.

    The process may be told to die at a point, when it passes it for the n-th time (``die_after``).
    """

    def __init__(self, process: str, path: Path, die_at: str | None = None, die_after: int = 1) -> None:
        self.process = process
        self._die_at = die_at
        self._passes_left = die_after
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, type_: str, op: str, **fields: Any) -> None:
        event = {"process": self.process, "type": type_, "op": op, "at_ms": time.monotonic() * 1000, **fields}
        os.write(self._file, json.dumps(event, separators=(",", ":")).encode() + b"\n")

    def reaches(self, *points: str) -> bool:
        """Pass these points; return whether the process must die there now."""
        if self._die_at not in points:
            return False
        self._passes_left -= 1
        return self._passes_left <= 0

    def at(self, *points: str) -> None:
        """Pass these points, and die if it must."""
        if self.reaches(*points):
            self.die()

    def die(self) -> None:
        """Record a kill and send kill -9 to this process."""
        self.add("info", "kill", target=self.process)
        os.kill(os.getpid(), signal.SIGKILL)


def options_parser(prog: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options of a program that writes its history."""
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("name")
    parser.add_argument("history", type=Path)
    parser.add_argument("--die-at", metavar="POINT", help="in-handler, before-ack, in-transaction, ...")
    parser.add_argument("--die-after", type=int, default=1, metavar="N", help="passes of that point (default: 1)")
    parser.add_argument("--install", metavar="MODULE:FUNCTION", help="a function that changes Marq")
    return parser


def install(name: str | None) -> None:
    """Call the function ``MODULE:FUNCTION``, if any, which changes Marq in this process."""
    if name:
        pkgutil.resolve_name(name)()


def around(owner: type, name: str, watched: Callable[..., Any]) -> None:
    """Replace a method in this process: ``watched`` gets the former one, the object, and the arguments."""
    former = getattr(owner, name)
    setattr(owner, name, lambda *arguments: watched(former, *arguments))
