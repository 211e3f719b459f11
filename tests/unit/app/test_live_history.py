"""Charts of more than 15 minutes, from the files of the data pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from marq.wire.errors import ConfigError
from marq.wire.live_windows import STATUS_FILE, hour_file, windows_folder
from marq_worker.web.dashboard.live_history import RANGES, LiveHistory
from marq_worker.web.dashboard.queries import DashboardQueries
from tests.live_windows import write_windows

#: 12:00:30 of some day.
NOON = 1_796_040_000 // 86_400 * 86_400 + 43_200
NOW = NOON + 30
DAY = 86_400


def read(data: Path, queue: str = "emails", range_: str = "1h", now: float = NOW) -> dict[str, Any]:
    return LiveHistory(data, "marq").read(queue, range_, now)


def test_a_minute_has_rates_and_the_longest_times(tmp_path: Path) -> None:
    row = {"sent": 120, "acked": 60, "released": 3, "rejected": 2, "expired": 1, "dead": 6}
    times = {"wait_p50_ms": 0, "wait_p99_ms": 70, "late_delivery_p99_ms": 5, "late_redelivery_p99_ms": 9}
    write_windows(tmp_path, {("emails", NOON - 120): row | times, ("other", NOON - 180): {"sent": 1}}, NOW)

    history = read(tmp_path)

    assert (len(history["times"]), history["times"][0], history["times"][-1]) == (60, NOON + 60 - 3_600, NOON)
    values = {name: series[-3] for name, series in history["series"].items()}
    assert values == {
        "sent_per_second": 2,
        "delivered_per_second": 0,
        "acked_per_second": 1,
        "failed_per_second": 0.1,
        "dead_lettered_per_second": 0.1,
        "wait_p50_ms": 0,
        "wait_p95_ms": None,
        "wait_p99_ms": 70,
        "late_ms": 9,
    }
    assert (history["complete"], history["problem"], history["computed_at"]) == (True, None, NOW)


def test_a_minute_without_events_is_zero_once_windows_are_known_and_unknown_before_and_after(tmp_path: Path) -> None:
    write_windows(tmp_path, {("emails", NOON - 240): {"sent": 6}}, computed_s=NOON - 30)

    history = read(tmp_path)

    # The minute that is not over counts by the seconds that are known.
    assert history["series"]["sent_per_second"][-6:] == [None, 0.1, 0, 0, 0, None]


def test_the_current_minute_has_the_rate_of_its_known_seconds(tmp_path: Path) -> None:
    write_windows(tmp_path, {("emails", NOON): {"sent": 40}}, computed_s=NOON + 20)
    assert read(tmp_path)["series"]["sent_per_second"][-1] == 2

    # A few seconds would be a guess.
    assert read(tmp_path, now=NOON + 61)["series"]["sent_per_second"][-1] is None


@pytest.mark.parametrize(("range_", "step"), [("24h", 300), ("7d", 1_800)])
def test_longer_ranges_add_up_minutes_and_keep_the_longest_wait(tmp_path: Path, range_: str, step: int) -> None:
    begin = NOON - RANGES[range_][0] + step
    windows = {("", begin + 60): {"sent": step, "wait_p95_ms": 7}, ("", begin + 180): {"sent": step, "wait_p95_ms": 3}}
    write_windows(tmp_path, windows, NOW, begin_s=begin)

    history = read(tmp_path, "", range_)

    assert history["times"][:2] == [begin, begin + step]
    assert history["series"]["sent_per_second"][:2] == [2, 0]
    assert history["series"]["wait_p95_ms"][:2] == [7, None]


def test_the_chart_says_how_old_its_windows_are(tmp_path: Path) -> None:
    write_windows(tmp_path, {("emails", NOON - 10_800): {"sent": 6}}, computed_s=NOW - 7_260)

    history = read(tmp_path, range_="24h")

    assert history["problem"] == "these windows are 2 h 1 m old: is `python -m pipeline ingest --follow` running?"
    assert max(value for value in history["series"]["sent_per_second"] if value is not None) > 0


def break_about(data: Path) -> None:
    (data / "about.json").write_text(json.dumps({"prefix": "other"}))


def break_version(data: Path) -> None:
    (data / STATUS_FILE).write_text(json.dumps({"version": 2}))


def break_hour(data: Path) -> None:
    (data / windows_folder("emails") / hour_file(NOON // 3_600)).write_text("{")


def make_unreadable(data: Path) -> None:
    (data / STATUS_FILE).unlink()
    (data / STATUS_FILE).mkdir()


def remove(data: Path) -> None:
    (data / STATUS_FILE).unlink()


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (break_about, "they are of the namespace 'other', not of 'marq'"),
        (break_version, "the windows have version 2, and this worker reads 1"),
        (break_hour, "has files that can't be read"),
        (make_unreadable, "live/status.json can't be read: Is a directory"),
        (remove, "there is no {data}/live/status.json: run `python -m pipeline ingest --follow`"),
    ],
)
def test_a_chart_without_readable_files_is_empty_and_says_why(tmp_path: Path, spoil: Any, text: str) -> None:
    write_windows(tmp_path, {("emails", NOON): {"sent": 6}}, NOW)
    spoil(tmp_path)

    history = read(tmp_path)

    assert text.format(data=tmp_path) in history["problem"]
    assert history["problem"].startswith("MARQ_PIPELINE_DATA: ")
    assert {value for series in history["series"].values() for value in series} == {None}


def test_a_queue_that_is_not_among_the_busiest_has_no_windows(tmp_path: Path) -> None:
    write_windows(tmp_path, {("emails", NOON): {"sent": 6}}, NOW, queues_left_out=3)

    assert read(tmp_path)["problem"] is None
    quiet = read(tmp_path, "quiet")
    assert quiet["problem"] == "only the busiest queues have windows, and 3 queues have none"
    assert set(quiet["series"]["sent_per_second"]) == {None}


def test_no_event_at_all_is_no_problem(tmp_path: Path) -> None:
    write_windows(tmp_path, {}, NOW)

    history = read(tmp_path)

    assert (history["problem"], set(history["series"]["sent_per_second"])) == (None, {None})


@pytest.mark.parametrize(
    ("range_", "text"),
    [("2h", "range=2h: expected one of 15m, 1h, 24h, 7d"), ("1h", "range=1h: set MARQ_PIPELINE_DATA")],
)
async def test_a_range_needs_a_data_directory(range_: str, text: str) -> None:
    queries = DashboardQueries(Mock(), Mock(pipeline_data=None), Mock(), Mock(), Mock())

    with pytest.raises(ConfigError, match=text):
        await queries.history("emails", {"range": range_})
    assert queries.ranges() == ("15m",)
