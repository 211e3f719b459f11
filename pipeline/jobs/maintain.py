"""``maintain``: merges small files of the tables, and removes old history.

Merges batches that ``lifecycle`` has processed, and directories of finished messages. The rows stay the same, except
those that --older removes. If it is interrupted, run it again: it finishes what it began.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict

from pipeline.errors import PipelineError
from pipeline.jobs.lifecycle import StepLog
from pipeline.lake import Lake
from pipeline.maintenance import Maintenance, MaintenanceResult
from pipeline.session import session
from pipeline.spans import DAY_MS, aligned, duration_ms, show_bytes, show_moment, size_bytes

TARGET = "128MiB"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", default=TARGET, metavar="SIZE", help="largest size of merged directories (%(default)s)"
    )
    parser.add_argument(
        "--older", metavar="AGE", help="also remove the history of messages that ended longer ago, such as 90d"
    )
    parser.add_argument("--dry-run", action="store_true", help="only show the files that would be merged")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")


def run(options: argparse.Namespace) -> int:
    target_bytes = size_bytes("--target", options.target)
    if target_bytes < 1:
        raise PipelineError(f"--target {options.target}: expected at least 1 byte")
    older_ms = None if options.older is None else duration_ms("--older", options.older, least_ms=DAY_MS)
    spark = session("maintain")
    steps = StepLog()
    say = (lambda text: None) if options.json else steps.say
    maintenance = Maintenance(spark, Lake(spark, options.data), target_bytes, say)
    now_ms = time.time_ns() // 1_000_000
    result = maintenance.run(older_ms=older_ms, now_ms=now_ms, dry_run=options.dry_run)
    if options.json:
        tables = {table: asdict(usage) for table, usage in result.usage.items()}
        print(json.dumps({"messages_removed": result.messages_removed, "tables": tables}))
        return 0
    print("\n".join(_lines(result)))
    if older_ms is not None:
        print(f"messages removed: {result.messages_removed:,} that ended before {show_moment(now_ms - older_ms)} UTC")
    print("dry run: nothing was changed" if options.dry_run else f"done in {steps.seconds():.1f} s", flush=True)
    return 0


def _lines(result: MaintenanceResult) -> list[str]:
    rows = [("table", "directories", "files", "bytes", "rows removed", "files after", "bytes after")]
    for table, usage in result.usage.items():
        before = (f"{usage.directories:,}", f"{usage.files:,}", show_bytes(usage.bytes), f"{usage.rows_removed:,}")
        after = ("-", "-")
        if usage.files_after is not None and usage.bytes_after is not None:
            after = (f"{usage.files_after:,}", show_bytes(usage.bytes_after))
        rows.append((table, *before, *after))
    return aligned(rows)
