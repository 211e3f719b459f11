"""The size of a benchmark run, from the environment: MESSAGES, RUNS, ONLY."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """``messages`` of ``value_bytes`` in ``partitions``; each system is measured ``runs`` times, in turn."""

    messages: int
    runs: int
    only: frozenset[str]
    value_bytes: int = 200
    partitions: int = 4

    @classmethod
    def from_environment(cls) -> Size:
        only = frozenset(filter(None, os.environ.get("ONLY", "").split(",")))
        return cls(int(os.environ.get("MESSAGES", "400000")), int(os.environ.get("RUNS", "5")), only)

    def wants(self, row: str) -> bool:
        return not self.only or row in self.only
