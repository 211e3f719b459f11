"""The process of a worker: its folder, its web address, and its end if a stop takes longer than its limit."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import faust

from marq.wire.errors import ConfigError
from marq_worker.config.settings import Role
from marq_worker.fatal_errors import end_with
from marq_worker.logs import hide_faust, shape
from marq_worker.web.addresses import no_address, own_address
from marq_worker.web.security import check_exposure
from marq_worker.worker_folders import claim_folder

if TYPE_CHECKING:
    from marq_worker.app.faust_app import MarqApp

log = logging.getLogger("marq.worker")

#: Time limit for tasks that were cancelled at the end of a stop.
LAST_TASKS_S = 1.0
#: Time limit for threads after a stop.
LAST_THREADS_S = 1.0


class MarqWorker(faust.Worker):
    """Faust's worker, adapted so that several can run on one machine."""

    app: MarqApp
    #: The signal that stopped it, and when it came.
    _signal: signal.Signals | None = None
    _signalled_s = 0.0

    def __init__(self, app: Any, *services: Any, **kwargs: Any) -> None:
        self._stop_timeout = app.settings.stop_timeout
        app.log_level = kwargs.get("loglevel")
        if Role.WEB not in app.settings.roles:
            app.conf.web_enabled = False
        try:
            if app.conf.web_enabled:
                check_exposure(app.settings, str(app.conf.web_bind))
            self._lock = place_worker(app)
        except ConfigError as error:
            end_with(error)
        # `faust worker` always redirects stdout and stderr; handlers' output would appear as warnings.
        super().__init__(app, *services, **{**kwargs, "redirect_stdouts": False})
        # The spinner writes to stdout what only a terminal understands.
        self.spinner = None

    def on_setup_root_logger(self, logger: logging.Logger, level: int) -> None:
        """Set the log format, once Faust has set logging up."""
        super().on_setup_root_logger(logger, level)
        shape(logger, self.app.settings.log_format)
        if not self.app.faust_log:
            hide_faust()

    def execute_from_commandline(self) -> NoReturn:
        try:
            super().execute_from_commandline()
        except SystemExit as ended:
            if self._signal is not None and not self.app.quiet:
                log.info("stopped by %s in %.1f s", self._signal.name, time.monotonic() - self._signalled_s)
            code = ended.code or self.app.exit_code
            if self.app.leaves_threads:
                limit_threads(code if isinstance(code, int) else 1)
            sys.exit(code)

    def install_signal_handlers(self) -> None:
        """Also handle SIGTSTP, which would suspend the process, and leases with it, and SIGCONT, which resumes."""
        super().install_signal_handlers()
        self.loop.add_signal_handler(signal.SIGTSTP, self.app.set_quiet, True)
        self.loop.add_signal_handler(signal.SIGCONT, self.app.set_quiet, False)

    def _schedule_shutdown(self, signal: signal.Signals) -> None:
        if self._signal is None:
            self._signal, self._signalled_s = signal, time.monotonic()
        super()._schedule_shutdown(signal)

    def _on_sigint(self) -> None:
        self._limit_stop()
        super()._on_sigint()

    def _on_sigterm(self) -> None:
        self._limit_stop()
        super()._on_sigterm()

    async def _sentinel_task(self) -> None:
        """Wait for the tasks that Faust cancelled at the end of a stop; Faust sleeps for a second instead."""
        cancelled = asyncio.all_tasks() - {asyncio.current_task()}
        if cancelled:
            await asyncio.wait(cancelled, timeout=LAST_TASKS_S)

    def on_worker_shutdown(self) -> None:
        """Limit every stop: after an error of the event loop, Faust's threads would keep the process alive."""
        self._limit_stop()

    def _limit_stop(self) -> None:
        # A thread, because without a broker a client may block the event loop's timers.
        timer = threading.Timer(self._stop_timeout, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        log.error(
            "not stopped within %s s (MARQ_STOP_TIMEOUT): exiting now. No message is lost: the next owner "
            "reads unwritten markers again",
            self._stop_timeout,
        )
        os._exit(self.app.exit_code or 1)


def limit_threads(code: int, limit_s: float = LAST_THREADS_S) -> None:
    """Let this process exit after a limit, even if threads still run: Python would wait for them.

    A plain handler that has not ended in time still runs in its thread, which nothing can cancel. Its message is
    released, so it would only delay the end of the worker until the worker kills this process.
    """
    timer = threading.Timer(limit_s, _exit_without_threads, [code])
    timer.daemon = True
    timer.start()


def _exit_without_threads(code: int) -> None:
    threads = [
        thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()
    ]
    # Without any, Python is running the exit functions of libraries, which have the time limit of the stop.
    if threads:
        log.warning("exiting now without waiting for threads, which can't be cancelled: threads=%d", len(threads))
        atexit._run_exitfuncs()
        os._exit(code)


def place_worker(app: Any) -> IO[str] | None:
    """Give a worker a locked folder, and a free web port near the requested one."""
    conf, slot, lock = app.conf, 0, None
    if app.keeps_tables:
        slot, folder, lock = claim_folder(Path(app.settings.data_dir))
        conf.datadir = folder.resolve()
    conf.canonical_url = own_address(conf, slot) if conf.web_enabled else no_address()
    return lock
