"""``stats.json``: the table ``stats`` for dashboards, with bounded size.

::

    {"version": 1,
     "generated_at": "2026-11-21T10:00:00.000Z",
     "from": "2026-11-21T08:00:00.000Z", "to": "2026-11-21T09:00:00.000Z",   the range of the totals
     "window_seconds": 60.0,
     "queues_left_out": 0,                      beyond 50 queues, the least busy ones are left out
     "queues": {
       "emails": {
         "total": {"sent": 1000, …, "wait_p50_ms": 12, …, "attempts": {"1": 990, "2": 10}, …},
         "keys": [{"key": "acme", "sent": 500, …, "wait_p50_ms": 12, …}, …],      at most 20, the busiest ones first
         "windows_left_out": 0,                 beyond 500 windows, the oldest ones are left out
         "windows": {                           columns of equal length, in the order of time
           "starts_at": ["2026-11-21T08:00:00.000Z", …],
           "sent_per_second": [16.7, …], …}}}}

``total`` has every column of the table except ``queue``, ``scope``, ``starts_at``, ``ends_at`` and ``key``. ``keys``
has those of :data:`OF_KEYS`; it is empty if keys are unknown. ``windows`` has those of :data:`SERIES`. Names end in
their unit. ``null`` means not measured. Readers ignore unknown names; removing a name or changing its meaning needs a
new version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pandas as pd

VERSION = 1
MAX_POINTS = 500
MAX_QUEUES = 50

#: Columns of the table that each window has.
SERIES = (
    "starts_at", "sent_per_second", "delivered_per_second", "acked_per_second", "released_per_second",
    "rejected_per_second", "expired_per_second", "dead_per_second", "cancelled_per_second", "wait_p50_ms",
    "wait_p95_ms", "wait_p99_ms", "run_p50_ms", "run_p95_ms", "run_p99_ms", "late_redelivery_p99_ms",
    "late_delivery_p99_ms", "attempts_max", "open", "delayed", "oldest_open_ms", "size_mean_bytes",
)  # fmt: skip
#: Columns that each key has.
OF_KEYS = (
    "key", "sent", "delivered", "acked", "released", "rejected", "expired", "dead", "message_expired", "open",
    "wait_p50_ms", "wait_p95_ms", "wait_p99_ms", "wait_max_ms", "run_p50_ms", "run_p95_ms", "run_p99_ms",
)  # fmt: skip
_NOT_IN_TOTAL = ("queue", "scope", "starts_at", "ends_at", "key")


def document(rows: pd.DataFrame, *, generated_at: datetime, window_ms: int) -> dict[str, Any]:
    """Return the document from rows of the table ``stats``, ready for ``json.dumps``."""
    totals = busiest_first(rows)
    shown = totals[:MAX_QUEUES]
    return {
        "version": VERSION,
        "generated_at": plain(generated_at),
        "from": plain(totals["starts_at"].min()),
        "to": plain(totals["ends_at"].max()),
        "window_seconds": window_ms / 1000,
        "queues_left_out": len(totals) - len(shown),
        "queues": {total["queue"]: _queue(rows, total) for total in shown.to_dict("records")},
    }


def busiest_first(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the totals of each queue."""
    return rows[rows["scope"] == "total"].sort_values(["sent", "queue"], ascending=[False, True])


def keys_of(rows: pd.DataFrame, queue: str) -> list[dict[str, Any]]:
    """Return the busiest keys of a queue, with the columns of :data:`OF_KEYS`."""
    keys = rows[(rows["scope"] == "key") & (rows["queue"] == queue)]
    return list(keys.sort_values(["sent", "key"], ascending=[False, True])[list(OF_KEYS)].to_dict("records"))


def _queue(rows: pd.DataFrame, total: Mapping[str, Any]) -> dict[str, Any]:
    windows = rows[(rows["scope"] == "window") & (rows["queue"] == total["queue"])].sort_values("starts_at")
    newest = windows[-MAX_POINTS:]
    return {
        "total": {name: plain(value) for name, value in total.items() if name not in _NOT_IN_TOTAL},
        "keys": [{name: plain(value) for name, value in key.items()} for key in keys_of(rows, total["queue"])],
        "windows_left_out": len(windows) - len(newest),
        "windows": {name: [plain(value) for value in newest[name]] for name in SERIES},
    }


def plain(value: Any) -> Any:
    """Return a value for JSON: whole numbers stay whole, others get three decimals, missing ones are null."""
    if isinstance(value, Mapping | list | tuple):  # pyarrow returns a map of a table as pairs
        return {str(name): plain(item) for name, item in dict(value).items()}
    if value is None or value is pd.NaT or value is pd.NA:
        return None
    if isinstance(value, datetime):
        return f"{value.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
    if isinstance(value, str):
        return value
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else round(number, 3)
