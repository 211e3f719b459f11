"""A consumer: the shipped session, receiver and handler pool, in a process of the simulated world.

Its event loop runs in the world's time (loop.py). Its connections to Kafka are simulated: reading.py reads as a member
of a group, sending.py writes markers, and starting.py writes markers and offsets in transactions. handling.py has the
user's handlers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.proof import history
from marq.consumer.handler_pool import HandlerTasks
from marq.kafka.queue_records import Serving
from marq.wire.markers import Source
from tests.simulation.actor import Actor
from tests.simulation.group import Group
from tests.simulation.handling import Handlers
from tests.simulation.log import TransactionalId
from tests.simulation.loop import Loop
from tests.simulation.reading import Reader
from tests.simulation.receiving import Session, SimulatedReceiver
from tests.simulation.sending import Writer
from tests.simulation.starting import Starting

if TYPE_CHECKING:
    from tests.simulation.world import World

MAX_IN_FLIGHT = 12
MAX_LEASE_MS = 3_600_000


class Consumer(Actor):
    """One member of a group."""

    def __init__(self, world: World, group: Group, name: str, transactional_id: TransactionalId | None) -> None:
        super().__init__(world, name)
        self.loop = Loop(self)
        transactional = transactional_id is not None or world.at_most_once
        self.starting = Starting(self, transactional_id) if transactional else None
        self.group = group
        self.serving = group.serving(self)
        self.reader = Reader(self)
        self.writer = Writer(self)
        # If handlers hang, leases can't be renewed for long, and no message waits behind handlers or for a DISPATCH.
        hangs = world.faults.forgotten > 0 and not world.at_most_once
        max_lease_ms = world.rng.choice([1, 2]) * world.lease_ms if hangs else MAX_LEASE_MS
        self.receiver = SimulatedReceiver(self, MAX_IN_FLIGHT, max_lease_ms)
        if hangs:
            self.receiver.suspects_run_at_once()
        self.session = Session(self.receiver)
        # Handlers that wait for their acks hold nothing.
        self._concurrency = 3 * MAX_IN_FLIGHT if hangs else world.rng.choice([1, 3, MAX_IN_FLIGHT])
        self.generation = 0
        #: The newest assignment that it has heard of.
        self._assignment: tuple[int, Sequence[Source]] | None = None
        self._reassigned = asyncio.Event()
        self._redefined = asyncio.Event()
        self._background: list[asyncio.Task[None]] = []
        self.stopping = False
        #: The version of the definitions whose purges its receiver has applied.
        self.purges_known = self.known
        self.loop.do(self._start)

    def _start(self) -> None:
        self.session.start()
        [buffer] = self.session.prefetch.distinct
        self.session.add(HandlerTasks(buffer, self.receiver, Handlers(self).handle, self._concurrency))
        self._background = [asyncio.create_task(each) for each in (self._follow_group(), self._follow_definitions())]

    def suffers(self) -> bool:
        world, faults = self.world, self.world.faults
        if world.hit(faults.consumer_crash):
            self.crash()
            return True
        if world.hit(faults.consumer_pause):
            self.pause(world.rng.choice([50, 500, 2_000]))
            return True
        if not self.stopping and world.hit(faults.consumer_stop):
            self.stop()
        return False

    def note(
        self, type_: str, op: str, holder: int, queue: str, source: Source, offsets: Sequence[int], **fields: Any
    ) -> None:
        """Note an operation on messages in the history."""
        names = {"holder": history.holder_name(holder), "queue": queue, "source": history.log_name(source)}
        self.world.history.add(self.name, type_, op, **names, offsets=list(offsets), **fields)

    @property
    def busy(self) -> bool:
        return self.receiver.busy

    # --- membership ---------------------------------------------------------------------------------------------------

    def hear(self, version: int) -> None:
        super().hear(version)
        self.loop.do(self._redefined.set)

    async def _follow_definitions(self) -> None:
        """Serve the queues that the definitions name."""
        while True:
            await self._redefined.wait()
            self._redefined.clear()
            wanted = self.group.serving(self)
            if wanted != self.serving and not self.stopping:
                await self.receiver.serve(wanted, self.reader.serve)
            if self.world.purger is not None or self.world.ordering.limits:
                version = self.known
                self.receiver.apply_settings()
                self.purges_known = version

    def serves(self, serving: Serving) -> None:
        """Join the group for other queues; an assignment that is still on its way was made for the former ones."""
        self._revoked()
        self.serving = serving
        self.generation, self._assignment = self.group.generation, None
        if self in self.group.members:
            self.group.rebalance()

    def assigned(self, generation: int, sources: list[Source]) -> None:
        """Learn of an assignment."""
        if generation > self.generation:
            self.generation, self._assignment = generation, (generation, sources)
            self.loop.do(self._reassigned.set)

    async def _follow_group(self) -> None:
        """Give up all partitions in each rebalance, and read what is assigned then."""
        while True:
            await self._reassigned.wait()
            self._reassigned.clear()
            self._revoked()
            await self.receiver.revoked()
            self.reader.revoked()
            if self._assignment is not None:
                self.reader.assigned(*self._assignment)
                self.receiver.assigned()

    def _revoked(self) -> None:
        self.world.history.add("nemesis", "info", "revoke", target=self.name)

    # --- life ---------------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Die by kill -9: its leases no longer have a holder, and the group notices after the session timeout."""
        super().crash()
        self.loop.close()
        world = self.world
        world.stats["consumer_crashes"] += 1
        world.schedule(world.rng.randint(50, 600), self.group.leave, self)
        kept = None
        if self.starting is not None and self.starting.always and world.rng.random() < 0.5:
            # It has a transactional id, and restarts with it.
            kept = self.starting.transactional_id
        world.schedule(world.rng.randint(100, 900), world.add_consumer, self.group, kept)

    def end_process(self) -> None:
        """Die because a handler ends the process."""
        if self.alive:
            self.crash()

    def pause(self, duration_ms: int) -> None:
        super().pause(duration_ms)
        self.world.stats["consumer_pauses"] += 1
        if self.world.rng.random() < 0.5 and len(self.group.members) > 1:
            # The pause exceeds the session timeout: the others read its partitions meanwhile.
            self.world.schedule(self.world.rng.randint(1, duration_ms), self._expel)

    def _expel(self) -> None:
        self.group.leave(self)
        self.later(self.world.rng.randint(0, 50), self._rejoin)

    def _rejoin(self) -> None:
        if not self.stopping and self not in self.group.members:
            self.group.join(self)

    def stop(self) -> None:
        """Stop cleanly: release prefetched messages, which does not count as an attempt, and then leave."""
        self.stopping = True
        self.world.stats["consumer_stops"] += 1
        self.world.history.add("nemesis", "info", "stop", target=self.name)
        self.loop.do(lambda: self._background.append(asyncio.create_task(self._stop())))

    async def _stop(self) -> None:
        world = self.world
        await self.session.stop(world.rng.choice([0, 0.03, 1.0]))
        self.group.leave(self)
        self.alive = False
        world.schedule(0, self.loop.close)
        world.schedule(world.rng.randint(10, 300), world.add_consumer, self.group)
