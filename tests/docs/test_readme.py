"""The way through README.md's "Your own handler in ten minutes", command by command, as a newcomer types them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from marq.core.names import Names
from tests.docs.checkout import LIMIT_SECONDS, Checkout
from tests.docs.pages import ROOT
from tests.worker.harness import eventually

SECTION = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Your own handler in ten minutes")[2]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", SECTION.partition("\n## ")[0], re.MULTILINE | re.DOTALL)


@pytest.fixture
async def checkout(tmp_path: Path, servers: str, names: Names) -> AsyncIterator[Checkout]:
    found = Checkout(tmp_path, servers, names)
    found.write("tasks.py", BLOCKS[0][1])
    with found.worker(BLOCKS[1][1].strip()):
        yield found


def test_the_section_has_these_steps() -> None:
    assert [language for language, _ in BLOCKS] == ["python", "sh", "sh", "sh"]
    assert BLOCKS[0][1].startswith("# tasks.py\n")
    assert "faust -A app worker" in BLOCKS[1][1]


async def test_a_stranger_comes_to_a_handler_of_his_own(checkout: Checkout) -> None:
    await eventually(checkout.said, lambda text: "owner of markers partition" in text, limit=LIMIT_SECONDS)

    receipts = await checkout.run(BLOCKS[2][1])
    await eventually(checkout.said, lambda text: "Hello Zoe, attempt 3" in text, limit=LIMIT_SECONDS)
    assert "Hello Ann, attempt 1" in await checkout.said()
    looked = await checkout.run(BLOCKS[3][1])

    assert len(receipts.splitlines()) == 3
    assert '"greetings":{"in_flight":0' in looked
    # A table, whose cells may be broken.
    assert re.search(r"there.*is.*nobody.*to.*greet", looked, re.DOTALL)
    assert re.search(r"max_attempts +2 +changed at run time", looked)

    await checkout.run(BLOCKS[2][1])
    letters = await eventually(
        lambda: checkout.run(".venv/bin/python -m examples.dead_letters greetings"), lambda text: "Zoe" in text
    )
    assert (
        "2 of 2 attempts used: the last time it was released\n  its last error was RuntimeError: Zoe is out" in letters
    )
