"""``audit``: proves that no message was lost, queue by queue, and lists what is not as it must be.

Brings the lifecycle up to date first. Exit code 1, with the ids, where anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.audit import CAUSES, FIGURES, account, balanced, causes, chosen, judged, wrong
from pipeline.errors import PipelineError
from pipeline.lake import Lake
from pipeline.runs import TABLE, Run
from pipeline.session import session

#: Ids that are printed of each kind; the table ``audit`` has all of them.
MAX_LISTED = 20
#: Ids in the JSON object.
MAX_IDS = 100_000
HANDLED = "handled"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queue", help="only this one")
    parser.add_argument("--from", dest="since", metavar="TIME", help="only what was sent from then on (ISO 8601, UTC)")
    parser.add_argument("--to", dest="until", metavar="TIME", help="only what was sent before")
    parser.add_argument("--drained", action="store_true", help="nothing may be open: what is, is a difference")
    parser.add_argument("--handled", metavar="PATH", help="Parquet or JSON of what handlers have finished")
    parser.add_argument("--json", action="store_true", help="one JSON object, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    spark = session("audit")
    lake = Lake(spark, arguments.data)
    say = (lambda text: None) if arguments.json else (lambda text: print(f"  {text}", file=sys.stderr, flush=True))
    Run(spark, lake, say).take()
    messages = chosen(lake.read(TABLE), arguments.queue, _time(spark, arguments.since), _time(spark, arguments.until))
    rows = judged(messages, _handled(spark, lake, arguments.handled)).cache()
    found = verdict(rows, drained=arguments.drained)
    if arguments.queue is not None and not found["queues"]:
        raise PipelineError(f"queue {arguments.queue!r}: nothing of it was ingested in that time; check its name")
    found["duplicates_by"] = "handlers" if _handled(spark, lake, arguments.handled) is not None else "deliveries"
    lake.write("audit", rows.where(wrong(drained=arguments.drained) | (F.col("duplicates") > 0)))
    show(found, as_json=arguments.json)
    return 0 if found["right"] else 1


def verdict(rows: DataFrame, *, drained: bool = False) -> dict[str, Any]:
    """Return the account as a JSON object: figures of all queues and of each, causes, and ids of what differs."""
    by_queue = {row["queue"] or "": {name: row[name] for name in FIGURES} for row in account(rows).collect()}
    total = {name: sum(figures[name] for figures in by_queue.values()) for name in FIGURES}
    found = rows.where(wrong(drained=drained))
    count = found.count()
    ids = [
        {"id": row.id, "queue": row.queue, "state": row.state, "why": [*row.why, *row.may_be]}
        for row in found.orderBy("id").limit(MAX_IDS).collect()
    ]
    return {
        **total,
        "causes": {row["cause"]: row["count"] for row in causes(rows).collect()},
        "queues": by_queue,
        "wrong": ids,
        "wrong_count": count,
        "right": not count and all(balanced(figures) for figures in by_queue.values()),
    }


def show(found: dict[str, Any], *, as_json: bool) -> None:
    """Print a verdict."""
    if as_json:
        print(json.dumps(found))
        return
    names = [name for name in FIGURES if found[name] or name in ("sent", "acked", "dead", "open", "lost", "duplicates")]
    wide = max([len(queue) for queue in found["queues"]] + [5])
    print("  ".join(["queue".ljust(wide), *[name.rjust(max(len(name), 9)) for name in names]]))
    for queue, figures in [*found["queues"].items(), ("all", found)]:
        print("  ".join([queue.ljust(wide), *[f"{figures[name]:,}".rjust(max(len(name), 9)) for name in names]]))
    for cause, count in found["causes"].items():
        print(f"{count:,} duplicates, cause {CAUSES[cause]}")
    for each in found["wrong"][:MAX_LISTED]:
        print("; ".join([f"WRONG {each['id']} of {each['queue']}: {each['state']}", *each["why"]]))
    if found["wrong_count"] > MAX_LISTED:
        print(f"… and {found['wrong_count'] - MAX_LISTED:,} more; the data directory's table audit has all of them")
    print(
        f"{'nothing is lost, and nothing differs' if found['right'] else 'NOT AS IT MUST BE'}: {found['sent']:,} sent"
    )


def _time(spark: SparkSession, text: str | None) -> str | None:
    if text is None:
        return None
    row = spark.range(1).select(F.try_to_timestamp(F.lit(text)).alias("time")).first()
    if row is None or row.time is None:
        raise PipelineError(f"{text!r} is no time: expected ISO 8601 in UTC, such as 2026-11-21T08:00:00")
    return text


def _handled(spark: SparkSession, lake: Lake, given: str | None) -> DataFrame | None:
    """What handlers say they have finished: as given, else the data directory's own table, if there is one."""
    if given is None and not lake.exists(HANDLED):
        return None
    path = given or f"{lake.path}/{HANDLED}"
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
