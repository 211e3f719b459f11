"""The documentation site builds without a warning, and its reference covers the library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import marq
from tests.docs.pages import ROOT

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

    assert all(each in text for each in contents)
