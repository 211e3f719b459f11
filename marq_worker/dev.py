"""``marq dev``: the embedded broker, and a worker that is restarted when files change.

Each directory has a namespace of its own: the broker's data is in the directory, and on a broker that others may use,
the prefix names the directory. Otherwise two projects on one broker would run each other's messages. While it runs, a
file has its settings, from which the commands in the same directory read them.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self
from urllib.request import urlopen
from zlib import crc32

import click

from marq.wire.errors import ConfigError
from marq.wire.names import DEFAULT_PREFIX
from marq_worker.broker.__main__ import DEFAULT_ADDRESS, prepare
from marq_worker.broker.embedded import EmbeddedBroker
from marq_worker.broker.errors import BrokerError
from marq_worker.broker.ports import is_free, join_address, split_address
from marq_worker.broker.process import watch
from marq_worker.config.queues import QueuesFile, load_queues
from marq_worker.config.settings import (
    DEV_FILE,
    ENV_FILE,
    PROJECT_FILE,
    AppSettings,
    load_settings,
    read_environment,
)
from marq_worker.handlers.handler_modules import check_exists
from marq_worker.new_project import project_name
from marq_worker.sources import imported_files
from marq_worker.web.addresses import free_port, port_error
from marq_worker.worker_exit_codes import EXIT_STALLED

#: How often to look for changed files and at the worker, and how long to wait for its answer or for the broker's.
_LOOK_S, _ANSWER_S = 0.5, 1.0
#: How long to wait for the end of a watchdog, which looks more often.
_WATCHDOG_S = 2.0
#: How often to say that something still takes time.
_PROGRESS_S = 10.0
#: Ports to try after one that is in use.
_FURTHER_PORTS = 100
_SETTINGS_FILES = (PROJECT_FILE, ENV_FILE)
#: The stop timeout of the worker, unless one is configured.
_STOP_TIMEOUT_S = 9.0
#: Directories that are not watched, besides those whose names begin with a dot.
_FOREIGN = frozenset({"__pycache__", "node_modules", "venv"})


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports that were asked for; None: the default, or the next free one."""

    broker: int | None = None
    web: int | None = None


def develop(modules: Sequence[str], data: Path, loglevel: str, ports: Ports = Ports()) -> int:
    """Run until SIGINT, SIGTERM or SIGHUP; return the exit code.

    Raises:
        ConfigError: a setting or a definition is wrong.
        BrokerError: the broker could not be started, or ended.
    """
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    with ExitStack() as stack:
        shown = stack.enter_context(_only_one())
        settings = load_settings()
        definitions = load_queues(settings.queues_file, None)
        for module in modules or settings.handlers:
            check_exists(module)
        if not (modules or settings.handlers or _handlers_in(definitions)):
            _say("no handlers: name their modules, as in `marq dev tasks`, or set handlers in marq.toml")
        # Chosen here, so that it can be printed and survives restarts of the worker.
        web = f"{settings.web_bind}:{_web_port(settings, ports.web)}"
        configured = read_environment()
        servers, broker = configured.get("MARQ_BOOTSTRAP_SERVERS"), None
        named = _names_of_directory(shared=servers is not None)
        if servers is None:
            servers = _broker_address(ports.broker)
            with _progress("preparing Kafka; the first time, this takes a minute or two"):
                prepare()
            with _progress(f"starting Kafka on {servers}"):
                broker = stack.enter_context(EmbeddedBroker(data, address=servers))
            _say(f"Kafka on {servers}, data in {data}")
        elif ports.broker is not None:
            raise ConfigError(
                f"--port {ports.broker}: MARQ_BOOTSTRAP_SERVERS={servers} is set, so no broker is started; leave out"
                " one of them"
            )
        # Commands look for the worker there.
        named |= {"MARQ_BOOTSTRAP_SERVERS": servers, "MARQ_WEB_PORT": web.rpartition(":")[2]}
        # What is configured counts, also if it changes in marq.toml.
        missing = {name: value for name, value in named.items() if name not in configured}
        _show(shown, {**named, **{name: configured[name] for name in named if name in configured}})
        # Only now, so that Ctrl-C still interrupts a download or the broker's start.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP, which a terminal sends when it is closed.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, on_signal)
        _say(f"dashboard on http://{web}")
        environment = {**os.environ, **missing, "MARQ_WEB_PORT": named["MARQ_WEB_PORT"]}
        stop_timeout_s = settings.stop_timeout
        if not {"MARQ_STOP_TIMEOUT", "MARQ_SHUTDOWN_TIMEOUT"} & configured.keys():
            # A restart after a change must not wait long for handlers.
            environment["MARQ_STOP_TIMEOUT"], stop_timeout_s = f"{_STOP_TIMEOUT_S:g}", _STOP_TIMEOUT_S
        arguments = [*modules, "-l", loglevel]
        seen, imported = dict(_sources()), _imported(modules)
        worker = _Worker(arguments, environment, f"http://{web}", stop_timeout_s, servers)
        stack.enter_context(worker)
        while not stop.wait(_LOOK_S):
            if broker is not None and not broker.running:
                raise BrokerError(broker.why_it_ended())
            found = dict(_sources())
            changed = {path for path, _ in found.items() ^ seen.items()}
            seen = found
            # A worker that has ended may have missed a file that its modules do not import yet, or no longer.
            if imported is not None and not worker.ended:
                changed &= imported
            if changed:
                imported = _imported(modules)
                _say(f"restarting the worker, because of {', '.join(sorted(changed))}")
                worker.restart()
            else:
                worker.look()
    return 0


@contextmanager
def _only_one() -> Iterator[int]:
    """Hold the file with the settings, which says that `marq dev` runs here."""
    try:
        DEV_FILE.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(DEV_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise BrokerError(f"{DEV_FILE.absolute()} can't be written: {error.strerror}") from error
    try:
        # Not shared with commands, which only look for a moment; see marq_worker.config.settings.
        for last in (*[False] * 20, True):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if last:
                    raise BrokerError("marq dev already runs in this directory: stop it first") from None
                time.sleep(0.05)
        os.truncate(file, 0)
        yield file
        os.truncate(file, 0)
    finally:
        os.close(file)


def _names_of_directory(*, shared: bool) -> dict[str, str]:
    """Return the namespace and the project of this directory, on a shared broker or on one of its own."""
    project = project_name(Path())
    prefix = f"dev-{project}-{crc32(os.fsencode(Path.cwd())):08x}" if shared else DEFAULT_PREFIX
    return {"MARQ_PREFIX": prefix, "MARQ_PROJECT": project}


def _show(file: int, named: Mapping[str, str]) -> None:
    """Write the settings for commands in this directory, and print those that programs need."""
    os.pwrite(file, "".join(f"{name}={value}\n" for name, value in named.items()).encode(), 0)
    defaults = {"MARQ_BOOTSTRAP_SERVERS": DEFAULT_ADDRESS, "MARQ_PREFIX": DEFAULT_PREFIX}
    needed = [f"{name}={named[name]}" for name, default in defaults.items() if named[name] != default]
    if needed:
        _say(f"commands in this directory use namespace {named['MARQ_PREFIX']} on {named['MARQ_BOOTSTRAP_SERVERS']}")
        _say(f"before you run your own programs: export {' '.join(needed)}")


def _broker_address(wanted: int | None) -> str:
    """Return the address for a broker of our own."""
    host, first = split_address(DEFAULT_ADDRESS)
    if wanted is not None:
        if not is_free(host, wanted):
            raise BrokerError(f"--port {wanted}: the port is in use; choose another one, or leave out --port")
        return join_address(host, wanted)
    port = next((candidate for candidate in range(first, first + _FURTHER_PORTS) if is_free(host, candidate)), None)
    if port is None:
        raise BrokerError(f"no port from {first} to {first + _FURTHER_PORTS - 1} is free: choose one with --port")
    if port != first:
        _say(
            f"{DEFAULT_ADDRESS} is in use, so Kafka gets port {port}. If a broker runs there, you can share it: each"
            f" directory has its own namespace. For that, run MARQ_BOOTSTRAP_SERVERS={DEFAULT_ADDRESS} marq dev"
        )
    return join_address(host, port)


def _web_port(settings: AppSettings, wanted: int | None) -> int:
    if wanted is None:
        return free_port(settings.web_bind, settings.web_port, 0)
    if port_error(settings.web_bind, wanted):
        raise ConfigError(f"--web-port {wanted}: the port is in use; choose another one, or leave out --web-port")
    return wanted


def _handlers_in(definitions: QueuesFile) -> list[str]:
    return [str(settings["handler"]) for settings in definitions.queues.values() if "handler" in settings]


def _imported(modules: Sequence[str]) -> set[str] | None:
    """Return the files whose changes restart the worker; None if its modules are not known, so any file may matter."""
    try:
        settings = load_settings()
        handlers = _handlers_in(load_queues(settings.queues_file, None))
    except ConfigError:
        return None  # a file is being edited; the worker reports what is wrong
    names = [*(modules or settings.handlers), *(handler.partition(":")[0] for handler in handlers)]
    files = imported_files(names)
    return None if files is None else {*map(str, files), *map(str, _SETTINGS_FILES)}


def _sources() -> Iterator[tuple[str, int]]:
    """Yield each file that may matter with its modification time in ns: Python files, marq.toml and .env."""
    for path in (*_python_files(), *_SETTINGS_FILES):
        try:
            yield str(path), path.stat().st_mtime_ns
        except OSError:
            continue  # missing, or deleted meanwhile


def _python_files() -> Iterator[Path]:
    for folder, folders, files in os.walk("."):
        if "pyvenv.cfg" in files:
            folders.clear()  # a virtual environment
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _FOREIGN]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Say what is done, and that it still is while it takes long."""
    done = threading.Event()
    began_s = time.monotonic()

    def remind() -> None:
        while not done.wait(_PROGRESS_S):
            _say(f"{what} ({time.monotonic() - began_s:.0f} s)")

    _say(what)
    reminding = threading.Thread(target=remind, daemon=True)
    reminding.start()
    try:
        yield
    finally:
        done.set()
        reminding.join()


def _answers(servers: str) -> bool:
    """Return whether a program listens at one of the addresses; True for an address that the worker will refuse."""
    for address in servers.split(","):
        try:
            with socket.create_connection(split_address(address), timeout=_ANSWER_S):
                return True
        except BrokerError:
            return True
        except OSError:
            continue
    return False


class _Worker:
    """``marq worker`` as a process; it is started when a broker answers, and again after each outage that ends it."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        address: str,
        stop_timeout_s: float,
        servers: str,
    ) -> None:
        self._command = [sys.executable, "-P", "-m", "marq_worker", "worker", "--quiet", *arguments]
        self._environment = environment
        self._address = address
        # The worker exits at its own limit.
        self._stop_limit_s = stop_timeout_s + 5
        self._servers = servers
        #: None while no broker answers.
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = self._reminded_s = time.monotonic()
        #: Each ends with its process, or ends it if this program dies without stopping it.
        self._watchdogs: list[subprocess.Popen[bytes]] = []
        self._said = ""

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        for watchdog in self._watchdogs:
            # One that still waits for a process of the worker ends that when this program ends.
            with suppress(subprocess.TimeoutExpired):
                watchdog.wait(_WATCHDOG_S)

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself, and waits for a file to change."""
        return self._process is not None and self._process.poll() is not None

    def restart(self) -> None:
        self._stop()
        self._start()

    def look(self) -> None:
        """Start the worker once a broker answers, and say once that it is ready, or has ended by itself."""
        if self._process is None:
            self._start()
            return
        code = self._process.poll()
        if code is not None:
            if code == EXIT_STALLED or not _answers(self._servers):
                _say(f"the worker ended with exit code {code}; it starts again as soon as a broker answers")
                self._process = None
            else:
                self._say_once(f"the worker ended with exit code {code}; it starts again when a file changes")
        elif not self._said:
            if self._ready():
                self._say_once("the worker is ready")
            elif time.monotonic() - self._reminded_s >= _PROGRESS_S:
                self._reminded_s = time.monotonic()
                _say(f"the worker is starting ({self._reminded_s - self._started_s:.0f} s)")

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
        if not _answers(self._servers):
            self._process = None
            self._say_once(f"waiting for a broker at {self._servers}")
            return
        self._started_s = self._reminded_s = time.monotonic()
        # A session of its own keeps Ctrl-C from the worker: this process stops it, and then the broker.
        self._process = subprocess.Popen(self._command, env=self._environment, start_new_session=True)
        running = [watchdog for watchdog in self._watchdogs if watchdog.poll() is None]
        self._watchdogs = [*running, watch(self._process.pid)]
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
