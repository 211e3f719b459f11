"""README.md, command by command, as a newcomer types them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.faults.scenarios import SCENARIOS
from marq.settings.queue import QueueSettings
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


def test_the_readme_counts_the_fault_scenarios() -> None:
    assert re.findall(r"\[(\d+) fault scenarios\]", README) == [str(len(SCENARIOS))]


async def test_the_example_of_the_readme(checkout: Checkout) -> None:
    checkout.write("tasks.py", EXAMPLE[1][1])
    start, send = EXAMPLE[2][1].splitlines()
    with checkout.worker(start):
        await checkout.run(send)
        await eventually(checkout.said, lambda text: "sent to ann@example.org" in text, limit=LIMIT_SECONDS)


#: What the page says of messages without an acknowledgement, with leases that end soon.
NEVER_ACKNOWLEDGED = """.venv/bin/python - <<'END'
import asyncio
import marq


async def main() -> None:
    async with marq.Producer() as producer, marq.Consumer("forgotten", lease=1, max_lease=1) as consumer:
        await producer.send("forgotten", b"hello")
        print([message.attempt for _ in range(5) for message in await consumer.receive(max_messages=1, wait=60)])


asyncio.run(main())
END
"""


def test_get_started_names_the_defaults_for_messages_that_are_never_acknowledged() -> None:
    defaults = QueueSettings()
    said = " ".join((ROOT / "docs" / "get-started.md").read_text(encoding="utf-8").split())

    assert f"If your program dies, the lease expires within {defaults.lease_ms // 1000} s (`lease`)" in said
    assert defaults.max_attempts == 5
    assert "After five deliveries (`max_attempts`), it becomes a dead letter" in said


@pytest.mark.verify
async def test_a_message_that_is_never_acknowledged(checkout: Checkout) -> None:
    with checkout.worker(".venv/bin/marq worker"):
        assert await checkout.run(NEVER_ACKNOWLEDGED) == "[1, 2, 3, 4, 5]\n"
        forgotten = await eventually(
            lambda: checkout.run(".venv/bin/python -m examples.dead_letters forgotten"), lambda text: "hello" in text
        )
        assert "5 of 5 attempts used" in forgotten
