"""How a consumer starts messages: steps 2 and 3 of :mod:`marq.flow`, ACQUIRE and the commit of the offset.

``marked``: the marker first, then the offset. A crash in between leaves messages that are open and unread: the next
reader takes them over, but if their leases end before, the tracker sends copies, and the records are handed out, too.

``transactional``: both in one Kafka transaction. A crash in between leaves nothing of either.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from marq.core.errors import ConfigError
from marq.core.markers import Source
from marq.reader import GroupReader, Reader
from marq.transactions import MarkerTransactions
from marq.writer import MarkerRecord, MarkerWriter

MARKED, TRANSACTIONAL = "marked", "transactional"
STARTS = (MARKED, TRANSACTIONAL)


def check_start(start: object) -> str:
    """Return how a consumer is to start messages.

    Raises:
        ConfigError: there is no such way.
    """
    if start not in STARTS:
        raise ConfigError(f"start={start!r}: expected one of {', '.join(map(repr, STARTS))}")
    return str(start)


#: Returns when all that was read before is committed. Raises NotCommitted when it never will be, or when the partitions
#: were assigned anew meanwhile.
Turn = Callable[[], Awaitable[None]]


class Start(Protocol):
    """Makes it certain that messages are ours and that nobody reads them again."""

    async def take(
        self, records: Sequence[MarkerRecord], offsets: Mapping[Source, int], limit_s: float, turn: Turn
    ) -> None:
        """Write the ACQUIREs, if there are any, and commit the offsets after the last records read.

        ``turn`` is awaited before the commit.

        Raises:
            BrokerUnavailable: not known to be written within ``limit_s``, or refused.
            NotCommitted: refused, or not known to be committed.
        """


class MarkedStart:
    """The marker goes first: a crash between commit and marker would lose the messages."""

    def __init__(self, acquirer: MarkerWriter, reader: Reader) -> None:
        self._acquirer = acquirer
        self._reader = reader

    async def take(
        self, records: Sequence[MarkerRecord], offsets: Mapping[Source, int], limit_s: float, turn: Turn
    ) -> None:
        if records:
            await self._acquirer.write(records, limit_s)
        await turn()
        await self._reader.commit(offsets)


class TransactionalStart:
    """One transaction for both; where nothing is acquired there is nothing to be kept together."""

    def __init__(self, transactions: MarkerTransactions, reader: GroupReader) -> None:
        self._transactions = transactions
        self._reader = reader

    async def take(
        self, records: Sequence[MarkerRecord], offsets: Mapping[Source, int], limit_s: float, turn: Turn
    ) -> None:
        # Of two open transactions the later one could never come first.
        await turn()
        if not records:
            await self._reader.commit(offsets)
            return
        # The generation of now, in which the partitions are ours: the group refuses it as soon as they are not.
        commit = self._reader.commit_of(offsets)
        await self._transactions.write(records, commit, limit_s)
        self._reader.committed(commit)
