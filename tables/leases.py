"""The lease table: one RocksDB per markers partition, backed by a changelog topic.

Faust declares the table, names its changelog and opens its databases. Two things differ:

* **Writes are batches.** A stock table sends one changelog record per assignment and may commit the source offset
  before it was sent. Here the owner's transaction carries the changelog, and RocksDB is written after it.
* **Recovery comes after fencing.** Faust reads the changelog before a stream starts; a paused former owner could still
  write to it. Here the owner first takes over the transactional producer and then calls :meth:`LeaseTable.recover`.

Local files are valid only with the changelog that they were written from. Its first record is a random identity, which
becomes a row: files with another identity belong to a changelog that no longer exists.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import faust
import rocksdict
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.structs import ConsumerRecord
from faust.tables.manager import TableManager
from faust.tables.recovery import Recovery
from faust.types import TP

from marq.core.storage.rows import IDENTITY_KEY
from marq.kafka.connection import stop_consumer
from marq.kafka.paced_clients import paced
from marq.owner.engine import PositionLost
from marq.settings.topic_configs import DELETE_RETENTION_MS

if TYPE_CHECKING:
    from faust.stores import rocksdb

#: Older local files may have missed a deletion that the changelog has forgotten; they are discarded.
MAX_LOCAL_AGE_SECONDS = DELETE_RETENTION_MS / 1000 / 2

STOP_CONSUMER_SECONDS = 2.0

#: How long a read of the changelog waits for records. The end of a transaction is not returned as a record, so each
#: takeover waits this long at the end of the changelog.
READ_WAIT_MS = 50

#: Changelog records to write before yielding to other tasks: some 20 ms.
RECORDS_AT_ONCE = 5_000

#: Rows to read from RocksDB at once; each may be a message of the largest size.
ROWS_IN_MEMORY = 100

#: RocksDB's words for damaged or missing files, which no retry brings back; rocksdict has one exception for all errors.
_DAMAGED = ("Corruption", "No such file or directory")

_OPTIONS = {
    "driver": "rocksdict",
    # For each partition: Faust's defaults (2 GiB of cache, 3 memtables of 64 MiB) are for one database.
    "block_cache_size": 16 << 20,
    "write_buffer_size": 8 << 20,
}


class LocalTableError(OSError):
    """RocksDB could not be opened, read or written, as on a full disk; the changelog still has the whole table."""


class ChangelogLost(KafkaError):  # type: ignore[misc]
    """The changelog no longer has the rows that the owner has read or written."""


class LeaseTable(faust.Table[bytes, bytes]):
    """Rows of :mod:`marq.core.storage.rows`, by markers partition."""

    data: rocksdb.Store

    @cached_property
    def replayed(self) -> Counter[int]:
        """Replayed changelog records by partition: a recovery makes progress while they grow."""
        return Counter()

    @cached_property
    def damaged(self) -> set[int]:
        """Partitions with damaged local files: they can't be used until an owner or a standby recovers them."""
        return set()

    async def on_rebalance(
        self, assigned: set[TP], revoked: set[TP], newly_assigned: set[TP], generation_id: int = 0
    ) -> None:
        # Faust would open the databases now, and an error would end the worker. Owners open them, and handle errors.
        await super().on_rebalance(assigned, revoked, set(), generation_id)

    def rows(self, partition: int) -> Iterator[tuple[bytes, bytes]]:
        """Return all rows of a partition; raises LocalTableError if the disk does not return all of them."""
        others = (self.data.offset_key, IDENTITY_KEY)
        # Both other keys are among the first; comparing a million rows would cost too much.
        first = takewhile(lambda row: row[0] <= max(others), self._read(partition, b""))
        return chain([row for row in first if row[0] not in others], self._read(partition, max(others) + b"\0"))

    def _read(self, partition: int, position: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows from a key on."""
        with self._database(partition) as database:
            rows = database.items(from_key=position)
            while some := list(islice(rows, ROWS_IN_MEMORY)):
                yield from some
                position = some[-1][0] + b"\0"
            # items() ends at a row that can't be read as if it were the last one: messages would be lost.
            rest = database.iter()
            rest.seek(position)
            rest.status()
            if rest.valid():
                raise OSError("RocksDB did not return all rows")

    def get(self, partition: int, keys: list[bytes]) -> list[bytes | None]:  # type: ignore[override]
        """Return the rows of these keys, None for missing ones; raises LocalTableError if the disk can't."""
        with self._database(partition) as database:
            rows: list[bytes | None] = database.get(keys)
            return rows

    def write(self, partition: int, rows: Mapping[bytes, bytes | None], changelog_offset: int) -> None:
        """Write rows (None: delete) that the changelog has up to ``changelog_offset``, atomically.

        Raises LocalTableError if the disk did not take them; they may be written again.
        """
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, value in rows.items():
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        batch.put(self.data.offset_key, b"%d" % changelog_offset)
        with self._database(partition) as database:
            try:
                database.write(batch)
            except Exception:
                # After a failed write, RocksDB refuses all later ones, even if there is room again.
                self._close(partition)
                raise
        self._written(partition).touch()

    async def recover(self, partition: int, producer: AIOKafkaProducer, client_settings: Mapping[str, Any]) -> int:
        """Bring the local database up to the changelog's end; return the number of records replayed.

        ``producer`` is the partition's transactional one, just taken over, so it alone can write to the changelog. An
        empty changelog gets its identity from it.
        """
        source = TopicPartition(self.changelog_topic_name, partition)
        # The broker answers an offset request only after the pending fetch on the connection.
        consumer = changelog_reader(client_settings, fetch_max_wait_ms=READ_WAIT_MS)
        await consumer.start()
        try:
            consumer.assign([source])
            identity = await self._identity(consumer, source)
            if identity is None:
                return await self._begin_changelog(consumer, source, producer)
            return await self._replay(consumer, source, await self._local_start(consumer, source, identity))
        finally:
            await stop_consumer(consumer, STOP_CONSUMER_SECONDS)

    async def _begin_changelog(
        self, consumer: AIOKafkaConsumer, source: TopicPartition, producer: AIOKafkaProducer
    ) -> int:
        identity = uuid.uuid4().bytes
        async with producer.transaction():
            # No wall clock: the broker refuses records from more than an hour ahead of its own.
            sent = await producer.send(source.topic, identity, IDENTITY_KEY, source.partition, timestamp_ms=0)
        await self._local_start(consumer, source, identity)
        # Not read back: readers may see a transaction's records only some time after its commit.
        self.write(source.partition, {IDENTITY_KEY: identity}, (await sent).offset)
        return 1

    async def start_copying(self, consumer: AIOKafkaConsumer, source: TopicPartition) -> int:
        """Return the offset from which to read this part of the changelog into a local copy."""
        consumer.assign([source])
        return await self._local_start(consumer, source, await self._identity(consumer, source))

    async def _identity(self, consumer: AIOKafkaConsumer, source: TopicPartition) -> bytes | None:
        """Return the value of the changelog's first record, None if it is empty.

        Raises PositionLost if the changelog begins with rows: a worker that did not notice that the topic was recreated
        has written them, and its earlier rows are missing. Local files may still have those.
        """
        await consumer.seek_to_beginning(source)
        end = (await consumer.end_offsets([source]))[source]
        while await consumer.position(source) < end:
            for records in (await consumer.getmany(source, timeout_ms=READ_WAIT_MS, max_records=1)).values():
                if records[0].key != IDENTITY_KEY and (await consumer.beginning_offsets([source]))[source] == 0:
                    raise PositionLost(
                        f"the first record of {source.topic}/{source.partition} is not its identity: the changelog was"
                        " recreated while a worker was running, so rows are missing. Processing of this partition stays"
                        " stopped: see docs/operations/recovery.md, 'Lost data'"
                    )
                return records[0].value or b""
        return None

    async def _local_start(self, consumer: AIOKafkaConsumer, source: TopicPartition, identity: bytes | None) -> int:
        """Return where the local files end in the changelog; discard files that can't be trusted."""
        partition = source.partition
        self._discard_if_damaged(partition)
        self._discard_if_old(partition)
        start = (await consumer.beginning_offsets([source]))[source]
        end = (await consumer.end_offsets([source]))[source]
        position = self._local_position(partition)
        if position and (position > end or self.get(partition, [IDENTITY_KEY]) != [identity]):
            self.log.warning(
                "lease table: local files of partition %s belong to a changelog that was lost or recreated: rebuilding "
                "them from the current one",
                partition,
            )
            self._discard(partition)
            position = 0
        return int(max(position, start))

    async def _replay(self, consumer: AIOKafkaConsumer, source: TopicPartition, position: int) -> int:
        end = (await consumer.end_offsets([source]))[source]
        consumer.seek(source, position)
        count = 0
        while position < end:
            records = await consumer.getmany(source, timeout_ms=READ_WAIT_MS, max_records=RECORDS_AT_ONCE)
            for batch in records.values():
                self.write_records(source.partition, batch)
                count += len(batch)
                self.replayed[source.partition] += len(batch)
            position = await consumer.position(source)
        return count

    def write_records(self, partition: int, records: list[ConsumerRecord[bytes, bytes]]) -> None:
        """Write changelog records atomically with their offset.

        Raises OSError if the reader was cut off for so long that it may have missed deletions. The next reader then
        discards the files.
        """
        self._check_age(partition)
        self.write(partition, {record.key: record.value for record in records}, records[-1].offset)

    def is_current(self, partition: int, at_s: float) -> None:
        """Note that the local files had all of the changelog at a time; raises OSError like :meth:`write_records`."""
        self._check_age(partition)
        if (written := self._written(partition)).exists():
            os.utime(written, (at_s, at_s))

    def _check_age(self, partition: int) -> None:
        if self._is_old(partition):
            raise OSError(f"lease table: the local files of partition {partition} have become too old")

    def check_changelog(self, partition: int, first: int) -> None:
        """Check that new rows, the first of them at ``first``, come after those that the local files have.

        Raises ChangelogLost if they do not, and discards the files.
        """
        position = self._local_position(partition)
        if first < position:
            # The current changelog decides from which marker on the table must be rebuilt.
            self._discard(partition)
            raise ChangelogLost(
                f"{self.changelog_topic_name}/{partition} continues at {first}, although it had records up to"
                f" {position}: the topic was recreated, or lost records"
            )

    def _local_position(self, partition: int) -> int:
        written = self.get(partition, [self.data.offset_key])[0]
        return 0 if written is None else int(written) + 1

    @contextmanager
    def _database(self, partition: int) -> Iterator[Any]:
        """Yield the database of a partition; raises LocalTableError for all its errors."""
        try:
            if partition in self.damaged:
                # An empty database in their place would answer that open messages have no payload.
                raise OSError("they were found damaged before")
            yield self.data._db_for_partition(partition)
        except Exception as error:  # rocksdict raises no narrower one
            raise self._unusable(partition, error) from error

    def _unusable(self, partition: int, error: Exception) -> LocalTableError:
        if any(words in str(error) for words in _DAMAGED):
            self.damaged.add(partition)
        action = "free space there, or repair the disk; processing resumes automatically"
        if partition in self.damaged:
            action = "the worker rebuilds them from the changelog"
        return LocalTableError(
            f"lease table: the local files of partition {partition} in {self.data.partition_path(partition)} can't be"
            f" used ({error}): {action}"
        )

    def _discard_if_damaged(self, partition: int) -> None:
        if partition in self.damaged:
            self.log.warning(
                "lease table: local files of partition %s are damaged: rebuilding them from the changelog", partition
            )
            self._discard(partition)
            self.damaged.remove(partition)

    def _discard_if_old(self, partition: int) -> None:
        if self._is_old(partition):
            self.log.warning(
                "lease table: local files of partition %s are older than half of the changelog's "
                "delete.retention.ms: rebuilding them from the changelog",
                partition,
            )
            self._discard(partition)

    def _is_old(self, partition: int) -> bool:
        """Return whether the changelog may have forgotten deletions that the local files have missed."""
        written = self._written(partition)
        # Not the age of RocksDB's own files: opening the database writes some.
        return written.exists() and time.time() - written.stat().st_mtime > MAX_LOCAL_AGE_SECONDS

    def _written(self, partition: int) -> Path:
        """Return a file whose time is when its database was last written, or last had all of the changelog."""
        return Path(self.data.partition_path(partition)) / "marq-written"

    def _discard(self, partition: int) -> None:
        self._close(partition)
        shutil.rmtree(self.data.partition_path(partition), ignore_errors=True)

    def _close(self, partition: int) -> None:
        database = self.data._dbs.pop(partition, None)
        if database is not None:
            with suppress(Exception):  # it reports the failed write again, but is closed
                database.close()


class PartitionRows(NamedTuple):
    table: LeaseTable
    partition: int

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        return self.table.get(self.partition, keys)

    def write(self, changes: Mapping[bytes, bytes | None], position: int) -> None:
        self.table.write(self.partition, changes, position)


class _FencedRecovery(Recovery):
    """Lets a rebalance continue at once: the owner of each partition recovers its part of the table."""

    async def _build_highwaters(self, consumer: Any, tps: Any, destination: Any, title: str) -> None:
        destination.clear()

    async def _build_offsets(self, consumer: Any, tps: Any, destination: Any, title: str) -> None:
        destination.clear()

    async def _seek_offsets(self, consumer: Any, tps: Any, offsets: Any, title: str) -> None:
        return

    def need_recovery(self) -> bool:
        return False


class Tables(TableManager):
    """Faust's table manager, without its recovery (see the module's docstring)."""

    async def on_start(self) -> None:
        # Faust's own would wait a second for more tables; meanwhile, partitions would have no owner.
        await self._update_channels()
        await self.recovery.start()

    @property
    def recovery(self) -> Recovery:
        if self._recovery is None:
            self._recovery = _FencedRecovery(self.app, self, beacon=self.beacon, loop=self.loop)
        return self._recovery


def changelog_reader(client_settings: Mapping[str, Any], **options: Any) -> AIOKafkaConsumer:
    """Return a consumer of committed changelog records that belongs to no group."""
    return paced(
        AIOKafkaConsumer(
            enable_auto_commit=False,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            max_partition_fetch_bytes=8 << 20,
            **client_settings,
            **options,
        )
    )


def attach(app: faust.App) -> LeaseTable:
    table = LeaseTable(
        app,
        name="leases",
        key_type=bytes,
        value_type=bytes,
        options=dict(_OPTIONS),
        help="Leases of the messages in flight, delayed messages, and what each queue has acquired.",
    )
    app.tables.add(table)
    return table
