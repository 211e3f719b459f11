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


def test_a_broker_that_ends_ends_it_and_signals_interrupt_the_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[object] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MARQ_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.setattr(dev, "prepare", lambda: steps.append("prepare"))
    monkeypatch.setattr(dev, "EmbeddedBroker", EndedBroker)
    monkeypatch.setattr(dev, "_Worker", SleepingWorker)
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)
    monkeypatch.setattr(signal, "signal", lambda number, _: steps.append(number))

    with pytest.raises(BrokerError, match=r"the broker ended by itself\nno space left on device"):
        dev.develop([], tmp_path, "warn")

    assert steps == ["prepare", signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
