"""Each program of examples/ does on a real broker what it says."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import marq
from broker.embedded import EmbeddedBroker
from marq.core.names import Names
from tests.docs.pages import ROOT
from tests.worker.harness import Installation, Worker, eventually, header

LIMIT_SECONDS = 60.0
PROGRAMS = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem not in ("__init__", "handlers"))


class Machine:
    """Where examples run: a checkout, a broker, and an installation of their own."""

    def __init__(self, servers: str, names: Names) -> None:
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MARQ_")},
            "PYTHONPATH": str(ROOT),
            "MARQ_BOOTSTRAP_SERVERS": servers,
            "MARQ_PREFIX": names.prefix,
        }

    async def start(self, program: str, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", f"examples.{program}", *arguments,
            cwd=ROOT, env=self._environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip

    async def run(self, program: str, *arguments: str) -> str:
        """Run an example to its end and return what it printed."""
        process = await self.start(program, *arguments)
        return await self.end(process)

    async def end(self, process: asyncio.subprocess.Process) -> str:
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                output, errors = await process.communicate()
        except TimeoutError:
            process.kill()
            raise
        assert process.returncode == 0, errors.decode()
        assert b"Traceback" not in errors, errors.decode()
        return output.decode()


@pytest.fixture
def machine(servers: str, names: Names) -> Machine:
    return Machine(servers, names)


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
    sent = await machine.run("send", "emails", "5")
    consumed = await machine.run("consume", "emails", "5")

    assert "sent 4 more" in sent
    assert len(consumed.splitlines()) == 5
    assert "b'the first' {'to': b'somebody@example.org'}" in consumed
    assert all(f"b'message {number}'" in consumed for number in range(1, 5))


async def test_receive(machine: Machine, servers: str, names: Names) -> None:
    await send(servers, names, "emails", *[b"x"] * 250)

    output = await machine.run("receive", "emails")

    assert output.splitlines()[-1] == "done: 250"


async def test_run_until_it_is_told_to_stop(machine: Machine, servers: str, names: Names) -> None:
    process = await machine.start("run", "emails")
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_SECONDS):
        while await process.stdout.readline() != b"running\n":
            pass
        await send(servers, names, "emails", b"good", b"bad")
        while b"handled b'good'" not in await process.stdout.readline():
            pass

    process.send_signal(signal.SIGTERM)

    await machine.end(process)


async def test_decide(machine: Machine, servers: str, names: Names) -> None:
    await send(servers, names, "emails", b"later", b"never", b"long", b"now")

    output = await machine.run("decide", "emails")

    assert set(output.splitlines()) == {
        "b'later' released for a minute", "b'never' rejected", "b'long' acked", "b'now' acked",
    }  # fmt: skip


async def test_elsewhere(machine: Machine, servers: str, names: Names, installation: Installation) -> None:
    await send(servers, names, "emails", b"taken here")

    token = await machine.run("elsewhere", "emails")
    finished = await machine.run("elsewhere", "emails", token.strip())

    assert finished == "acked\n"
    assert type((await installation.markers())[-1][1]).__name__ == "Ack"


async def test_the_handlers_of_the_worker(
    broker: EmbeddedBroker, servers: str, names: Names, tmp_path: Path, installation: Installation
) -> None:
    queues = (ROOT / "examples" / "queues.toml").read_text(encoding="utf-8")
    worker = Worker(servers, tmp_path, prefix=names.prefix, queues=queues)
    try:
        await worker.start().ready(1)
        async with marq.Producer(servers, prefix=names.prefix) as producer:
            await producer.send("emails", b"hello", headers={"to": b"somebody@example.org"})
            await producer.send("emails", b"without an address")
            await producer.send("thumbnails", b"picture")

        async def figures() -> list[tuple[float, float]]:
            found = (await worker.figures()).get("queues", {})
            return [(found[name]["acked"], found[name]["dead"]) for name in ("emails", "thumbnails") if name in found]

        await eventually(figures, lambda found: found == [(1, 1), (1, 0)])
    finally:
        worker.close()
    letters = await installation.records(names.dead_letters)
    assert [(letter.value, header(letter)["marq-reason"]) for letter in letters] == [
        (b"without an address", b"no address")
    ]


def test_each_program_is_tested_and_named_in_the_readme() -> None:
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    tests = Path(__file__).read_text(encoding="utf-8")

    for program in PROGRAMS:
        assert f"[{program}.py]({program}.py)" in readme
        assert f'"{program}", "emails"' in tests
