"""Queues' own topics that were recreated: their records have the same places as those of the former incarnation.

In the tables, the first ingested incarnation has the topic's plain name, and each later one ``NAME@ID``. Markers name
the incarnation, too. Only the ids of messages do not: a redelivery or dead letter belongs to the newest incarnation
that markers had named when it was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from marq.wire.names import incarnation

#: {topic: {id of an incarnation: its name in the tables}}, in the order in which they were ingested.
Names = Mapping[str, Mapping[str, str]]
#: {topic: {name of an incarnation: the time of the first marker that names it, in ms}}, without the first incarnation.
Begins = dict[str, dict[str, int]]


def named(names: Names) -> Column:
    """Return the topic of a marker, with each incarnation named as in the tables."""
    plain = {incarnation(topic, id_): name for topic, known in names.items() for id_, name in known.items()}
    return renamed({full: name for full, name in plain.items() if full != name})


def renamed(names: Mapping[str, str]) -> Column:
    """Return the column ``topic`` with other names of topics."""
    pairs = F.create_map(*[F.lit(text) for pair in names.items() for text in pair])
    return F.coalesce(pairs[F.col("topic")], "topic") if names else F.col("topic")


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
    id_ = F.col("id")
    for topic, name, later in _later(at, begins):
        with_name = F.concat(F.lit(name), F.substr(id_, F.lit(len(topic) + 1)))
        id_ = F.when(id_.startswith(f"{topic}/") & later, with_name).otherwise(id_)
    rows = rows.withColumn("id", id_)
    return rows.withColumn("origin_topic", origin(at, begins)) if "origin_topic" in rows.columns else rows


def origin(at: str, begins: Begins) -> Column:
    """Return the column ``origin_topic``, with each incarnation named as in the tables."""
    origin_topic = F.col("origin_topic")
    for topic, name, later in _later(at, begins):
        origin_topic = F.when((origin_topic == topic) & later, name).otherwise(origin_topic)
    return origin_topic


def _later(at: str, begins: Begins) -> Iterator[tuple[str, str, Column]]:
    """Yield each later incarnation: its topic, its name, and whether markers had named it at a row's time.

    The newest comes first: a name that was replaced is not that of the plain topic any more.
    """
    for topic, known in begins.items():
        for name, begin_ms in reversed(known.items()):
            yield topic, name, F.unix_millis(at) >= begin_ms
