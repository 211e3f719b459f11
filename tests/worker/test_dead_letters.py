"""Redrives and deletions on real workers: broken off, doubled, at random with kills, and a hundred thousand."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import marq
from marq_worker.broker import EmbeddedBroker
from tests.worker.dead_letters import yard_of
from tests.worker.harness import Worker, eventually, faust

Make = Callable[..., Worker]

pytestmark = pytest.mark.verify


def start(worker: Worker, *arguments: str) -> subprocess.Popen[str]:
    """Start a command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "faust", "-A", "app", *arguments],
        cwd=worker.directory, env=worker.environment, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_a_redrive_that_is_killed_in_the_middle_is_called_again_and_nothing_comes_twice(
    new_worker: Make, broker: EmbeddedBroker, number: signal.Signals
) -> None:
    worker = await new_worker().start().ready()
    async with yard_of(worker, broker) as yard:
        ids = await yard.bury("q", 1_500)
        process = start(worker, "redrive", "q", "--rate", "100", "--yes")
        await eventually(lambda: yard.delivered("q"), lambda counts: len(counts) > 50)

        os.kill(process.pid, number)
        out, _ = await asyncio.to_thread(process.communicate, None, 30)
        assert len(await yard.delivered("q")) < 1_500
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert "repeat the command for the rest" in out

        code, out, _ = await faust(worker, "redrive", "q", "--json", "--yes")

        again = json.loads(out)
        assert (code, again["chosen"]) == (0, again["redriven"] + again["already_settled"])
        assert 0 < again["redriven"] < 1_500
        await yard.each_once("q", ids)
        assert await yard.dead_letters.count("q") == []


async def test_a_worker_is_killed_and_started_again_in_the_middle_of_two_redrives(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = await new_worker(environment={"MARQ_FLUSH_INTERVAL": "0.5"}).start().ready()
    async with yard_of(worker, broker) as yard:
        ids = await yard.bury("q", 1_000) | await yard.bury("q", 1_000, partition=1)
        calls = [asyncio.create_task(yard.dead_letters.redrive("q", rate=rate)) for rate in (600, 900)]
        await eventually(lambda: yard.delivered("q"), lambda counts: len(counts) > 200)

        worker.kill()
        later = await new_worker(like=worker).start().ready()

        one, two = await asyncio.gather(*calls)
        assert one.redriven + two.redriven == 2_000
        assert one.already_settled + two.already_settled == 2_000
        await yard.each_once("q", ids)

        later.kill()
        await new_worker(like=worker).start().ready()
        assert (await yard.dead_letters.redrive("q")).chosen == 0
        assert await yard.dead_letters.count() == []


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_redrives_and_deletions_with_kills_settle_each_dead_letter_once(
    new_worker: Make, broker: EmbeddedBroker, seed: int
) -> None:
    chance = random.Random(seed)
    worker = await new_worker(environment={"MARQ_FLUSH_INTERVAL": "1"}).start().ready()
    async with yard_of(worker, broker) as yard:
        ids = await yard.bury("q", 800) | await yard.bury("q", 800, partition=1)
        results: list[marq.Redriven | marq.Deleted] = []

        async def settle(number: int) -> None:
            """Settle some dead letters at some rate; every third call is cancelled midway."""
            filters: dict[str, Any] = {"limit": chance.randint(100, 900)} if number % 2 else {}
            call = (
                yard.dead_letters.delete("q", reason="no good", **filters)
                if number % 4 == 3
                else yard.dead_letters.redrive(
                    "q", to=f"q{number % 3}", allow_unknown=True, rate=chance.choice([200, 400]), **filters
                )
            )
            task = asyncio.ensure_future(call)
            await asyncio.sleep(chance.random() * 2)
            if number % 3 == 0:
                task.cancel()
                await asyncio.wait([task])
            else:
                results.append(await task)

        async def kill() -> None:
            nonlocal worker
            for _ in range(2):
                await asyncio.sleep(0.5 + chance.random())
                worker.kill()
                worker = await new_worker(like=worker).start().ready()

        await asyncio.gather(kill(), *[settle(number) for number in range(9)])
        results.append(await yard.dead_letters.redrive("q", to="q0", allow_unknown=True))

        assert await yard.dead_letters.count("q") == []
        notes = await yard.notes()
        delivered = await eventually(
            lambda: yard.delivered("q0", "q1", "q2"), lambda counts: len(counts) >= notes["redriven"]
        )
        assert set(delivered.values()) == {1}
        assert delivered.keys() <= ids
        assert len(delivered) == notes["redriven"]
        assert notes["redriven"] + notes["deleted"] == len(ids)
        assert min(notes["redriven"], notes["deleted"]) > 0
        assert all(done(result) + result.already_settled == result.chosen for result in results)


def done(result: marq.Redriven | marq.Deleted) -> int:
    return result.redriven if isinstance(result, marq.Redriven) else result.deleted


@pytest.mark.timeout(900)
async def test_a_hundred_thousand_scattered_letters_are_redriven_and_the_others_stay(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = await new_worker().start().ready()
    async with yard_of(worker, broker) as yard:
        producer, topic = yard.namespace.producer, worker.names.dead_letters
        sent = [
            await producer.send(topic, b"%d" % number, b"mine" if number % 2 else b"other", partition=0)
            for number in range(200_000)
        ]
        await asyncio.gather(*sent[-1:])

        result = await yard.dead_letters.redrive("mine")

        assert result == marq.Redriven(100_000, 100_000, 100_000, 0)
        assert [(count.queue, count.dead_letters) for count in await yard.dead_letters.count()] == [("other", 100_000)]
        again = await yard.dead_letters.redrive("mine")
        assert again.chosen == 0
