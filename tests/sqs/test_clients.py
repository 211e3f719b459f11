"""Clients that others wrote, in other languages: they lose no message, and understand all answers and errors."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from marq_worker.broker.embedded import EmbeddedBroker
from marq_worker.broker.ports import free_port
from tests.docs.pages import ROOT, blocks
from tests.sqs import environments
from tests.worker.harness import Worker, eventually

# The time limit covers the first test, which also installs the client.
pytestmark = [pytest.mark.verify, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]

LIMIT_SECONDS = 240


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def endpoint(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    environment = {"MARQ_ROLES": "tracker,handlers,web,sqs", "MARQ_SQS_PORT": str(free_port("127.0.0.1"))}
    worker = Worker(broker.bootstrap_servers, tmp_path_factory.mktemp("worker"), environment=environment)
    try:
        yield await worker.start().ready()
    finally:
        worker.close()


async def test_the_sdk_for_javascript_with_sqs_consumer(endpoint: Worker) -> None:
    modules = await asyncio.to_thread(environments.node_modules)
    node = await asyncio.to_thread(environments.node)
    command = [node, environments.HERE / "node" / "client.cjs"]

    printed = await run(command, endpoint, {"NODE_PATH": str(modules)})

    await check_accounts(endpoint, json.loads(printed))


@pytest.mark.parametrize("program", ["sqsclient", "gocloud"])
async def test_go(endpoint: Worker, program: str) -> None:
    programs = await asyncio.to_thread(environments.go_clients)

    printed = await run([programs / program], endpoint, {})

    await check_accounts(endpoint, json.loads(printed))


@pytest.mark.parametrize("library", ["dramatiq", "taskiq", "django"])
async def test_a_task_queue_in_python(endpoint: Worker, library: str) -> None:
    python = await asyncio.to_thread(environments.python, "tasks")

    printed = await run([python, environments.HERE / "python" / f"{library}_client.py"], endpoint, {})

    await check_accounts(endpoint, json.loads(printed))


@pytest.mark.parametrize("version", ["spring3", "spring4"])
async def test_spring_cloud_aws(endpoint: Worker, version: str) -> None:
    command = await asyncio.to_thread(environments.java_client, version, "SpringClient")

    printed = await run(command, endpoint, {"PREFIX": version})

    await check_accounts(endpoint, json.loads(printed))


@pytest.mark.parametrize("program", ["JmsClient", "BatchClient", "CamelClient"])
async def test_java(endpoint: Worker, program: str) -> None:
    command = await asyncio.to_thread(environments.java_client, "clients", program)

    printed = await run(command, endpoint, {})

    await check_accounts(endpoint, json.loads(printed))


async def test_the_commands_of_the_page(endpoint: Worker, tmp_path: Path) -> None:
    python = await asyncio.to_thread(environments.python, "judges")
    [page] = [
        block.code
        for block in blocks("sh")
        if block.page == ROOT / "docs" / "sqs.md" and "sqs send-message" in block.code
    ]
    script = tmp_path / "commands.sh"
    script.write_text(page.replace("9324", endpoint.environment["MARQ_SQS_PORT"]), encoding="utf-8")
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"

    printed = await run(["sh", "-eu", script], endpoint, {"PATH": path, "HOME": str(tmp_path)})

    # One JSON document for each command with an answer.
    answers: list[dict[str, Any]] = []
    decoder, rest = json.JSONDecoder(), printed.strip()
    while rest:
        document, end = decoder.raw_decode(rest)
        answers.append(document)
        rest = rest[end:].lstrip()
    assert answers[0]["QueueUrl"].endswith("/emails")
    assert answers[1]["MD5OfMessageBody"] == "5d41402abc4b2a76b9719d911017c592"
    assert [message["Body"] for message in answers[2]["Messages"]] == ["hello"]


async def run(command: Sequence[str | Path], endpoint: Worker, environment: dict[str, str]) -> str:
    """Run a client to its end and return what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MARQ_", "NODE_"))}
    variables = {**kept, "ENDPOINT": f"http://127.0.0.1:{endpoint.environment['MARQ_SQS_PORT']}", **environment}
    done = await asyncio.to_thread(
        subprocess.run, command, env=variables, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def check_accounts(endpoint: Worker, messages: dict[str, int]) -> None:
    """Check that Marq has sent and deleted exactly the messages that the client counted, by queue."""
    for queue, count in messages.items():
        await eventually(
            lambda name=queue: endpoint.queue(name),
            lambda metrics, expected=count: metrics.get("acked") == expected and metrics["in_flight"] == 0,
        )
