"""Programs of examples/ that need a broker alone do on a real one what they say."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from marq.wire.markers import Ack
from marq.wire.names import Names
from tests.docs.machine import LIMIT_SECONDS, Machine
from tests.docs.pages import PROGRAMS, ROOT
from tests.worker.harness import Namespace


@pytest.fixture
async def machine(servers: str, names: Names) -> AsyncIterator[Machine]:
    async with Machine(servers, names) as machine:
        yield machine


async def test_send_and_consume(machine: Machine) -> None:
    sent = await machine.run("send", "jobs", "5")
    consumed = await machine.run("consume", "jobs", "5")

    assert "sent 4 more" in sent
    assert len(consumed.splitlines()) == 5
    assert "b'the first' {'to': b'ann@example.org'}" in consumed
    assert all(f"b'message {number}'" in consumed for number in range(1, 5))


async def test_synchronous(machine: Machine) -> None:
    sent = await machine.run("synchronous", "jobs", "20")
    consumed = await machine.run("consume", "jobs", "21")

    assert sent.splitlines()[0] == "sent 20 from threads"
    assert [line.split()[1] for line in sent.splitlines()[1:]] == ["jobs", "jobs-audit"]
    assert all(f'{{"number":{number},"square":{number**2}}}' in consumed for number in range(20))
    assert '{"done":20}' in consumed


async def test_receive(machine: Machine) -> None:
    await machine.send("jobs", *[b"x"] * 250)

    output = await machine.run("receive", "jobs")

    assert output.splitlines()[-1] == "done: 250"


async def test_run_until_it_is_told_to_stop(machine: Machine) -> None:
    process = await machine.start("run", "jobs")
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_SECONDS):
        while await process.stdout.readline() != b"running\n":
            pass
        await machine.send("jobs", b"good", b"bad")
        while b"handled b'good'" not in await process.stdout.readline():
            pass

    process.send_signal(signal.SIGTERM)

    await machine.end(process)


async def test_decide(machine: Machine) -> None:
    await machine.send("jobs", b"later", b"never", b"long", b"now")

    output = await machine.run("decide", "jobs")

    assert set(output.splitlines()) == {
        "b'later' released for a minute", "b'never' rejected", "b'long' acked", "b'now' acked",
    }  # fmt: skip


async def test_elsewhere(machine: Machine) -> None:
    await machine.send("jobs", b"taken here")

    token = await machine.run("elsewhere", "jobs")
    finished = await machine.run("elsewhere", "jobs", token.strip())

    assert finished == "acked\n"
    async with Namespace(machine.servers, machine.names) as namespace:
        assert isinstance((await namespace.markers())[-1][1], Ack)


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_is_tested_and_named_in_the_readme(program: str) -> None:
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_examples*.py"))
    module = program.removesuffix(".py").replace("/", ".")

    assert f"({program})" in readme
    assert f'"{module}"' in tests or f'"{module}:app"' in tests or f'"examples.{module}"' in tests
