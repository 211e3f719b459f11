"""``maintain``: merges small files of the tables.

Merges batches that ``lifecycle`` has processed, and directories of finished messages. The rows stay the same. If it is
interrupted, run it again: it finishes what it began.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from pipeline.errors import PipelineError
from pipeline.jobs.lifecycle import StepLog
from pipeline.lake import Lake
from pipeline.maintenance import Maintenance, Result
from pipeline.session import session
from pipeline.spans import show_bytes, size_bytes

TARGET = "128MiB"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", default=TARGET, metavar="SIZE", help="largest size of merged directories (%(default)s)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only show the files that would be merged")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")


def run(options: argparse.Namespace) -> int:
    target_bytes = size_bytes("--target", options.target)
    if target_bytes < 1:
        raise PipelineError(f"--target {options.target}: expected at least 1 byte")
    spark = session("maintain")
    steps = StepLog()
    say = (lambda text: None) if options.json else steps.say
    result = Maintenance(spark, Lake(spark, options.data), target_bytes, say).run(dry_run=options.dry_run)
    if options.json:
        print(json.dumps({"tables": {table: asdict(usage) for table, usage in result.usage.items()}}))
        return 0
    print("\n".join(_lines(result)))
    print("dry run: nothing was changed" if options.dry_run else f"done in {steps.seconds():.1f} s", flush=True)
    return 0


def _lines(result: Result) -> list[str]:
    rows = [("table", "directories", "files", "bytes", "files after", "bytes after")]
    for table, usage in result.usage.items():
        before = (f"{usage.directories:,}", f"{usage.files:,}", show_bytes(usage.bytes))
        after = ("-", "-")
        if usage.files_after is not None and usage.bytes_after is not None:
            after = (f"{usage.files_after:,}", show_bytes(usage.bytes_after))
        rows.append((table, *before, *after))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if at else text.ljust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
