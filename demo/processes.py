"""The processes of the demo: each with a log, and a watchdog that ends it when the demo dies without doing so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from broker.ports import free_port
from broker.process import WATCHDOG
from demo.errors import DemoError
from demo.journal import JournalTail
from demo.plan import QUEUES_FILE, Plan

ROOT = Path(__file__).resolve().parent.parent
LOG_TAIL_LINES = 15
STOP_SECONDS = 10.0
#: How long a worker may take to answer with its figures.
ANSWER_SECONDS = 2.0


class Child:
    """A process in a session of its own, so that Ctrl-C in the terminal reaches the demo, which ends it."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self.killed = False
        self.log_file = folder / f"{name}.log"
        with self.log_file.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        arguments = [str(os.getpid()), str(self._process.pid), str(folder)]
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WATCHDOG), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raise DemoError when the process has ended and nobody asked it to."""
        if not self.killed and not self.running:
            raise DemoError(f"{self.name} ended by itself, exit code {self._process.returncode}:\n{self.log_tail()}")

    def kill(self) -> None:
        """kill -9, and return when it is gone."""
        self.killed = True
        self._process.kill()
        self._process.wait()
        self._watchdog.kill()
        self._watchdog.wait()

    def terminate(self) -> None:
        """SIGTERM."""
        self.killed = True
        self._process.terminate()

    def join(self, limit_seconds: float = STOP_SECONDS) -> None:
        """Return when the process is gone: killed, if it takes too long."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_seconds)
        self.kill()

    def log_tail(self) -> str:
        lines = self.log_file.read_text(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"the end of {self.name}'s log:", *[f"    {line}" for line in lines]])


class Worker(Child):
    """``faust -A app worker`` with a data directory and a web port of its own."""

    def __init__(self, name: str, environment: Mapping[str, str], folder: Path) -> None:
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        own = {
            "MARQ_DATA_DIR": str(folder / name),
            "MARQ_WEB_BIND": "127.0.0.1",
            "MARQ_WEB_PORT": str(port),
            "MARQ_QUEUES_FILE": str(QUEUES_FILE),
        }
        super().__init__(name, ["-m", "faust", "-A", "app", "worker", "-l", "info"], {**own, **environment}, folder)

    def figures(self, query: str = "") -> dict[str, Any]:
        """What ``/api/queues`` says; empty while there is no answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/queues{query}", timeout=ANSWER_SECONDS) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, ValueError):
            return {}

    def partitions(self) -> list[dict[str, Any]]:
        """The markers partitions that this worker has; those that it may not write yet are no owner's."""
        found: list[dict[str, Any]] = self.figures("?scope=worker").get("partitions", [])
        return found


class ConsumerProcess(Child):
    """``python -m demo.consumer`` and its journal."""

    def __init__(self, name: str, plan: Plan, environment: Mapping[str, str], folder: Path) -> None:
        journal = folder / f"{name}.journal"
        self.journal = JournalTail(journal)
        options = [
            f"--{option}={value}"
            for option, value in (
                ("messages", plan.messages),
                ("queues", plan.queues),
                ("lease", plan.lease_seconds),
            )
        ]
        super().__init__(name, ["-m", "demo.consumer", str(journal), *options], environment, folder)


class Cast:
    """All processes of a run; ends those that are left when it is left."""

    def __init__(self, plan: Plan, environment: Mapping[str, str], folder: Path) -> None:
        self.workers: list[Worker] = []
        self.consumers: list[ConsumerProcess] = []
        self._plan = plan
        self._environment = environment
        self._folder = folder

    def start(self) -> None:
        for index in range(2):
            self.workers.append(Worker(f"worker-{index + 1}", self._environment, self._folder))
        for index in range(self._plan.consumers):
            name = f"consumer-{index + 1}"
            self.consumers.append(ConsumerProcess(name, self._plan, self._environment, self._folder))

    @property
    def children(self) -> list[Child]:
        return [*self.workers, *self.consumers]

    def check(self) -> None:
        for child in self.children:
            child.check()

    def log_tails(self) -> str:
        return "\n".join(child.log_tail() for child in self.children)

    def stop(self, children: Sequence[Child]) -> None:
        """SIGTERM to all of them at once, then wait for each."""
        for child in children:
            if child.running:
                child.terminate()
        for child in children:
            child.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.stop(self.children)
        for child in self.children:
            child.kill()
