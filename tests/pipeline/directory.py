"""A data directory as ``ingest`` leaves it, with rows of a test."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from pipeline.lake import ROUNDS, Lake
from pipeline.lifecycle_runs import Run
from pipeline.subscriptions import Subscription
from pipeline.tables import DAYS, LIFECYCLE_TABLE, STREAMS

Offsets = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Tables:
    """Ingested rows, in the order of their logs."""

    markers: pa.Table
    messages: pa.Table
    dead_letters: pa.Table


def arrow(rows: Sequence[dict[str, Any]], schema: StructType) -> pa.Table:
    """Return rows as a table; missing values are null."""
    whole = [{name: row.get(name) for name in schema.names} for row in rows]
    return pa.Table.from_pylist(whole, to_arrow_schema(schema, timezone="UTC"))


@dataclass
class Directory:
    """Rounds of ``ingest``, without Kafka."""

    spark: SparkSession
    path: Path
    #: Properties of the rounds' commits.
    first: Offsets = field(default_factory=dict)
    begins: Offsets = field(default_factory=dict)
    held_back: Collection[str] = ()
    without_dead_letters: Collection[str] = ()
    without_order: Collection[str] = ()
    backoffs: Mapping[str, int] = field(default_factory=lambda: {"*": 600_000})
    paused_at: Mapping[str, int] = field(default_factory=lambda: {"*": 0})
    truncated: bool = False
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    gaps: Sequence[tuple[str, int, int, int]] = ()
    compacted: Sequence[str] = ()
    quarantined: Sequence[str] = ()
    subscriptions: Sequence[Subscription] = ()
    #: Write a directory for each date, as ``ingest`` does.
    dated: bool = False

    def __post_init__(self) -> None:
        self.lake = Lake(self.spark, str(self.path))
        self.lake.belong("cluster", "marq")
        self._batches = dict.fromkeys(STREAMS, -1)
        self._rounds = 0

    def _parts(self, rows: pa.Table, day_of: str) -> Iterator[tuple[str, pa.Table]]:
        if not self.dated:
            yield "", rows
            return
        dates = pc.strftime(rows[day_of], format="%Y-%m-%d")
        for date in dates.unique().to_pylist():
            yield f"date={date}", rows.filter(pc.equal(dates, date))

    def lifecycle(self, tables: Tables) -> DataFrame:
        """Add a round with some rows, run ``lifecycle``, and return its table."""
        self.bring(tables)
        Run(self.spark, self.lake).take()
        return self.lake.read(LIFECYCLE_TABLE)

    def bring(self, tables: Tables) -> None:
        """Add a round with some rows."""
        for stream in STREAMS:
            rows: pa.Table = getattr(tables, stream)
            self._batches[stream] += 1
            number = self._batches[stream]
            stage = Path(self.lake.stage(stream, number).removeprefix("file:"))
            stage.mkdir(parents=True)
            for folder, part in self._parts(rows, DAYS[stream]):
                (stage / folder).mkdir(exist_ok=True)
                pyarrow.parquet.write_table(part, stage / folder / "part-0.parquet")
            self.lake.publish(stream, number, {stream: ""}, {})
        round_ = {
            "last": dict(self._batches),
            "begins": self.begins,
            "first": {"messages": self.first, "markers": {"marq.markers": {"0": int(self.truncated)}}},
            "held_back": sorted(self.held_back),
            "without_dead_letters": sorted(self.without_dead_letters),
            "with_order": [],
            "without_order": sorted(self.without_order),
            "deduplication_windows": {"*": 300_000},
            "shortest_deduplication_windows": {"*": 300_000},
            "backoffs": self.backoffs,
            "paused_at": self.paused_at,
            "subscriptions": [each.document() for each in self.subscriptions],
            "names": self.names,
            "gaps": {**dict.fromkeys(STREAMS, ()), "messages": self.gaps},
            "compacted": self.compacted,
            "quarantined": self.quarantined,
            "unread": {},
        }
        self.lake.publish(ROUNDS, self._rounds, {}, round_)
        self._rounds += 1
