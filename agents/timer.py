"""The timer agent: redelivers expired messages, and writes everything else that is due.

When marq/owner/engine.py has something to write, the owner passes it to the agent as a turn
(marq_worker/owner/turns.py).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import faust
from faust.types import StreamT

from marq.owner.engine import OwnerTransaction
from marq_worker.owner.turns import redeliver
from marq_worker.transport.turns import Turn, TurnChannel

if TYPE_CHECKING:
    from marq_worker.owner.ownership import Ownership


class Owners(TurnChannel):
    """The in-memory channel from owners to the timer agent."""

    shown = "<owners>"

    async def turn(self, owner: Ownership, write: OwnerTransaction) -> None:
        """Hand an owner and its first write to the agent; return when the owner has nothing more to write."""
        await self.run(partial(redeliver, owner, write))


def attach(app: faust.App) -> Owners:
    """Attach the timer to an application; return its channel."""
    channel = Owners(app)

    @app.agent(channel, name="timer")
    async def timer(turns: StreamT[Turn]) -> None:
        """Redeliver expired messages, deliver delayed ones, and write the TICKs that say which are due."""
        async for turn in turns:
            turn.begin()

    return channel
