"""docs/get-started.md, command by command, in an empty directory with a new virtual environment."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from marq_worker.broker.process import ChildProcess
from tests.docs.pages import ROOT
from tests.worker.harness import eventually

PAGE = (ROOT / "docs" / "get-started.md").read_text(encoding="utf-8")
LIMIT_SECONDS = 300.0
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def blocks(heading: str) -> list[str]:
    """The code of each fenced block in a section."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```\w+\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


class Shell:
    """A shell of a newcomer: nothing of the checkout's environment is installed or set in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("MARQ_", "PYTEST_", "PYTHON"))
        }
        # Where the embedded broker's files are, and come from.
        places = {name: os.environ[name] for name in ("MARQ_CACHE", "MARQ_MAVEN_REPOSITORY") if name in os.environ}
        self._environment = {**kept, **places, "COLUMNS": "200"}

    def run(self, commands: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", commands], cwd=self.directory, env=self._environment, capture_output=True, text=True,
            timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def activate(self) -> None:
        self._environment["PATH"] = f"{self.directory / '.venv' / 'bin'}:{self._environment['PATH']}"

    def background(self, command: str) -> ChildProcess:
        return ChildProcess(
            command.split(), self.directory / "dev.log", directory=self.directory, environment=self._environment
        ).start()


def built(kind: str, directory: Path) -> Path:
    """Build a package from a clean copy of the checkout; return its path."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        # Links stay links, as in a clone.
        shutil.copy(ROOT / name, directory / name, follow_symlinks=False)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(directory / "built")], cwd=directory, capture_output=True,
        text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "built" / done.stdout.splitlines()[-1]


@pytest.mark.verify
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
async def test_get_started(tmp_path: Path, kind: str) -> None:
    checkout, project = tmp_path / "checkout", tmp_path / "project"
    project.mkdir()
    package = built(kind, checkout)
    shell = Shell(project)
    [install] = blocks("Install")
    assert "'marq[worker]'" in install
    shell.run(install.replace("'marq[worker]'", f"'{package}[worker]'"))
    shell.activate()

    start, tasks, send, look = blocks("Run a project")
    init, dev = [line.partition("#")[0].strip() for line in start.splitlines()]
    shell.run(init)
    written = (project / "tasks.py").read_text()
    assert written == tasks.removeprefix("# tasks.py\n")
    running = shell.background(dev)
    try:

        async def said() -> str:
            return (project / "dev.log").read_text(errors="replace")

        await eventually(said, lambda text: "the worker is ready" in text, limit=LIMIT_SECONDS)
        shell.run(send)
        await eventually(said, lambda text: "Hello, Ann!" in text, limit=LIMIT_SECONDS)

        async def looked() -> str:
            return shell.run(look)

        dead = await eventually(looked, lambda text: "Zoe has moved away" in text, limit=LIMIT_SECONDS)
        assert "given up after 2 attempts, last error: ValueError: Zoe has moved away" in dead

        about_zoe = [line for line in written.splitlines(keepends=True) if "Zoe" in line]
        assert len(about_zoe) == 2
        (project / "tasks.py").write_text(
            "".join(line for line in written.splitlines(keepends=True) if "Zoe" not in line)
        )
        await eventually(said, lambda text: text.count("the worker is ready") == 2, limit=LIMIT_SECONDS)
        [redrive] = blocks("Fix the handler and redrive")
        shell.run(redrive)
        await eventually(said, lambda text: "Hello, Zoe!" in text, limit=LIMIT_SECONDS)
        assert "restarting the worker, because of tasks.py" in await said()

        os.kill(running.pid, signal.SIGINT)
        assert running.wait(LIMIT_SECONDS)
    finally:
        running.kill()

    shell.run(blocks("Test a handler")[0])
