"""This machine: the data directory, the web port, and the installed versions."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from marq.wire.errors import ConfigError
from marq_worker.config.settings import AppSettings
from marq_worker.findings import CheckFinding, fine, problem, warning
from marq_worker.web.security import check_exposure

#: Exact versions, because Marq uses private interfaces: read tests/worker/faust_reliances.py before an upgrade.
VERSIONS = {"faust-streaming": "0.15.3", "mode-streaming": "0.7.1", "aiokafka": "0.14.0", "rocksdict": "0.3.29"}


def judge_data_directory(path: Path) -> CheckFinding:
    """Judge whether a worker can write its tables below a directory, which need not exist yet."""
    subject = f"data directory {path}"
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        return problem(subject, f"{existing} is not a directory", advice="set MARQ_DATA_DIR to another one")
    if not os.access(existing, os.W_OK | os.X_OK):
        return problem(
            subject, f"user {os.getuid()} can't write to {existing}", advice="grant that, or set MARQ_DATA_DIR"
        )
    return fine(subject, "can be written")


def judge_port(bind: str, number: int, error: int, host: str, workers: Iterable[str] | None) -> CheckFinding:
    """Judge the worker's web port.

    ``error``: the error of listening there, 0 if it is possible; ``host``: the name that other workers use;
    ``workers``: addresses of their pages, None if unknown.
    """
    subject = f"web port {bind}:{number}"
    if not error:
        return fine(subject, "is free")
    if error == errno.EADDRINUSE:
        if workers is None:
            return fine(subject, "in use, perhaps by a worker")
        if f"http://{host}:{number}" in {address.rstrip("/") for address in workers}:
            return fine(subject, "in use by a running worker")
        return warning(
            subject,
            "in use by another program",
            advice="a worker takes the next free port; set MARQ_WEB_PORT to choose, or MARQ_ROLES without web",
        )
    if error == errno.EACCES:
        return problem(subject, f"user {os.getuid()} may not listen there", advice="set MARQ_WEB_PORT above 1023")
    return problem(
        subject,
        f"cannot listen there ({os.strerror(error)})",
        expected="an address of this machine",
        advice="set MARQ_WEB_BIND",
    )


def judge_exposure(settings: AppSettings) -> Iterator[CheckFinding]:
    """Check whether others can open the worker's pages without a login."""
    try:
        check_exposure(settings, settings.web_bind)
    except ConfigError as error:
        yield problem("web access", str(error), expected="logins, the same on all workers")


def judge_packages(installed: Mapping[str, str | None], pinned: Mapping[str, str]) -> Iterator[CheckFinding]:
    """Judge the versions of packages whose private interfaces a worker uses."""
    different = [name for name, version in pinned.items() if installed.get(name) != version]
    if not different:
        yield fine("packages", ", ".join(f"{name} {version}" for name, version in pinned.items()))
    for name in different:
        yield warning(
            f"package {name}",
            f"version {installed.get(name) or 'none'}",
            expected=f"{pinned[name]}, with which marq was tested",
            advice="install the locked packages",
            commands=["pip install -r requirements.lock"],
        )
