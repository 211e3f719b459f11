"""What an owner does in a turn of the timer agent: it writes a TICK, redeliveries, answers, messages of schedules.

marq/core/lease_book.py decides which messages are due, and marq/core/redeliver_or_dead_letter.py where each one goes.
The owner reads no markers until its turn is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marq.client.uptime import uptime_ms
from marq.owner.engine import OwnerTransaction

if TYPE_CHECKING:
    from marq_worker.owner.ownership import Ownership


async def redeliver(owner: Ownership, write: OwnerTransaction | None) -> None:
    """Write everything that an owner has to write now, one transaction after another."""
    while write is not None:
        await owner.perform(write)
        write = owner.engine.next_write(uptime_ms())
