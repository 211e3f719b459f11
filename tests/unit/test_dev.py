"""``marq dev``: what it leaves behind however it ends, and what it says of a broker that ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any, Self

import pytest

from marq.wire.errors import ConfigError
from marq_worker import dev
from marq_worker.broker.errors import BrokerError
from marq_worker.config.settings import read_environment

LIMIT_S = 60

#: A worker that sleeps, in the place of the real one.
PROGRAM = """
import sys
from marq_worker import dev

dev._answers = lambda servers: True
worker = dev._Worker([], {}, "http://127.0.0.1:1", 10, "127.0.0.1:1")
worker._command = [sys.executable, "-c", "import time; time.sleep(600)"]
with worker:
    print(worker._process.pid, flush=True)
    sys.stdin.read()
"""


class EndedBroker:
    bootstrap_servers = "127.0.0.1:1"
    running = False

    def __init__(self, data: Path, address: str) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def why_it_ended(self) -> str:
        return "the broker exited unexpectedly: no space left on device"


class SleepingWorker:
    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_a_worker_does_not_outlive_a_program_that_got_kill_9() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=PIPE, stdout=PIPE, stderr=PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())

        parent.kill()
        try:
            # The worker and its watchdog have the program's stderr: its end is the sign that both have ended.
            _, errors = parent.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(pid, signal.SIGKILL)
            raise

    assert errors == b""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, without settings."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("MARQ_")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def started(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The addresses of brokers and the environments of workers that are started; an EndedBroker ends `marq dev`."""
    started: list[Any] = []

    class Broker(EndedBroker):
        def __init__(self, data: Path, address: str) -> None:
            started.append(address)

    class Worker(SleepingWorker):
        def __init__(self, arguments: object, environment: dict[str, str], *_: object) -> None:
            started.append({name: value for name, value in environment.items() if name.startswith("MARQ_")})
            # What commands in the directory see meanwhile.
            started.append(marq_settings())
            raise BrokerError("enough")

    monkeypatch.setattr(dev, "prepare", lambda: None)
    monkeypatch.setattr(dev, "EmbeddedBroker", Broker)
    monkeypatch.setattr(dev, "_Worker", Worker)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return started


def marq_settings() -> dict[str, str]:
    return {name: value for name, value in read_environment().items() if name.startswith("MARQ_")}


def run_dev(error: str = "^enough$", **ports: int) -> None:
    with pytest.raises((BrokerError, ConfigError), match=error):
        dev.develop([], Path("data"), "warn", dev.Ports(**ports))


def test_a_broker_gets_the_next_free_port_and_what_to_export_is_printed(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dev, "is_free", lambda host, port: port > 9093)

    run_dev()

    address, environment, seen = started
    assert address == "127.0.0.1:9094"
    assert (environment["MARQ_BOOTSTRAP_SERVERS"], environment["MARQ_PREFIX"]) == (address, "marq")
    # A restart after a change does not wait long for handlers.
    assert environment["MARQ_STOP_TIMEOUT"] == "9"
    # Otherwise `marq check` would look for the worker at another port.
    web = {"MARQ_WEB_PORT": environment["MARQ_WEB_PORT"]}
    names = {"MARQ_PREFIX": "marq", "MARQ_PROJECT": dev.project_name(Path())}
    assert seen == {"MARQ_BOOTSTRAP_SERVERS": address, **names, **web}
    said = capsys.readouterr().out
    assert "127.0.0.1:9092 is in use, so Kafka gets port 9094" in said
    assert "before you run your own programs: export MARQ_BOOTSTRAP_SERVERS=127.0.0.1:9094\n" in said
    # then: once it has ended, commands do not look for its broker
    assert marq_settings() == {}


def test_on_a_shared_broker_each_directory_has_a_namespace_of_its_own(
    started: list[Any], directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # given: the first project runs there, with the default prefix
    monkeypatch.setenv("MARQ_BOOTSTRAP_SERVERS", "127.0.0.1:9092")

    # when: two others do what is advised if the port is in use
    for name in ("one", "two"):
        (directory / name).mkdir()
        monkeypatch.chdir(directory / name)
        run_dev()

    first, second = started[0]["MARQ_PREFIX"], started[2]["MARQ_PREFIX"]
    assert re.fullmatch(r"dev-one-[0-9a-f]{8}", first)
    assert re.fullmatch(r"dev-two-[0-9a-f]{8}", second)
    assert started[1]["MARQ_PREFIX"] == first
    assert f"export MARQ_PREFIX={first}" in capsys.readouterr().out


def test_what_is_configured_counts(started: list[Any], directory: Path) -> None:
    (directory / "marq.toml").write_text(
        '[settings]\nproject = "shop"\nprefix = "own"\nbootstrap_servers = "kafka:9092"\nstop_timeout = 60\n'
    )

    run_dev(web=dev.free_port("127.0.0.1", 21_000, 0))

    environment, seen = started
    assert environment.keys() == {"MARQ_WEB_PORT"}
    assert (seen["MARQ_PROJECT"], seen["MARQ_PREFIX"]) == ("shop", "own")
    run_dev("--port 9: MARQ_BOOTSTRAP_SERVERS=kafka:9092 is set, so no broker is started", broker=9)


def test_ports_that_were_asked_for_are_not_replaced(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        run_dev(f"--port {port}: the port is in use", broker=port)
        run_dev(f"--web-port {port}: the port is in use", web=port)

    assert started == []


def test_the_settings_that_a_killed_one_left_are_ignored(directory: Path) -> None:
    (directory / ".marq").mkdir()
    (directory / ".marq" / "dev.env").write_text("MARQ_BOOTSTRAP_SERVERS=127.0.0.1:9093\n")

    assert marq_settings() == {}


def test_a_second_one_in_the_directory_is_refused(started: list[Any]) -> None:
    with dev._only_one():
        run_dev("marq dev already runs in this directory: stop it first")


def test_the_worker_waits_for_the_broker_and_returns_after_an_outage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # given: no broker answers
    answers = False
    monkeypatch.setattr(dev, "_answers", lambda servers: answers)
    worker = dev._Worker([], {}, "http://127.0.0.1:1", 10, "kafka:9092")
    worker._command = [sys.executable, "-c", ""]
    with worker:
        worker.look()
        assert (worker._process, worker.ended) == (None, False)

        # when: it answers
        answers = True
        worker.look()
        first = worker._process
        assert first is not None
        first.wait(LIMIT_S)

        # and when: the worker has ended, and no broker answers
        answers = False
        worker.look()
        worker.look()
        assert worker._process is None
        answers = True
        worker.look()
        assert worker._process is not None
        worker._process.wait(LIMIT_S)

        # then: with a broker, it waits for a file to change
        worker.look()
        assert worker.ended

    assert capsys.readouterr().out.splitlines() == [
        "marq dev: waiting for a broker at kafka:9092",
        "marq dev: the worker ended with exit code 0; it starts again as soon as a broker answers",
        "marq dev: waiting for a broker at kafka:9092",
        "marq dev: the worker ended with exit code 0; it starts again when a file changes",
    ]


@pytest.mark.parametrize(
    ("modules", "project", "said"),
    [
        ([], "", True),
        (["tasks"], "", False),
        ([], "[settings]\nhandlers = ['tasks']", False),
        ([], "[queues.emails]\nhandler = 'tasks:send'", False),
    ],
)
def test_a_start_without_handlers_says_how_to_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], modules, project, said
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MARQ_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.delenv("MARQ_HANDLERS", raising=False)
    (tmp_path / "marq.toml").write_text(project)
    (tmp_path / "tasks.py").touch()
    monkeypatch.setattr(dev, "is_free", lambda host, port: False)

    with pytest.raises(BrokerError, match="no port from 9092 to 9191 is free: choose one with --port"):
        dev.develop(modules, tmp_path, "warn")

    assert ("no handlers: name their modules" in capsys.readouterr().out) is said


def test_sources_are_watched_but_no_virtual_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tasks.py", "shop/orders.py", "env/pyvenv.cfg", "env/lib/site.py", ".git/hook.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)

    assert sorted(path for path, _ in dev._sources()) == ["shop/orders.py", "tasks.py"]


def test_only_files_that_handlers_import_restart_the_worker(directory: Path) -> None:
    # given: handlers that import in several ways, and files that they do not import
    files = {
        "tasks.py": "import json, shop.orders\ndef f():\n    from reports import daily\n    load('plugins.mail')",
        "shop/__init__.py": "from . import prices",
        "shop/orders.py": "from .prices import total\nfrom shop import taxes",
        "shop/prices.py": "total = 1",
        "shop/taxes.py": "this is no Python",
        "shop/unused.py": "",
        "reports/daily.py": "",
        "plugins/mail.py": "",
        "test_tasks.py": "import tasks",
        "notebooks/analysis.py": "import shop.unused",
        "jobs.py": "",
    }
    for name, text in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    (directory / "marq.toml").write_text('[queues.nightly]\nhandler = "jobs:run"')

    imported = dev._imported(["tasks"])

    unrelated = {"shop/unused.py", "test_tasks.py", "notebooks/analysis.py"}
    assert imported == (files.keys() - unrelated) | {"marq.toml", ".env"}
    # then: if a module is elsewhere, any file may be one that it imports
    assert dev._imported(["tasks", "nowhere"]) is None


def test_a_change_of_another_file_does_not_restart_the_worker(
    started: list[Any], directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = []

    class Worker(SleepingWorker):
        ended = False

        def look(self) -> None:
            looks.append(len(looks))
            (directory / ["unused.py", "tasks.py"][looks[-1]]).write_text("changed = True")

        def restart(self) -> None:
            raise BrokerError("enough")

    monkeypatch.setattr(dev, "_Worker", Worker)
    monkeypatch.setattr(dev, "_LOOK_S", 0.01)
    monkeypatch.setenv("MARQ_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    (directory / "tasks.py").touch()

    with pytest.raises(BrokerError, match="enough"):
        dev.develop(["tasks"], Path("data"), "warn")

    assert looks == [0, 1]
    assert "restarting the worker, because of tasks.py\n" in capsys.readouterr().out


def test_a_broker_that_ends_ends_it_and_signals_interrupt_the_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[object] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MARQ_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.setattr(dev, "is_free", lambda host, port: True)
    monkeypatch.setattr(dev, "prepare", lambda: steps.append("prepare"))
    monkeypatch.setattr(dev, "EmbeddedBroker", EndedBroker)
    monkeypatch.setattr(dev, "_Worker", SleepingWorker)
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)
    monkeypatch.setattr(signal, "signal", lambda number, _: steps.append(number))

    with pytest.raises(BrokerError, match="the broker exited unexpectedly: no space left on device"):
        dev.develop([], tmp_path, "warn")

    assert steps == ["prepare", signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
