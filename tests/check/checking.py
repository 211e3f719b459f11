"""Runs ``faust -A app check`` as users do, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from app.checkup.examination import LIMIT_S
from app.checkup.findings import Finding, Level
from marq.settings import ClientSettings
from marq.topics import ensure_topics
from tests.embedded import kafka_tools
from tests.worker.harness import Worker

ROOT = Path(__file__).resolve().parents[2]
#: What a loaded machine may need beside the command's own limit, to start Python and to end.
SLACK_S = 45.0

NewWorker = Callable[..., Worker]


@dataclass(frozen=True)
class Outcome:
    """What the command said, and how it ended."""

    exit_code: int
    findings: list[Finding]
    seconds: float

    def of(self, level: Level, subject: str) -> Finding:
        """Return the one finding of a level whose subject begins so."""
        found = [each for each in self.findings if each.level is level and each.subject.startswith(subject)]
        assert len(found) == 1, f"expected one {level} about {subject!r} in\n{self}"
        return found[0]

    def problem(self, subject: str) -> Finding:
        assert self.exit_code == 1, f"expected exit code 1 for\n{self}"
        return self.of(Level.PROBLEM, subject)

    def has(self, level: Level, subject: str = "") -> bool:
        return any(each.level is level and each.subject.startswith(subject) for each in self.findings)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.findings), f"exit code {self.exit_code}"])


class Check:
    """The command with the settings of one installation."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MARQ_")}
        self.environment = {**kept, "PYTHONPATH": str(ROOT), "MARQ_DATA_DIR": str(directory / "data"), **environment}

    async def text(self, *options: str, **environment: str) -> tuple[int, str]:
        """Run it; return its exit code and what it printed."""
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "faust", "-A", "app", "check", *options],
            cwd=self._directory,
            env={**self.environment, **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), LIMIT_S + SLACK_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        assert b"Traceback" not in errors, errors.decode()
        assert process.returncode is not None
        return process.returncode, output.decode()

    async def __call__(self, *options: str, **environment: str) -> Outcome:
        began = time.monotonic()
        code, output = await self.text("--json", *options, **environment)
        document = json.loads(output)
        findings = [
            Finding(Level(each.pop("level")), commands=tuple(each.pop("commands")), **each)
            for each in document["findings"]
        ]
        assert document["ok"] == (code == 0)
        return Outcome(code, findings, time.monotonic() - began)


async def obey(finding: Finding, servers: str) -> None:
    """Run the commands of a finding, as an administrator."""
    assert finding.commands, f"no command in: {finding}"
    for command in finding.commands:
        await kafka_tools.run(command, servers)


async def make_topics(servers: str, prefix: str) -> None:
    """Make the topics of an installation, with two partitions each."""
    await ensure_topics(
        ClientSettings.read(servers, {"prefix": prefix, "partitions": 2}, environment={}), changelog=True
    )


async def lags(worker: Worker) -> list[int]:
    """How far behind a worker is in each of its markers partitions."""
    return [part["lag"] for part in (await worker.partitions()).values()]
