"""Programs of this checkout as processes: start, signal and end them, and read what they write.

A :class:`Worker` has web pages. A :class:`BenchClient` is one that a measurement starts and controls line by line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from lab.proof.history import Event
from lab.resources import Meter, memory_bytes
from marq_worker.broker.ports import free_port
from marq_worker.broker.process import ChildProcess

ROOT = Path(__file__).resolve().parents[1]
LOG_TAIL_LINES = 15
STOP_SECONDS = 30.0
START_SECONDS = 180.0
#: Time limit of a wait; on a busy machine, a worker may have a million rows to restore.
LIMIT_SECONDS = 600.0
POLL_SECONDS = 0.02


class RunError(Exception):
    """A program ended by itself, did not start, or was too slow; the text has the end of its log."""


class NewLines:
    """Reads the lines of a file that grows; a line that is not written to its end waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes_read = 0

    def read(self) -> list[str]:
        """Return the whole lines since the last call; none if the file does not exist."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._bytes_read)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._bytes_read += len(text)
        return text.decode(errors="replace").splitlines()


class Program(ChildProcess):
    """A command with a log; it never outlives this process. It may write a history next to its log.

    A command that begins with an option runs with this Python. ``environment`` is on top of this process's variables.
    The ``temporary`` directories are deleted if this process dies.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_file: Path,
        *,
        directory: Path = ROOT,
        temporary: Sequence[Path] = (),
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        command = [sys.executable, *command] if command[0].startswith("-") else command
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        super().__init__(
            command, log_file, directory=directory, environment=environment, temporary=temporary, stdin=stdin
        )
        self.name = name
        #: True if this process ended it; see :meth:`check`.
        self.ended_by_us = False
        self.history = log_file.with_suffix(".jsonl")
        self._events = NewLines(self.history)

    @property
    def has_killed_itself(self) -> bool:
        """Whether an option told the program to kill itself, and it did."""
        doomed = any(option.startswith("--die") for option in self.command)
        return doomed and not self.running and self.exit_code == -signal.SIGKILL

    def check(self) -> None:
        """Raise RunError if the program ended by itself, unless it was told to."""
        # Check first whether it runs, because it may die between the two checks.
        if not self.ended_by_us and not self.running and not self.has_killed_itself:
            raise RunError(f"{self.name} ended by itself, exit code {self.exit_code}:\n{self.log_tail()}")

    def new_events(self) -> list[Event]:
        """Return the events of its history since the last call."""
        return [json.loads(line) for line in self._events.read()]

    def terminate(self) -> None:
        self.ended_by_us = True
        super().terminate()

    def kill(self) -> None:
        self.ended_by_us = True
        super().kill()

    def lines(self, limit_seconds: float, start: str = "") -> Iterator[str]:
        """Yield the lines of its log with this start until it ends; raise RunError if none comes within the limit."""
        new_lines = NewLines(self.log_file)
        until_s = time.monotonic() + limit_seconds
        while True:
            # Before its lines, because it may write some and end between the two.
            running = self.running
            if lines := [line for line in new_lines.read() if line.startswith(start)]:
                yield from lines
                until_s = time.monotonic() + limit_seconds
            elif not running:
                return
            elif time.monotonic() > until_s:
                raise RunError(f"{self.name} wrote nothing for {limit_seconds:g} s: {self.log_tail()}")
            else:
                time.sleep(POLL_SECONDS)

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def log_tail(self) -> str:
        lines = self.log().strip().splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"the end of {self.name}'s log:", *[f"    {line}" for line in lines]])

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.terminate()
            self.join(STOP_SECONDS)
        self.kill()


def stop_all(programs: Sequence[Program]) -> None:
    """Send SIGTERM to all, then wait for each."""
    running = [program for program in programs if program.running]
    for program in running:
        program.terminate()
    for program in running:
        program.join(STOP_SECONDS)


def recorded(name: str, folder: Path, module: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command of a module that takes its name and the path of its history, then options."""
    return ["-m", module, name, str(folder / f"{name}.jsonl"), *options]


class Worker(Program):
    """A worker with a data directory (default: ``folder/name``) and a web port of its own (default: a free one)."""

    #: Time limit of a request to its pages.
    answer_seconds = 30.0

    def __init__(
        self,
        name: str,
        folder: Path,
        environment: Mapping[str, str],
        *,
        command: Sequence[str] = ("-m", "faust", "-A", "app", "worker", "-l", "info"),
        data: Path | None = None,
        web_port: int | None = None,
        directory: Path = ROOT,
        temporary: Sequence[Path] = (),
    ) -> None:
        self.data = data or folder / name
        self.web_port = web_port or free_port("127.0.0.1")
        #: Headers of requests to its pages.
        self.headers: dict[str, str] = {}
        own = {"MARQ_DATA_DIR": str(self.data), "MARQ_WEB_PORT": str(self.web_port)}
        log_file = folder / f"{name}.log"
        super().__init__(name, command, {**own, **environment}, log_file, directory=directory, temporary=temporary)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.web_port}"

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of a page; status 0 if the worker does not answer."""
        try:
            request = urllib.request.Request(self.url + path, headers=self.headers)
            with urllib.request.urlopen(request, timeout=self.answer_seconds) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except (OSError, ValueError):
            return 0, ""

    def statistics(self, scope: str = "") -> dict[str, Any]:
        """Return the JSON of ``/api/queues``; {} if the worker does not answer."""
        status, text = self.get(f"/api/queues?scope={scope}" if scope else "/api/queues")
        statistics: dict[str, Any] = json.loads(text) if status == 200 else {}
        return statistics

    def row(self, queue: str, scope: str = "") -> dict[str, Any]:
        """Return the statistics of a queue; {} while there are none."""
        return dict(self.statistics(scope).get("queues", {}).get(queue, {}))

    def owned(self) -> dict[int, dict[str, Any]]:
        """Return the statistics of the worker's markers partitions by number; {} if it does not answer."""
        return {part["partition"]: part for part in self.statistics("worker").get("partitions", ())}

    def wait_until(
        self, condition: Callable[[], object], limit: float = LIMIT_SECONDS, pause: float = POLL_SECONDS
    ) -> None:
        """Wait for a condition; raise RunError if it does not hold within the limit, or the worker ended by itself."""
        until_s = time.monotonic() + limit
        while not condition():
            self.check()
            if time.monotonic() > until_s:
                queues = str(self.statistics().get("queues"))[:2_000]
                raise RunError(f"{self.name} was not ready after {limit:g} s; see {self.log_file}; queues: {queues}")
            time.sleep(pause)

    def wait_until_owned(self, workers: int = 1, partitions: int | None = None) -> None:
        """Wait until this many workers own all partitions, and each of them owns some; raise like :meth:`wait_until`.

        ``partitions``: how many there are. Without it, a former owner may still count as one.
        """

        def owned() -> bool:
            own = [worker["partitions"] for worker in self.statistics().get("workers", [])]
            states = [part["state"] for parts in own for part in parts]
            whole = partitions in (None, len(states))
            return len(own) == workers and all(own) and whole and set(states) == {"owner"}

        self.wait_until(owned, START_SECONDS, 0.1)

    def wait_until_drained(self, queue: str, acked: int) -> None:
        """Wait until the tracker has folded every ack and its table is empty; raise like :meth:`wait_until`."""
        self.wait_until(lambda: {"acked": acked, "in_flight": 0}.items() <= self.row(queue).items())

    def memory_mib(self, name: str) -> dict[str, float]:
        """Return peak and current memory under names that begin with ``name``."""
        peak, now = (memory_bytes(self.pid, field) / 2**20 for field in ("VmHWM", "VmRSS"))
        return {f"{name}_peak_mib": peak, f"{name}_mib": now}

    def core_percent(self, seconds: float) -> float:
        """Return how much of a core it uses, measured for this time."""
        meter = Meter({"worker": [self.pid]})
        time.sleep(seconds)
        return 100 * meter.cores()["worker_cores"]


class BenchClient(Program):
    """A function in a process of its own; leaving the context kills it.

    It writes lines of JSON and waits for empty lines (:mod:`lab.bench.client`). The arguments must be ready for JSON.
    """

    limit_seconds = 300.0

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="marq-client-", ignore_cleanup_errors=True)
        folder, name = Path(self._folder.name), f"{function.__module__}:{function.__name__}"
        command = ["-m", "lab.bench.client", name, json.dumps(arguments)]
        log_file = folder / "log"
        super().__init__(function.__name__, command, {}, log_file, temporary=[folder], stdin=subprocess.PIPE)
        self._told = self.lines(self.limit_seconds, "{")

    def read(self) -> dict[str, Any]:
        """Return its next line; raise RunError if it ended, or wrote nothing within the limit."""
        line = next(self._told, None)
        if line is None:
            raise RunError(f"{self.name} failed: {self.log_tail()}")
        told: dict[str, Any] = json.loads(line)
        return told

    def go(self) -> None:
        """Let it continue."""
        self.write(b"\n")

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()


def ask(*clients: BenchClient) -> list[dict[str, Any]]:
    """Let clients continue at the same time; return the next line of each."""
    for client in clients:
        client.go()
    return [client.read() for client in clients]


def measured(function: Callable[..., object], *arguments: object) -> dict[str, float]:
    """Run a client to its end; return the measurements that it writes.

    Raise RunError if it failed, or took longer than its limit.
    """
    with BenchClient(function, *arguments) as client:
        measurements = client.read()
        client.wait(client.limit_seconds)
        if client.exit_code != 0:
            raise RunError(f"{client.name} failed, exit code {client.exit_code}: {client.log_tail()}")
    return measurements
