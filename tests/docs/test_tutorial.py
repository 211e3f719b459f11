"""docs/tutorial.md, typed command by command in a checkout, as a newcomer does it."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from pathlib import Path

import pytest

from marq.wire.names import Names
from tests.docs.checkout import LIMIT_SECONDS, Checkout
from tests.docs.pages import ROOT
from tests.worker.harness import eventually

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
#: Blocks of each numbered step, with their languages.
STEPS = {
    int(number): re.findall(r"^```(\w+)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for number, text in re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}


def codes(step: int, *languages: str) -> list[str]:
    """The blocks of a step, which must be of these languages in this order."""
    assert [language for language, _ in STEPS[step]] == list(languages)
    return [code for _, code in STEPS[step]]


async def says(checkout: Checkout, text: str, times: int = 1) -> None:
    """Wait until the worker has printed a text so often."""
    await eventually(checkout.said, lambda said: said.count(text) >= times, limit=LIMIT_SECONDS)


@pytest.mark.verify
@pytest.mark.timeout(900)
async def test_a_newcomer_comes_through_it(tmp_path: Path, servers: str, names: Names) -> None:
    definition, handler = codes(2, "toml", "python")
    start, check = codes(3, "bash", "bash")
    shop, send, queues = codes(4, "python", "bash", "bash")
    go_wrong, dead = codes(5, "bash", "bash")
    mend, delete = codes(6, "bash", "bash")
    later, deliver, schedule, schedules = codes(7, "bash", "bash", "toml", "bash")
    _, send_eve = codes(8, "bash", "bash")
    test, run_test = codes(9, "python", "bash")
    (forget,) = codes(10, "bash")
    checkout = Checkout(tmp_path, servers, names)
    before = (tmp_path / "marq.toml").read_text(encoding="utf-8")
    checkout.append("marq.toml", "\n" + definition)
    for code in (handler, shop, test):
        checkout.write(re.findall(r"^# (\w+\.py)$", code, re.MULTILINE)[0], code)

    with checkout.worker(start) as worker:
        await eventually(lambda: ready(checkout), lambda found: found, limit=LIMIT_SECONDS)
        assert "PROBLEM" not in await checkout.run(check)
        assert (await checkout.run(send)).count("accepted") == 2
        await says(checkout, "invoice for Ann, attempt 1")
        await says(checkout, "invoice for Bob, attempt 1")
        assert "invoices" in await checkout.run(queues)

        await checkout.run(go_wrong)
        died = ("the printer does not answer", "nothing to pay")
        await eventually(
            lambda: checkout.run(dead), lambda said: all(reason in said for reason in died), limit=LIMIT_SECONDS
        )
        await checkout.run(mend)
        await says(checkout, "invoice for Cid, attempt 1")
        await checkout.run(delete)
        assert "nothing to pay" not in await checkout.run(dead)

        identity = (await checkout.run(later)).split()[0]
        await checkout.run(deliver.replace("ID", identity))
        await says(checkout, "invoice for Dora, attempt 1")
        checkout.append("marq.toml", "\n" + schedule)
        await checkout.interrupt(worker)

    with checkout.worker(start):
        await says(checkout, "invoice for Tenant, attempt 1", times=2)
        assert "rent" in await checkout.run(schedules)

    # Its end was a kill -9.
    checkout.write("marq.toml", before + "\n" + definition)
    await checkout.run(send_eve)
    with checkout.worker(start):
        await says(checkout, "invoice for Eve, attempt 1")
    assert "1 passed" in await checkout.run(run_test)
    await checkout.run(forget)


async def ready(checkout: Checkout) -> bool:
    def ask() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{checkout.port}/readyz", timeout=5) as answer:
                return bool(json.load(answer)["ready"])
        except OSError:
            return False

    return await asyncio.to_thread(ask)


def test_each_step_is_in_the_list_of_steps() -> None:
    listed = re.findall(r"^(\d+)\. \[", PAGE, re.MULTILINE)

    assert [int(number) for number in listed] == list(STEPS)
