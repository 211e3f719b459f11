"""The pages that users read, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "deploy" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

#: The pages for operators; settings.md has the tables of settings.
OPERATIONS = sorted((ROOT / "docs" / "operations").glob("*.md"))

#: Programs of examples/.
PROGRAMS = sorted(
    path.relative_to(ROOT / "examples").as_posix()
    for path in (ROOT / "examples").rglob("*.py")
    if path.stem != "__init__"
)

#: Opening fence with its info string ("python compile-only"), the code, closing fence.
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One fenced block; ``note`` is what follows the language on its first line."""

    page: Path
    line: int
    language: str
    note: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    """Return all blocks of one language, in the order of the pages."""
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2].strip(), found[3])
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for found in _BLOCK.finditer(text)
        if found[1] == language
    ]
