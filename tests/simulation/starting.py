"""Simulates a consumer that acquires messages in a transaction: ACQUIRE and the offset, both or neither.

The shipped receiver (:mod:`marq.consumer.receiver`) decides what a transaction contains; this module simulates its
producer and the broker. The group accepts the offset only from the member that the partition is
assigned to in the current generation, and the partition's next owner waits until no open transaction can move its
offset. So only one of the two delivers the messages. After an unknown outcome, a new producer takes over the
transactional id. This aborts the former producer's open transaction, and the consumer reads the records again. A dead
producer's open transaction is aborted by the broker or by the next process with its name; until then, no tracker reads
the markers behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from marq.kafka.group_reader import NotCommitted
from marq.kafka.marker_writer import MarkerRecord
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import Acquire, MixedAcquire, split
from tests.simulation.group import Commit
from tests.simulation.log import Fenced, Outcome, Transaction, TransactionalId
from tests.simulation.loop import give
from tests.simulation.sending import NEWER_VERSION, TYPES, Sent

if TYPE_CHECKING:
    from tests.simulation.consumer import Consumer
    from tests.simulation.reading import GroupCommit

#: How long a transaction may be open, and how often the broker checks that.
TIMEOUT_MS, LOOK_MS = 300, 400
#: How long a consumer waits for the outcome of a transaction.
PATIENCE_MS = 200


class Starting:
    """The one producer of a consumer, with one transaction at a time."""

    def __init__(self, consumer: Consumer, transactional_id: TransactionalId | None) -> None:
        #: Whether all messages are acquired like this, or only those that are delivered at most once.
        self.always = transactional_id is not None
        self.transactional_id = transactional_id or TransactionalId()
        self._consumer = consumer
        self._world = consumer.world
        self._epoch = self.transactional_id.fence()
        self._transaction: Transaction | None = None
        self._busy = False

    async def write(self, records: Sequence[MarkerRecord], commit: GroupCommit, limit_s: float) -> None:
        """Write records and commit offsets, like :meth:`marq.kafka.transactions.MarkerTransactions.write`."""
        consumer, world = self._consumer, self._world
        while self._busy or (self._transaction is not None and not self._transaction.shown):
            # The previous transaction is not over, or the broker is still ending it.
            await consumer.loop.wait(2)
        self._busy = True
        began_ms = consumer.monotonic_ms()
        batches: list[Acquire | MixedAcquire] = [value.about for _, value in records]  # type: ignore[attr-defined]
        result, error = await self._transact(records, commit)
        self._busy = False
        if error is not None:
            # Continue with a new producer, and read again.
            self._epoch = self.transactional_id.fence()
        for batch in batches:
            self._note(TYPES[result], batch, took_ms=consumer.monotonic_ms() - began_ms)
        if error is not None:
            raise error
        await consumer.loop.wait(world.rng.randint(0, 3))

    async def _transact(
        self, records: Sequence[MarkerRecord], commit: GroupCommit
    ) -> tuple[Sent, BrokerUnavailable | NotCommitted | None]:
        """Return what the client knows of the transaction, and the error if it is not known to be committed."""
        consumer, world, result = self._consumer, self._world, Sent.FAILED
        try:
            self._transaction = transaction = self.transactional_id.begin(self._epoch)
            world.stats["start_transactions"] += 1
            world.schedule(TIMEOUT_MS + world.rng.randint(0, LOOK_MS), self.transactional_id.expire, transaction)
            await self._write(records, transaction)
            if world.hit(world.faults.commit_failed):
                raise BrokerUnavailable("failed")
            for source, committed in commit.offsets.items():
                outcome = consumer.group.commit_in(transaction, source, committed, commit.generation, consumer)
                if outcome is Commit.REFUSED:
                    world.stats["commits_refused"] += 1
                    raise NotCommitted("refused")
            slow = world.hit(world.faults.slow_commit)
            await consumer.loop.wait(world.rng.randint(20, 150) if slow else world.rng.randint(0, 3))
            result = Sent.UNKNOWN
            await self._decide(transaction)
        except Fenced:
            return result, BrokerUnavailable("fenced")
        except (BrokerUnavailable, NotCommitted) as error:
            return result, error
        return Sent.OK, None

    async def _write(self, records: Sequence[MarkerRecord], transaction: Transaction) -> None:
        answer, results = self._consumer.loop.create_future(), list[Sent]()

        def written(result: Sent) -> None:
            results.append(result if self.transactional_id.accepts(transaction) else Sent.FAILED)
            if len(results) == len(records):
                failed = any(each is not Sent.OK for each in results)
                give(answer, failed)

        for _, value in records:
            self._send(transaction, value, written)
        if await answer:
            raise BrokerUnavailable("not known to be written")

    def _send(self, transaction: Transaction, data: bytes, written: Callable[[Sent], None]) -> None:
        world, faults = self._world, self._world.faults
        batch: Acquire | MixedAcquire = data.about  # type: ignore[attr-defined]
        self._note("invoke", batch)
        world.stats["mixed_acquires"] += isinstance(batch, MixedAcquire)
        if world.hit(faults.acquire_failed):
            self._consumer.loop.arrive(world.rng.randint(5, 50), written, Sent.FAILED)
            return
        travel_ms = world.rng.randint(20, 600) if world.hit(faults.acquire_slow) else world.rng.randint(1, 5)
        result = Sent.UNKNOWN if world.hit(faults.acquire_unknown) else Sent.OK
        if world.hit(faults.newer_marker):
            data = NEWER_VERSION + data[1:]
            world.stats["newer_markers"] += 1
        world.schedule(travel_ms, self._append, transaction, batch, data)
        self._consumer.loop.arrive(travel_ms + world.rng.randint(1, 3), written, result)

    def _append(self, transaction: Transaction, batch: Acquire | MixedAcquire, data: bytes) -> None:
        """Append at the broker, which accepts nothing for a transaction that is over."""
        if self.transactional_id.accepts(transaction):
            self._world.markers_of(batch.source).append(data, about=batch, transaction=transaction)

    async def _decide(self, transaction: Transaction) -> None:
        world = self._world
        if world.hit(world.faults.commit_unknown):
            if world.rng.random() < 0.5:
                self._commit(transaction)
            await self._consumer.loop.wait(world.rng.randint(1, PATIENCE_MS))
            raise BrokerUnavailable("unknown")
        self._commit(transaction)

    def _commit(self, transaction: Transaction) -> None:
        self.transactional_id.decide(transaction, Outcome.COMMITTED)
        # The broker informs the partitions and the group: at once, or a little later.
        if self._world.hit(self._world.faults.slow_commit):
            self._world.schedule(self._world.rng.randint(1, 50), transaction.show)
        else:
            transaction.show()

    def _note(self, type_: str, sent: Acquire | MixedAcquire, **fields: int) -> None:
        for batch in split(sent):
            assert isinstance(batch, Acquire)
            self._consumer.note(type_, "acquire", batch.holder, batch.queue, batch.source, batch.offsets, **fields)
