"""Cycles of :mod:`marq.flow` that are under way: steps 2 to 4 for some records each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from marq.core.markers import Source
from marq.reader import NotCommitted
from marq.records import Records

#: Cycles under way at a time: one writes its ACQUIREs while the one before commits. More of them only while so many
#: records wait: a cycle of few costs as much as one of many, and one of many takes as long as the event loop is busy.
MAX_CYCLES, MAX_CYCLES_BUSY, BUSY_RECORDS = 2, 4, 1_000


class BeforeFailed(NotCommitted):
    """The cycle before failed, and went back for both."""


class Cycle(NamedTuple):
    """Steps 2 to 4 under way for some records, of which ``pending`` at the most are going to be handed out."""

    records: Mapping[Source, Records]
    assignment: int
    pending: int
    task: asyncio.Task[bool]


class Cycles(deque[Cycle]):
    """Those under way, in the order in which they were read."""

    @property
    def tasks(self) -> list[asyncio.Task[bool]]:
        return [cycle.task for cycle in self]

    @property
    def pending(self) -> int:
        """How many messages at the most are going to be handed out."""
        return sum([cycle.pending for cycle in self])

    def have_to_end(self, waiting: int) -> bool:
        """Whether the first has ended, or has to before so many records that wait may be in a further one."""
        most = MAX_CYCLES_BUSY if waiting >= BUSY_RECORDS else MAX_CYCLES
        return bool(self) and (self[0].task.done() or (waiting > 0 and len(self) >= most))


async def ended(before: asyncio.Task[bool] | None) -> None:
    """Wait for the cycle before.

    Raises:
        BeforeFailed: it was not done with.
    """
    if before is None:
        return
    await asyncio.wait([before])
    if before.cancelled() or before.exception() is not None or not before.result():
        raise BeforeFailed("what was read before it was not committed")
