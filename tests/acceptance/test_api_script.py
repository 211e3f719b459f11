"""The bar of the main job: a script that uses only API.md's names finds each of its messages accounted for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance import api_script
from tests.acceptance.processes import Process
from tests.worker.harness import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_script_that_is_killed_finds_each_message_accounted_for(
    start_process: Callable[..., Process], worker: Worker, tmp_path: Path
) -> None:
    script = start_process(str(Path(api_script.__file__)), f"{worker.canonical_url}/api/queues", str(tmp_path))

    assert await script.ended(limit=90) == 0, script.output.read_text()

    account = json.loads(script.lines()[-1])
    assert account["killed"]
    assert account["lost"] == []
    assert (account["sent"], account["handled"], account["in_flight"]) == (300, 300, 0)
    # One of ten is rejected, all others are acked in the end.
    assert (account["acked"], account["dead"]) == (270, 30)
    assert account["ids_of_one_message"] == 1
    assert account["tenants"] == ["acme"]
