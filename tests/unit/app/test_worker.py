"""How the event loop of a worker ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import faust
import pytest

from marq_worker.faust_worker import LAST_THREADS_S, MarqWorker
from marq_worker.web.addresses import free_port
from marq_worker.worker_folders import MAX_WORKERS

LIMIT_S = 60.0


def test_a_task_that_is_cancelled_at_the_end_of_a_stop_can_end() -> None:
    ended = []

    async def last_task() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            # Several turns of the event loop, as for closing a connection.
            await asyncio.sleep(0.01)
            ended.append(True)

    async def stop() -> None:
        task = asyncio.create_task(last_task())
        await asyncio.sleep(0)
        task.cancel()
        await MarqWorker.__new__(MarqWorker)._sentinel_task()
        assert ended == [True]

    asyncio.run(stop())


def test_a_stop_without_a_signal_has_a_time_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, codes = threading.Event(), []
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    worker = MarqWorker.__new__(MarqWorker)
    worker._stop_timeout, worker.app = 0.01, SimpleNamespace(exit_code=0)

    # Faust calls it when the event loop has ended, here because of a KeyboardInterrupt in a handler.
    worker.on_worker_shutdown()

    assert ended.wait(10)
    assert codes == [1]


@pytest.mark.parametrize(("quiet", "lines"), [(False, 1), (True, 0)])
def test_a_stop_by_a_signal_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, quiet: bool, lines: int
) -> None:
    def run(worker: faust.Worker) -> None:
        worker._schedule_shutdown(signal.SIGTERM)
        raise SystemExit(0)

    monkeypatch.setattr(faust.Worker, "execute_from_commandline", run)
    monkeypatch.setattr(faust.Worker, "_schedule_shutdown", lambda worker, number: None)
    worker = MarqWorker.__new__(MarqWorker)
    worker.app = SimpleNamespace(exit_code=3, quiet=quiet, leaves_threads=False)

    with caplog.at_level(logging.INFO, "marq.worker"), pytest.raises(SystemExit) as ended:
        worker.execute_from_commandline()

    assert ended.value.code == 3
    assert len(caplog.records) == lines
    assert all(record.getMessage().startswith("stopped by SIGTERM in ") for record in caplog.records)


@pytest.mark.parametrize("bind", ["::1", "::", "127.0.0.1"])
def test_a_worker_finds_a_free_port_at_an_ipv6_address_too(bind: str) -> None:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        taken = socket.create_server((bind, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no address {bind}")
    with taken:
        number = taken.getsockname()[1]
        assert number < free_port(bind, number, 0) < number + MAX_WORKERS


ENDING = """
import atexit, sys, threading
from marq_worker.faust_worker import limit_threads

def end_of_a_library():
    print("exit functions ran", flush=True)

def never():
    threading.Event().wait()

atexit.register(end_of_a_library)
{thread}
limit_threads(3, {limit_s})
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("thread", "limit_s"), [("threading.Thread(target=never).start()", 0.01), ("", 0.01), ("", LAST_THREADS_S)]
)
def test_a_thread_that_never_ends_does_not_keep_a_handler_process_alive(thread: str, limit_s: float) -> None:
    """A plain handler can't be cancelled: the process stayed until its worker killed it."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDING.format(thread=thread, limit_s=limit_s)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )

    assert (ended.returncode, ended.stdout) == (3, "exit functions ran\n")
    assert ("threads=1" in ended.stderr) is bool(thread)
