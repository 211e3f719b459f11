"""``marq dev``: what it leaves behind however it ends, and what it says of a broker that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Self

import pytest

from marq_worker import dev
from marq_worker.broker.errors import BrokerError

LIMIT_S = 60

#: A worker that sleeps, in the place of the real one.
PROGRAM = """
import sys
from marq_worker import dev

worker = dev._Worker([], {}, "http://127.0.0.1:1", 10)
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

    def log_tail(self) -> str:
        return "no space left on device"


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


def test_an_address_in_use_is_said_to_be_a_broker_to_use_and_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MARQ_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.setattr(dev, "is_free", lambda host, port: False)

    with pytest.raises(BrokerError, match=r"run `MARQ_BOOTSTRAP_SERVERS=127\.0\.0\.1:9092 marq dev`"):
        dev.develop([], tmp_path, "warn")


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

    with pytest.raises(BrokerError):
        dev.develop(modules, tmp_path, "warn")

    assert ("no handlers: name their modules" in capsys.readouterr().out) is said


def test_sources_are_watched_but_no_virtual_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tasks.py", "shop/orders.py", "env/pyvenv.cfg", "env/lib/site.py", ".git/hook.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)

    assert sorted(path for path, _ in dev._sources()) == ["shop/orders.py", "tasks.py"]


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

    with pytest.raises(BrokerError, match=r"the broker exited unexpectedly\nno space left on device"):
        dev.develop([], tmp_path, "warn")

    assert steps == ["prepare", signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
