"""The handler processes of a worker, one for each group: starts, watches and stops them.

A process that ends is restarted after a growing pause. A group whose queues, topics, handlers or concurrency change
gets a new process once the former one has released its messages. All old processes end before a new one starts, so that
a queue that moves between groups resumes from its committed position.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mode import Service

from marq.client.background import failure_of
from marq.wire.errors import ConfigError, MarqError
from marq_worker.config.settings import HANDLERS_PROCESS, read_environment
from marq_worker.handlers.handler_groups import HandlerGroup
from marq_worker.handlers.handlers_process import HandlersProcess
from marq_worker.handlers.worker_pipes import SILENCE_SECONDS, Questions, reports
from marq_worker.process_usage import is_stopped
from marq_worker.worker_exit_codes import EXIT_FENCED, EXIT_STALLED

log = logging.getLogger("marq.handlers")

#: Backoff before a restart: first and longest, reset by a process that lives long enough.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
LONG_LIFE_S = 60.0
#: After a change of definitions: several changes together restart a process once.
SETTLE_S = 0.2
#: How long to wait for the end of a dead process's reports; a process that a handler forked may keep the pipe open.
REPORTS_END_S = 1.0
#: A silence of this length is logged: a blocked process whose watchdog runs has reported it by then.
SILENT_S = 2 * SILENCE_SECONDS
#: How long to wait for a killed process to exit.
KILL_LIMIT_S = 2.0

#: Report of a process that does not run, or has not reported yet.
NOTHING_REPORTED: Mapping[str, Any] = {
    "breakers": {}, "keys": {}, "partitions": None, "in_flight": 0, "processing": 0, "blocked_by": None,
}  # fmt: skip


class Pauses:
    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def after(self, lived_s: float) -> float:
        """Return the pause after a process that lived this long."""
        pause_s = FIRST_PAUSE_S if lived_s >= LONG_LIFE_S else self._next_s
        self._next_s = min(pause_s * 2, MAX_PAUSE_S)
        return pause_s


def changes(running: Mapping[str, HandlerGroup], wanted: Mapping[str, HandlerGroup]) -> tuple[list[str], list[str]]:
    """Return the groups whose processes to stop, and those for which then to start one."""
    stop = [name for name, group in running.items() if wanted.get(name) != group]
    start = [name for name, group in wanted.items() if running.get(name) != group]
    return stop, start


def command(log_level: str | int | None, *, faust_log: bool = False) -> list[str]:
    """Return the command of a handler process; with ``faust_log`` its log has Faust's lines, too."""
    level = [] if log_level is None else ["-l", str(log_level)]
    level += ["--faust-log"] if faust_log else []
    # -P: files in the current directory must not shadow modules that the worker itself imports.
    return [sys.executable, "-P", "-m", "marq_worker", "worker", "--quiet", "--without-web", *level]


class HandlersProcesses(Service):
    """Keeps one process running for each wanted group.

    ``end`` stops the worker with an exit code, if one of its processes was fenced and must not be restarted, or if an
    unexpected error keeps one from being restarted.
    """

    def __init__(self, stop_limit_s: float, command: Sequence[str], end: Callable[[int], None]) -> None:
        super().__init__()
        self._stop_limit_s = stop_limit_s
        self._end = end
        self._command = command
        # Read once: a process that is restarted later must not read files that were changed meanwhile.
        ours = {name: value for name, value in read_environment().items() if name.startswith("MARQ_")}
        self._environment = {**os.environ, **ours}
        self._wanted: Mapping[str, HandlerGroup] = {}
        self._running: dict[str, _GroupProcess] = {}
        self._quiet = False
        self._changed = asyncio.Event()

    def want(self, groups: Mapping[str, HandlerGroup]) -> None:
        """Run these groups from now on, and no others."""
        self._wanted = groups
        self._changed.set()

    def set_quiet(self, quiet: bool) -> None:
        """Let all processes take no more messages, or take messages again."""
        if quiet != self._quiet:
            self._quiet = quiet
            for process in self._running.values():
                process.set_quiet(quiet)

    async def on_start(self) -> None:
        self._following = self.add_future(self._follow())

    async def on_stop(self) -> None:
        """Stop all processes; kill those that exceed the limit."""
        self._following.cancel()
        await asyncio.wait([self._following])
        await self._stop(list(self._running))

    def metrics(self) -> list[dict[str, Any]]:
        return [self._running[name].metrics() for name in sorted(self._running)]

    async def calls(self) -> list[dict[str, Any]]:
        """Return what the handlers of each group do now: ``calls`` is None if the process does not answer."""
        processes = [self._running[name] for name in sorted(self._running)]
        answers = await asyncio.gather(*[process.ask({}) for process in processes])
        return [
            {"group": process.group.name, "calls": None if answer is None else answer.get("calls")}
            for process, answer in zip(processes, answers, strict=True)
        ]

    async def cancel(self, queue: str, message_id: str, *, counted: bool) -> None:
        """Cancel the handler of a message; ``counted``: as a failed attempt.

        Raises:
            ConfigError: no handler here has the message, or it can't be cancelled.
            MarqError: a process does not answer.
        """
        processes = [process for process in self._running.values() if queue in process.group.queues]
        cancel = {"queue": queue, "id": message_id, "counted": counted}
        answers = [await process.ask({"cancel": cancel}) for process in processes]
        if any(answer is None or "calls" not in answer for answer in answers):
            raise MarqError(
                f"message {message_id} of queue {queue}: it is unknown whether its handler is cancelled, because its"
                " process does not answer: it is starting, or a signal has stopped it"
            )
        told = [call for answer in answers if answer for call in answer["calls"] if call["id"] == message_id]
        if not told:
            raise ConfigError(f"message {message_id} of queue {queue}: no handler of this worker has it now")
        if not told[0]["cancellable"]:
            raise ConfigError(
                f"message {message_id} of queue {queue}: its handler {told[0]['handler']} is a plain function, which"
                " runs in a thread and can't be cancelled"
            )

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            if self._running:
                await asyncio.sleep(SETTLE_S)
            self._changed.clear()
            stop, start = changes({name: process.group for name, process in self._running.items()}, self._wanted)
            await self._stop(stop)
            # If other groups are wanted by now, stop the processes that they replace first.
            if not self._changed.is_set():
                for name in start:
                    group = self._wanted[name]
                    process = _GroupProcess(group, self._command, self._environment, self._end)
                    self._running[name] = process
                    process.set_quiet(self._quiet)
                    process.start()

    async def _stop(self, names: list[str]) -> None:
        await asyncio.gather(*[self._running[name].stop(self._stop_limit_s) for name in names])
        for name in names:
            del self._running[name]


class _GroupProcess:
    """One group: its process, and the restarts."""

    def __init__(
        self,
        group: HandlerGroup,
        command: Sequence[str],
        environment: Mapping[str, str],
        end: Callable[[int], None],
    ) -> None:
        self.group = group
        self._command = command
        self._environment = environment
        self._end = end
        self._questions: Questions | None = None
        self._process: Process | None = None
        self._living: asyncio.Task[None] | None = None
        self._starts = 0
        self._report: dict[str, Any] = dict(NOTHING_REPORTED)
        self._blocked_s = 0.0
        #: Whether the process has reported something: only then does it handle signals.
        self._begun = False
        self._quiet = False
        self._stopping = False

    def start(self) -> None:
        self._living = asyncio.create_task(self._live(), name=f"handlers of group {self.group.name}")
        self._living.add_done_callback(self._ended)

    def _ended(self, living: asyncio.Task[None]) -> None:
        if failure_of(living, stopping=self._stopping) is not None:
            self._end(EXIT_STALLED)

    def metrics(self) -> dict[str, Any]:
        running = self._process is not None and self._process.returncode is None
        pid = self._process.pid if self._process is not None and running else None
        return {
            "group": self.group.name,
            "queues": sorted(self.group.queues),
            "pid": pid,
            "starts": self._starts,
            "blocked_seconds": 0.0 if self._stopping else self._blocked_s,
            "stopped": pid is not None and is_stopped(pid),
            "quiet": self._quiet,
            **self._report,
        }

    async def ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Return the process's answer to a question, None without one."""
        # Before its first report, it imports modules.
        return await self._questions.ask(question) if self._questions is not None and self._begun else None

    def set_quiet(self, quiet: bool) -> None:
        self._quiet = quiet
        # The process confirms it with its next report.
        self._report.pop("quiet", None)
        self._signal_quiet()

    def _signal_quiet(self) -> None:
        # SIGTSTP would suspend a process that does not handle it yet.
        if self._begun and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTSTP if self._quiet else signal.SIGCONT)

    async def stop(self, limit_s: float) -> None:
        """Send SIGTERM, and SIGKILL after the limit."""
        self._stopping = True
        living, process = self._living, self._process
        if living is None:
            return
        if process is None or process.returncode is not None:
            # Between two processes.
            living.cancel()
        else:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        _, late = await asyncio.wait([living], timeout=limit_s)
        if late and process is not None:
            log.error(
                "group %s: its handler process %d has not stopped within %g s: ending it. No message is "
                "lost: its messages are redelivered when their leases expire",
                self.group.name, process.pid, limit_s,
            )  # fmt: skip
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.wait([living], timeout=KILL_LIMIT_S)
        living.cancel()
        await asyncio.wait([living])

    async def _live(self) -> None:
        pauses = Pauses()
        while not self._stopping:
            began_s = time.monotonic()
            self._questions = Questions()
            try:
                how = await self._run()
            finally:
                self._questions.close()
            if self._stopping:
                return
            if self._process is not None and self._process.returncode == EXIT_FENCED:
                # A new process would take the partitions back from the worker that has them now.
                self._end(EXIT_FENCED)
                return
            pause_s = pauses.after(time.monotonic() - began_s)
            log.error("group %s: its handler process %s; the next one starts in %g s", self.group.name, how, pause_s)
            await asyncio.sleep(pause_s)

    async def _run(self) -> str:
        reading, writing = os.pipe()
        # Only this process has the other end, because files are not inherited: when it dies, the process reads its end.
        assert self._questions is not None, "they are of this run"
        questions = self._questions.theirs
        document = HandlersProcess(self.group, questions.fileno(), writing)
        listening = asyncio.create_task(self._listen(reading), name=f"reports of group {self.group.name}")
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=DEVNULL,
                env={**self._environment, HANDLERS_PROCESS: document.encode()},
                pass_fds=(questions.fileno(), writing),
            )
        except OSError as error:
            return f"could not be started ({error})"
        finally:
            # The process has them, and its death ends the reports.
            os.close(writing)
            questions.close()
        self._starts += 1
        queues = ", ".join(self.group.queues)
        log.info("group %s: handler process %d, queues %s", self.group.name, process.pid, queues)
        try:
            code = await process.wait()
            ended, _ = await asyncio.wait([listening], timeout=REPORTS_END_S)
            if ended and (failure := listening.exception()) is not None:
                log.error("group %s: its process sent no readable reports: %r", self.group.name, failure)
        finally:
            listening.cancel()
        return f"{process.pid} has ended with exit code {code}"

    def _warn_of_silence(self) -> None:
        """Warn once about a silence that the process can't explain itself: its watchdog does not run either."""
        if self._blocked_s != SILENT_S or self._report["blocked_by"] or self._stopping or self._process is None:
            return
        pid = self._process.pid
        reason = (
            f"it was stopped by a signal (SIGSTOP); resume it with kill -CONT {pid}, or replace it with kill -9 {pid}"
            if is_stopped(pid)
            else "native code of a handler holds the GIL, or the machine lacks CPU time"
        )
        log.warning(
            "group %s: its handler process %d has been silent for %g s, so no handler of its queues runs: %s",
            self.group.name, pid, self._blocked_s, reason,
        )  # fmt: skip

    async def _listen(self, pipe: int) -> None:
        try:
            async for report in reports(pipe):
                if report is not None:
                    if not self._begun:
                        self._begun = True
                        if self._quiet:
                            self._signal_quiet()
                    self._report = {**self._report, **report}
                    # The watchdog of a blocked process still reports what blocks it.
                    if not report.get("blocked_by"):
                        self._blocked_s = 0.0
                elif self._begun:
                    # Before its first report the process imports modules, which may take any time.
                    self._blocked_s += SILENCE_SECONDS
                    self._warn_of_silence()
        finally:
            self._report, self._blocked_s, self._begun = dict(NOTHING_REPORTED), 0.0, False
