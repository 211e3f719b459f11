"""The process of a worker: its data directory, its web port, and the time limit of its stop."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import IO, Any, NoReturn

import faust
from faust.exceptions import AlreadyConfiguredWarning

from marq.wire.errors import ConfigError
from marq_worker.app.logs import shape
from marq_worker.app.readable import end_with
from marq_worker.app.web.security import check_exposure
from marq_worker.config.settings import Role

log = logging.getLogger("marq.worker")

#: Workers on one machine that share a data directory's parent.
MAX_WORKERS = 64
#: Time limit for tasks that were cancelled at the end of a stop.
LAST_TASKS_S = 1.0


class MarqWorker(faust.Worker):
    """Faust's worker, adapted so that several can run on one machine."""

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

    def execute_from_commandline(self) -> NoReturn:
        try:
            super().execute_from_commandline()
        except SystemExit as ended:
            sys.exit(ended.code or self.app.exit_code)

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


def claim_slot(data_dir: Path) -> tuple[int, IO[str]]:
    """Take the first free worker folder below a data directory, for as long as the file stays open."""
    for slot in range(MAX_WORKERS):
        folder = data_dir / f"worker-{slot}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / "lock").open("w")
        except OSError as error:
            raise ConfigError(f"MARQ_DATA_DIR {data_dir}: can't be written ({error}); choose another one") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        return slot, lock
    raise ConfigError(f"MARQ_DATA_DIR {data_dir}: {MAX_WORKERS} workers already use it")


def place_worker(app: Any) -> IO[str] | None:
    """Give a worker a locked folder, and a free web port near the requested one."""
    conf, slot, lock = app.conf, 0, None
    if app.keeps_tables:
        slot, lock = claim_slot(Path(app.settings.data_dir))
        conf.datadir = (Path(app.settings.data_dir) / f"worker-{slot}").resolve()
    conf.canonical_url = (
        _web_address(conf, slot) if conf.web_enabled else f"no-web://{socket.gethostname()}:{os.getpid()}"
    )
    return lock


def _web_address(conf: Any, slot: int) -> str:
    wanted = int(conf.web_port)
    port = free_port(str(conf.web_bind), wanted, slot)
    if port != wanted:
        log.info("web port %s is taken on this machine; using %s", wanted, port)
    with warnings.catch_warnings():
        # Faust warns because the port was read above; nothing is bound to it yet.
        warnings.simplefilter("ignore", AlreadyConfiguredWarning)
        conf.web_port = port
    return f"http://{conf.web_host}:{port}"


def reachable_name(bind: str) -> str:
    """Return the name by which others reach a server that is bound to an address."""
    if bind in {"", "0.0.0.0", "::"}:
        # Bound to all addresses.
        return socket.gethostname()
    return f"[{bind}]" if ":" in bind else bind


def free_port(bind: str, wanted: int, slot: int) -> int:
    """Return the first free port from ``wanted`` + ``slot`` on, so that workers that start together do not collide."""
    first = wanted + slot
    for port in range(first, min(first + MAX_WORKERS, 65_536)):
        if not port_error(bind, port):
            return port
    raise ConfigError(f"MARQ_WEB_PORT {wanted}: no free port from {first} on at {bind}")


def port_error(bind: str, number: int) -> int:
    """Return the error number of an attempt to listen on a port, 0 if it succeeds."""
    with socket.socket(socket.AF_INET6 if ":" in bind else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, number))
        except socket.gaierror:
            return errno.EADDRNOTAVAIL
        except OSError as error:
            return error.errno or errno.EINVAL
    return 0
