"""The identity that a worker shows in its group: its version and a fingerprint of its marq.toml.

They are part of the client id, which the broker shows for each member, and reveal two sets of workers that share a
prefix by mistake.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

import faust
from faust.exceptions import AlreadyConfiguredWarning

from marq.version import VERSION
from marq_worker.config.queues import QueuesFile

_CLIENT_ID = re.compile(r".*-(?P<version>\d[^-]*)-q(?P<fingerprint>[0-9a-f]+)", re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class Identity:
    """``fingerprint`` is that of the definitions in the worker's marq.toml."""

    version: str
    fingerprint: str

    @classmethod
    def of(cls, file: QueuesFile) -> Identity:
        return cls(VERSION, file.fingerprint)

    @classmethod
    def read(cls, client_id: str) -> Identity | None:
        """Parse a member's client id; None if it is not a worker's."""
        match = _CLIENT_ID.fullmatch(client_id)
        return None if match is None else cls(match["version"], match["fingerprint"])

    def client_id(self, base: str) -> str:
        return f"{base}-{self.version}-q{self.fingerprint}"


def show(app: faust.App, base: str, file: QueuesFile) -> None:
    """Set the client id of a worker with this file, before the application connects."""
    with warnings.catch_warnings():
        # Faust warns because the setting was read before; no consumer exists yet.
        warnings.simplefilter("ignore", AlreadyConfiguredWarning)
        app.conf.broker_client_id = Identity.of(file).client_id(base)
