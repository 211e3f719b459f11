"""The address of a worker's web server: its first free port, and the name by which others reach it."""

from __future__ import annotations

import errno
import logging
import os
import socket
import warnings
from typing import Any

from faust.exceptions import AlreadyConfiguredWarning

from marq.wire.errors import ConfigError
from marq_worker.worker_folders import MAX_WORKERS

log = logging.getLogger("marq.worker")


def own_address(conf: Any, slot: int) -> str:
    """Return the URL of a worker's web server, and set the first free port."""
    wanted = int(conf.web_port)
    port = free_port(str(conf.web_bind), wanted, slot)
    if port != wanted:
        log.info("web port %s is taken on this machine; using %s", wanted, port)
    with warnings.catch_warnings():
        # Faust warns because the port was read above; nothing is bound to it yet.
        warnings.simplefilter("ignore", AlreadyConfiguredWarning)
        conf.web_port = port
    return f"http://{conf.web_host}:{port}"


def no_address() -> str:
    """Return a URL that names a worker without a web server."""
    return f"no-web://{socket.gethostname()}:{os.getpid()}"


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
