"""Ends a worker that makes no progress, so that its supervisor restarts it.

A task in the event loop reports progress. A thread evaluates the reports, because a blocked event loop can't. Code that
never releases the GIL stops the thread, too.

Time counts only while the watchdog itself runs: a suspended process or machine adds almost nothing. A subject is
stalled if its progress is unchanged for the whole limit although it has work that it could do. A probe with its own
clients runs at half of the limit and at its end: if there is nothing to do, or the broker is unavailable, the timer
restarts.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from mode import Service

from marq_worker.progress import ProgressReport
from marq_worker.watchdog.blocked_loop import BlockedLoop, Describe, describe_task
from marq_worker.worker_exit_codes import EXIT_STALLED

log = logging.getLogger("marq.watchdog")

#: Interval between two checks.
LOOK_SECONDS = 1.0
#: Interval between two reports of the event loop: shorter, so that each check has a new one.
SAY_SECONDS = 0.5
#: Time limit of the last log lines: a blocked log may be the reason for the stall.
LAST_WORDS_SECONDS = 5.0


class Watchdog(Service):
    """Watches one process, whose event loop reports progress with ``standings``.

    ``describe`` names what blocks the event loop, for a warning; with ``watches_loop``, a blocked loop also counts as
    stalled.
    """

    def __init__(
        self,
        limit_s: float,
        standings: Callable[[], Mapping[Hashable, ProgressReport]],
        ask: Ask,
        *,
        watches_loop: bool = True,
        describe: Describe = describe_task,
    ) -> None:
        super().__init__()
        self._limit_s = limit_s
        self._standings = standings
        self._stillness = StallDetector(limit_s, ask, watches_loop)
        self._describe = describe
        self._turns = 0
        self._said: Mapping[Hashable, ProgressReport] = {}
        self._over = threading.Event()

    async def on_start(self) -> None:
        blocked = BlockedLoop(self._describe)
        threading.Thread(target=self._watch, args=[blocked], name="marq-watchdog", daemon=True).start()

    @property
    def suspects(self) -> frozenset[Hashable]:
        """Stalled subjects: for half of the limit they had work that the probe could do, and made no progress."""
        return self._stillness.suspects

    async def on_stop(self) -> None:
        # A stop has its own time limit.
        self._over.set()

    @Service.task
    async def _say(self) -> None:
        while not self.should_stop:
            try:
                self._said = self._standings()
            except Exception:
                # A defect here must not look like a blocked event loop.
                log.exception("the watchdog fails; it now checks only the event loop")
                self._said = {}
            self._turns += 1
            await asyncio.sleep(SAY_SECONDS)

    def _watch(self, blocked: BlockedLoop) -> None:
        before_s = time.monotonic()
        while not self._over.wait(LOOK_SECONDS):
            now_s = time.monotonic()
            # After a longer pause this thread was suspended too.
            passed_s = min(now_s - before_s, 2 * LOOK_SECONDS)
            before_s = now_s
            try:
                loop_still_s = blocked.look(self._turns, passed_s)
                stalled = self._stillness.look(loop_still_s, self._said, passed_s)
            except Exception:
                # A defect in one check must not end all later ones.
                log.exception("a check of the watchdog failed; it checks again in %g s", LOOK_SECONDS)
                continue
            if stalled and not self._over.is_set():
                self._end(stalled)

    def _end(self, stalled: str) -> None:
        timer = threading.Timer(LAST_WORDS_SECONDS, os._exit, [EXIT_STALLED])
        timer.daemon = True
        timer.start()
        try:
            log.critical(
                "watchdog: %s, for %g s (MARQ_WATCHDOG), although the broker answers. Terminating with exit "
                "code %d, so that its supervisor restarts it. No message is lost: the next owner reads unwritten "
                "markers again",
                stalled,
                self._limit_s,
                EXIT_STALLED,
            )
            faulthandler.dump_traceback()
        finally:
            os._exit(EXIT_STALLED)


class ProbeResult(Enum):
    """The finding of a probe."""

    #: The broker does not answer the probe either.
    AWAY = auto()
    NOTHING_TO_DO = auto()
    WORK_WAITS = auto()


#: Asks a probe about a subject, its progress, and whether it is the last time. May take a while.
Ask = Callable[[Hashable, ProgressReport, bool], ProbeResult]


@dataclass(slots=True)
class _Case:
    progress: tuple[int, ...]
    still_s: float = 0.0
    asked: bool = False
    condemned: bool = False


@dataclass
class StallDetector:
    """Judges one report after another; ``watches_loop``: whether a blocked event loop counts."""

    limit_s: float
    ask: Ask
    watches_loop: bool = True
    _cases: dict[Hashable, _Case] = field(default_factory=dict)

    def look(self, loop_still_s: float, standings: Mapping[Hashable, ProgressReport], passed_s: float) -> str:
        """Return which subject is stalled, "" if none.

        ``loop_still_s``: for how long the event loop has not run; ``standings`` is its last report; ``passed_s`` is the
        running time since the last check.
        """
        if loop_still_s:
            # The reports are old.
            over = self.watches_loop and loop_still_s >= self.limit_s
            return "the event loop has had no turn" if over else ""
        self._cases = {subject: self._case(subject, standing) for subject, standing in standings.items()}
        for subject, standing in standings.items():
            if self._judge(subject, self._cases[subject], standing, passed_s):
                return f"{subject} stalled: {standing.owes or 'available records are not read'}"
        return ""

    @property
    def suspects(self) -> frozenset[Hashable]:
        """Subjects without progress for half of the limit, although a probe found work for them."""
        return frozenset(subject for subject, case in self._cases.items() if case.asked)

    def _case(self, subject: Hashable, standing: ProgressReport) -> _Case:
        case = self._cases.get(subject)
        return case if case is not None and case.progress == standing.progress else _Case(standing.progress)

    def _judge(self, subject: Hashable, case: _Case, standing: ProgressReport, passed_s: float) -> bool:
        if case.condemned:
            # It had the time of the probe to make progress.
            return True
        case.still_s += passed_s
        last = case.asked and case.still_s >= self.limit_s
        if not last and (case.asked or case.still_s < self.limit_s / 2):
            return False
        answer = self.ask(subject, standing, last)
        if answer is not ProbeResult.WORK_WAITS:
            self._cases[subject] = _Case(standing.progress)
        else:
            case.asked, case.condemned = True, last
        return False
