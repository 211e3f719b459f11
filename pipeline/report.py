"""``report.html``: the plots and a table for each queue on one self-contained page.

Names of queues and keys are untrusted and therefore escaped.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

import pandas as pd

from pipeline import plots
from pipeline.dashboard import busiest_first, keys_of, plain
from pipeline.spans import show_ms
from pipeline.statistics import EVENTS

#: Queues with a table of their own; less busy ones are only in the table ``stats``.
MAX_QUEUES = 200

_COUNTS = (*EVENTS, "open", "delayed")
_DURATIONS = (
    ("wait until acquired", "wait"),
    ("run until settled", "run"),
    ("redeliveries late by", "late_redelivery"),
    ("delayed messages late by", "late_delivery"),
)
_SHARES = ("p50", "p95", "p99", "max")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; background: #ffffff; margin: 2rem auto; max-width: 70rem;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2.5rem 0 .25rem; overflow-wrap: anywhere; }
p { margin: .25rem 0 .75rem; color: #59636e; }
img { max-width: 100%; min-width: 46rem; height: auto; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0 1rem; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #d8dee4; white-space: nowrap; }
th { font-weight: 600; }
th:first-child, td:first-child { text-align: left; padding-left: 0; position: sticky; left: 0; background: #ffffff;
  max-width: 20rem; white-space: normal; overflow-wrap: break-word; }
@media (max-width: 40rem) {
  body { margin-top: 1rem; }
  th, td { padding: .25rem .4rem; }
  th:first-child, td:first-child { max-width: 9rem; }
}
"""

#: PNGs by the names of plots.
Pictures = Mapping[str, bytes]


def page(rows: pd.DataFrame, drawn: Pictures, *, generated_at: datetime, window_ms: int) -> str:
    totals = busiest_first(rows)
    begin, end, now = (
        f"{moment:%Y-%m-%d %H:%M:%S}" for moment in (totals["starts_at"].min(), totals["ends_at"].max(), generated_at)
    )
    shown = totals[:MAX_QUEUES].to_dict("records")
    notes = []
    if left_out := len(totals) - len(shown):
        notes.append(f"<p>{left_out:,} less busy queues are not on this page; the table stats has them.</p>")
    if len(totals) > plots.MAX_QUEUES:
        notes.append(f"<p>The plots show the {plots.MAX_QUEUES} busiest of {len(totals):,} queues.</p>")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Marq: queue statistics</title><style>{_STYLE}</style></head><body><main>",
            "<h1>Queue statistics</h1>",
            f"<p>{begin} to {end} UTC, in windows of {show_ms(window_ms)}; generated at {now} UTC.",
            "Percentiles are approximate: their rank is off by at most 1 in 10,000.</p>",
            *notes,
            _overview(shown),
            *(_picture(plot, drawn) for plot in plots.PLOTS),
            *(_queue(total, keys_of(rows, total["queue"])) for total in shown),
            "</main></body></html>\n",
        ]
    )


def _picture(plot: plots.Plot, drawn: Pictures) -> str:
    image = f"data:image/png;base64,{base64.b64encode(drawn[plot.name]).decode()}"
    title = escape(plot.title)
    return f'<h2>{title}</h2><p>{escape(plot.text)}</p>{_wide(title, f"""<img src="{image}" alt="{title}">""")}'


def _overview(totals: Sequence[Mapping[str, Any]]) -> str:
    heads = ("queue", "sent/s", "sent", "acked", "dead", "open", "delayed", "wait p99", "run p99", "oldest open")
    counts = ("sent_per_second", "sent", "acked", "dead", "open", "delayed")
    durations = ("wait_p99_ms", "run_p99_ms", "oldest_open_ms")
    lines = [
        [total["queue"], *(_number(total[name]) for name in counts), *(_duration(total[name]) for name in durations)]
        for total in totals
    ]
    return f"<h2>All queues</h2>{_table('All queues', heads, lines)}"


def _queue(total: Mapping[str, Any], keys: Sequence[Mapping[str, Any]]) -> str:
    queue = total["queue"]
    counts = [_number(total[name]) for name in _COUNTS]
    messages = _table(f"{queue}: messages", _COUNTS, [counts])
    durations = _table(
        f"{queue}: times",
        ("time", *_SHARES),
        [[title, *(_duration(total.get(f"{name}_{share}_ms")) for share in _SHARES)] for title, name in _DURATIONS],
    )
    attempts = ", ".join(f"{count:,} at {attempt}" for attempt, count in (plain(total["attempts"]) or {}).items())
    sizes = f"{_number(total['size_mean_bytes'])} bytes on average, p99 {_number(total['size_p99_bytes'])}"
    return (
        f"<section><h2>{escape(queue)}</h2>{messages}{durations}"
        f"<p>Ended at attempt: {attempts or 'none'}. Values: {sizes}.</p>{_keys(queue, keys) if keys else ''}</section>"
    )


def _keys(queue: str, keys: Sequence[Mapping[str, Any]]) -> str:
    counts = ("sent", "acked", "released", "rejected", "expired", "dead", "message_expired", "open")
    heads = ("busiest keys", *counts, *(f"wait {share}" for share in _SHARES))
    lines = [
        [
            key["key"],
            *(_number(key[name]) for name in counts),
            *(_duration(key[f"wait_{share}_ms"]) for share in _SHARES),
        ]
        for key in keys
    ]
    return _table(f"{queue}: busiest keys", heads, lines)


def _table(label: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in line)}</tr>" for line in lines)
    return _wide(escape(label), f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _wide(label: str, content: str) -> str:
    """Return content that scrolls on a narrow screen, also by keyboard; ``label`` is escaped."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{label}">{content}</div>'


def _number(value: Any) -> str:
    number = plain(value)
    if number is None:
        return "-"
    return f"{number:,}" if isinstance(number, int) else f"{number:,.3g}" if number < 100 else f"{number:,.0f}"


def _duration(value: Any) -> str:
    ms = plain(value)
    return "-" if ms is None else show_ms(ms)
