"""How a consumer acquires messages: steps 2 and 3 of :mod:`marq.consumer.receiver`, ACQUIRE and commit of the offset.

``marked``: the marker first, then the offset. After a crash in between, messages are acquired but their offsets are not
committed. The next reader takes them over; if their leases expire before that, the tracker redelivers them, and the
records are delivered as well.

``transactional``: both in one Kafka transaction. A crash in between leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from marq.kafka.group_reader import Reader, TransactionalReader
from marq.kafka.marker_writer import MarkerRecord, MarkerWriter
from marq.kafka.queue_positions import LowWatermarks
from marq.kafka.transactions import MarkerTransactions
from marq.wire.markers import Source

MARKED, TRANSACTIONAL = "marked", "transactional"
STARTS = (MARKED, TRANSACTIONAL)


class AcquireStrategy(Protocol):
    """Steps 2 and 3 of the receiver: acquire messages, and make sure that they are not read again."""

    async def acquire(self, records: Sequence[MarkerRecord], limit_s: float) -> None:
        """Write the ACQUIREs, unless they are part of the commit's transaction; cycles may overlap here.

        Raises BrokerUnavailable if they are not known to be written within ``limit_s``, or were refused.
        """

    async def commit(
        self, records: Sequence[MarkerRecord], offsets: Mapping[Source, int], limit_s: float, behind: LowWatermarks
    ) -> None:
        """Commit the offsets after the last records read, when all earlier ones are committed.

        ``behind`` has the positions of queues with ordering.

        Raises BrokerUnavailable like :meth:`acquire`; NotCommitted if refused, or the outcome is unknown.
        """


class MarkerFirst:
    """Writes the marker first: a crash between commit and marker would lose the messages."""

    def __init__(self, writer: MarkerWriter, reader: Reader) -> None:
        self._writer = writer
        self._reader = reader

    async def acquire(self, records: Sequence[MarkerRecord], limit_s: float) -> None:
        if records:
            await self._writer.write(records, limit_s)

    async def commit(
        self, records: Sequence[MarkerRecord], offsets: Mapping[Source, int], limit_s: float, behind: LowWatermarks
    ) -> None:
        await self._reader.commit(offsets, behind)


class Transactional:
    """Writes both in one transaction; a commit without ACQUIREs needs none."""

    def __init__(self, transactions: MarkerTransactions, reader: TransactionalReader) -> None:
        self._transactions = transactions
        self._reader = reader

    async def acquire(self, records: Sequence[MarkerRecord], limit_s: float) -> None:
        """Do nothing: of two open transactions, the later one could not be committed first."""

    async def commit(
        self, records: Sequence[MarkerRecord], offsets: Mapping[Source, int], limit_s: float, behind: LowWatermarks
    ) -> None:
        if not records:
            await self._reader.commit(offsets, behind)
            return
        # The current generation, in which we own the partitions: the group refuses it after a rebalance.
        commit = self._reader.commit_of(offsets, behind)
        await self._transactions.write(records, commit, limit_s)
        self._reader.committed(commit)
