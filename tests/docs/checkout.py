"""A directory like a fresh clone after `make setup`, and a shell in it: what pages say is typed there."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from marq.wire.names import Names
from marq_worker.broker import ports
from marq_worker.broker.process import ChildProcess
from tests.docs.pages import ROOT
from tests.worker.harness import output_of

LIMIT_SECONDS = 180
#: Files of a checkout that the commands need, in addition to marq.toml, into which readers write.
NEEDED = ["app", "agents", "tables", "config", "marq_worker", "marq", "examples", "pyproject.toml"]


class Checkout:
    """Commands run with the broker, the prefix and the web port of a test."""

    def __init__(self, directory: Path, servers: str, names: Names) -> None:
        self.directory = directory
        self.port = ports.free_port("127.0.0.1")
        for name in NEEDED:
            (directory / name).symlink_to(ROOT / name)
        shutil.copy(ROOT / "marq.toml", directory)
        (directory / ".venv").symlink_to(sys.prefix)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MARQ_") and k != "PYTHONPATH"}
        settings = {"BOOTSTRAP_SERVERS": servers, "PREFIX": names.prefix, "WEB_PORT": str(self.port)}
        kept["PATH"] = f"{directory / '.venv' / 'bin'}:{kept['PATH']}"
        # The shortest: how long Kafka waits for a worker that was killed.
        settings["SESSION_TIMEOUT"] = "6"
        self._environment = kept | {f"MARQ_{name}": value for name, value in settings.items()} | {"COLUMNS": "200"}
        #: Log of each worker.
        self.logs: list[Path] = []

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text, encoding="utf-8")

    def append(self, name: str, text: str) -> None:
        with (self.directory / name).open("a", encoding="utf-8") as file:
            file.write(text)

    async def run(self, commands: str) -> str:
        """Run what a reader types, with the web server's port of this test."""
        process = await asyncio.create_subprocess_exec(
            "bash", "-e", "-c", commands.replace("6066", str(self.port)),
            cwd=self.directory, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        output, errors = await output_of(process)
        assert process.returncode == 0, output + errors
        return output

    @contextmanager
    def worker(self, command: str) -> Iterator[ChildProcess]:
        """Run a command in the background, and kill it with all of its processes at the end."""
        words = ["bash", "-c", f"exec env {command}"]
        self.logs.append(self.directory / f"worker-{len(self.logs)}.log")
        worker = ChildProcess(words, self.logs[-1], directory=self.directory, environment=self._environment).start()
        try:
            yield worker
        finally:
            worker.kill()

    async def interrupt(self, worker: ChildProcess) -> None:
        """Ctrl-C, and its end."""
        os.killpg(worker.pid, signal.SIGINT)
        assert await asyncio.to_thread(worker.wait, LIMIT_SECONDS)

    async def said(self) -> str:
        """What the workers have logged so far."""
        return "".join([log.read_text(errors="replace") for log in self.logs])
