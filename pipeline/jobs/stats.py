"""``stats``: rates, times, attempts, lateness by queue and window.

Reads the table lifecycle; writes the table stats, stats.json, report.html, and plots/*.png.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline import dashboard, plots, report
from pipeline.errors import PipelineError
from pipeline.lake import Lake
from pipeline.session import session
from pipeline.spans import SECOND_MS, duration_ms, moment_ms, show_moment, show_ms
from pipeline.statistics import Windows, span, statistics

#: Names of queues that an error lists.
MAX_NAMES = 10


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the job takes."""
    parser.add_argument(
        "--window", metavar="LENGTH", help="length of a window, such as 10s, 1m, 1h (default: by the range)"
    )
    parser.add_argument("--from", dest="begin", metavar="TIME", help="first moment, such as 2026-11-21T08:00 (UTC)")
    parser.add_argument("--to", dest="end", metavar="TIME", help="first moment that is left out")
    parser.add_argument("--queue", action="append", default=[], metavar="NAME", help="only this one; may be repeated")


def run(given: argparse.Namespace) -> int:
    """Compute the table and what is made from it."""
    length = duration_ms("--window", given.window, least_ms=SECOND_MS) if given.window is not None else None
    begin, end = (
        moment_ms(name, text) if text is not None else None
        for name, text in (("--from", given.begin), ("--to", given.end))
    )
    spark = session("stats")
    lake = Lake(spark, given.data)
    lifecycle = lake.read("lifecycle")
    if given.queue:
        lifecycle = chosen(lifecycle, given.queue)
    windows = chosen_windows(lifecycle, begin, end, length)
    lake.write("stats", statistics(lifecycle, windows).coalesce(1).orderBy("queue", "scope", "starts_at"))
    rows = lake.read("stats").toPandas()
    generated_at = datetime.now(UTC)
    written = dashboard.document(rows, generated_at=generated_at, window_ms=windows.length_ms)
    lake.write_text("stats.json", json.dumps(written, ensure_ascii=False, allow_nan=False))
    drawn = report.pictures(rows)
    for plot in plots.PLOTS:
        lake.write_bytes(f"plots/{plot.name}.png", drawn[plot.name, plots.LIGHT.name])
    page = report.page(rows, drawn, generated_at=generated_at, window_ms=windows.length_ms)
    lake.write_text("report.html", page)
    print("\n".join(told(rows, windows)))
    print(f"stats.json, report.html and plots/ are in {lake.path}")
    return 0


def chosen(lifecycle: DataFrame, queues: Sequence[str]) -> DataFrame:
    """Return the messages of these queues.

    Raises:
        PipelineError: one of them has no messages.
    """
    known = [row.queue for row in lifecycle.select("queue").where("queue IS NOT NULL").distinct().collect()]
    for queue in queues:
        if queue not in known:
            raise PipelineError(unknown_queue(queue, known))
    return lifecycle.where(F.col("queue").isin(*queues))


def unknown_queue(queue: str, known: Sequence[str], option: str = "--queue") -> str:
    """Return the sentence for a queue that has no messages, with the names that come nearest."""
    near = difflib.get_close_matches(queue, known, MAX_NAMES) or sorted(known)[:MAX_NAMES]
    more = ", …" if len(known) > len(near) else ""
    return f"{option} {queue}: the table lifecycle has no message of it; it has {', '.join(near)}{more}"


def chosen_windows(lifecycle: DataFrame, begin: int | None, end: int | None, length: int | None) -> Windows:
    """Return the windows of what was asked for, else of all that is known.

    Raises:
        PipelineError: nothing is known, or the range is empty or has too many windows.
    """
    found = span(lifecycle).first()
    if found is None or found.begin_ms is None:
        raise PipelineError("the table lifecycle has no messages: run ingest and lifecycle when some were sent")
    windows = Windows.cut(
        found.begin_ms if begin is None else begin, found.last_ms + 1 if end is None else end, length
    )  # fmt: skip
    return windows.whole(begin=begin is None, end=end is None)


def told(rows: pd.DataFrame, windows: Windows) -> list[str]:
    """Return lines for the terminal."""
    heads = ("queue", "sent", "sent/s", "acked", "dead", "open", "delayed", "wait p99", "run p99")
    totals = rows[rows["scope"] == "total"].sort_values("sent", ascending=False).to_dict("records")
    lines = [heads, *(_line(total) for total in totals)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    shown = [
        "  ".join(
            [line[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
    span_told = f"{show_moment(windows.begin_ms)} to {show_moment(windows.end_ms)} UTC"
    return [f"{span_told}, {windows.count:,} windows of {show_ms(windows.length_ms)}", "", *shown, ""]


def _line(total: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (f"{total[name]:,}" for name in ("acked", "dead", "open", "delayed"))
    times = ("-" if pd.isna(total[name]) else show_ms(total[name]) for name in ("wait_p99_ms", "run_p99_ms"))
    return total["queue"], f"{total['sent']:,}", f"{total['sent_per_second']:,.1f}", *counts, *times
