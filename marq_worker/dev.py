"""``marq dev``: the embedded broker, and a worker that is restarted when files change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Self
from urllib.request import urlopen

import click
from watchfiles import PythonFilter, watch

from marq_worker.app.faust_worker import free_port
from marq_worker.broker.__main__ import DEFAULT_ADDRESS, prepare
from marq_worker.broker.embedded import EmbeddedBroker
from marq_worker.config.settings import ENV_FILE, PROJECT_FILE, load_settings, read_environment

#: How often to look whether the worker is ready or has ended, and how long to wait for its answer.
_LOOK_MS, _ANSWER_S = 500, 1.0


def develop(modules: Sequence[str], data: Path, loglevel: str) -> int:
    """Run until SIGINT or SIGTERM; return the exit code."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    settings = load_settings()
    with ExitStack() as stack:
        environment = dict(os.environ)
        if "MARQ_BOOTSTRAP_SERVERS" not in read_environment():
            prepare()
            broker = stack.enter_context(EmbeddedBroker(data, address=DEFAULT_ADDRESS))
            environment["MARQ_BOOTSTRAP_SERVERS"] = broker.bootstrap_servers
            _say(f"Kafka on {broker.bootstrap_servers}, data in {data}")
        # Chosen here so that it stays the same, and can be told.
        port = free_port(settings.web_bind, settings.web_port, 0)
        environment["MARQ_WEB_PORT"] = str(port)
        address = f"http://{settings.web_bind}:{port}"
        _say(f"dashboard on {address}")
        worker = stack.enter_context(_Worker([*modules, "-l", loglevel], environment, address, settings.stop_timeout))
        for changes in watch(Path(), watch_filter=_Sources(), stop_event=stop, rust_timeout=_LOOK_MS,
                             yield_on_timeout=True, raise_interrupt=False):  # fmt: skip
            if changes:
                _say(f"changed: {', '.join(sorted({os.path.relpath(path) for _, path in changes}))}")
                worker.restart()
            else:
                worker.look()
    return 0


class _Sources(PythonFilter):
    """Python files, and the files with settings; ``.marq`` has the data of broker and worker."""

    ignore_dirs = (*PythonFilter.ignore_dirs, ".marq")

    def __init__(self) -> None:
        super().__init__(extra_extensions=(PROJECT_FILE.name, ENV_FILE.name))


class _Worker:
    """``marq worker`` as a process."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], address: str, stop_timeout_s: float
    ) -> None:
        self._command = [sys.executable, "-P", "-m", "marq_worker", "worker", "--quiet", *arguments]
        self._environment = environment
        self._address = address
        # The worker ends itself at its own limit.
        self._stop_limit_s = stop_timeout_s + 5
        self._process: subprocess.Popen[bytes] | None = None
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
        # In a session of its own, so that Ctrl-C reaches only this process, which stops the worker before the broker.
        self._process = subprocess.Popen(self._command, env=self._environment, start_new_session=True)
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
