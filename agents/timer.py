"""The timer agent: redelivers expired messages, and writes everything else that is due.

When marq/owner/engine.py has something to write, the owner passes it to the agent as a turn
(marq_worker/owner/turns.py).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import faust
from faust.types import StreamT
from mode.utils.queues import FlowControlEvent, ThrowableQueue

from marq.owner.transaction_content import OwnerTransaction
from marq_worker.owner.turns import Turn

if TYPE_CHECKING:
    from marq_worker.owner.ownership import Ownership


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

    async def turn(self, owner: Ownership, write: OwnerTransaction) -> None:
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
