"""What the supervisor of handler processes decides."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from marq.wire.errors import ConfigError, MarqError
from marq_worker.config.settings import HANDLERS_PROCESS
from marq_worker.handlers.handler_groups import HandledQueue, HandlerGroup
from marq_worker.handlers.handlers_process import HandlersProcess
from marq_worker.handlers.supervisor import (
    FIRST_PAUSE_S,
    LONG_LIFE_S,
    MAX_PAUSE_S,
    HandlersProcesses,
    Pauses,
    _GroupProcess,
    changes,
    command,
)
from marq_worker.handlers.worker_pipes import SILENCE_SECONDS, Questions, reports
from marq_worker.worker_exit_codes import EXIT_FENCED, EXIT_STALLED


def group(name: str, *queues: str, concurrency: int = 64, topic: str | None = None) -> HandlerGroup:
    return HandlerGroup(name, {queue: HandledQueue("mail:send", concurrency, topic) for queue in queues})


def test_groups_that_come_and_go_start_and_stop_processes_and_one_that_stays_keeps_its_own() -> None:
    running = {"a": group("a", "emails")}

    assert changes(running, {"a": group("a", "emails")}) == ([], [])
    assert changes(running, {"b": group("b", "reports")}) == (["a"], ["b"])
    assert changes({}, running) == ([], ["a"])
    assert changes(running, {}) == (["a"], [])


@pytest.mark.parametrize(
    "changed",
    [
        group("a", "emails", "reports"),
        group("a", "emails", concurrency=3),
        group("a", "emails", topic="emails"),
        HandlerGroup("a", {"emails": HandledQueue("mail:send_twice", 64)}),
    ],
    ids=["queues", "concurrency", "topic", "handler"],
)
def test_a_group_that_differs_gets_another_process(changed: HandlerGroup) -> None:
    running = {"a": group("a", "emails"), "b": group("b", "orders")}

    assert changes(running, {**running, "a": changed}) == (["a"], ["a"])


def test_the_pause_before_the_next_start_grows_up_to_a_limit_and_is_short_again_after_a_long_life() -> None:
    pauses = Pauses()

    found = [pauses.after(1.0) for _ in range(10)]

    assert found[:3] == [FIRST_PAUSE_S, FIRST_PAUSE_S * 2, FIRST_PAUSE_S * 4]
    assert found[-1] == MAX_PAUSE_S
    assert [pauses.after(LONG_LIFE_S), pauses.after(1.0)] == [FIRST_PAUSE_S, FIRST_PAUSE_S * 2]


class Supervised:
    """The handler process of a worker, as its supervisor runs it."""

    def __init__(self) -> None:
        self._codes: asyncio.Queue[int] = asyncio.Queue()
        self._started: list[HandlersProcesses] = []

    async def start(self, program: str) -> HandlersProcesses:
        """Start a supervisor that does not run the program yet."""
        processes = HandlersProcesses(1, [sys.executable, "-c", program], self._codes.put_nowait)
        self._started.append(processes)
        await processes.start()
        return processes

    async def ends_worker(self, processes: HandlersProcesses) -> int:
        """Run the program until the supervisor ends the worker; return the worker's exit code."""
        processes.want({"a": group("a", "emails")})
        return await asyncio.wait_for(self._codes.get(), 60)

    async def stop(self) -> None:
        for processes in self._started:
            await processes.stop()


@pytest.fixture
async def supervised() -> AsyncIterator[Supervised]:
    supervised = Supervised()
    yield supervised
    await supervised.stop()


async def test_a_process_whose_instance_id_another_one_uses_ends_its_worker_and_is_not_started_again(
    supervised: Supervised,
) -> None:
    processes = await supervised.start(f"raise SystemExit({EXIT_FENCED})")

    assert await supervised.ends_worker(processes) == EXIT_FENCED

    [metrics] = processes.metrics()
    assert metrics["starts"] == 1


async def test_a_process_is_restarted_although_a_process_that_it_forked_holds_its_reports_open(
    supervised: Supervised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The forked process ends with the worker.
    program = f"""
import json, os, pathlib
started_before = pathlib.Path({str(tmp_path / "started")!r})
if started_before.exists():
    raise SystemExit({EXIT_FENCED})
started_before.touch()
if os.fork() == 0:
    os.read(json.loads(os.environ[{HANDLERS_PROCESS!r}])["pipe"], 1)
"""
    monkeypatch.setattr("marq_worker.handlers.supervisor.FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr("marq_worker.handlers.supervisor.REPORTS_END_S", 0.01)
    processes = await supervised.start(program)

    assert await supervised.ends_worker(processes) == EXIT_FENCED

    [metrics] = processes.metrics()
    assert metrics["starts"] == 2


async def test_an_unexpected_error_that_keeps_a_process_from_being_restarted_ends_the_worker(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def defect(_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("marq_worker.handlers.supervisor._GroupProcess._run", defect)

    assert await supervised.ends_worker(await supervised.start("")) == EXIT_STALLED
    assert "task stopped after an unexpected error: handlers of group a" in caplog.text


async def test_a_process_has_the_settings_of_its_worker_even_if_the_files_have_changed(
    supervised: Supervised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MARQ_PREFIX", raising=False)
    project = tmp_path / "marq.toml"
    project.write_text("[settings]\nprefix = 'shop'\n")
    ask = f"""
from marq_worker.config.settings import load_settings
raise SystemExit({EXIT_FENCED} if load_settings().prefix == "shop" else 1)
"""
    processes = await supervised.start(ask)

    project.write_text("[settings\n")

    assert await supervised.ends_worker(processes) == EXIT_FENCED


class Reporting:
    """A process whose reports the test makes; None: it was silent."""

    def __init__(self) -> None:
        self.process = _GroupProcess(group("a", "emails"), [], {}, lambda code: None)
        self._told: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()

    async def reports(self, pipe: int) -> AsyncIterator[Mapping[str, Any] | None]:
        while True:
            yield await self._told.get()
            self._told.task_done()

    async def after(self, *reports: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return the metrics of the process after these reports."""
        for report in reports:
            self._told.put_nowait(report)
        await self._told.join()
        return self.process.metrics()


@pytest.fixture
async def reporting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reporting]:
    reporting = Reporting()
    monkeypatch.setattr("marq_worker.handlers.supervisor.reports", reporting.reports)
    listening = asyncio.create_task(reporting.process._listen(0))
    yield reporting
    listening.cancel()


async def test_a_blocked_process_stays_blocked_while_only_its_watchdog_reports(reporting: Reporting) -> None:
    async def blocked_after(*reports: Mapping[str, Any] | None) -> tuple[float, str | None]:
        metrics = await reporting.after(*reports)
        return metrics["blocked_seconds"], metrics["blocked_by"]

    handler = "handler mail:send of queue emails"
    assert await blocked_after(None, {"partitions": 2, "blocked_by": None}) == (0.0, None)
    assert await blocked_after(None, {"blocked_by": handler}, None) == (2 * SILENCE_SECONDS, handler)
    assert await blocked_after({"partitions": 2, "blocked_by": None}) == (0.0, None)


async def test_a_process_reports_whether_it_is_quiet_which_it_is_as_soon_as_its_worker_is(
    reporting: Reporting,
) -> None:
    assert not (await reporting.after())["quiet"]
    # A signal of its own.
    for quiet in (True, False):
        assert (await reporting.after({"partitions": 2, "quiet": quiet}))["quiet"] is quiet
    reporting.process.set_quiet(True)
    assert (await reporting.after())["quiet"]


_ANSWERING = f"""
import json, os, time
from marq_worker.handlers.worker_pipes import follow_parent
document = json.loads(os.environ[{HANDLERS_PROCESS!r}])
calls = [{{"id": f"t/0/{{number}}", "handler": "mail:send", "cancellable": number > 0}} for number in range(3)]

def answer(question):
    if "cancel" not in question:
        return {{"calls": calls}}
    wanted = question["cancel"]["id"]
    if wanted == "t/0/9":
        raise ValueError("a defect")
    return {{"calls": [call for call in calls if call["id"] == wanted]}}

follow_parent(document["pipe"], 60, answer)
os.write(document["reports"], b"{{}}\\n")
time.sleep(120)
"""


async def running(supervised: Supervised, program: str, monkeypatch: pytest.MonkeyPatch) -> HandlersProcesses:
    """Start a process that runs a program, and wait for its first report."""
    reported = asyncio.Event()

    async def noted(pipe: int) -> AsyncIterator[Mapping[str, Any] | None]:
        async for report in reports(pipe):
            yield report
            reported.set()

    monkeypatch.setattr("marq_worker.handlers.supervisor.reports", noted)
    processes = await supervised.start(program)
    processes.want({"a": group("a", "emails")})
    await asyncio.wait_for(reported.wait(), 60)
    return processes


async def test_a_process_tells_its_worker_what_its_handlers_do_and_cancels_one_of_them(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marq_worker.handlers.worker_pipes.ANSWER_LIMIT_S", 60.0)
    processes = await running(supervised, _ANSWERING, monkeypatch)

    [told] = await processes.calls()
    await processes.cancel("emails", "t/0/1", counted=True)
    for queue, identity, error, said in (
        ("emails", "t/0/0", ConfigError, "its handler mail:send is a plain function, which runs in a thread"),
        ("emails", "t/0/7", ConfigError, "no handler of this worker has it now"),
        ("emails", "t/0/9", MarqError, "it is unknown whether its handler is cancelled"),
        ("reports", "t/0/1", ConfigError, "no handler of this worker has it now"),
    ):
        with pytest.raises(error, match=said):
            await processes.cancel(queue, identity, counted=False)

    assert told["group"] == "a"
    assert [call["id"] for call in told["calls"]] == ["t/0/0", "t/0/1", "t/0/2"]


async def test_what_a_process_that_does_not_answer_runs_is_unknown(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marq_worker.handlers.worker_pipes.ANSWER_LIMIT_S", 0.1)
    silent = _ANSWERING.replace("def answer(question):", "def answer(question):\n    time.sleep(120)")
    processes = await running(supervised, silent, monkeypatch)

    assert await processes.calls() == [{"group": "a", "calls": None}]
    with pytest.raises(MarqError, match="its process does not answer"):
        await processes.cancel("emails", "t/0/1", counted=False)


async def test_a_late_answer_is_not_taken_for_that_of_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = Questions()
    monkeypatch.setattr("marq_worker.handlers.worker_pipes.ANSWER_LIMIT_S", 0.01)
    assert await questions.ask({}) is None
    monkeypatch.setattr("marq_worker.handlers.worker_pipes.ANSWER_LIMIT_S", 60.0)

    questions.theirs.sendall(b'{"number": 1, "calls": "late"}\n{"number": 2, "calls": "ours"}\n')

    assert await questions.ask({}) == {"number": 2, "calls": "ours"}
    questions.theirs.close()
    assert await questions.ask({}) is None
    questions.close()


async def test_a_question_that_times_out_before_the_socket_is_open_does_not_prevent_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    questions = Questions()
    monkeypatch.setattr("marq_worker.handlers.worker_pipes.ANSWER_LIMIT_S", 0.0)
    assert await questions.ask({}) is None
    monkeypatch.setattr("marq_worker.handlers.worker_pipes.ANSWER_LIMIT_S", 60.0)

    questions.theirs.sendall(b'{"number": 2}\n')

    assert await questions.ask({}) == {"number": 2}
    questions.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_process_that_ends_while_its_socket_opens_answers_neither_this_question_nor_later_ones(run: Any) -> None:
    async def ask() -> tuple[list[Any], int]:
        questions = Questions()
        first, waiting = (asyncio.create_task(questions.ask({})) for _ in range(2))
        await asyncio.sleep(0)
        questions.close()
        answers = await asyncio.gather(first, waiting, return_exceptions=True)
        answers.append(await questions.ask({}))
        questions.close()
        await asyncio.sleep(0)
        return answers, questions._own.fileno()

    assert run(ask()) == ([None, None, None], -1)


@pytest.mark.parametrize(
    ("stopped", "reason"), [(True, "was stopped by a signal (SIGSTOP)"), (False, "holds the GIL, or the machine lacks")]
)
async def test_a_silent_process_is_logged_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stopped: bool, reason: str
) -> None:
    async def reports(pipe: int) -> AsyncIterator[Mapping[str, Any] | None]:
        yield None
        for said in (handler, None):
            yield {"partitions": 2, "blocked_by": said}
            for _ in range(5):
                yield None
        metrics.append(process.metrics())

    handler, metrics = "handler mail:send of queue emails", list[Mapping[str, Any]]()
    monkeypatch.setattr("marq_worker.handlers.supervisor.reports", reports)
    monkeypatch.setattr("marq_worker.handlers.supervisor.is_stopped", lambda pid: stopped)
    process = _GroupProcess(group("mail", "emails"), [], {}, lambda code: None)
    process._process = SimpleNamespace(pid=4711, returncode=None)  # type: ignore[assignment]

    await process._listen(0)

    # The first silence had a reason that the process told: a blocked handler.
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith("group mail: its handler process 4711 has been silent for 4 s")
    assert reason in warning
    assert [process["stopped"] for process in metrics] == [stopped]


def test_a_process_has_the_workers_log_level_and_no_web_server() -> None:
    assert command("INFO")[-3:] == ["--without-web", "-l", "INFO"]
    assert command(None)[-1] == "--without-web"
    assert command("INFO", faust_log=True)[-1] == "--faust-log"


def test_a_process_reads_what_it_is_told_from_its_environment() -> None:
    told = HandlersProcess(group("a", "emails", topic="t"), 7, 8)

    assert HandlersProcess.read({HANDLERS_PROCESS: told.encode(), "PATH": "/bin"}) == told
    assert HandlersProcess.read({"PATH": "/bin"}) is None


def test_a_handlers_process_whose_application_fails_never_becomes_a_worker() -> None:
    # Faust imports the module again when it has failed: a worker would then start a handler process, and so on.
    program = f"""
import os
for _ in range(2):
    try:
        from marq_worker.app import app
    except OSError:  # there is no such pipe
        print({HANDLERS_PROCESS!r} in os.environ)
"""
    # The event loop has the lowest numbers.
    told = HandlersProcess(group("a", "emails", topic="t"), 1_000, 1_001).encode()

    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, HANDLERS_PROCESS: told},
        capture_output=True,
        text=True,
        timeout=180,
    )

    assert done.stdout == "True\n" * 2, done.stderr


async def test_a_process_that_starts_while_its_worker_is_quiet_is_told_so_once_it_handles_signals(
    supervised: Supervised,
) -> None:
    program = f"""
import json, os, signal
signal.signal(signal.SIGTSTP, lambda *_: os._exit({EXIT_FENCED}))
document = json.loads(os.environ[{HANDLERS_PROCESS!r}])
os.write(document["reports"], b"{{}}\\n")
# Until the worker ends.
os.read(document["pipe"], 1)
"""
    processes = await supervised.start(program)

    processes.set_quiet(True)

    assert await supervised.ends_worker(processes) == EXIT_FENCED
