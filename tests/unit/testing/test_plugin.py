"""The pytest plugin, in runs of pytest of its own: with pytest-asyncio in both modes, and without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

ASYNC = """
import marq, pytest

MARK

async def service():
    async with marq.Producer() as producer, marq.Consumer("emails") as consumer:
        await producer.send("emails", b"x")
        [message] = await consumer.receive(wait=20)
        await message.release(60)
        assert await consumer.receive(wait=59) == []

async def test_a_service(marq_broker):
    await service()
    await marq_broker.advance(60)
    assert [message.attempt for message in marq_broker.messages("emails")] == [2]

async def test_each_test_has_a_broker_of_its_own(marq_broker):
    assert marq_broker.messages("emails") == []
    async with marq.Queues() as queues:
        assert queues["emails"].lease == 30
"""

SYNC = """
import asyncio, marq

def service():
    with marq.SyncProducer() as producer:
        producer.send("emails", b"x")

async def work():
    async with marq.Consumer("emails") as consumer:
        await consumer.ack(await consumer.receive())

def test_a_service(marq_broker):
    service()
    assert [message.body for message in marq_broker.messages("emails")] == [b"x"]
    asyncio.run(work())
    assert len(marq_broker.acked("emails")) == 1

def test_the_address_is_gone_afterwards(monkeypatch):
    import os
    assert "MARQ_BOOTSTRAP_SERVERS" not in os.environ
"""

LEFT = """
async def test_leaves_a_client(marq_broker):
    producer = marq.Producer()
    await producer.start()
"""


def run(directory: Path, code: str, *options: str) -> str:
    (directory / "test_service.py").write_text(code, encoding="utf-8")
    (directory / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MARQ_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=directory, env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_in_strict_mode_of_pytest_asyncio_each_test_has_a_broker_of_its_own(tmp_path: Path) -> None:
    code = ASYNC.replace("MARK", "pytestmark = pytest.mark.asyncio")
    options = ["-o", "asyncio_mode=strict", "-o", "asyncio_default_fixture_loop_scope=function"]
    output = run(tmp_path, code, "-W", "error", *options)

    assert "2 passed" in output, output
    assert "warning" not in output


def test_in_auto_mode_a_client_that_is_left_running_is_the_only_warning(tmp_path: Path) -> None:
    output = run(tmp_path, ASYNC.replace("MARK", "") + LEFT, "-o", "asyncio_mode=auto")

    assert "3 passed, 1 warning" in output, output
    assert "left running at the end: a Producer" in output


def test_tests_without_an_event_loop_need_no_other_plugin(tmp_path: Path) -> None:
    output = run(tmp_path, SYNC, "-W", "error", "-p", "no:asyncio")

    assert "2 passed" in output, output
