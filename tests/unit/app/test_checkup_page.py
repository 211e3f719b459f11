"""What the page on operations quotes of ``faust -A app check`` is what it says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def quoted() -> list[str]:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    table = page.partition("| what is broken |")[2].partition("\n\n")[0]
    cells = [row.split(" | ")[1] for row in table.splitlines() if row.startswith("| ") and not row.startswith("|--")]
    return [text for cell in cells for text in re.findall(r'"([^"]+)"', cell)]


def source() -> str:
    files = [*sorted((ROOT / "app" / "checkup").glob("*.py")), ROOT / "marq" / "reachability.py"]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    # Literals that follow each other are one, and what stands between braces is a name or a number.
    joined = re.sub(r'"\s*\n\s*f?"', "", text)
    return re.sub(r"\{[^{}]*\}", "…", joined)


def test_each_quotation_stands_in_the_source() -> None:
    found, said = quoted(), source()

    assert len(found) > 20
    for text in found:
        for part in filter(None, (each.strip() for each in text.split("…"))):
            assert part in said, f"{text!r}: {part!r} is not said"
