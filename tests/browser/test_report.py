"""report.html of the data pipeline on a telephone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from pipeline.plots import PLOTS, draw
from pipeline.report import page as report
from tests.browser.windows import LONG, PHONE, violations, width
from tests.pipeline.test_plots import MINUTE_MS, NOW, row


def test_the_report_fits_a_phone_and_its_plots_and_tables_scroll(new_page: Any, tmp_path: Path) -> None:
    queues = ("emails", LONG)
    rows = pd.DataFrame([row(queue, minute) for queue in queues for minute in (None, 0, 1)])
    file = tmp_path / "report.html"
    drawn = {plot.name: draw(plot, rows) for plot in PLOTS}
    file.write_text(report(rows, drawn, generated_at=NOW, window_ms=MINUTE_MS))
    page = new_page(viewport=PHONE)

    page.goto(file.as_uri())

    assert width(page) <= PHONE["width"]
    # Scaled to the screen, their text would be 4 px high.
    assert {image.bounding_box()["width"] >= 700 for image in page.locator("img").all()} == {True}
    names = page.get_by_role("region", name="All queues").locator("tbody td:first-child").all()
    page.get_by_role("region", name="All queues").evaluate("box => { box.scrollLeft = 200; }")
    assert all(0 <= name.bounding_box()["x"] < name.bounding_box()["width"] < PHONE["width"] / 2 for name in names)
    assert violations(page) == []
