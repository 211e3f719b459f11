"""What Faust is told by our settings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaError
from mode.services import ServiceTask

from marq_worker.app.faust_app import MarqApp, new_app
from marq_worker.config.settings import load_client_settings, load_settings
from marq_worker.transport.batch_transport import BatchConsumer
from marq_worker.worker_exit_codes import EXIT_STALLED


@pytest.mark.parametrize("seconds", [6, 10, 300])
def test_each_session_timeout_that_may_be_set_is_shorter_than_what_a_request_may_take(
    monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """Else Faust's consumer does not start."""
    monkeypatch.setenv("MARQ_SESSION_TIMEOUT", str(seconds))
    settings = load_settings()

    conf = new_app(MarqApp, "t-app", settings, load_client_settings(settings), store="memory://").conf

    assert conf.broker_session_timeout == seconds
    assert conf.broker_request_timeout > seconds


async def test_a_process_whose_consumer_has_failed_ends_with_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Faust does not ask aiokafka for an error of the group's coordinator: the process was a member no longer."""
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _, number: signals.append(number))
    settings = load_settings()
    app = new_app(MarqApp, "t-app", settings, load_client_settings(settings), store="memory://")
    thread = SimpleNamespace(failure=None)

    async def sleep(_: float) -> None:
        assert signals == []
        thread.failure = KafkaError("SyncGroup was refused")

    consumer: Any = SimpleNamespace(should_stop=False, thread=thread, app=app, sleep=sleep)
    look: Any = BatchConsumer._look_for_failure
    await look(consumer)

    assert isinstance(look, ServiceTask)
    assert (signals, app.exit_code) == ([signal.SIGTERM], EXIT_STALLED)
    assert "group t-app: the consumer receives nothing more after an error" in caplog.text
    assert "SyncGroup was refused" in caplog.text


def test_a_worker_runs_on_uvloop_and_other_loops_of_its_process_are_asyncios() -> None:
    """Python 3.14 deprecates event loop policies, which would change all loops."""
    program = """
import asyncio
from mode.utils.loops import get_event_loop
from marq_worker.app import app
print(type(get_event_loop()).__module__, type(asyncio.new_event_loop()).__module__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False)

    assert done.stdout == "uvloop asyncio.unix_events\n", done.stderr
