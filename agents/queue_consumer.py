"""The queue consumer agent: emits the ACQUIRE markers of one group of queues.

Each group has its own process, a Faust application with this single agent (app/handlers_app.py). The process reads the
group's records with the same reader and receiver as :class:`marq.Consumer` (marq_worker/handlers/running_handlers.py).
For each receive cycle, the receiver hands its ACQUIREs to this agent as one turn (with transactions, together with the
offsets), and waits for the turn. A worker only lists the agent.

**Marker before offset.** A cycle commits the offset only after its turn is over, so it loses nothing however the turn
ends: if it fails, the cycle reads its records again, and acquiring them again takes over their leases.

**Who waits for whom.** The cycle waits for the agent, and the agent for no cycle. If the agent does not begin a turn
within the limit of the write, because its loop has crashed or hangs, the turn expires and is never begun: an ACQUIRE
without a cycle would end as an attempt that no handler saw. A stop ends the cycles before Faust stops the agent. All
other markers are written by the session, so leases are renewed and outcomes written while the agent does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import faust
from aiokafka.errors import KafkaError
from faust.types import StreamT

from marq.kafka.marker_writer import MarkerRecord
from marq.wire.errors import BrokerUnavailable
from marq_worker.transport.turns import Turn, TurnChannel


class Acquirers(TurnChannel):
    """The in-memory channel from receive cycles to the queue consumer agent."""

    shown = "<acquirers>"

    def writer(self, writer: Any) -> AgentWriter:
        """Return a writer whose writes are turns of the agent; ``writer`` carries them out."""
        return AgentWriter(self, writer)


class AgentWriter:
    """A writer of :mod:`marq.kafka.marker_writer` or :mod:`marq.kafka.transactions` whose writes the agent makes."""

    def __init__(self, channel: Acquirers, writer: Any) -> None:
        self._channel = channel
        self._writer = writer

    async def start(self) -> None:
        await self._writer.start()

    async def stop(self, limit_s: float) -> None:
        await self._writer.stop(limit_s)

    async def write(self, records: Sequence[MarkerRecord], *more: Any) -> Any:
        """Let the agent write; ``more`` ends with the limit in seconds."""
        try:
            return await self._channel.run(partial(self._writer.write, records, *more), more[-1])
        except KafkaError as error:
            raise BrokerUnavailable(
                f"the queue consumer agent did not write {len(records)} ACQUIREs: {error}"
            ) from error


def attach(app: faust.App, *, listed: bool = False) -> Acquirers:
    """Attach the queue consumer to an application; return its channel.

    ``listed``: only for `faust -A app agents`, because the agent runs in other processes.
    """
    channel = Acquirers(app)

    @app.agent(channel, name="queue consumer")
    async def consume(acquirers: StreamT[Turn]) -> None:
        """Write the ACQUIRE markers of messages for handlers; each group of queues has its own process."""
        async for turn in acquirers:
            turn.begin()

    if listed:
        consume.concurrency = 0
    return channel
