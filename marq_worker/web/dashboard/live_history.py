"""The last hour, day or 7 days of each queue, from the live windows of the data pipeline.

The files (:mod:`marq.wire.live_windows`) are on a disk that other programs write to, so each may be missing, unreadable
or old. Then the chart says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marq.wire.live_windows import HOUR_S, MINUTE_S, STATUS_FILE, VERSION, hour_file, windows_folder
from marq_worker.readable import span

#: The ranges of charts: seconds in all, and of each value.
RANGES: Mapping[str, tuple[int, int]] = {
    "1h": (HOUR_S, MINUTE_S),
    "24h": (24 * HOUR_S, 5 * MINUTE_S),
    "7d": (7 * 24 * HOUR_S, 30 * MINUTE_S),
}
#: Rates: each series adds up these columns.
RATES: Mapping[str, Sequence[str]] = {
    "sent_per_second": ("sent",),
    "delivered_per_second": ("delivered",),
    "acked_per_second": ("acked",),
    "failed_per_second": ("released", "rejected", "expired"),
    "dead_lettered_per_second": ("dead",),
}
#: Times: each series is the longest of these columns.
TIMES: Mapping[str, Sequence[str]] = {
    "wait_p50_ms": ("wait_p50_ms",),
    "wait_p95_ms": ("wait_p95_ms",),
    "wait_p99_ms": ("wait_p99_ms",),
    "late_ms": ("late_delivery_p99_ms", "late_redelivery_p99_ms"),
}
#: Older windows show that nothing computes them any more.
STALE_S = 60
#: Rates of a shorter time would jump, also because a round reads a few seconds of records more.
LEAST_S = 20

Line = Mapping[str, Any]


class LiveHistory:
    """The windows in a data directory, which must be that of this namespace."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self._directory = directory
        self._prefix = prefix

    def read(self, queue: str, range_: str, now_s: float) -> dict[str, Any]:
        """Return a queue's windows, or those of all together for an empty name: ``times`` and ``series`` as in charts.

        ``problem`` says why values are missing or old; else it is None.
        """
        length_s, step_s = RANGES[range_]
        end_of_last_s = (int(now_s) // step_s + 1) * step_s
        times = [*range(end_of_last_s - length_s, end_of_last_s, step_s)]
        lines: Sequence[Line] = ()
        begin_s, end_s, problem = math.inf, 0.0, None
        try:
            status = self._status()
            lines = [*self._lines(queue, times[0], end_of_last_s)]
            end_s = status["computed_ms"] / 1000
            if not lines and status["queues_left_out"] and not (self._directory / windows_folder(queue)).exists():
                problem = f"only the busiest queues have windows, and {status['queues_left_out']} queues have none"
            else:
                begin_s = status["begin_s"] or math.inf
                if now_s - end_s > STALE_S:
                    age = span(now_s - end_s)
                    problem = f"these windows are {age} old: is `python -m pipeline ingest --follow` running?"
        except FileNotFoundError as error:
            problem = f"MARQ_PIPELINE_DATA: there is no {error.filename}: run `python -m pipeline ingest --follow`"
        except OSError as error:
            problem = f"MARQ_PIPELINE_DATA: {error.filename} can't be read: {error.strerror}"
        except (ValueError, KeyError, TypeError) as error:
            problem = f"MARQ_PIPELINE_DATA: {self._directory} has files that can't be read: {error}"
        return {
            "range": range_,
            "complete": problem is None,
            "problem": problem,
            "computed_at": end_s or None,
            "times": times,
            "series": _series(times, step_s, lines, begin_s, end_s),
        }

    def _status(self) -> Mapping[str, Any]:
        about = json.loads((self._directory / "about.json").read_text())
        if about["prefix"] != self._prefix:
            raise ValueError(f"they are of the namespace {about['prefix']!r}, not of {self._prefix!r}")
        status: Mapping[str, Any] = json.loads((self._directory / STATUS_FILE).read_text())
        if status["version"] != VERSION:
            raise ValueError(f"the windows have version {status['version']}, and this worker reads {VERSION}")
        return status

    def _lines(self, queue: str, begin_s: int, end_s: int) -> Iterator[Line]:
        folder = self._directory / windows_folder(queue)
        for hour in range(begin_s // HOUR_S, -(-end_s // HOUR_S)):
            try:
                text = (folder / hour_file(hour)).read_text()
            except FileNotFoundError:
                continue
            yield from map(json.loads, text.splitlines())


def _series(
    times: Sequence[int], step_s: int, lines: Sequence[Line], begin_s: float, end_s: float
) -> dict[str, list[float | None]]:
    """Return the series; a value is None if its time is not known, or if nothing was measured."""
    by_time: list[list[Line]] = [[] for _ in times]
    for line in lines:
        number = (line["at"] - times[0]) // step_s
        if 0 <= number < len(times):
            by_time[number].append(line)
    known_s = [min(time + step_s, end_s) - max(time, begin_s) for time in times]
    series: dict[str, list[float | None]] = {}
    for name, columns in RATES.items():
        counts = [sum(line.get(column, 0) for line in here for column in columns) for here in by_time]
        series[name] = [
            None if seconds < LEAST_S else count / seconds for count, seconds in zip(counts, known_s, strict=True)
        ]
    for name, columns in TIMES.items():
        values = [[line[column] for line in here for column in columns if column in line] for here in by_time]
        series[name] = [max(here, default=None) for here in values]
    return series
