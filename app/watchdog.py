"""Ends a worker that makes no progress, so that its supervisor starts it again.

A task in the event loop says every now and then how far everything is; a thread judges it (app/stillness.py), for an
event loop that stands still can't. Code that keeps the interpreter's lock stops the thread, too.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping

from agents.standing import Standing
from app.stillness import Ask, Sample, Stillness

log = logging.getLogger("marq.watchdog")

#: Of a process that was ended by its watchdog ("temporary failure" in sysexits.h).
EXIT_CODE = 75
#: Between two looks; also the most by which one that came late makes anything older.
LOOK_SECONDS = 1.0
#: Between two reports of the event loop: more often than looks, so that none comes without a new one.
SAY_SECONDS = 0.5
#: For the last words: a log that nobody reads any more may be what the worker stands still for.
LAST_WORDS_SECONDS = 5.0


class Watchdog:
    """Watches one process, whose event loop says by ``standings`` how far everything is."""

    def __init__(
        self,
        limit_s: float,
        standings: Callable[[], Mapping[Hashable, Standing]],
        ask: Ask,
        *,
        watches_loop: bool = True,
    ) -> None:
        self._limit_s = limit_s
        self._standings = standings
        self._stillness = Stillness(limit_s, ask, watches_loop)
        self._turns = 0
        self._said: Mapping[Hashable, Standing] = {}
        self._saying: asyncio.Task[None] | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin; needs a running event loop."""
        self._saying = asyncio.create_task(self._say(), name="watchdog")
        threading.Thread(target=self._watch, name="marq-watchdog", daemon=True).start()

    @property
    def suspects(self) -> frozenset[Hashable]:
        """What is wedged: for half of the limit it has had work that somebody else could do, and made no progress."""
        return self._stillness.suspects

    def stop(self) -> None:
        """End: what follows has a limit of its own."""
        self._stopped.set()
        if self._saying is not None:
            self._saying.cancel()

    async def _say(self) -> None:
        while True:
            try:
                self._said = self._standings()
            except Exception:
                # A defect here must not look like an event loop that stands still.
                log.exception("the watchdog sees nothing but the event loop")
                self._said = {}
            self._turns += 1
            await asyncio.sleep(SAY_SECONDS)

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._stopped.wait(LOOK_SECONDS):
            now_s = time.monotonic()
            # However long ago the last look was: so long did everything stand still, this thread too.
            passed_s = min(now_s - before_s, 2 * LOOK_SECONDS)
            before_s = now_s
            found = self._stillness.look(Sample(self._turns, self._said), passed_s)
            if found and not self._stopped.is_set():
                self._end(found)

    def _end(self, found: str) -> None:
        timer = threading.Timer(LAST_WORDS_SECONDS, os._exit, [EXIT_CODE])
        timer.daemon = True
        timer.start()
        try:
            log.critical(
                "watchdog: %s, for %g s (MARQ_WATCHDOG), and not for want of a broker. Ending this process with exit "
                "code %d, so that its supervisor starts it again. Nothing is lost: what was not written is read again",
                found,
                self._limit_s,
                EXIT_CODE,
            )
            # Where each thread stands.
            faulthandler.dump_traceback()
        finally:
            os._exit(EXIT_CODE)
