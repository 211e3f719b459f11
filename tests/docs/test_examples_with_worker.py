"""Programs of examples/ that need a worker, or outlive their broker, do what they say."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import marq
from marq.wire.names import Names
from marq_worker.broker import ports
from marq_worker.broker.embedded import EmbeddedBroker
from tests.docs.machine import LIMIT_SECONDS, Machine
from tests.docs.pages import ROOT
from tests.worker.harness import Worker, eventually

pytestmark = pytest.mark.verify

QUEUES = (ROOT / "examples" / "queues.toml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def started(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker as examples/handlers.py starts one."""
    prefix = f"t{uuid.uuid4().hex[:12]}"
    with Worker(
        broker.bootstrap_servers, tmp_path_factory.mktemp("examples"), prefix=prefix,
        queues=QUEUES.replace('"orders"', f'"{prefix}-orders"'), environment={"MARQ_HANDLERS": "examples.handlers"},
    ) as worker:  # fmt: skip
        yield worker


@pytest.fixture
async def worker(started: Worker) -> Worker:
    return await started.ready(1)


@pytest.fixture
async def machine(worker: Worker, servers: str) -> AsyncIterator[Machine]:
    async with Machine(servers, worker.names) as machine:
        yield machine


async def ends(worker: Worker, queue: str) -> tuple[float, float]:
    """How many messages of a queue were acked, and how many are dead."""
    found = await worker.queue(queue)
    return found.get("acked", 0), found.get("dead_lettered", 0)


async def test_later(machine: Machine, worker: Worker) -> None:
    assert await machine.run("later", "jobs") == "moved: True\ncancelled: True\ncancelled again: False\n"

    await eventually(lambda: worker.queue("jobs"), lambda found: found.get("delivered") == 1)


async def test_ordered(machine: Machine) -> None:
    lines = (await machine.run("ordered", "ordered")).splitlines()

    first = [line.removeprefix("order-1 ") for line in lines if line.startswith("order-1 ")]
    assert first == ["created", "paid: failed, attempt 1", "paid: failed, attempt 2", "paid", "shipped"]
    for order in ("order-2", "order-3"):
        own = [line for line in lines if line.startswith(order)]
        assert own == [f"{order} {change}" for change in ("created", "paid", "shipped")]
        # They did not wait for the first order.
        assert lines.index(f"{order} shipped") < lines.index("order-1 paid")


async def test_handlers(machine: Machine, worker: Worker) -> None:
    acked, dead = await ends(worker, "emails")

    await machine.send(
        "emails",
        b'{"to": "ann@example.org", "subject": "hello"}',
        b'{"subject": "without an address"}',
        b"no JSON",
    )
    await machine.send("thumbnails", b"picture")

    await eventually(lambda: ends(worker, "emails"), lambda found: found == (acked + 1, dead + 2))
    await eventually(lambda: ends(worker, "thumbnails"), lambda found: found == (1, 0))
    letters = (await machine.run("dead_letters", "emails")).splitlines()
    assert len(letters) == 2
    assert any(line.endswith("""b'{"subject": "without an address"}' died: no address""") for line in letters)
    assert any("b'no JSON' died: the value (7 bytes) is not a valid Email: json_invalid" in line for line in letters)
    assert "2 sent back to emails" in await machine.run("dead_letters", "emails", "--redrive")
    await eventually(lambda: ends(worker, "emails"), lambda found: found == (acked + 1, dead + 4))


async def test_plain_kafka(machine: Machine, worker: Worker) -> None:
    acked, dead = await ends(worker, "emails")

    await machine.run("plain_kafka", "emails", f"{worker.names.prefix}-orders")

    consumed = await machine.run("consume", "orders", "3")
    assert re.findall(r"attempt 1 (b'.+') {}", consumed) == ["b'one of everything'"] * 3
    await eventually(lambda: ends(worker, "emails"), lambda found: found == (acked + 3, dead))


# --- sender, processor and tracker apart ------------------------------------------------------------------------------


async def test_standalone(machine: Machine) -> None:
    sender = await machine.start("standalone.sender", "50")
    first = await machine.start("standalone.processor")
    assert first.stdout is not None

    said = []
    async with asyncio.timeout(LIMIT_SECONDS):
        while sum(line.startswith("processed") for line in said) < 10:
            said.append((await first.stdout.readline()).decode())
    first.kill()
    rest, _ = await first.communicate()
    said += rest.decode().splitlines()
    said += (await machine.run("standalone.processor")).splitlines()
    sent = await machine.end(sender)

    processed = [int(number) for number in re.findall(r"^processed (\d+)", "\n".join(said), re.MULTILINE)]
    assert sent.splitlines() == [f"sent {number}" for number in range(1, 51)]
    assert set(processed) == set(range(1, 51))
    assert any("redelivered, attempt 2" in line for line in said)


# --- a web service ----------------------------------------------------------------------------------------------------


async def ask(url: str, document: object = None) -> tuple[int, Any]:
    """POST a document, or GET without one; status 0 if there is no answer."""

    def get() -> tuple[int, Any]:
        data = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_SECONDS) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except OSError:
            return 0, None

    return await asyncio.to_thread(get)


@pytest.fixture
def mortal_broker() -> Iterator[EmbeddedBroker]:
    """A broker that a test may stop."""
    with EmbeddedBroker() as broker:
        yield broker


async def test_fastapi_service(mortal_broker: EmbeddedBroker, names: Names) -> None:
    email = {"to": "ann@example.org", "subject": "hello"}
    port = ports.free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    async with Machine(mortal_broker.bootstrap_servers, names) as machine:
        service = await machine.start("fastapi_service:app", "--port", str(port), runner="uvicorn")
        await eventually(lambda: ask(f"{url}/healthz"), lambda answer: answer[0] == 200)

        status, answer = await ask(f"{url}/emails", email)
        assert (status, (await ask(f"{url}/emails", {}))[0]) == (202, 422)

        await asyncio.to_thread(mortal_broker.stop)
        assert await ask(f"{url}/emails", email) == (503, {"detail": "not known to be accepted, try again"})
        assert (await ask(f"{url}/healthz"))[0] == 200

        await asyncio.to_thread(mortal_broker.start)
        await eventually(lambda: ask(f"{url}/emails", email), lambda answer: answer[0] == 202)

        async with marq.Consumer("emails", mortal_broker.bootstrap_servers, prefix=names.prefix) as consumer:
            received: dict[str, Any] = {}
            async with asyncio.timeout(LIMIT_SECONDS):
                while answer["id"] not in received:
                    received |= {message.id: json.loads(message.value) for message in await consumer.receive()}
        assert received[answer["id"]] == email

        service.send_signal(signal.SIGTERM)
        await asyncio.wait_for(service.communicate(), LIMIT_SECONDS)
        assert service.returncode in (0, -signal.SIGTERM)
