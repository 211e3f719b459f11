"""Tables as ``ingest`` makes them, of seeded worlds (tests/simulation): what real trackers write under faults.

Many worlds are put side by side as partitions of their own: of world 7 partition 1 is 701, its queue ``a`` is
``a 7``, and a topic that queues name, ``own``, is ``own-7``. So one pass over the tables judges them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from marq.wire.names import Names, log_name
from pipeline import records
from pipeline.markers import _decode_all
from pipeline.subscriptions import Subscription
from pipeline.tables import MARKERS
from tests.pipeline.directory import Directory, Tables, arrow
from tests.simulation.log import Partition
from tests.simulation.world import Plan, inspect

SPREAD = 100
NAMES = Names("marq")
#: With these a tracker cannot do its work, and what it lacks the tables lack, too.
LOSSES = frozenset({"markers_gone_every_ms", "unread_gone_every_ms", "newer_marker"})
_RECORDS = "topic string, partition int, offset long, timestamp timestamp, key binary, value binary,"
_HEADERS = " headers array<struct<key: string, value: binary>>"

Row = dict[str, Any]


@dataclass
class Worlds:
    """The rows of some worlds."""

    markers: list[Row] = field(default_factory=list)
    messages: list[Row] = field(default_factory=list)
    dead_letters: list[Row] = field(default_factory=list)
    first: dict[str, dict[str, int]] = field(default_factory=dict)
    begins: dict[str, dict[str, int]] = field(default_factory=dict)
    without_dead_letters: set[str] = field(default_factory=set)
    without_order: set[str] = field(default_factory=set)
    subscriptions: list[Subscription] = field(default_factory=list)

    @classmethod
    def of(cls, *seeds: int) -> Self:
        """Return the worlds of some seeds."""
        worlds = cls()
        for seed in seeds:
            worlds.add(seed)
        return worlds

    def add(self, seed: int, plan: Plan | None = None) -> None:
        """Add the world of a seed, which must have come to its end."""
        result, _, world = inspect(seed, plan or Plan(without=LOSSES, ids=False))
        assert not result.failed, result.failed
        for source, log in world.messages.items():
            topic, number = _topic(source.topic, seed), source.partition + SPREAD * seed
            self.messages += _records(log, topic, number, seed)
            self.first.setdefault(topic, {})[str(number)] = 0
            self.begins.setdefault(topic, {})[str(number)] = log.start
        self.dead_letters += _records(world.dead_letters, world.names.dead_letters, SPREAD * seed, seed)
        for number, log in enumerate(world.markers):
            self.markers += _markers(log, number + SPREAD * seed, seed)
        pairs = set()
        for definitions in world.definitions.versions[1:]:
            for queue in world.queues:
                settings = definitions.settings(queue)
                if not settings.dead_letter:
                    self.without_dead_letters.add(f"{queue} {seed}")
                if settings.limited and not settings.ordered:
                    self.without_order.add(f"{queue} {seed}")
                if settings.topic is not None:
                    pairs.add((queue, settings.topic))
        self.subscriptions += [
            Subscription(f"{queue} {seed}", _topic(topic, seed), current=True) for queue, topic in sorted(pairs)
        ]

    def tables(self, spark: SparkSession) -> Tables:
        """Return markers, messages and dead letters."""
        messages, letters = _frame(spark, self.messages), _frame(spark, self.dead_letters)
        return Tables(
            arrow(self.markers, MARKERS),
            records.messages(messages, NAMES.messages).toArrow(),
            records.dead_letters(letters).toArrow(),
        )

    def directory(self, spark: SparkSession, path: Path, *, dated: bool = False) -> Directory:
        """Return a directory for the rows."""
        return Directory(
            spark, path, self.first, self.begins, without_dead_letters=self.without_dead_letters,
            without_order=self.without_order, subscriptions=self.subscriptions, dated=dated,
        )  # fmt: skip


def _frame(spark: SparkSession, rows: list[Row]) -> DataFrame:
    names = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
    return spark.createDataFrame([tuple(row[name] for name in names) for row in rows], _RECORDS + _HEADERS)


def _topic(topic: str, seed: int) -> str:
    """Return the name that a topic has among several worlds."""
    return f"{topic}-{seed}" if NAMES.is_senders_topic(topic) else topic


def _records(log: Partition, topic: str, number: int, seed: int) -> Iterable[Row]:
    for record in log.records:
        if record is None or not record.committed:
            continue
        headers = [(n, _moved_value(n, v, seed)) for n, v in record.headers]
        key = record.key and record.key + f" {seed}".encode()
        yield {
            "topic": topic,
            "partition": number,
            "offset": record.offset,
            "timestamp": datetime.fromtimestamp(record.timestamp / 1000, UTC),
            "key": key,
            "value": record.value,
            "headers": headers,
        }


def _markers(log: Partition, number: int, seed: int) -> Iterable[Row]:
    found = [record for record in log.records if record is not None and record.committed]
    table = pa.record_batch(
        {
            "partition": pa.array([number] * len(found), pa.int32()),
            "offset": pa.array([record.offset for record in found], pa.int64()),
            "timestamp": pa.array([record.timestamp * 1000 for record in found], pa.timestamp("us", "UTC")),
            "value": pa.array([record.value for record in found], pa.binary()),
        }
    )
    for rows in _decode_all([table]):
        for row in rows.to_pylist():
            if row["error"] is None:
                yield _moved_row(row, seed)


def _moved_row(row: Row, seed: int) -> Row:
    if row["topic"] is None:
        return row
    # No topic is recreated, so that its name tells it.
    moved = {"topic": _topic(log_name(row["topic"]), seed), "partition": row["partition"] + SPREAD * seed}
    if row["queue"]:
        moved["queue"] = f"{row['queue']} {seed}"
    if row["id"] is not None:
        moved["id"] = _moved(row["id"], seed)
    return {**row, **moved}


def _moved_value(name: str, value: bytes | None, seed: int) -> bytes | None:
    if name in ("marq-id", "marq-origin") and value is not None:
        return _moved(value.decode(), seed).encode()
    return value


def _moved(place: str, seed: int) -> str:
    """Return a place with the partition that it has among several worlds."""
    parts = re.fullmatch(r"(.+)/(\d+)/(\d+)", place)
    assert parts is not None
    return f"{_topic(parts[1], seed)}/{int(parts[2]) + SPREAD * seed}/{parts[3]}"
