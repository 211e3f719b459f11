"""A lifecycle that an earlier release wrote, without columns that this one has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from pipeline.audit import judged
from pipeline.lake import Lake
from pipeline.lifecycle_runs import TABLE, Run
from tests.pipeline.directory import Directory
from tests.pipeline.stories import MESSAGES_TOPIC, Log

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]


def story() -> list[Log]:
    """Three rounds: an ordered message that is released three times and acked in the second one, and others."""
    first = Log()
    second = Log(after=first)
    third = Log(after=second)
    for offset in (0, 1):
        first.record(offset, 1)
    first.say("ACQUIRE", 0, 2)
    first.say("ACK", 0, 3)
    for attempt in (1, 2, 3):
        first.say("ACQUIRE", 1, 2 * attempt, attempt=attempt, in_order=True)
        first.say("RELEASE", 1, 2 * attempt + 1, counted=True)
    first.say("TICK", None, 9, None, queue=None)
    second.say("ACQUIRE", 1, 10, attempt=4, in_order=True)
    second.say("ACK", 1, 11)
    second.say("TICK", None, 11.5, None, queue=None)
    third.record(2, 12)
    third.say("TICK", None, 13, None, queue=None)
    return [first, second, third]


def of_an_earlier_release(spark: SparkSession, lake: Lake) -> list[str]:
    """Remove newer columns from the table, and return its directories."""
    commit = lake.last_commit(TABLE)
    assert commit is not None
    rows = spark.read.parquet(f"{lake.path}/{commit['open']}")
    rows = rows.withColumn("parts", F.transform("parts", lambda part: part.dropFields("releases")))
    rows = rows.withColumn("deliveries", F.transform("deliveries", lambda delivery: delivery.dropFields("expirations")))
    earlier = f"{TABLE}/side=open/earlier"
    rows.write.parquet(f"{lake.path}/{earlier}")
    schema = StructType([field for field in StructType.fromJson(commit["schema"]) if field.name != "deliveries"])
    places = [*commit["closed"], earlier]
    older: dict[str, Any] = {"open": earlier, "places": places, "schema": schema.jsonValue()}
    lake.publish(TABLE, commit["batch"], {}, {**commit, **older})
    return places


@pytest.mark.parametrize("name", ["parts", "rules"])
def test_a_table_with_other_parts_or_rules_is_computed_again(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Messages that are carried forward would keep what they had by the former rules."""
    directory = Directory(spark, tmp_path, {MESSAGES_TOPIC: {"0": 0}})
    lake = directory.lake
    directory.lifecycle(story()[0].tables())
    commit = lake.last_commit(TABLE)
    assert commit is not None
    lake.publish(TABLE, commit["batch"], {}, {**commit, "basis": {**commit["basis"], name: None}})

    said: list[str] = []
    Run(spark, lake, said.append).take()

    assert said[0] == "computing all messages again, because an earlier release wrote the table"
    said.clear()
    Run(spark, lake, said.append).take()
    assert said == []


def test_releases_before_an_upgrade_are_no_duplicates(spark: SparkSession, tmp_path: Path) -> None:
    first, second, third = story()
    directory = Directory(spark, tmp_path, {MESSAGES_TOPIC: {"0": 0}})
    lake = directory.lake
    directory.lifecycle(first.tables())
    former = of_an_earlier_release(spark, lake)

    directory.bring(second.tables())
    said: list[str] = []
    Run(spark, lake, said.append).take()

    rows = {row.id: row for row in judged(lake.read(TABLE)).collect()}
    assert {id_: (row.state, row.duplicates, row.differences) for id_, row in rows.items()} == {
        f"{MESSAGES_TOPIC}/0/{offset}": ("acked", 0, 0) for offset in (0, 1)
    }
    assert said[0] == "computing all messages again, because an earlier release wrote the table"
    assert all(lake.exists(place) for place in former), "readers may still use these"

    assert directory.lifecycle(third.tables()).count() == 3
    assert not any(lake.exists(place) for place in former)
