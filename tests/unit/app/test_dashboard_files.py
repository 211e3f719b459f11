"""The dashboard's files: what others wrote is as they published it, and no page has a script or a style of its own."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[3] / "marq_worker" / "web" / "dashboard"
VENDOR = HERE / "static" / "vendor"
TEMPLATES = sorted((HERE / "templates").glob("*.html"))


def test_what_others_wrote_is_unchanged_and_has_its_licence() -> None:
    said = re.findall(
        r"^\| `([\w.]+)` \|.*`([\w.]+\.txt)` \| `([0-9a-f]{64})` \|$", (VENDOR / "VENDOR.md").read_text(), re.MULTILINE
    )
    there = {path.name for path in VENDOR.iterdir()} - {"VENDOR.md"}

    assert {name for file, licence, _ in said for name in (file, licence)} == there
    for file, _, digest in said:
        assert sha256((VENDOR / file).read_bytes()).hexdigest() == digest, file


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_a_page_has_no_script_or_style_within(template: Path) -> None:
    text = template.read_text()

    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son[a-z]+=|javascript:|\|safe\b", text)
