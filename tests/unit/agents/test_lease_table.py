"""The lease table on a damaged disk: no row is lost silently, and the changelog replaces damaged files."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import faust
import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaTimeoutError
from faust.types import TP

from marq.core.storage import rows
from marq.core.storage.log_clock import LogClock
from marq.core.storage.rows import IDENTITY_KEY, LeaseRow
from marq.core.storage.table_image import Restoration
from marq.owner.engine import PositionLost
from marq.wire.markers import Payload, Source
from marq_worker.tables import leases
from marq_worker.tables.leases import ChangelogLost, LeaseTable, LocalTableError
from marq_worker.tables.standby import Standby

SOURCE = Source("t.messages", 0)
LEASES = 5_000


def row_key(number: int) -> bytes:
    return rows.row_key("emails", SOURCE, number)


def attached(directory: Path) -> LeaseTable:
    app = faust.App("t", store="rocksdb://", TableManager=leases.Tables, datadir=str(directory))
    return leases.attach(app)


@pytest.fixture
def table(tmp_path: Path) -> LeaseTable:
    """A table of many leases, all in one file of RocksDB."""
    table = attached(tmp_path)
    lease = rows.encode_lease(LeaseRow("emails", 1, 1, 1000, 0))
    content = {row_key(number): rows.encode_row(lease, payload()) for number in range(LEASES)}
    table.write(0, {IDENTITY_KEY: b"x" * 16, rows.APPLIED_KEY: rows.encode_applied(123, LogClock()), **content}, 9)
    table.data._db_for_partition(0).flush()
    return table


def payload() -> Payload:
    return Payload(0, 1, None, (), os.urandom(100))


def files(table: LeaseTable, kind: str) -> list[Path]:
    return sorted(Path(table.data.partition_path(0)).glob(kind), key=lambda path: path.stat().st_size)


def damage(table: LeaseTable) -> None:
    """Overwrite some bytes in the middle of the largest file, and reopen it."""
    table._close(0)
    file = files(table, "*.sst")[-1]
    with file.open("r+b") as content:
        content.seek(file.stat().st_size // 2)
        content.write(os.urandom(64))


def restored(table: LeaseTable) -> int:
    restoration = Restoration()
    for _ in restoration.read(table.rows(0)):
        pass
    assert restoration.applied == 123
    return sum(map(len, restoration.leases.values()))


def test_all_rows_are_restored_but_the_local_databases_own(table: LeaseTable) -> None:
    assert restored(table) == LEASES


def test_a_damaged_block_does_not_cut_the_table_short(table: LeaseTable) -> None:
    damage(table)

    with pytest.raises(LocalTableError, match="rebuilds them from the changelog"):
        restored(table)


def test_a_read_that_ends_before_the_last_row_is_an_error(table: LeaseTable) -> None:
    """As after an I/O error that does not occur again."""
    database = table.data._db_for_partition(0)

    class EndsEarly:
        def items(self, from_key: bytes) -> Any:
            return iter(list(database.items(from_key=from_key))[:-1])

        def iter(self) -> Any:
            return database.iter()

    table.data._dbs[0] = EndsEarly()

    with pytest.raises(LocalTableError, match="did not return all rows"):
        restored(table)
    assert table.damaged == set()


def get_all(table: LeaseTable) -> object:
    return table.get(0, [row_key(number) for number in range(LEASES)])


def remove_manifest(table: LeaseTable) -> None:
    table._close(0)
    files(table, "MANIFEST-*")[0].unlink()


def damage_manifest(table: LeaseTable) -> None:
    table._close(0)
    files(table, "MANIFEST-*")[0].write_bytes(b"damaged")


class Changelog:
    """A changelog from offset 0 to 10."""

    async def beginning_offsets(self, sources: object) -> Any:
        return defaultdict(int)

    async def end_offsets(self, sources: object) -> Any:
        return defaultdict(lambda: 10)


@pytest.mark.parametrize("harm", [damage, damage_manifest, remove_manifest])
async def test_damaged_files_are_rebuilt_and_not_used_before(
    table: LeaseTable, harm: Callable[[LeaseTable], None]
) -> None:
    """An empty database in their place would answer that open messages have no payload."""
    harm(table)

    for _ in range(2):
        with pytest.raises(LocalTableError, match="rebuilds them from the changelog"):
            get_all(table)
    with pytest.raises(LocalTableError):
        table.write(0, {b"r": b""}, 10)
    source: Any = TopicPartition("t.changelog", 0)
    consumer: Any = Changelog()

    assert await table._local_start(consumer, source, b"x" * 16) == 0
    assert list(table.rows(0)) == []
    assert table.get(0, [row_key(0)]) == [None]


async def test_sound_files_are_kept(table: LeaseTable) -> None:
    source: Any = TopicPartition("t.changelog", 0)
    consumer: Any = Changelog()

    assert await table._local_start(consumer, source, b"x" * 16) == 10
    assert restored(table) == LEASES


class BeginsWithRow(Changelog):
    """A changelog without an identity: the owner did not notice that it was recreated."""

    def __init__(self, start: int) -> None:
        self._start = start

    async def beginning_offsets(self, sources: object) -> Any:
        return defaultdict(lambda: self._start)

    async def seek_to_beginning(self, source: object) -> None: ...

    async def position(self, source: object) -> int:
        return self._start

    async def getmany(self, source: object, **_: object) -> Any:
        return {source: [SimpleNamespace(key=row_key(7), value=b"row", offset=self._start)]}


async def test_a_changelog_that_begins_with_a_row_replaces_no_local_files(table: LeaseTable) -> None:
    source: Any = TopicPartition("t.changelog", 0)
    consumer: Any = BeginsWithRow(0)

    with pytest.raises(PositionLost, match="recreated while a worker was running"):
        await table._identity(consumer, source)

    assert restored(table) == LEASES


async def test_a_changelog_whose_first_records_were_deleted_may_begin_with_a_row(table: LeaseTable) -> None:
    source: Any = TopicPartition("t.changelog", 0)
    consumer: Any = BeginsWithRow(5)

    assert await table._identity(consumer, source) == b"row"


def test_rows_must_come_after_those_that_the_local_files_have(table: LeaseTable) -> None:
    table.check_changelog(0, 10)
    assert restored(table) == LEASES

    with pytest.raises(ChangelogLost, match="continues at 9, although it had records up to 10"):
        table.check_changelog(0, 9)

    assert list(table.rows(0)) == []


class OneMoreRecord(Changelog):
    """A changelog with one record more than the local files have."""

    def __init__(self) -> None:
        self._at = 0

    def seek(self, source: object, position: int) -> None:
        self._at = position

    async def position(self, source: object) -> int:
        return self._at

    async def getmany(self, *_: object, **__: object) -> Any:
        self._at = 11
        return {TopicPartition("t.changelog", 0): [SimpleNamespace(key=row_key(0), value=None, offset=10)]}

    async def end_offsets(self, sources: object) -> Any:
        return defaultdict(lambda: 11)


async def copy(table: LeaseTable, consumer: Any) -> None:
    await Standby(table, {}, 1)._copy(consumer, {TopicPartition("t.changelog", 0): 10})


async def replay(table: LeaseTable, consumer: Any) -> None:
    await table._replay(consumer, TopicPartition("t.changelog", 0), 10)


@pytest.mark.parametrize("reader", [copy, replay])
async def test_a_reader_that_was_cut_off_for_days_does_not_bring_old_files_up_to_date(
    table: LeaseTable, reader: Callable[[LeaseTable, Any], Awaitable[None]]
) -> None:
    """The changelog may have forgotten deletions that it has missed, so finished messages would be open again."""
    written = table._written(0)
    old_s = written.stat().st_mtime - 4 * 24 * 3600
    os.utime(written, (old_s, old_s))

    with pytest.raises(OSError, match="too old"):
        await reader(table, OneMoreRecord())

    assert restored(table) == LEASES
    assert written.stat().st_mtime == old_s
    consumer: Any = Changelog()
    source: Any = TopicPartition("t.changelog", 0)
    assert await table._local_start(consumer, source, b"x" * 16) == 0


class QuietChangelog(Changelog):
    """A changelog without new records; later the standby is stopped."""

    def __init__(self, position: int, *, reads: int = 1, cut_off: bool = False) -> None:
        self._at = position
        self._reads = reads
        self._cut_off = cut_off

    async def position(self, source: object) -> int:
        return self._at

    async def getmany(self, *_: object, **__: object) -> Any:
        self._reads -= 1
        if self._reads < 0:
            raise asyncio.CancelledError
        return {}

    async def end_offsets(self, sources: object) -> Any:
        if self._cut_off:
            raise KafkaTimeoutError
        return defaultdict(lambda: 10)


def aged(table: LeaseTable, days: float) -> float:
    written = table._written(0)
    at_s = written.stat().st_mtime - days * 24 * 3600
    os.utime(written, (at_s, at_s))
    return at_s


async def test_the_copy_of_a_quiet_partition_stays_young(table: LeaseTable) -> None:
    aged(table, 3)
    before_s = int(time.time())

    with pytest.raises(asyncio.CancelledError):
        await copy(table, QuietChangelog(10))

    assert table._written(0).stat().st_mtime >= before_s
    # The next record is written, although three more days have passed.
    aged(table, 3)
    with pytest.raises(asyncio.CancelledError):
        await copy(table, QuietChangelog(10))
    table.write_records(0, [SimpleNamespace(key=b"r", value=b"", offset=10)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "changelog",
    [QuietChangelog(9, reads=1), QuietChangelog(11, reads=1)],
    ids=["behind", "recreated"],
)
async def test_a_copy_that_is_not_at_the_end_of_its_changelog_ages(table: LeaseTable, changelog: Any) -> None:
    aged_s = aged(table, 3)

    with pytest.raises(asyncio.CancelledError):
        await copy(table, changelog)

    assert table._written(0).stat().st_mtime == aged_s


async def test_a_copy_that_is_cut_off_ages(table: LeaseTable) -> None:
    aged_s = aged(table, 3)

    await Standby(table, {}, 1)._note_current(
        cast("Any", QuietChangelog(10, cut_off=True)), [TopicPartition("t.changelog", 0)]
    )

    assert table._written(0).stat().st_mtime == aged_s


async def test_a_copy_that_was_cut_off_for_days_is_discarded_even_if_nothing_is_left_to_read(table: LeaseTable) -> None:
    """The deletions that it has missed may be what is no longer there."""
    aged_s = aged(table, 4)

    with pytest.raises(OSError, match="too old"):
        await copy(table, QuietChangelog(10))

    assert table._written(0).stat().st_mtime == aged_s


async def test_a_rebalance_does_not_fail_because_of_damaged_files(
    table: LeaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faust would open them, and an error would end the worker each time it starts."""
    damage_manifest(table)
    assigned = {TP(table.changelog_topic_name, 0)}
    monkeypatch.setattr(table.app.assignor, "assigned_standbys", set)

    await table.on_rebalance(assigned, set(), assigned, 1)

    with pytest.raises(LocalTableError):
        get_all(table)
