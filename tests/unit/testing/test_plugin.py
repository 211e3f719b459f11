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


MARQ_TOML = """
[settings]
project = "shop"
handlers = ["shop_tasks"]

[defaults]
max_attempts = 4

[queues.orders]
max_attempts = 2
backoff = [60]
group = "background"

[queues.audits]
group = "background"
topic = "shop.audits"
"""

TASKS = """
import marq

seen = []

@marq.handler("orders", lease=45)
async def bill(order: dict, message: marq.Message[dict]) -> None:
    seen.append((order["number"], message.attempt))
    if order["number"] == 13:
        raise ValueError("unlucky")

@marq.handler("audits")
async def audit(message: marq.Message) -> None:
    seen.append(message.value)
"""

PROJECT = """
import asyncio, marq

def run(broker, *handlers):
    async def send_and_handle():
        async with marq.Producer(codec=marq.JSON) as producer:
            await producer.send("orders", {"number": 13})
            await producer.send("audits", "x")
        await broker.run(*handlers)
    asyncio.run(send_and_handle())

def test_the_handlers_of_the_project_run_with_the_settings_of_its_queues(marq_broker):
    run(marq_broker)
    import shop_tasks
    assert shop_tasks.seen == [(13, 1), b'"x"', (13, 2)] or shop_tasks.seen == [b'"x"', (13, 1), (13, 2)]
    assert len(marq_broker.dead_letters("orders")) == 1
    async def settings():
        async with marq.Queues() as queues:
            return queues["orders"], queues["elsewhere"]
    orders, elsewhere = asyncio.run(settings())
    assert (orders.max_attempts, orders.lease, elsewhere.max_attempts) == (2, 45, 4)

def test_one_of_the_handlers_of_a_group_can_run_alone(marq_broker):
    import shop_tasks
    run(marq_broker, shop_tasks.audit)
    assert len(marq_broker.messages("orders")) == 1
"""


def test_the_broker_has_the_queues_and_handlers_of_the_projects_marq_toml(tmp_path: Path) -> None:
    (tmp_path / "marq.toml").write_text(MARQ_TOML, encoding="utf-8")
    (tmp_path / "shop_tasks.py").write_text(TASKS, encoding="utf-8")
    tests = tmp_path / "tests"
    tests.mkdir()

    output = run(
        tests, PROJECT, "-p", "no:asyncio", "-W", "error", "--rootdir", str(tmp_path), "--import-mode=importlib"
    )

    assert "2 passed" in output, output


def test_a_mistake_in_marq_toml_is_named_and_an_option_leaves_the_file_out(tmp_path: Path) -> None:
    (tmp_path / "marq.toml").write_text("[queues.orders]\nmax_attempt = 2\n", encoding="utf-8")
    code = "def test_a_service(marq_broker): ..."

    assert "marq.toml: queue 'orders': max_attempt: unknown key" in run(tmp_path, code)
    assert "1 passed" in run(tmp_path, code, "-o", "marq_toml=")
