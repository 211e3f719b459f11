"""``audit``: proves that no message was lost, queue by queue, and lists differences.

Updates the lifecycle first. Exit code 1, with the ids, if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from marq.wire.names import Names
from pipeline.audit import CAUSES, COUNTS, MAX_IDS, between, chosen, judged, remarkable, verdict
from pipeline.errors import PipelineError
from pipeline.ingest import digest_of_record
from pipeline.lake import ROUNDS, Commit, Lake
from pipeline.lifecycle_runs import TABLE, Run, last_run
from pipeline.session import session
from pipeline.spans import moment_ms, show_moment
from pipeline.tables import CORRUPT

#: Printed ids; the table ``audit`` has all of them.
MAX_LISTED = 20
HANDLED = "handled"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queue", help="only this queue")
    parser.add_argument("--from", dest="begin", metavar="TIME", help="start of the sending times (ISO 8601, UTC)")
    parser.add_argument("--to", dest="end", metavar="TIME", help="end of the sending times, excluded")
    parser.add_argument("--drained", action="store_true", help="report open messages as differences")
    parser.add_argument("--handled", metavar="PATH", help="Parquet or JSON with the deliveries that handlers finished")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")


def run(options: argparse.Namespace) -> int:
    begin, end = moment_ms("--from", options.begin), moment_ms("--to", options.end)
    spark = session("audit")
    lake = Lake(spark, options.data)
    say = (lambda text: None) if options.json else (lambda text: print(f"  {text}", file=sys.stderr, flush=True))
    Run(spark, lake, say).take()
    handled = _handled(spark, lake, options.handled)
    rows = judged(chosen(lake.read(TABLE), options.queue, begin, end), handled)
    # Computed once: the verdict asks for the same rows.
    few = remarkable(rows, drained=options.drained).cache()
    round_ = lake.last_commit(ROUNDS) or {}
    result = verdict(rows, corrupt=_corrupt(lake, round_, begin, end), drained=options.drained)
    if options.queue is not None and not result["queues"]:
        raise PipelineError(f"queue {options.queue!r}: no message of it was ingested in that time; check the name")
    # Records that are in no table: retention removed them before they were ingested, or their topic cannot be read.
    result["gaps"] = [gap for gaps in round_["gaps"].values() for gap in gaps]
    result["unread_topics"] = round_["unread"]
    result["removed"] = last_run(lake)["removed"]
    result["duplicates_by"] = "deliveries" if handled is None else "handlers"
    lake.write("audit", few)
    if options.json:
        print(json.dumps(result))
    else:
        _show(result)
    return 0 if result["right"] else 1


def _show(result: dict[str, Any]) -> None:
    always = ("sent", "acked", "dead", "open", "lost", "duplicates")
    names = [name for name in COUNTS if result[name] or name in always]
    wide = max([len(queue) for queue in result["queues"]] + [5])
    print("  ".join(["queue".ljust(wide), *[name.rjust(max(len(name), 9)) for name in names]]))
    for queue, counts in [*result["queues"].items(), ("all", result)]:
        print("  ".join([queue.ljust(wide), *[f"{counts[name]:,}".rjust(max(len(name), 9)) for name in names]]))
    for cause, count in result["causes"].items():
        print(f"{count:,} duplicates, cause {CAUSES[cause]}")
    for message in result["wrong"][:MAX_LISTED]:
        print("; ".join([f"WRONG {message['id']} of {message['queue']}: {message['state']}", *message["why"]]))
    for place in result["corrupt_markers"][:MAX_LISTED]:
        print(f"WRONG {place}: not a marker, so it is unknown what it said; --from LATER leaves it out")
    if (more := len(result["corrupt_markers"]) - MAX_LISTED) > 0:
        print(f"… and {more:,} more that are not markers; --json lists them")
    for topic, partition, begin, end in result["gaps"]:
        print(
            f"NOT AUDITED {topic}/{partition}: retention removed records {begin} to {end - 1} before ingest read them"
        )
    for reason in result["unread_topics"].values():
        print(f"NOT AUDITED {reason}")
    if result["removed"]["messages"]:
        before = show_moment(result["removed"]["before_ms"])
        print(f"NOT AUDITED {result['removed']['messages']:,} messages that ended before {before} UTC: removed")
    if result["wrong_count"] > MAX_LISTED:
        print(f"… and {result['wrong_count'] - MAX_LISTED:,} more; the data directory's table audit has all of them")
    print(
        f"{'no message is lost, no differences' if result['right'] else 'DIFFERENCES FOUND'}: {result['sent']:,} sent"
    )


def _corrupt(lake: Lake, round_: Commit, begin_ms: int | None, end_ms: int | None) -> list[str]:
    """Return the places of corrupt markers of a time range; operators have not quarantined them."""
    rows = lake.table("corrupt", CORRUPT, round_["last"]["markers"])
    rows = between(rows.where(~digest_of_record().isin(round_["quarantined"])), "logged_at", begin_ms, end_ms)
    topic = Names(lake.about()["prefix"]).markers
    places = rows.orderBy("log_partition", "log_offset").limit(MAX_IDS).collect()
    return [f"{topic}/{row.log_partition}/{row.log_offset}" for row in places]


def _handled(spark: SparkSession, lake: Lake, option: str | None) -> DataFrame | None:
    """Return the deliveries that handlers finished: from --handled, else from the data directory if it has them."""
    if option is None and not lake.exists(HANDLED):
        return None
    path = option or f"{lake.path}/{HANDLED}"
    reader = spark.read.json if path.endswith((".json", ".jsonl")) else spark.read.parquet
    try:
        rows = reader(path)
    except Exception as error:
        raise PipelineError(f"--handled {path}: can't be read as Parquet or JSON lines") from error
    missing = {"topic", "partition", "offset"} - set(rows.columns)
    if missing:
        raise PipelineError(
            f"--handled {path}: expected columns topic, partition and offset; {sorted(missing)} missing"
        )
    return rows
