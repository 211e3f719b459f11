"""The documentation site builds without a warning, and its reference covers the library."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import marq
from marq.version import VERSION
from tests.docs.pages import PROGRAMS, ROOT

pytestmark = pytest.mark.verify


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", directory],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return directory


def test_the_home_page_is_the_readme(site: Path) -> None:
    assert "Marq turns Apache Kafka into a message queue" in (site / "index.html").read_text(encoding="utf-8")


def test_the_reference_has_every_public_name(site: Path) -> None:
    text = (site / "reference" / "api.html").read_text(encoding="utf-8")

    assert not [name for name in marq.__all__ if f'id="marq.{name}"' not in text and name not in ("BYTES", "JSON")]
    assert ":class:" not in text


@pytest.mark.parametrize(
    ("page", "contents"),
    [
        ("settings", ["MARQ_BOOTSTRAP_SERVERS", "max_attempts"]),
        ("cli", ["marq redrive", "--json"]),
        ("metrics", ["marq_messages_redelivered_total"]),
        ("errors", ["marq.LeaseLost"]),
    ],
)
def test_reference_pages_come_from_code(site: Path, page: str, contents: list[str]) -> None:
    text = (site / "reference" / f"{page}.html").read_text(encoding="utf-8")

    assert all(content in text for content in contents)


def test_each_example_has_a_page_that_other_pages_link_to(site: Path) -> None:
    index = (site / "examples" / "index.html").read_text(encoding="utf-8")

    assert len(PROGRAMS) > 15
    for program in PROGRAMS:
        assert f'href="{program}.html"' in index, program
        assert (site / "examples" / f"{program}.html").exists(), program
    assert "../examples/recipes/outbox.py.html" in (site / "recipes" / "outbox.html").read_text(encoding="utf-8")


def test_the_search_finds_pages_and_no_decisions(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))

    pages = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"guarantees.html", "recipes/outbox.html", "examples/send.py.html", "reference/api.html"} <= pages
    assert not [page for page in pages if page.startswith("decisions/")]


def test_the_site_has_a_logo_its_version_both_themes_and_no_byte_code(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")

    assert f"Marq {VERSION}" in text
    assert 'src="images/logo.svg"' in text
    assert len(re.findall(r'name="__palette"', text)) == 2
    assert [path for path in site.rglob("*") if path.suffix in (".py", ".pyc") or path.name == "__pycache__"] == []


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)[^>]* (?:src|href)="(https?:[^"]+)"', page.read_text(encoding="utf-8")
        )
        assert loaded == [], page
