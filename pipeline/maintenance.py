"""Merges small files of tables whose rows the lifecycle has processed, and removes old history.

Each batch of ``ingest``, and each run of ``lifecycle``, leaves at least one file for each date. A merge replaces
neighbouring batches by one with their rows. It has the number of the last of them, so readers that know batches by
their numbers read the same rows as before: the next run of ``lifecycle`` reads only later batches.

The history of old messages (:mod:`pipeline.removal`) is removed by the same exchange of batches, and then from the
lifecycle. If a run dies in between, the next one finds the messages in the lifecycle again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline import live_windows
from pipeline.errors import PipelineError
from pipeline.lake import MAINTAIN, ROUNDS, Commit, Lake, batch_place
from pipeline.lifecycle import LIFECYCLE
from pipeline.lifecycle_runs import TABLE, last_run, rewrite_closed
from pipeline.record_parts import PLACE
from pipeline.removal import Removal
from pipeline.tables import DAYS, STREAMS

#: The columns by which rows are ordered, in ``ingest``'s tables as it reads them.
_ORDER = {
    "markers": ("log_partition", "log_offset", "index"),
    "messages": PLACE,
    "dead_letters": PLACE,
    TABLE: ("queue", "id"),
}
#: Columns that Spark makes of the names of directories.
_FOLDERS = ("side", "batch", "date")


@dataclass(frozen=True)
class TableDirectory:
    """A directory of a table: a batch, or one of closed messages."""

    place: str
    files: int
    bytes: int
    dates: frozenset[str]


@dataclass(frozen=True)
class Merge:
    """Directories of a table that become one."""

    table: str
    batches: tuple[TableDirectory, ...]

    @property
    def places(self) -> list[str]:
        return [batch.place for batch in self.batches]

    @property
    def bytes(self) -> int:
        return sum(batch.bytes for batch in self.batches)


@dataclass
class TableUsage:
    """Files and bytes of a table before and after a run; those after a dry run are None."""

    directories: int = 0
    files: int = 0
    bytes: int = 0
    rows_removed: int = 0
    files_after: int | None = None
    bytes_after: int | None = None


@dataclass
class MaintenanceResult:
    """What a run did, or would do, for each table."""

    usage: dict[str, TableUsage] = field(default_factory=dict)
    messages_removed: int = 0


def merges(
    table: str, batches: Sequence[TableDirectory], target_bytes: int, changed: Collection[str] = frozenset()
) -> list[Merge]:
    """Return which neighbouring batches to merge, so that the bytes of each merge are at most the target.

    ``changed`` are the places of batches that lose rows, so that they are written again in any case.
    """
    groups: list[list[TableDirectory]] = [[]]
    for batch in batches:
        if sum(one.bytes for one in groups[-1]) + batch.bytes > target_bytes:
            groups.append([])
        groups[-1].append(batch)
    return [Merge(table, tuple(group)) for group in groups if _is_worthwhile(group, target_bytes, changed)]


def _is_worthwhile(group: Sequence[TableDirectory], target_bytes: int, changed: Collection[str]) -> bool:
    if len(group) != 1 or group[0].place in changed:
        return len(group) > 0
    [batch] = group
    return batch.bytes <= target_bytes and batch.files > max(1, len(batch.dates))


class Maintenance:
    """A run of ``maintain``; ``say`` is called with each step."""

    def __init__(
        self, spark: SparkSession, lake: Lake, target_bytes: int, say: Callable[[str], None] = lambda _: None
    ) -> None:
        if not lake.path.startswith("file:"):
            raise PipelineError(
                f"{lake.path}: maintain needs a data directory on this machine or on a mounted file system, because it"
                " locks the directory and renames its parts atomically"
            )
        self._spark = spark
        self._lake = lake
        self._target_bytes = target_bytes
        self._say = say

    def run(self, *, older_ms: int | None = None, now_ms: int = 0, dry_run: bool = False) -> MaintenanceResult:
        """Merge what is worthwhile, and remove the history of messages that ended this long ago; or only return it.

        Raises:
            PipelineError: there is no lifecycle yet, or another ``maintain`` or ``lifecycle`` is running, or the age is
                not longer than a deduplication window.
        """
        if dry_run:
            return self._planned(older_ms, now_ms)[1]
        # Before the locks, which would make a directory.
        last_run(self._lake)
        # The lock of the lifecycle, which reads the same batches.
        with self._lake.alone(MAINTAIN), self._lake.alone(TABLE):
            if self._lake.finish():
                self._say("finished a run that was interrupted")
            self._clean()
            plan, result, removal = self._planned(older_ms, now_ms)
            self._merge_batches([merge for merge in plan if merge.table != TABLE], result, removal)
            self._merge_closed([merge for merge in plan if merge.table == TABLE], result, removal)
        return result

    def _planned(self, older_ms: int | None, now_ms: int) -> tuple[list[Merge], MaintenanceResult, Removal | None]:
        run = last_run(self._lake)
        removal = None
        if older_ms is not None:
            self._say("choosing the messages to remove")
            round_ = self._lake.last_commit(ROUNDS)
            assert round_ is not None, "the lifecycle has processed a round"
            before_ms = now_ms - older_ms
            removal = Removal(self._spark, self._lake, run, round_, older_ms=older_ms, before_ms=before_ms)
        result = MaintenanceResult()
        # A batch with rows that the live windows have counted, and others, would be counted twice.
        live = self._lake.last_commit(live_windows.TABLE)
        plan: list[Merge] = []
        for table, schema in STREAMS.items():
            last = run["last"][table] if live is None else min(run["last"][table], live["last"][table])
            changed: dict[str, int] = {}
            if removal is not None:
                rows = removal.changed_batches(table, self._lake.table(table, schema, last))
                changed = {batch_place(table, number): count for number, count in rows.items()}
            places = [batch_place(table, number) for number in self._lake.batches(table, last)]
            plan += self._merges(table, places, changed, result)
        changed = {} if removal is None else removal.changed()
        plan += self._merges(TABLE, run["closed"], changed, result)
        result.messages_removed = 0 if removal is None else removal.count()
        return plan, result, removal

    def _merges(
        self, table: str, places: Sequence[str], changed: Mapping[str, int], result: MaintenanceResult
    ) -> list[Merge]:
        found = merges(table, [self._batch(place) for place in places], self._target_bytes, changed)
        result.usage[table] = TableUsage(
            directories=sum(len(merge.batches) for merge in found),
            files=sum(batch.files for merge in found for batch in merge.batches),
            bytes=sum(merge.bytes for merge in found),
            rows_removed=sum(changed.values()),
        )
        return found

    def _clean(self) -> None:
        """Delete what an interrupted run left: staged files, and directories of closed messages without a commit."""
        for stream in (MAINTAIN, TABLE):
            self._lake.clean(stream)
        commit = last_run(self._lake)
        used = {*commit["places"], *commit["garbage"]}
        for side in self._lake.names(TABLE):
            for batch in self._lake.names(f"{TABLE}/{side}"):
                if f"{TABLE}/{side}/{batch}" not in used:
                    self._lake.delete(f"{TABLE}/{side}/{batch}")

    def _batch(self, place: str) -> TableDirectory:
        files, bytes_ = self._lake.usage(place)
        dates = frozenset(name for name in self._lake.names(place) if name.startswith("date="))
        return TableDirectory(place, files, bytes_, dates)

    def _merge_batches(self, plan: Sequence[Merge], result: MaintenanceResult, removal: Removal | None) -> None:
        if not plan:
            return
        before = self._lake.last_commit(MAINTAIN)
        number = 0 if before is None else before["batch"] + 1
        stage = self._lake.stage(MAINTAIN, number)
        swaps = [self._staged(merge, stage, removal) for merge in plan]
        self._say("exchanging the files")
        # Once history is gone, a lifecycle that is computed again needs what earlier ones knew.
        removed = (before or {}).get("removed", False) or result.messages_removed > 0
        self._lake.exchange(number, swaps, {"removed": removed})
        for swap in swaps:
            if swap["target"] is not None:
                self._measure(swap["table"], batch_place(swap["table"], swap["target"]), result)

    def _staged(self, merge: Merge, stage: str, removal: Removal | None) -> Commit:
        self._say(f"merging directories of {merge.table}: {len(merge.batches):,}")
        numbers = [int(place.rpartition("batch=")[2]) for place in merge.places]
        # A batch of aborted records has no files.
        paths = [f"{self._lake.path}/{batch.place}" for batch in merge.batches if batch.files]
        left = 0
        if paths:
            # The files of one table may lack columns that others have, such as those of ingest's --payload.
            reader = self._spark.read.option("mergeSchema", "true")
            rows = reader.option("basePath", f"{self._lake.path}/{merge.table}").parquet(*paths)
            rows = rows if removal is None else removal.without(merge.table, rows)
            left = self._write(rows, merge, f"{stage}/{batch_place(merge.table, numbers[-1])}")
        return {"table": merge.table, "sources": numbers, "target": numbers[-1] if left else None}

    def _merge_closed(self, plan: Sequence[Merge], result: MaintenanceResult, removal: Removal | None) -> None:
        if not plan:
            return
        former = last_run(self._lake)
        number = former["batch"] + 1
        stage = self._lake.stage(TABLE, number)
        replaced: list[tuple[list[str], str | None]] = []
        for index, merge in enumerate(plan):
            self._say(f"merging directories of {merge.table}: {len(merge.batches):,}")
            rows = self._lake.files(LIFECYCLE, merge.places)
            rows = rows if removal is None else removal.without_messages(rows)
            name = f"merged-{index}"
            left = self._write(rows, merge, f"{stage}/{name}")
            replaced.append((merge.places, name if left else None))
        removed = former["removed"]
        if removal is not None and result.messages_removed:
            before_ms = max(removed["before_ms"] or 0, removal.before_ms)
            removed = {"messages": removed["messages"] + result.messages_removed, "before_ms": before_ms}
        rewrite_closed(self._lake, former, replaced, removed)
        for name in (name for _, name in replaced if name is not None):
            self._measure(TABLE, batch_place(f"{TABLE}/side={name}", number), result)

    def _write(self, rows: DataFrame, merge: Merge, path: str) -> int:
        """Write the rows of a merge, and return their number; if it is not too large, in one file for each date.

        Raises:
            PipelineError: not all rows were written.
        """
        count = rows.count()
        if not count:
            return 0
        order = _ORDER[merge.table]
        dated = rows.drop(*_FOLDERS).withColumn("date", F.to_date(DAYS.get(merge.table, "sent_at")))
        parts = math.ceil(merge.bytes / self._target_bytes)
        spread = dated.repartitionByRange(parts, "date", *order) if parts > 1 else dated.repartition(1)
        spread.sortWithinPartitions("date", *order).write.partitionBy("date").parquet(path)
        written = int(self._spark.read.parquet(path).count())
        if written != count:
            raise PipelineError(
                f"{merge.table}: {written:,} of {count:,} rows were written, so nothing was changed: do other programs"
                f" write to {self._lake.path}?"
            )
        return written

    def _measure(self, table: str, place: str, result: MaintenanceResult) -> None:
        files, bytes_ = self._lake.usage(place)
        usage = result.usage[table]
        usage.files_after = (usage.files_after or 0) + files
        usage.bytes_after = (usage.bytes_after or 0) + bytes_
