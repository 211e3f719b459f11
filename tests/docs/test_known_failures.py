"""The table of Faust's known failures: each has tests, and these say which failure they are about."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import ROOT

EVIDENCE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
TABLE = EVIDENCE.partition("## Faust's known failures")[2].partition("\n## ")[0]
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ") and "::" in line]
#: Failures that the page must list, among others.
ISSUES = {"#175", "#640", "#651", "#176", "#155", "#158", "#91", "#92", "#333"}


def docstring(path: str, name: str) -> str:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    [found] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    return ast.get_docstring(found) or ""


def test_no_known_failure_is_missing() -> None:
    assert set(re.findall(r"#\d+", " ".join(row.split("|")[1] for row in ROWS))) >= ISSUES
    assert len(ROWS) >= len(ISSUES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip() + row.split("|")[2][:20])
def test_each_known_failure_has_tests_that_name_it(row: str) -> None:
    _, issues, _, _, tests, _ = row.split("|")
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
    said = " ".join(docstring(path, name) for path, name in named)

    assert named
    for issue in re.findall(r"#\d+", issues):
        assert re.search(rf"{issue}\b", said), f"no test of this row names {issue}"
