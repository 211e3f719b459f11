"""The turns of owners that have something to write (a TICK, redeliveries, answers, messages of schedules).

marq/core/due_messages.py decides which messages are due, and marq/core/redeliver_or_dead_letter.py where each one goes.
The owner reads no markers until its turn is over.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokafka.errors import KafkaError

from marq.client.uptime import uptime_ms
from marq.owner.transaction_content import OwnerTransaction

if TYPE_CHECKING:
    from marq_worker.owner.ownership import Ownership


async def redeliver(owner: Ownership, write: OwnerTransaction | None) -> None:
    """Write everything that an owner has to write now, one transaction after another."""
    while write is not None:
        await owner.perform(write)
        write = owner.engine.next_write(uptime_ms())


class Turn:
    """An owner's turn; ``over`` completes with its outcome."""

    def __init__(self, owner: Ownership, write: OwnerTransaction) -> None:
        self.over = asyncio.get_running_loop().create_future()
        self._owner = owner
        self._write = write
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Write in a task, so that a slow partition does not hold up the others; stop if the owner gives up."""
        if self._task is None and not self.over.done():
            self._task = task = asyncio.create_task(self._live())
            self.over.add_done_callback(lambda _: task.cancel())

    async def _live(self) -> None:
        try:
            await redeliver(self._owner, self._write)
        except BaseException as error:
            if not self.over.done():
                # The owner waits for this turn, so every way in which it ends must complete `over`.
                lost = KafkaError("the turn was cancelled") if isinstance(error, asyncio.CancelledError) else error
                self.over.set_exception(lost)
            if not isinstance(error, Exception):
                raise
            return
        if not self.over.done():
            self.over.set_result(None)

    async def end(self) -> None:
        """Cancel the task and wait until it has stopped writing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
