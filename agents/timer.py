"""The timer agent: redelivers expired messages, and writes everything else that is due.

marq/core/due_messages.py decides which messages are due, and marq/core/redeliver_or_dead_letter.py where each one goes.
When marq/owner/engine.py has something to write (a TICK, redeliveries, answers, messages of schedules), the owner
passes it to the agent, and reads no markers until the agent is done.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING

import faust
from aiokafka.errors import KafkaError
from faust.types import StreamT
from mode.utils.queues import FlowControlEvent, ThrowableQueue

from marq.client.uptime import uptime_ms
from marq.owner.transaction_content import Write

if TYPE_CHECKING:
    from marq_worker.owner.ownership import Ownership


async def redeliver(owner: Ownership, write: Write | None) -> None:
    """Write everything that an owner has to write now, one transaction after another."""
    while write is not None:
        await owner.perform(write)
        write = owner.engine.next_write(uptime_ms())


class Turn:
    """An owner's turn; ``over`` completes with its outcome."""

    def __init__(self, owner: Ownership, write: Write) -> None:
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


class Owners(faust.Channel):
    """The in-memory channel from owners to the timer agent.

    A rebalance clears Faust's own channels; owners would then wait forever.
    """

    @cached_property
    def queue(self) -> ThrowableQueue:
        return ThrowableQueue(flow_control=FlowControlEvent(initially_suspended=False))

    def get_topic_name(self) -> str:
        # Without a name, `faust agents` hides the agent.
        return "<owners>"

    async def turn(self, owner: Ownership, write: Write) -> None:
        """Hand an owner and its first write to the agent; return when the owner has nothing more to write."""
        turn = Turn(owner, write)
        await self.put(turn)
        try:
            await turn.over
        finally:
            await turn.end()


def attach(app: faust.App) -> Owners:
    """Attach the timer to an application; return its channel."""
    channel = Owners(app)

    @app.agent(channel, name="timer")
    async def timer(turns: StreamT[Turn]) -> None:
        """Redeliver expired messages, deliver delayed ones, and write the TICKs that say which are due."""
        async for turn in turns:
            turn.begin()

    return channel
