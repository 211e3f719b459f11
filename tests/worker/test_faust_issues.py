"""Known failures of Faust, by the numbers of their issues in faust-streaming/faust: what they look like can't happen.

docs/evidence.md has the table of all of them, with the test of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import faust
import pytest
import pytest_asyncio
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewTopic, RecordsToDelete
from faust.types import TP

from marq.core.storage.rows import IDENTITY_KEY
from marq.wire.names import Names
from marq_worker.broker import EmbeddedBroker
from marq_worker.tables import leases
from marq_worker.tables.leases import LeaseTable, LocalTableError
from tests.worker.harness import admin

PARTITION = 0
RECOVERY_SECONDS = 120.0


class Changelog:
    """One partition of a table's changelog, and local tables that are recovered from it as an owner does it."""

    def __init__(self, bootstrap_servers: str, names: Names, directory: Path) -> None:
        self.client = {"bootstrap_servers": bootstrap_servers}
        self.names = names
        self._directory = directory
        self._producer: AIOKafkaProducer | None = None

    @property
    def topic(self) -> str:
        return self.names.changelog

    async def owner(self) -> AIOKafkaProducer:
        """Take the partition over, as a new owner does."""
        await self.close()
        transactional_id = self.names.transactional_id(PARTITION)
        self._producer = AIOKafkaProducer(transactional_id=transactional_id, **self.client)
        await self._producer.start()
        return self._producer

    async def close(self) -> None:
        if self._producer is not None:
            await self._producer.stop()

    def table(self, name: str = "one") -> LeaseTable:
        """A worker's table, with the files of that worker."""
        app = faust.App(
            self.names.app_id,
            store="rocksdb://",
            TableManager=leases.Tables,
            datadir=str(self._directory / name),
        )
        return leases.attach(app)

    async def write(self, *rows: tuple[bytes, bytes | None], commit: bool = True) -> None:
        """Write rows in one transaction."""
        assert self._producer is not None
        await self._producer.begin_transaction()
        for key, value in rows:
            await self._producer.send(self.topic, value, key, partition=PARTITION)
        await (self._producer.commit_transaction() if commit else self._producer.abort_transaction())

    async def recover(self, table: LeaseTable) -> int:
        """Recover; fails where it does not end."""
        async with asyncio.timeout(RECOVERY_SECONDS):
            return await table.recover(PARTITION, await self.owner(), self.client)

    async def delete_records(self, before: int) -> None:
        """Let retention remove records."""
        async with admin(self.client["bootstrap_servers"]) as client:
            await client.delete_records({TopicPartition(self.topic, PARTITION): RecordsToDelete(before_offset=before)})

    async def end(self) -> int:
        consumer = AIOKafkaConsumer(**self.client)
        await consumer.start()
        try:
            source = TopicPartition(self.topic, PARTITION)
            return int((await consumer.end_offsets([source]))[source])
        finally:
            await consumer.stop()


def rows_of(table: LeaseTable) -> dict[bytes, bytes]:
    return dict(table.rows(PARTITION))


def some(start: int, end: int) -> list[tuple[bytes, bytes | None]]:
    return [(b"r%d" % number, b"row") for number in range(start, end)]


@pytest_asyncio.fixture
async def changelog(broker: EmbeddedBroker, names: Names, tmp_path: Path) -> AsyncIterator[Changelog]:
    made = Changelog(broker.bootstrap_servers, names, tmp_path)
    # Kafka's own compaction is never waited for: what it leaves is what `delete_records` and rewritten rows leave.
    settings = {"cleanup.policy": "compact,delete", "retention.ms": "-1"}
    async with admin(broker.bootstrap_servers) as client:
        await client.create_topics([NewTopic(made.topic, 1, 1, topic_configs=settings)])
    await made.owner()
    yield made
    await made.close()


@pytest_asyncio.fixture
async def table(changelog: Changelog) -> LeaseTable:
    """A worker's table that has ten rows, all of its changelog."""
    table = changelog.table()
    await changelog.recover(table)
    await changelog.write(*some(0, 10))
    await changelog.recover(table)
    return table


async def first_value(changelog: Changelog) -> bytes:
    consumer = AIOKafkaConsumer(auto_offset_reset="earliest", **changelog.client)
    await consumer.start()
    try:
        source = TopicPartition(changelog.topic, PARTITION)
        consumer.assign([source])
        record = await consumer.getone(source)
        assert record.key == IDENTITY_KEY
        return bytes(record.value)
    finally:
        await consumer.stop()


async def test_recovery_from_an_empty_changelog_ends(changelog: Changelog) -> None:
    """#155, #597: "No event received for active tp", without end, for the last record of a partition that has none."""
    table = changelog.table()

    assert await changelog.recover(table) == 1, "its identity, which was not there"
    assert rows_of(table) == {}


async def test_recovery_of_a_table_that_has_all_of_its_changelog_ends(changelog: Changelog) -> None:
    """#155: off by one, it waited for a record after the last one. The last offset is a control record's, besides."""
    table = changelog.table()
    await changelog.recover(table)
    await changelog.write(*some(0, 10))
    assert await changelog.recover(table) == 10

    assert await changelog.recover(table) == 0
    assert rows_of(table) == dict(some(0, 10))


@pytest.mark.parametrize("kept", [True, False], ids=["local table kept", "local table lost"])
async def test_recovery_whose_end_is_an_aborted_transaction_ends(
    changelog: Changelog, table: LeaseTable, kept: bool
) -> None:
    """#155, #47: records that a reader of committed ones never gets are at the end, and then a control record."""
    await changelog.write(*some(10, 20), commit=False)

    table = table if kept else changelog.table("two")
    assert await changelog.recover(table) == (0 if kept else 11)
    assert rows_of(table) == dict(some(0, 10))


async def test_recovery_from_a_changelog_whose_begin_was_compacted_away_ends(
    changelog: Changelog, table: LeaseTable
) -> None:
    """#176: the local table is at an offset that the changelog no longer has; Faust reads before its first record."""
    await changelog.write(*some(10, 30))
    identity = await first_value(changelog)
    first = await changelog.end()
    # What compaction leaves: the newest record of each key, behind a gap.
    await changelog.write((IDENTITY_KEY, identity), *some(0, 30))
    await changelog.delete_records(first)

    assert await changelog.recover(table) == 31
    assert rows_of(table) == dict(some(0, 30))
    assert await changelog.recover(changelog.table("two")) == 31


async def test_recovery_from_a_changelog_that_was_emptied_ends(changelog: Changelog, table: LeaseTable) -> None:
    """#176, #597: retention has removed all of it. Nothing is believed that the changelog does not say."""
    await changelog.delete_records(await changelog.end())

    assert await changelog.recover(table) == 1, "a new identity"
    assert rows_of(table) == {}


async def test_recovery_ends_although_records_are_removed_while_it_reads(
    changelog: Changelog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """#651: what is to be read next is removed; with auto.offset.reset=latest Faust waits for it without end."""
    await changelog.recover(changelog.table())
    # More than one fetch brings.
    await changelog.write(*[(b"r%d" % number, b"x" * 900_000) for number in range(12)])
    end = await changelog.end()
    table = changelog.table("two")

    class Losing(AIOKafkaConsumer):
        async def position(self, source: TopicPartition) -> int:
            if table.replayed[PARTITION] and (await self.beginning_offsets([source]))[source] < end:
                await changelog.delete_records(end)
            return int(await super().position(source))

    monkeypatch.setattr(leases, "AIOKafkaConsumer", Losing)
    replayed = await changelog.recover(table)

    assert 0 < replayed < 13, "nothing was removed in time: nothing was shown"


async def test_a_local_table_that_is_ahead_of_its_changelog_is_rebuilt(changelog: Changelog, table: LeaseTable) -> None:
    """#158: "The persisted offset … is higher than the last offset in that topic", at each start."""
    table.write(PARTITION, {b"r99": b"of a changelog that lost its end"}, await changelog.end() + 100)

    assert await changelog.recover(table) == 11
    assert rows_of(table) == dict(some(0, 10))


async def test_rocksdb_of_a_partition_that_comes_back_is_opened_again_while_the_former_owner_still_reads_it(
    changelog: Changelog, table: LeaseTable
) -> None:
    """#91, #92: Faust closes a database by dropping it; another reference to it locks out the next owner."""
    reading = table.rows(PARTITION)
    next(reading)

    # A rebalance takes the partition away, as Faust does it, and another one brings it back.
    table.data.revoke_partitions(table, {TP(changelog.topic, PARTITION)})
    await changelog.write(*some(10, 20))
    # The owner says why, and tries again.
    with pytest.raises(LocalTableError):
        await changelog.recover(table)
    del reading

    assert await changelog.recover(table) == 10
    assert rows_of(table) == dict(some(0, 20))
