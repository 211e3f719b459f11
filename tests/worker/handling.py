"""Handlers that a test's worker runs, and what they noted."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from tests.worker.harness import ROOT, eventually


class Handlers:
    """The module that workers import, and what its handlers noted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        shutil.copy(Path(__file__).with_name("handler_module.py"), directory / "handlers_of_the_test.py")

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(self.directory)])}

    def let_go(self, name: str) -> None:
        """Let the handlers end that work on messages of this value."""
        (self.directory / name).touch()

    async def noted(self, queue: str) -> list[dict[str, Any]]:
        """The starts of a queue's handler so far, in order."""
        journal = self.directory / "journal"
        text = journal.read_text() if journal.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if line["queue"] == queue]

    async def has_noted(self, queue: str, count: int) -> list[dict[str, Any]]:
        """Wait for this many starts."""
        return await eventually(lambda: self.noted(queue), lambda found: len(found) >= count)
