"""pipeline/operator_questions.ipynb, run without Jupyter: each cell in turn, as its kernel does."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest

from tests.pipeline.directory import Directory
from tests.pipeline.processes import ROOT
from tests.pipeline.stories import DRAWN, MESSAGES_TOPIC, at

NOTEBOOK = json.loads((ROOT / "pipeline" / "operator_questions.ipynb").read_text())
CELLS = {cell["id"]: "".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"}
pytestmark = pytest.mark.timeout(900)


def answers(folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run all cells in a folder, and return the value that Jupyter would show below each cell."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MARQ_PIPELINE_DATA", str(data))
    names: dict[str, Any] = {}
    shown = {}
    for id_, source in CELLS.items():
        program = ast.parse(source, id_)
        last = program.body.pop() if isinstance(program.body[-1], ast.Expr) else None
        exec(compile(program, id_, "exec"), names)
        if isinstance(last, ast.Expr):
            shown[id_] = eval(compile(ast.Expression(last.value), id_, "eval"), names)
    names["views"].close()
    return shown


@pytest.fixture(params=[ROOT, ROOT / "pipeline"], ids=["from-the-checkout", "from-its-folder"])
def shown(
    audited: Directory, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Mapping[str, pd.DataFrame]:
    return answers(request.param, audited.path, monkeypatch)


def of(table: pd.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    """Return the rows of some columns, with lists for arrays and None for missing values."""
    rows = table[list(columns)].astype(object).where(table[list(columns)].notna(), None)
    return [
        tuple(list(value) if hasattr(value, "tolist") and not isinstance(value, str) else value for value in row)
        for row in rows.itertuples(index=False)
    ]


def test_the_notebook_answers_five_questions(shown: Mapping[str, pd.DataFrame]) -> None:
    place = f"{MESSAGES_TOPIC}/0"

    assert of(shown["queue-times"], "queue", "deliveries", "most_time_in") == [("q", 37, "wait")]
    [times] = shown["queue-times"].to_dict("records")
    for name in ("wait", "run"):
        assert 0 < times[f"{name}_p50_ms"] <= times[f"{name}_p95_ms"] <= times[f"{name}_p99_ms"]
    [slowest, *_] = shown["slowest-minutes"].to_dict("records")
    assert (slowest["minute"].to_pydatetime(), slowest["wait_p99_ms"]) == (at(18 * 60), 1_089_000)
    assert sorted(of(shown["failures"], "outcome", "kind", "failures", "dead")) == [
        ("abandoned", "abandoned", 1, 0),
        ("expired", "expired", 5, 1),
        ("message_expired", "boom N", 1, 1),
        ("message_expired", "message_expired", 1, 0),
        ("rejected", "bad", 4, 2),
        ("released", "boom N", 4, 2),
    ]
    assert (["expired"], ["acked late"], 1) in of(shown["repeat-reasons"], "reasons", "causes", "messages")
    assert (["released: boom N"], [], 1) in of(shown["repeat-reasons"], "reasons", "causes", "messages")
    assert shown["repeat-reasons"]["messages"].sum() == len(shown["repeats"]) == 13
    assert of(shown["late-by-queue"], "queue", "kind", "late", "late_max_ms") == [("q", "redelivery", 5, 3_100)]
    assert of(shown["late"], "id", "late_ms")[0] == (f"{place}/10", 3_100)
    assert set(of(shown["open-by-state"], "state", "messages", "wrong")) == {
        ("released", 3, 0),
        ("leased", 3, 0),
        ("delayed", 2, 1),
        ("rejected", 1, 1),
        ("waiting", 1, 0),
    }
    assert {id_ for (id_,) in of(shown["oldest-open"], "id")} == {
        *[f"{place}/{offset}" for offset in (2, 16, 18, 21, 22, 23, 26, 500)],
        *[f"{DRAWN}/0/{offset}" for offset in (2, 3)],
    }


def test_each_time_that_it_shows_is_in_utc(shown: Mapping[str, pd.DataFrame]) -> None:
    kinds = {
        str(table[column].dtype)
        for table in shown.values()
        for column in table.columns
        if column.endswith("_at") or column == "minute"
    }

    assert len(kinds) >= 1
    assert all(kind.startswith("datetime64") and kind.endswith("UTC]") for kind in kinds)


def test_without_an_audit_it_says_which_job_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "about.json").write_text(json.dumps({"format": 3, "cluster": "cluster", "prefix": "marq"}))

    with pytest.raises(
        duckdb.InvalidInputException, match="has no table lifecycle: run `python -m pipeline lifecycle`"
    ):
        answers(ROOT, tmp_path, monkeypatch)


def test_its_file_has_no_results() -> None:
    """They would be those of one machine, and change with each run."""
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]

    assert (NOTEBOOK["nbformat"], len(cells)) == (4, 10)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
