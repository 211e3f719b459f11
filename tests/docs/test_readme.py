"""README.md and docs/get-started.md, command by command, as a newcomer types them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from marq.wire.names import Names
from tests.docs.checkout import LIMIT_SECONDS, Checkout
from tests.docs.pages import ROOT
from tests.worker.harness import eventually

README = (ROOT / "README.md").read_text(encoding="utf-8")
GET_STARTED = (ROOT / "docs" / "get-started.md").read_text(encoding="utf-8")


def steps(page: str, heading: str) -> list[tuple[str, str]]:
    """The language and the code of each fenced block in a section."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


EXAMPLE = steps(README, "Try it")
HANDLER = steps(GET_STARTED, "Your own handler in ten minutes")


@pytest.fixture
def checkout(tmp_path: Path, servers: str, names: Names) -> Checkout:
    return Checkout(tmp_path, servers, names)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 900


def test_the_sections_have_these_steps() -> None:
    assert [language for language, _ in EXAMPLE] == ["sh", "python", "sh"]
    assert [language for language, _ in HANDLER] == ["python", "sh", "sh", "sh"]
    for blocks in (EXAMPLE[1:], HANDLER):
        assert blocks[0][1].startswith("# tasks.py\n")
        assert "marq worker" in blocks[1][1]


async def test_the_example_of_the_readme(checkout: Checkout) -> None:
    checkout.write("tasks.py", EXAMPLE[1][1])
    start, send = EXAMPLE[2][1].splitlines()
    with checkout.worker(start):
        await checkout.run(send)
        await eventually(checkout.said, lambda text: "sent to ann@example.org" in text, limit=LIMIT_SECONDS)


@pytest.mark.verify
async def test_get_started(checkout: Checkout) -> None:
    checkout.write("tasks.py", HANDLER[0][1])
    with checkout.worker(HANDLER[1][1].strip()):
        await eventually(checkout.said, lambda text: "owner of markers partition" in text, limit=LIMIT_SECONDS)

        receipts = await checkout.run(HANDLER[2][1])
        await eventually(checkout.said, lambda text: "Hello Zoe, attempt 3" in text, limit=LIMIT_SECONDS)
        assert "Hello Ann, attempt 1" in await checkout.said()
        output = await checkout.run(HANDLER[3][1])

        assert len(receipts.splitlines()) == 3
        assert '"greetings":{"in_flight":0' in output
        # A table, whose cells may be broken.
        assert re.search(r"there.*is.*nobody.*to.*greet", output, re.DOTALL)
        assert re.search(r"max_attempts +2 +changed at run time", output)

        await checkout.run(HANDLER[2][1])
        dead_letters = await eventually(
            lambda: checkout.run(".venv/bin/python -m examples.dead_letters greetings"), lambda text: "Zoe" in text
        )
        assert "2 of 2 attempts used" in dead_letters
        assert "its last error was RuntimeError: Zoe is out" in dead_letters
