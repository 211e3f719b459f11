"""How a handlers process notices that the worker which started it is gone, also after a kill -9."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

log = logging.getLogger("marq.worker")


def follow_parent(pipe: int, stop_limit_s: float) -> None:
    """Stop this process, within the limit, when the last writer of a pipe has closed it: the parent, by its death."""
    # What handlers start must not hold the pipe open for itself.
    os.set_inheritable(pipe, False)
    # A thread: a handler may block the event loop.
    threading.Thread(target=_wait, args=(pipe, stop_limit_s), name="marq-parent", daemon=True).start()


def _wait(pipe: int, stop_limit_s: float) -> None:
    while os.read(pipe, 1):
        pass
    log.error("the worker that started this process is gone: stopping")
    # As if it had come from the parent: handlers may end, and what was prefetched is given back.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(stop_limit_s)
    os._exit(1)
