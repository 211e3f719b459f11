"""The identity that a worker shows in its group: its version, a fingerprint of its marq.toml, and its project.

They are part of the client id, which the broker shows for each member, and reveal workers of one project that have
different files.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

import faust
from faust.exceptions import AlreadyConfiguredWarning

from marq.version import VERSION
from marq_worker.config.queues import QueuesFile

_CLIENT_ID = re.compile(r".*-(?P<version>\d[^-]*)-q(?P<fingerprint>[0-9a-f]+|none)(:(?P<project>[\w.-]+))?", re.DOTALL)
#: The fingerprint of a worker without a marq.toml.
_NO_FILE = "none"


@dataclass(frozen=True, slots=True, order=True)
class Identity:
    """``fingerprint`` is that of the definitions in the worker's marq.toml, "none" without one."""

    version: str
    fingerprint: str
    project: str = ""

    @classmethod
    def of(cls, file: QueuesFile) -> Identity:
        return cls(VERSION, file.fingerprint if file.present else _NO_FILE, file.project)

    @classmethod
    def read(cls, client_id: str) -> Identity | None:
        """Parse a member's client id; None if it is not a worker's."""
        match = _CLIENT_ID.fullmatch(client_id)
        return None if match is None else cls(match["version"], match["fingerprint"], match["project"] or "")

    def client_id(self, base: str) -> str:
        project = f":{self.project}" if self.project else ""
        return f"{base}-{self.version}-q{self.fingerprint}{project}"

    @property
    def publishes(self) -> bool:
        """Whether the worker has published a marq.toml."""
        return self.fingerprint != _NO_FILE


def show(app: faust.App, base: str, file: QueuesFile) -> None:
    """Set the client id of a worker with this file, before the application connects."""
    with warnings.catch_warnings():
        # Faust warns because the setting was read before; no consumer exists yet.
        warnings.simplefilter("ignore", AlreadyConfiguredWarning)
        app.conf.broker_client_id = Identity.of(file).client_id(base)
