"""``stats``: rates, times, attempts, lateness by queue and window, and totals of the busiest keys of each queue.

Reads the table lifecycle, and the keys of messages; writes the table stats, stats.json, report.html, and plots/*.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from marq.settings.limits import check_key
from marq.wire.errors import ConfigError
from pipeline import dashboard, plots, report
from pipeline.errors import PipelineError, unknown_queue
from pipeline.lake import Lake
from pipeline.session import session
from pipeline.spans import SECOND_MS, aligned, duration_ms, moment_ms, show_moment, show_ms
from pipeline.statistics import message_keys, statistics
from pipeline.tables import LIFECYCLE_TABLE, MESSAGES, PAYLOAD
from pipeline.windows import Windows, chosen_windows


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--window", metavar="LENGTH", help="length of a window, such as 10s, 1m, 1h (default: chosen by the range)"
    )
    parser.add_argument(
        "--from", dest="begin", metavar="TIME", help="start of the range, such as 2026-11-21T08:00 (UTC)"
    )
    parser.add_argument("--to", dest="end", metavar="TIME", help="end of the range, excluded")
    parser.add_argument("--queue", action="append", default=[], metavar="NAME", help="only this queue; repeatable")
    parser.add_argument(
        "--key",
        default="ordering",
        metavar="KEY",
        help='what a message\'s key is: "ordering" (default) or "header:NAME"; messages need ingest --payload',
    )


def run(options: argparse.Namespace) -> int:
    length = None if options.window is None else duration_ms("--window", options.window, least_ms=SECOND_MS)
    begin, end = moment_ms("--from", options.begin), moment_ms("--to", options.end)
    try:
        check_key(options.key)
    except ConfigError as error:
        raise PipelineError(f"--key: {error}") from error
    lake = Lake(session("stats"), options.data)
    lifecycle = chosen(lake.read(LIFECYCLE_TABLE), options.queue)
    windows = chosen_windows(lifecycle, begin, end, length)
    found = statistics(lifecycle, windows, known_keys(lake, options.key))
    lake.write("stats", found.coalesce(1).orderBy("queue", "scope", "starts_at", "key"))
    rows = lake.read("stats").toPandas()
    now = datetime.now(UTC)
    document = dashboard.document(rows, generated_at=now, window_ms=windows.length_ms)
    lake.write_text("stats.json", json.dumps(document, ensure_ascii=False, allow_nan=False))
    drawn = {plot.name: plots.draw(plot, rows) for plot in plots.PLOTS}
    for name, picture in drawn.items():
        lake.write_bytes(f"plots/{name}.png", picture)
    lake.write_text("report.html", report.page(rows, drawn, generated_at=now, window_ms=windows.length_ms))
    print("\n".join(_lines(rows, windows)))
    print(f"stats.json, report.html and plots/ are in {lake.path}")
    return 0


def chosen(lifecycle: DataFrame, queues: Sequence[str]) -> DataFrame:
    """Return the messages of these queues, of all if none is named."""
    if not queues:
        return lifecycle
    known = [row.queue for row in lifecycle.select("queue").where("queue IS NOT NULL").distinct().collect()]
    for queue in queues:
        if queue not in known:
            raise PipelineError(unknown_queue(queue, known))
    return lifecycle.where(F.col("queue").isin(*queues))


def known_keys(lake: Lake, key: str) -> DataFrame | None:
    """Return the keys of all messages; None if no message was ingested."""
    commit = lake.last_commit("messages")
    if commit is None:
        return None
    messages = lake.table("messages", StructType([*MESSAGES.fields, *PAYLOAD.fields]), commit["batch"])
    return message_keys(messages, key)


def _lines(rows: pd.DataFrame, windows: Windows) -> list[str]:
    heads = ("queue", "sent", "sent/s", "acked", "dead", "open", "delayed", "wait p99", "run p99")
    totals = rows[rows["scope"] == "total"].sort_values("sent", ascending=False).to_dict("records")
    lines = [heads, *(_line(total) for total in totals)]
    shown = f"{show_moment(windows.begin_ms)} to {show_moment(windows.end_ms)} UTC"
    return [f"{shown}, {windows.count:,} windows of {show_ms(windows.length_ms)}", "", *aligned(lines), ""]


def _line(total: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (f"{total[name]:,}" for name in ("acked", "dead", "open", "delayed"))
    times = ("-" if pd.isna(total[name]) else show_ms(total[name]) for name in ("wait_p99_ms", "run_p99_ms"))
    return total["queue"], f"{total['sent']:,}", f"{total['sent_per_second']:,.1f}", *counts, *times
