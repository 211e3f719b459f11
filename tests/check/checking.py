"""Runs ``marq check``: in this process, as the command does, or as a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

import marq
from marq.kafka.role_permissions import Permission, Tools, grants
from marq.kafka.topics import ensure_topics
from marq.settings.client import ClientSettings
from marq_worker.check.examination import Examination
from marq_worker.check.permissions import WORKER
from marq_worker.config.settings import load_client_settings, load_settings
from marq_worker.findings import CheckFinding, Level, exit_code
from tests.embedded import kafka_tools
from tests.worker.harness import Worker, eventually, output_of

ROOT = Path(__file__).resolve().parents[2]

NewWorker = Callable[..., Worker]

#: For starts of clients that end at once, on a busy machine.
LIMIT_S = 30.0


@dataclass(frozen=True)
class Outcome:
    """The findings of a check."""

    findings: list[CheckFinding]

    @property
    def exit_code(self) -> int:
        return exit_code(self.findings)

    def of(self, level: Level, subject: str) -> CheckFinding:
        """Return the one finding of this level whose subject has this beginning."""
        found = [finding for finding in self.findings if finding.level is level and finding.subject.startswith(subject)]
        assert len(found) == 1, f"expected one {level} about {subject!r} in\n{self}"
        return found[0]

    def problem(self, subject: str) -> CheckFinding:
        return self.of(Level.PROBLEM, subject)

    def has(self, level: Level, subject: str = "") -> bool:
        return any(finding.level is level and finding.subject.startswith(subject) for finding in self.findings)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


class Check:
    """The check with some settings."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MARQ_")}
        self.environment = {**kept, "PYTHONPATH": str(ROOT), "MARQ_DATA_DIR": str(directory / "data"), **environment}

    async def __call__(self, *roles: str, **environment: str) -> Outcome:
        """Run the check in this process, as the command does with these roles."""
        with patch.dict(os.environ, {**self.environment, **environment}, clear=True):
            settings = load_settings()
            client = load_client_settings(settings)
        with no_tracebacks():
            return Outcome(await Examination(settings, client, roles or [WORKER]).run())

    async def until(self, fits: Callable[[Outcome], bool], *roles: str, **environment: str) -> Outcome:
        """Repeat the check until the outcome fits: a broker applies a change shortly after it confirms it."""
        return await eventually(lambda: self(*roles, **environment), fits)

    async def command(self, *options: str, **environment: str) -> tuple[int, str]:
        """Run the command in a process of its own; return its exit code and its output."""
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "faust", "-A", "app", "check", *options],
            cwd=self._directory,
            env={**self.environment, **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await output_of(process)
        assert "Traceback" not in errors, errors
        assert process.returncode is not None
        return process.returncode, output


def read_report(output: str) -> Outcome:
    """Return the findings in the output of the command with ``--json``."""
    document = json.loads(output)
    outcome = Outcome(
        [
            CheckFinding(Level(finding.pop("level")), commands=tuple(finding.pop("commands")), **finding)
            for finding in document["findings"]
        ]
    )
    assert document["ok"] == (outcome.exit_code == 0)
    return outcome


@contextmanager
def no_tracebacks() -> Iterator[None]:
    """Fail if anything logs a traceback: the command would print it."""

    class Tracebacks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                logged.append(self.format(record))

    logged: list[str] = []
    handler = Tracebacks(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    assert not logged, "\n".join(logged)


async def obey(finding: CheckFinding, servers: str) -> None:
    """Run the commands of a finding as an administrator."""
    assert finding.commands, f"no command in: {finding}"
    for command in finding.commands:
        await kafka_tools.run(command, servers)


async def allow(servers: str, user: str, permissions: list[Permission]) -> None:
    """Grant these permissions to a user."""
    for command in grants(permissions, f"User:{user}", Tools("any")):
        await kafka_tools.run(command, servers)


async def said(address: str, **options: object) -> str:
    """Return the error of a start that cannot succeed."""
    with pytest.raises(marq.BrokerUnavailable) as caught:
        await ensure_topics(ClientSettings.read(address, {"connect_timeout": LIMIT_S, **options}, environment={}))
    return str(caught.value)


async def make_topics(servers: str, prefix: str) -> None:
    """Make all topics with two partitions each."""
    await ensure_topics(
        ClientSettings.read(servers, {"prefix": prefix, "partitions": 2}, environment={}), changelog=True
    )


async def lags(worker: Worker) -> list[int]:
    """Return the lag of a worker in each of its markers partitions."""
    return [part["lag"] for part in (await worker.partitions()).values()]
