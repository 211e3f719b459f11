"""Log lines about lost leases: one for a queue at once, then summaries, so that an outage adds few lines to a log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from marq.leases.held import HeldBatch

log = logging.getLogger("marq")

#: Least seconds between two log lines for one queue.
SUMMARY_S = 5.0


@dataclass(slots=True)
class _Lost:
    """The lost leases of a queue that the log does not mention yet; times are monotonic seconds."""

    partition: int
    offset: int
    taken_s: float
    max_lease_ms: int
    messages: int = 0


@dataclass(slots=True)
class LostLeasesLog:
    """Counts lost leases until the log mentions them."""

    _lost: dict[tuple[str, int], _Lost] = field(default_factory=dict)
    _logged_s: dict[tuple[str, int], float] = field(default_factory=dict)

    def add(self, lease: HeldBatch, offsets: Sequence[int], max_lease_ms: int) -> None:
        """Note the offsets of a batch whose leases have ended."""
        key = (lease.queue, logging.DEBUG if lease.ends else logging.WARNING)
        lost = self._lost.get(key)
        if lost is None:
            lost = self._lost[key] = _Lost(lease.source.partition, min(offsets), lease.taken_s, max_lease_ms)
        lost.taken_s = min(lost.taken_s, lease.taken_s)
        lost.messages += len(offsets)

    def write(self, now_s: float, *, stopping: bool = False) -> None:
        """Write the lines that are due, or all of them before a stop."""
        for key in list(self._lost):
            if stopping or now_s - self._logged_s.get(key, -inf) >= SUMMARY_S:
                lost = self._lost.pop(key)
                self._logged_s[key] = now_s
                queue, level = key
                log.log(
                    level,
                    "leases lost, the messages will be redelivered: queue=%s messages=%d first_partition=%d"
                    " first_offset=%d held=%.0fs max_lease=%gs",
                    queue, lost.messages, lost.partition, lost.offset, now_s - lost.taken_s, lost.max_lease_ms / 1000,
                )  # fmt: skip
