"""Where examples run: a checkout, a broker, and a namespace of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Self

import marq
from marq.wire.names import Names
from tests.docs.pages import ROOT
from tests.worker.harness import output_of

LIMIT_SECONDS = 180.0


class Machine:
    """Starts the programs of examples/, and lets none outlive the test.

    ``packages`` are directories with packages of the programs, in addition to those of .venv.
    """

    def __init__(self, servers: str, names: Names, *packages: Path) -> None:
        self.servers, self.names = servers, names
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MARQ_")},
            "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *packages])),
            "MARQ_BOOTSTRAP_SERVERS": servers,
            "MARQ_PREFIX": names.prefix,
        }
        self._started: list[Process] = []

    async def start(self, program: str, *arguments: str, runner: str = "", package: str = "examples") -> Process:
        """Start ``python -m examples.PROGRAM``; with a ``runner`` (uvicorn) that gets it as an argument."""
        command = [runner, f"{package}.{program}"] if runner else [f"{package}.{program}"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command, *arguments, cwd=ROOT, env=self.environment, stdout=PIPE, stderr=PIPE
        )
        self._started.append(process)
        return process

    async def run(self, program: str, *arguments: str) -> str:
        """Run an example to its end and return what it printed."""
        process = await self.start(program, *arguments)
        return await self.end(process)

    async def end(self, process: Process) -> str:
        output, errors = await output_of(process)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors, errors
        return output

    async def send(self, queue: str, *values: bytes) -> None:
        async with marq.Producer(self.servers, prefix=self.names.prefix) as producer:
            await producer.send_many(queue, values)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
