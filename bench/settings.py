"""The size of a benchmark run, from the environment: MESSAGES, RUNS, ONLY."""

from __future__ import annotations

import os
from dataclasses import dataclass

#: What the bars are for.
BARRED_MESSAGES, BARRED_RUNS = 400_000, 5


@dataclass(frozen=True)
class Size:
    """``messages`` of ``value_bytes`` in ``partitions``; each system is measured ``runs`` times, in turn.

    ``only``: names of rows, or of families of rows; all without it.
    """

    messages: int
    runs: int
    only: frozenset[str]
    value_bytes: int = 200
    partitions: int = 4

    @classmethod
    def from_environment(cls) -> Size:
        only = frozenset(filter(None, os.environ.get("ONLY", "").split(",")))
        messages, runs = os.environ.get("MESSAGES") or BARRED_MESSAGES, os.environ.get("RUNS") or BARRED_RUNS
        return cls(int(messages), int(runs), only)

    @property
    def is_barred(self) -> bool:
        """Whether it is the size that the bars are for."""
        return self.messages == BARRED_MESSAGES and self.runs >= BARRED_RUNS
