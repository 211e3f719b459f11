"""Each program of examples/ does on a real broker what it says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import marq
from broker import ports
from broker.embedded import EmbeddedBroker
from marq.core.names import Names
from tests.docs.pages import ROOT
from tests.worker.harness import Installation, Worker, eventually

LIMIT_SECONDS = 180.0
PROGRAMS = sorted(
    path.relative_to(ROOT / "examples").as_posix()
    for path in (ROOT / "examples").rglob("*.py")
    if path.stem != "__init__"
)
QUEUES = (ROOT / "examples" / "queues.toml").read_text(encoding="utf-8")


class Machine:
    """Where examples run: a checkout, a broker, and an installation of their own."""

    def __init__(self, servers: str, names: Names) -> None:
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MARQ_")},
            "PYTHONPATH": str(ROOT),
            "MARQ_BOOTSTRAP_SERVERS": servers,
            "MARQ_PREFIX": names.prefix,
        }
        self._started: list[Process] = []

    async def start(self, program: str, *arguments: str, runner: str = "") -> Process:
        """Start ``python -m examples.PROGRAM``; with a ``runner`` (uvicorn) that gets it as an argument."""
        command = [runner, f"examples.{program}"] if runner else [f"examples.{program}"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command, *arguments, cwd=ROOT, env=self._environment, stdout=PIPE, stderr=PIPE
        )
        self._started.append(process)
        return process

    async def run(self, program: str, *arguments: str) -> str:
        """Run an example to its end and return what it printed."""
        process = await self.start(program, *arguments)
        return await self.end(process)

    async def end(self, process: Process) -> str:
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                output, errors = await process.communicate()
        except TimeoutError:
            process.kill()
            raise
        assert process.returncode == 0, errors.decode()
        assert b"Traceback" not in errors, errors.decode()
        return output.decode()

    async def close(self) -> None:
        """Let nothing outlive the test."""
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


@pytest.fixture
async def machine(servers: str, names: Names) -> AsyncIterator[Machine]:
    machine = Machine(servers, names)
    yield machine
    await machine.close()


@pytest.fixture
async def worker(machine: Machine, servers: str, names: Names, tmp_path: Path) -> AsyncIterator[Worker]:
    """A worker as examples/handlers.py starts one."""
    queues = QUEUES.replace('"orders"', f'"{names.prefix}-orders"')
    found = Worker(
        servers, tmp_path, prefix=names.prefix, queues=queues, environment={"MARQ_HANDLERS": "examples.handlers"}
    )
    try:
        yield await found.start().ready(1)
    finally:
        found.close()


@pytest.fixture
async def installation(machine: Machine, servers: str, names: Names) -> AsyncIterator[Installation]:
    async with marq.Producer(servers, prefix=names.prefix):
        pass  # it makes the topics
    async with Installation(servers, names) as found:
        yield found


async def send(servers: str, names: Names, queue: str, *values: bytes) -> None:
    async with marq.Producer(servers, prefix=names.prefix) as producer:
        await producer.send_many(queue, values)


async def test_send_and_consume(machine: Machine) -> None:
    sent = await machine.run("send", "jobs", "5")
    consumed = await machine.run("consume", "jobs", "5")

    assert "sent 4 more" in sent
    assert len(consumed.splitlines()) == 5
    assert "b'the first' {'to': b'somebody@example.org'}" in consumed
    assert all(f"b'message {number}'" in consumed for number in range(1, 5))


async def test_synchronous(machine: Machine) -> None:
    sent = await machine.run("synchronous", "jobs", "20")
    consumed = await machine.run("consume", "jobs", "21")

    assert sent.splitlines()[0] == "sent 20 from threads"
    assert [line.split()[1] for line in sent.splitlines()[1:]] == ["jobs", "jobs-audit"]
    assert all(f'{{"number":{number},"square":{number**2}}}' in consumed for number in range(20))
    assert '{"done":20}' in consumed


async def test_receive(machine: Machine, servers: str, names: Names) -> None:
    await send(servers, names, "jobs", *[b"x"] * 250)

    output = await machine.run("receive", "jobs")

    assert output.splitlines()[-1] == "done: 250"


async def test_run_until_it_is_told_to_stop(machine: Machine, servers: str, names: Names) -> None:
    process = await machine.start("run", "jobs")
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_SECONDS):
        while await process.stdout.readline() != b"running\n":
            pass
        await send(servers, names, "jobs", b"good", b"bad")
        while b"handled b'good'" not in await process.stdout.readline():
            pass

    process.send_signal(signal.SIGTERM)

    await machine.end(process)


async def test_decide(machine: Machine, servers: str, names: Names) -> None:
    await send(servers, names, "jobs", b"later", b"never", b"long", b"now")

    output = await machine.run("decide", "jobs")

    assert set(output.splitlines()) == {
        "b'later' released for a minute", "b'never' rejected", "b'long' acked", "b'now' acked",
    }  # fmt: skip


async def test_elsewhere(machine: Machine, servers: str, names: Names, installation: Installation) -> None:
    await send(servers, names, "jobs", b"taken here")

    token = await machine.run("elsewhere", "jobs")
    finished = await machine.run("elsewhere", "jobs", token.strip())

    assert finished == "acked\n"
    assert type((await installation.markers())[-1][1]).__name__ == "Ack"


async def test_later(machine: Machine, worker: Worker) -> None:
    assert await machine.run("later", "jobs") == "moved: True\ncancelled: True\ncancelled again: False\n"

    async def delivered() -> int:
        return int((await worker.figures()).get("queues", {}).get("jobs", {}).get("delivered", 0))

    await eventually(delivered, lambda count: count == 1)


async def test_handlers(machine: Machine, worker: Worker, servers: str, names: Names) -> None:
    async with marq.Producer(servers, prefix=names.prefix) as producer:
        await producer.send("emails", b'{"to": "somebody@example.org", "subject": "hello"}')
        await producer.send("emails", b'{"subject": "without an address"}')
        await producer.send("emails", b"no JSON")
        await producer.send("thumbnails", b"picture")

    await ended(worker, emails=(1, 2), thumbnails=(1, 0))

    letters = (await machine.run("dead_letters", "emails")).splitlines()
    assert len(letters) == 2
    assert any(line.endswith("""b'{"subject": "without an address"}' died: no address""") for line in letters)
    assert any("b'no JSON' died: the value (7 bytes) is not JSON" in line for line in letters)
    assert "2 sent back to emails" in await machine.run("dead_letters", "emails", "--redrive")
    await ended(worker, emails=(1, 4))


async def ended(worker: Worker, **queues: tuple[int, int]) -> None:
    """Wait until so many messages of each queue were acked, and so many are dead."""

    async def figures() -> dict[str, tuple[float, float]]:
        found = (await worker.figures()).get("queues", {})
        return {name: (found[name]["acked"], found[name]["dead"]) for name in queues if name in found}

    await eventually(figures, lambda found: found == queues)


async def test_plain_kafka(machine: Machine, worker: Worker, names: Names) -> None:
    await machine.run("plain_kafka", "emails", f"{names.prefix}-orders")

    consumed = await machine.run("consume", "orders", "3")

    assert re.findall(r"attempt 1 (b'.+') {}", consumed) == ["b'one of everything'"] * 3
    await ended(worker, emails=(3, 0))


# --- a web service ----------------------------------------------------------------------------------------------------


async def ask(url: str, document: object = None) -> tuple[int, Any]:
    """POST a document, or GET without one; status 0 when nobody answers."""

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
    email = {"to": "somebody@example.org", "subject": "hello"}
    port = ports.free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    machine = Machine(mortal_broker.bootstrap_servers, names)
    try:
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
    finally:
        await machine.close()


# --- sender, processor and tracker apart ------------------------------------------------------------------------------


async def test_standalone(machine: Machine, worker: Worker) -> None:
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


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_is_tested_and_named_in_the_readme(program: str) -> None:
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    tests = Path(__file__).read_text(encoding="utf-8")
    module = program.removesuffix(".py").replace("/", ".")

    assert f"({program})" in readme
    assert f'"{module}"' in tests or f'"{module}:app"' in tests or f'"examples.{module}"' in tests
