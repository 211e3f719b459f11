"""``faust -A app worker`` as a process, and its web pages."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.rig.program import ROOT, Program, RigError
from marq_worker.broker.ports import free_port

WORKER = ("-m", "faust", "-A", "app", "worker", "-l", "info")
#: Time limit of a request to its pages.
ANSWER_SECONDS = 30.0
START_SECONDS = 180.0


class Worker(Program):
    """A worker with a data directory and a web port of its own.

    Args:
        name: name in error messages, and of its log and data directory.
        folder: directory for both.
        environment: settings, ``MARQ_...``.
        command: a program that runs a worker.
        data: data directory instead of ``folder/name``.
        web_port: port of its pages (default: a free one).
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        environment: Mapping[str, str],
        *,
        command: Sequence[str] = WORKER,
        data: Path | None = None,
        web_port: int | None = None,
        directory: Path = ROOT,
        temporary: Sequence[Path] = (),
    ) -> None:
        self.data = data or folder / name
        self.web_port = web_port or free_port("127.0.0.1")
        #: Headers of requests to its pages.
        self.headers: dict[str, str] = {}
        own = {
            "MARQ_DATA_DIR": str(self.data),
            "MARQ_WEB_PORT": str(self.web_port),
        }
        log_file = folder / f"{name}.log"
        super().__init__(name, command, {**own, **environment}, log_file, directory=directory, temporary=temporary)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.web_port}"

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of a page; status 0 if the worker does not answer."""
        try:
            request = urllib.request.Request(self.url + path, headers=self.headers)
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except (OSError, ValueError):
            return 0, ""

    def statistics(self, scope: str = "") -> dict[str, Any]:
        """Return the JSON of ``/api/queues``; {} if the worker does not answer."""
        status, text = self.get(f"/api/queues?scope={scope}" if scope else "/api/queues")
        statistics: dict[str, Any] = json.loads(text) if status == 200 else {}
        return statistics

    def owned(self) -> dict[int, dict[str, Any]]:
        """Return the statistics of the worker's markers partitions by number; {} if it does not answer."""
        return {part["partition"]: part for part in self.statistics("worker").get("partitions", ())}

    def wait_until_owner(self) -> None:
        """Wait until each markers partition has an owner.

        Raises:
            RigError: it took more than START_SECONDS, or the worker ended by itself.
        """
        until_s = time.monotonic() + START_SECONDS
        while time.monotonic() < until_s:
            self.check()
            workers = self.statistics().get("workers", [])
            states = [part["state"] for worker in workers for part in worker["partitions"]]
            if states and all(state == "owner" for state in states):
                return
            time.sleep(0.1)
        raise RigError(f"{self.name} was not ready after {START_SECONDS:g} s; see {self.log_file}")
