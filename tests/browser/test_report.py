"""report.html of the data pipeline on a telephone and on a desktop."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from pipeline.plots import PLOTS, draw
from pipeline.report import page as report
from tests.browser.windows import LONG, PHONE, violations, width
from tests.pipeline.test_plots import MINUTE_MS, NOW, row

#: More of a name or a table than its box shows.
HIDDEN = "boxes => boxes.filter(box => box.scrollWidth > box.clientWidth).map(box => box.innerText)"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report of two queues, one of which has the longest name."""
    rows = pd.DataFrame([row(queue, minute) for queue in ("emails", LONG) for minute in (None, 0, 1)])
    file = tmp_path_factory.mktemp("report") / "report.html"
    drawn = {plot.name: draw(plot, rows) for plot in PLOTS}
    file.write_text(report(rows, drawn, generated_at=NOW, window_ms=MINUTE_MS))
    return file.as_uri()


def test_the_report_shows_all_of_its_tables_on_a_desktop(new_page: Any, address: str) -> None:
    page = new_page(viewport={"width": 1280, "height": 900})

    page.goto(address)

    assert page.get_by_role("region").count() == len(PLOTS) + 5
    assert page.get_by_role("region").evaluate_all(HIDDEN) == []


def test_the_report_fits_a_phone_and_its_plots_and_tables_scroll(new_page: Any, address: str) -> None:
    page = new_page(viewport=PHONE)

    page.goto(address)

    assert width(page) <= PHONE["width"]
    # Scaled to the screen, their text would be 4 px high.
    assert {image.bounding_box()["width"] >= 700 for image in page.locator("img").all()} == {True}
    names = page.get_by_role("region", name="All queues").locator("tbody td:first-child").all()
    assert page.locator("td:first-child").evaluate_all(HIDDEN) == []
    page.get_by_role("region", name="All queues").evaluate("box => { box.scrollLeft = 200; }")
    assert all(0 <= name.bounding_box()["x"] < name.bounding_box()["width"] < PHONE["width"] / 2 for name in names)
    assert violations(page) == []
