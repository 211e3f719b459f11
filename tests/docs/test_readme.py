"""README.md, command by command, as a newcomer types them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from marq.wire.names import Names
from tests.docs.checkout import LIMIT_SECONDS, Checkout
from tests.docs.pages import ROOT
from tests.worker.harness import eventually

README = (ROOT / "README.md").read_text(encoding="utf-8")


def steps(page: str, heading: str) -> list[tuple[str, str]]:
    """The language and the code of each fenced block in a section."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


EXAMPLE = steps(README, "Try it")


@pytest.fixture
def checkout(tmp_path: Path, servers: str, names: Names) -> Checkout:
    return Checkout(tmp_path, servers, names)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 900


def test_the_sections_have_these_steps() -> None:
    assert [language for language, _ in EXAMPLE] == ["sh", "python", "sh"]
    assert EXAMPLE[1][1].startswith("# tasks.py\n")
    assert "marq worker" in EXAMPLE[2][1]


async def test_the_example_of_the_readme(checkout: Checkout) -> None:
    checkout.write("tasks.py", EXAMPLE[1][1])
    start, send = EXAMPLE[2][1].splitlines()
    with checkout.worker(start):
        await checkout.run(send)
        await eventually(checkout.said, lambda text: "sent to ann@example.org" in text, limit=LIMIT_SECONDS)
