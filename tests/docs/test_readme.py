"""The way through README.md's "Your own handler in ten minutes", command by command, as a newcomer types them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from broker import ports
from broker.process import WATCHDOG
from marq.core.names import Names
from tests.docs.pages import ROOT
from tests.worker.harness import eventually

SECTION = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Your own handler in ten minutes")[2]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", SECTION.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
LIMIT_SECONDS = 60
#: What a checkout has that the commands need.
NEEDED = ["app", "agents", "tables", "config", "marq", "examples"]


class Checkout:
    """A directory like a fresh clone after `make setup`, and a shell in it."""

    def __init__(self, directory: Path, servers: str, names: Names) -> None:
        self.directory = directory
        self.port = ports.free_port("127.0.0.1")
        for name in NEEDED:
            (directory / name).symlink_to(ROOT / name)
        (directory / ".venv").symlink_to(sys.prefix)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MARQ_") and k != "PYTHONPATH"}
        settings = {"BOOTSTRAP_SERVERS": servers, "PREFIX": names.prefix, "WEB_PORT": str(self.port)}
        self._environment = kept | {f"MARQ_{name}": value for name, value in settings.items()}
        self.log = directory / "worker.log"

    async def run(self, commands: str) -> str:
        """Run what a reader types, with the web server's port of this test."""
        process = await asyncio.create_subprocess_exec(
            "bash", "-e", "-c", commands.replace("6066", str(self.port)),
            cwd=self.directory, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(LIMIT_SECONDS):
            output, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return output.decode()

    def start_worker(self, command: str) -> Iterator[None]:
        """Run a command in the background until the iterator goes on."""
        with self.log.open("ab") as log:
            worker = subprocess.Popen(
                ["bash", "-c", f"exec env {command}"],
                cwd=self.directory, env=self._environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WATCHDOG), str(os.getpid()), str(worker.pid)], start_new_session=True
        )
        try:
            yield
        finally:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            watchdog.kill()
            watchdog.wait()


@pytest.fixture
async def checkout(tmp_path: Path, servers: str, names: Names) -> AsyncIterator[Checkout]:
    found = Checkout(tmp_path, servers, names)
    (tmp_path / "tasks.py").write_text(BLOCKS[0][1], encoding="utf-8")
    running = found.start_worker(BLOCKS[1][1].strip())
    next(running)
    yield found
    running.close()  # type: ignore[attr-defined]


def test_the_section_has_these_steps() -> None:
    assert [language for language, _ in BLOCKS] == ["python", "sh", "sh", "sh"]
    assert BLOCKS[0][1].startswith("# tasks.py\n")
    assert "faust -A app worker" in BLOCKS[1][1]


async def test_a_stranger_comes_to_a_handler_of_his_own(checkout: Checkout) -> None:
    async def said() -> str:
        return checkout.log.read_text(errors="replace")

    await eventually(said, lambda text: "owner of markers partition" in text, limit=LIMIT_SECONDS)

    receipts = await checkout.run(BLOCKS[2][1])
    await eventually(said, lambda text: "Hello Zoe, attempt 3" in text, limit=LIMIT_SECONDS)
    assert "Hello Ann, attempt 1" in await said()
    looked = await checkout.run(BLOCKS[3][1])

    assert len(receipts.splitlines()) == 3
    assert '"greetings":{"in_flight":0' in looked
    # A table, whose cells may be broken.
    assert re.search(r"there.*is.*nobody.*to.*greet", looked, re.DOTALL)
    assert re.search(r"max_attempts +2 +changed at run time", looked)

    await checkout.run(BLOCKS[2][1])
    letters = await eventually(
        lambda: checkout.run(".venv/bin/python -m examples.dead_letters greetings"), lambda text: "Zoe" in text
    )
    assert (
        "2 of 2 attempts used: the last time it was released\n  its last error was RuntimeError: Zoe is out" in letters
    )
