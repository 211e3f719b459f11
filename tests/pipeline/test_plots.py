from __future__ import annotations

import io
import json
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import pandas as pd
import pytest
from matplotlib.dates import date2num
from matplotlib.figure import Figure
from matplotlib.image import imread

from pipeline.dashboard import MAX_POINTS, SERIES, document
from pipeline.dashboard import MAX_QUEUES as MAX_LISTED
from pipeline.plots import MAX_QUEUES, PLOTS, Plot, draw, shown_queues
from pipeline.report import page
from pipeline.statistics import EVENTS

NOON = datetime(2026, 11, 21, 12)  # noqa: DTZ001 - as toPandas gives it
NOW = datetime(2026, 11, 21, 13, tzinfo=UTC)
MINUTE_MS = 60_000
NO_PICTURES = {plot.name: b"" for plot in PLOTS}
HOSTILE = "<script>alert('$x^$')</script>\n\x07"


def row(queue: str, minute: int | None, **columns: Any) -> dict[str, Any]:
    """A row of the table; of a minute, or the totals."""
    measured = ("wait", "run", "late_redelivery", "late_delivery")
    found: dict[str, Any] = {
        "queue": queue,
        "scope": "total" if minute is None else "window",
        "starts_at": NOON + timedelta(minutes=minute or 0),
        "ends_at": NOON + timedelta(minutes=(minute or 0) + 1),
        "seconds": 60.0,
        "attempts": {1: 10, 2: 1},
        "attempts_max": 2,
        "open": 5,
        "delayed": 0,
        "oldest_open_ms": 1234,
        "size_mean_bytes": 200.5,
        "size_p99_bytes": None,
        "key": None,
    }
    found |= {f"{name}_{share}_ms": None for name in measured for share in ("p50", "p95", "p99", "max")}
    found |= dict.fromkeys(EVENTS, 60) | {f"{name}_per_second": 1.0 for name in EVENTS}
    return found | columns


def rows(*queues: str, minutes: int = 3, **columns: Any) -> pd.DataFrame:
    found = [row(queue, minute, **columns) for queue in queues for minute in (*range(minutes), None)]
    return pd.DataFrame(found)


#: Each queue has axes of its own, so one table has queues of all kinds; one more than are drawn.
KINDS = pd.concat(
    [
        rows(HOSTILE, "n" * 200, "emails", "zzz"),
        rows("one window", minutes=1),
        rows("long", **dict.fromkeys(("wait_p50_ms", "wait_max_ms", "late_delivery_max_ms"), 86_400_000)),
        rows("idle", attempts={}, oldest_open_ms=None, **{f"{name}_per_second": 0.0 for name in EVENTS}),
        rows("pairs", attempts=[(1, 3), (20, 1)], wait_p50_ms=0),
        rows("pairs and one window", attempts=[(1, 3)], minutes=1),
    ]
)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
@pytest.mark.parametrize(
    "queues",
    [[*KINDS["queue"].unique()], ["one window"], ["idle"]],
    ids=["all kinds", "one window", "idle"],
)
def test_a_plot_is_drawn_of_any_table(plot: Plot, queues: list[str]) -> None:
    picture = imread(io.BytesIO(draw(plot, KINDS[KINDS["queue"].isin(queues)])), format="png")

    height, width, _ = picture.shape
    assert width == 1100
    assert 200 < height < 2500
    assert picture[:, :, :3].min() < 0.5  # something is drawn


def test_the_rates_of_one_window_are_drawn_over_its_length() -> None:
    table = rows("rare", minutes=1, **{f"{name}_per_second": 0.25 for name in EVENTS})
    figure = Figure()
    [rates] = [plot for plot in PLOTS if plot.name == "rates"]

    rates.draw(figure, table)

    left, right = figure.axes
    noon, later = (date2num(NOON + timedelta(minutes=minute)) for minute in (0, 1))
    for panel, lines in ((left, 2), (right, 4)):
        assert [list(panel.convert_xunits(line.get_xdata())) for line in panel.lines] == [[noon, later]] * lines
        begin, end = panel.get_xlim()
        assert noon - (later - noon) < begin <= noon < later <= end < later + (later - noon)
    # Without prefixes such as "m" for a thousandth.
    labels = [label.get_text() for label in left.get_yticklabels()]
    assert [float(label) for label in labels] == pytest.approx(left.get_yticks())
    assert 0 < float(labels[1]) < 1


def test_the_busiest_queues_are_plotted_and_no_more_than_can_be_looked_at() -> None:
    found = pd.DataFrame([row(f"queue {number:02}", None, sent=number) for number in range(20)])

    assert shown_queues(found) == [f"queue {number:02}" for number in range(19, 19 - MAX_QUEUES, -1)]


class Tags(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_no_network_and_takes_names_for_text() -> None:
    table = rows(HOSTILE, "emails")

    made = page(table, NO_PICTURES, generated_at=NOW, window_ms=MINUTE_MS)

    found = Tags()
    found.feed(made)
    assert "script" not in found.tags
    assert "<script>alert('$x^$')</script>" in found.text
    assert len(found.links) == len(PLOTS)
    assert all(link.startswith("data:image/png;base64,") for link in found.links)
    assert re.search("https?://|url\\(|@import", made) is None


def test_the_page_says_how_many_queues_it_leaves_out() -> None:
    table = rows(*(f"queue {number}" for number in range(230)), minutes=1)

    made = page(table, NO_PICTURES, generated_at=NOW, window_ms=MINUTE_MS)

    assert "30 less busy queues are not on this page" in made
    assert f"the {MAX_QUEUES} busiest of 230 queues" in made


def test_the_document_has_the_newest_windows_of_the_busiest_queues() -> None:
    many = [row("emails", minute, sent=minute) for minute in range(MAX_POINTS + 10)]
    quiet = [row(f"quiet {number:02}", None, sent=1) for number in range(MAX_LISTED)]
    table = pd.DataFrame([*many, row("emails", None, sent=1000), *quiet])

    found = document(table, generated_at=NOW, window_ms=MINUTE_MS)

    emails = found["queues"]["emails"]
    assert (emails["windows_left_out"], found["queues_left_out"]) == (10, 1)
    assert {len(series) for series in emails["windows"].values()} == {MAX_POINTS}
    assert emails["windows"]["starts_at"][0] == "2026-11-21T12:10:00.000Z"
    assert tuple(emails["windows"]) == SERIES


def test_the_document_is_strict_json_with_whole_numbers_and_null() -> None:
    found = document(rows("emails", oldest_open_ms=float("nan")), generated_at=NOW, window_ms=1500)

    again = json.loads(json.dumps(found, allow_nan=False))
    total = again["queues"]["emails"]["total"]
    assert again == found
    assert (again["from"], again["generated_at"]) == ("2026-11-21T12:00:00.000Z", "2026-11-21T13:00:00.000Z")
    assert again["window_seconds"] == 1.5
    assert (total["sent"], total["size_mean_bytes"], total["oldest_open_ms"]) == (60, 200.5, None)
    assert total["attempts"] == {"1": 10, "2": 1}
