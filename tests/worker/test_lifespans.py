"""Lifespans in the handler processes of a worker: errors at their start, and stops."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import marq
from marq_worker.broker import EmbeddedBroker
from tests.worker.harness import ROOT, Worker, eventually

pytestmark = pytest.mark.verify

Make = Callable[..., Worker]

SOURCE = """
import asyncio
from pathlib import Path

import marq

HERE = Path(__file__).parent

def note(line):
    with (HERE / "journal").open("a") as journal:
        journal.write(line + "\\n")

@marq.lifespan
async def resources():
    note("start")
    if not (HERE / "up").exists():
        raise ConnectionError("the database does not answer")
    while (HERE / "slow").exists():
        await asyncio.sleep(0.02)
    yield "open"
    for _ in range(10):
        # Longer than a stop without lifespans takes.
        await asyncio.sleep(0.1)
    note("end")

@marq.handler("emails")
def handle(message):
    note(f"handled {message.state}")
"""


class Module:
    """The module that the worker imports, and what it noted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        (directory / "handlers_with_lifespan.py").write_text(SOURCE)

    @property
    def environment(self) -> dict[str, str]:
        paths = os.pathsep.join([str(ROOT), str(self.directory)])
        return {"MARQ_HANDLERS": "handlers_with_lifespan", "PYTHONPATH": paths}

    async def noted(self) -> list[str]:
        journal = self.directory / "journal"
        return journal.read_text().splitlines() if journal.exists() else []


async def test_a_lifespan_that_fails_at_its_start_is_told_and_tried_again_and_a_stop_waits_for_its_end(
    new_worker: Make, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    module = Module(tmp_path / "module")
    worker = await new_worker(environment=module.environment).start().ready()
    async with marq.Producer(broker.bootstrap_servers, prefix=worker.names.prefix) as producer:
        await producer.send("emails", b"x")
    await eventually(module.noted, lambda lines: lines.count("start") >= 2)
    (module.directory / "up").touch()
    await eventually(lambda: worker.queue("emails"), lambda found: found.get("acked") == 1)
    await worker.stop()

    log = worker.log()
    assert "marq: lifespan handlers_with_lifespan:resources failed on startup: ConnectionError(" in log
    assert 'raise ConnectionError("the database does not answer")' in log
    assert "its handler process" in log
    assert [line for line in await module.noted() if line != "start"] == ["handled open", "end"]
    assert worker.exit_code == 0


async def test_a_stop_does_not_wait_for_a_lifespan_that_still_starts(new_worker: Make, tmp_path: Path) -> None:
    module = Module(tmp_path / "module")
    for name in ("up", "slow"):
        (module.directory / name).touch()
    worker = await new_worker(environment=module.environment).start().ready()
    await eventually(module.noted, lambda lines: lines == ["start"])
    await worker.stop()

    assert worker.exit_code == 0
    assert "has not stopped within" not in worker.log()
    assert await module.noted() == ["start"]
