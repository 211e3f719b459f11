"""Queues' own topics that were recreated: their records have the same places as those of the former incarnation.

In the tables, the first ingested incarnation has the topic's plain name, and each later one ``NAME@ID``. Markers name
the incarnation, too. Only the ids of messages do not: a redelivery or dead letter belongs to the newest incarnation
that markers had named when it was written.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from marq.wire.names import incarnation

#: {topic: {id of an incarnation: its name in the tables}}, in the order in which they were ingested.
Names = Mapping[str, Mapping[str, str]]
#: {topic: {name of an incarnation: the time of the first marker that names it, in ms}}, without the first incarnation.
Begins = dict[str, dict[str, int]]


def with_names(markers: DataFrame, names: Names) -> DataFrame:
    """Return markers that name each incarnation as the tables do."""
    plain = {incarnation(topic, id_): name for topic, known in names.items() for id_, name in known.items()}
    return renamed(markers, {named: name for named, name in plain.items() if named != name})


def renamed(rows: DataFrame, names: Mapping[str, str]) -> DataFrame:
    """Return rows with other names of topics."""
    if not names:
        return rows
    pairs: Column = F.create_map(*[F.lit(text) for pair in names.items() for text in pair])
    return rows.withColumn("topic", F.coalesce(pairs[F.col("topic")], "topic"))


def begins(markers: DataFrame, names: Names, before: Begins) -> Begins:
    """Return when markers first named each later incarnation, in the order of time; ``before`` are earlier markers."""
    later = {topic: [name for name in known.values() if name != topic] for topic, known in names.items()}
    wanted = [name for topic, known in later.items() for name in known if name not in before.get(topic, {})]
    found: dict[str, int] = {}
    if wanted:
        chosen = markers.where(F.col("topic").isin(wanted)).groupBy("topic")
        found = {row.topic: row.ms for row in chosen.agg(F.min(F.unix_millis("logged_at")).alias("ms")).collect()}
    return {
        topic: {**before.get(topic, {}), **{name: found[name] for name in known if name in found}}
        for topic, known in later.items()
        if known
    }


def with_ids(rows: DataFrame, at: str, begins: Begins) -> DataFrame:
    """Return rows whose ids (and origins) name the incarnation; ``at`` is the column with their time."""
    for topic, known in begins.items():
        # The newest first: a renamed id is not one of the plain topic any more.
        for name, begin_ms in reversed(known.items()):
            later = F.unix_millis(at) >= begin_ms
            with_name = F.concat(F.lit(name), F.substr("id", F.lit(len(topic) + 1)))
            of_topic = F.col("id").startswith(f"{topic}/")
            rows = rows.withColumn("id", F.when(of_topic & later, with_name).otherwise(F.col("id")))
            if "origin_topic" in rows.columns:
                of_topic = F.col("origin_topic") == topic
                rows = rows.withColumn("origin_topic", F.when(of_topic & later, name).otherwise(F.col("origin_topic")))
    return rows
