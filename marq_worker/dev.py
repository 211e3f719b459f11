"""``marq dev``: the embedded broker, and a worker that is restarted when files change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Self
from urllib.request import urlopen

import click

from marq_worker.agents.handler_modules import check_exists
from marq_worker.app.web.addresses import free_port
from marq_worker.broker.__main__ import DEFAULT_ADDRESS, prepare
from marq_worker.broker.embedded import EmbeddedBroker
from marq_worker.broker.errors import BrokerError
from marq_worker.broker.ports import is_free, split_address
from marq_worker.broker.process import watch
from marq_worker.config.queues import load_queues
from marq_worker.config.settings import ENV_FILE, PROJECT_FILE, load_settings, read_environment

#: How often to look for changed files and at the worker, and how long to wait for its answer.
_LOOK_S, _ANSWER_S = 0.5, 1.0
_IN_USE = (
    f"{DEFAULT_ADDRESS} is in use: if a Kafka broker listens there, run `MARQ_BOOTSTRAP_SERVERS={DEFAULT_ADDRESS} marq"
    " dev`. Otherwise stop that program, or run `MARQ_BOOTSTRAP_SERVERS=127.0.0.1:9093 marq broker`, and marq dev and"
    " the other commands with the same setting"
)
#: Directories that are not watched, besides those whose names begin with a dot.
_FOREIGN = frozenset({"__pycache__", "node_modules", "venv"})


def develop(modules: Sequence[str], data: Path, loglevel: str) -> int:
    """Run until SIGINT, SIGTERM or SIGHUP; return the exit code.

    Raises:
        ConfigError: a setting or a definition is wrong.
        BrokerError: the broker could not be started, or ended.
    """
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    settings = load_settings()
    definitions = load_queues(settings.queues_file, None)
    for module in modules or settings.handlers:
        check_exists(module)
    with ExitStack() as stack:
        environment, broker = dict(os.environ), None
        if not (modules or settings.handlers or any("handler" in each for each in definitions.queues.values())):
            _say("no handlers: name their modules, as in `marq dev tasks`, or set handlers in marq.toml")
        if "MARQ_BOOTSTRAP_SERVERS" not in read_environment():
            if not is_free(*split_address(DEFAULT_ADDRESS)):
                raise BrokerError(_IN_USE)
            prepare()
            broker = stack.enter_context(EmbeddedBroker(data, address=DEFAULT_ADDRESS))
            environment["MARQ_BOOTSTRAP_SERVERS"] = broker.bootstrap_servers
            _say(f"Kafka on {broker.bootstrap_servers}, data in {data}")
        # Only now, so that Ctrl-C still interrupts a download or the broker's start.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP, which a terminal sends when it is closed.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, on_signal)
        # Chosen here, so that it can be printed and survives restarts of the worker.
        port = free_port(settings.web_bind, settings.web_port, 0)
        environment["MARQ_WEB_PORT"] = str(port)
        address = f"http://{settings.web_bind}:{port}"
        _say(f"dashboard on {address}")
        seen = dict(_sources())
        worker = stack.enter_context(_Worker([*modules, "-l", loglevel], environment, address, settings.stop_timeout))
        while not stop.wait(_LOOK_S):
            if broker is not None and not broker.running:
                raise BrokerError(f"the broker exited unexpectedly\n{broker.log_tail()}")
            found = dict(_sources())
            if found == seen:
                worker.look()
                continue
            changed = sorted(path for path, _ in found.items() ^ seen.items())
            _say(f"restarting the worker, because of {', '.join(dict.fromkeys(changed))}")
            seen = found
            worker.restart()
    return 0


def _sources() -> Iterator[tuple[str, int]]:
    """Yield each watched file with its modification time in ns: Python files, marq.toml and .env."""
    for folder, folders, files in os.walk("."):
        if "pyvenv.cfg" in files:
            folders.clear()  # a virtual environment
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _FOREIGN]
        for name in files:
            if name.endswith(".py") or name in {PROJECT_FILE.name, ENV_FILE.name}:
                path = Path(folder, name)
                try:
                    yield str(path), path.stat().st_mtime_ns
                except OSError:
                    continue  # deleted meanwhile


class _Worker:
    """``marq worker`` as a process."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], address: str, stop_timeout_s: float
    ) -> None:
        self._command = [sys.executable, "-P", "-m", "marq_worker", "worker", "--quiet", *arguments]
        self._environment = environment
        self._address = address
        # The worker exits at its own limit.
        self._stop_limit_s = stop_timeout_s + 5
        self._process: subprocess.Popen[bytes] | None = None
        #: Ends with the process, or ends it if this program dies without stopping it.
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._said = ""

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def restart(self) -> None:
        self._stop()
        self._start()

    def look(self) -> None:
        """Say once that the worker is ready, or has ended by itself."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            self._say_once(f"the worker ended with exit code {code}; it starts again when a file changes")
        elif not self._said and self._ready():
            self._say_once("the worker is ready")

    def _ready(self) -> bool:
        try:
            with urlopen(f"{self._address}/readyz", timeout=_ANSWER_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            _say(text)

    def _start(self) -> None:
        # A session of its own keeps Ctrl-C from the worker: this process stops it, and then the broker.
        self._process = subprocess.Popen(self._command, env=self._environment, start_new_session=True)
        self._watchdog = watch(self._process.pid)
        self._said = ""

    def _stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(self._stop_limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _say(text: str) -> None:
    click.echo(f"marq dev: {text}")
