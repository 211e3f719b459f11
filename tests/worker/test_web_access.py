"""Workers whose pages ask for a password, and workers that refuse to start without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from aiohttp import ClientSession

from tests.worker.harness import Worker, eventually, faust

TOKEN = "prometheus-0123456789"
LOGINS = {"MARQ_WEB_OPERATORS": "alice:open sesame", "MARQ_WEB_VIEWER_TOKENS": TOKEN}
VIEWER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.mark.verify
async def test_workers_with_logins_know_each_other(new_worker: Callable[..., Worker]) -> None:
    first = new_worker(environment=LOGINS)
    first.headers = VIEWER
    await first.start().ready()
    second = new_worker(like=first, MARQ_WEB_PORT=str(first.web_port + 1)).start()

    statistics = await eventually(first.published, lambda found: found.get("complete") and len(found["workers"]) == 2)

    assert all(worker["answered"] for worker in statistics["workers"])
    assert second.exit_code is None
    # A command authenticates by the same settings.
    await eventually(
        lambda: faust(first, "schedules", "--json"), lambda done: done[0] == 0 and '"complete": true' in done[1]
    )
    async with ClientSession() as newcomer:
        for path, status in [("/", 401), ("/metrics", 401), ("/api/queues", 401), ("/healthz", 200)]:
            async with newcomer.get(first.url + path) as response:
                assert (path, response.status) == (path, status)


async def test_a_password_can_be_hashed(new_worker: Callable[..., Worker]) -> None:
    exit_code, output, _ = await faust(new_worker(), "web-password", answer="correct horse\n")

    assert (exit_code, output.count("$")) == (0, 2)
    assert "horse" not in output
