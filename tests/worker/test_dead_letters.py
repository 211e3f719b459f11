"""Dead letters on real workers: commands, and redrives that are broken off, doubled and outlive their tracker."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import marq
from broker import EmbeddedBroker
from marq.core.markers import Discard, Source
from marq.core.names import DIED_AT_HEADER, ERROR_HEADER, ID_HEADER, REASON_HEADER
from marq.core.notes import Became, decode, is_note
from tests.worker.harness import Installation, Worker, eventually, header

Make = Callable[..., Worker]
#: What a loaded machine may need for a hundred thousand letters; a calm one takes a tenth.
MANY_SECONDS = 100.0


class Yard:
    """Dead letters that are written as the tracker writes them, and what becomes of them."""

    def __init__(self, worker: Worker, installation: Installation, letters: marq.DeadLetters) -> None:
        self.worker = worker
        self.letters = letters
        self._installation = installation
        self._topic = worker.names.dead_letters

    async def bury(self, queue: str, count: int, *, partition: int = 0, reason: str = "no good") -> set[bytes]:
        """Write dead letters; return their ids."""
        sent, ids = [], []
        for number in range(count):
            ids.append(f"gone/{partition}/{number}-{queue}".encode())
            headers = [
                (ID_HEADER, ids[-1]), (REASON_HEADER, reason.encode()), (ERROR_HEADER, b"LookupError: [/x]"),
                (DIED_AT_HEADER, b"%d" % (1_700_000_000_000 + number)), ("tenant", b"acme"),
            ]  # fmt: skip
            sent.append(
                await self._installation.producer.send(
                    self._topic, b"%d" % number, queue.encode(), partition=partition, headers=headers
                )
            )
        await asyncio.gather(*sent)
        return set(ids)

    async def delivered(self, queue: str) -> Counter[bytes]:
        """How often each id was sent back to a queue."""
        records = await self._installation.records(self.worker.names.messages)
        return Counter(header(each)[ID_HEADER] for each in records if each.key == queue.encode())

    async def delivered_of(self, *queues: str) -> Counter[bytes]:
        return sum([await self.delivered(queue) for queue in queues], Counter[bytes]())

    async def notes(self) -> Counter[str]:
        """How many places became what; each is told of once but to those who came too late."""
        found: Counter[str] = Counter()
        told: set[tuple[int, int]] = set()
        for record in await self._installation.records(self._topic):
            note = decode(Source(self._topic, record.partition), record.value) if is_note(record.headers) else None
            if note is not None and note.became is not Became.BEFORE:
                # Written once more where it was unknown whether a transaction had been committed.
                places = {(record.partition, offset) for offset in note.offsets} - told
                told |= places
                found[note.became] += len(places)
        return found

    async def each_once(self, queue: str, ids: set[bytes]) -> None:
        """Wait until all these were delivered; fail if one was twice, or another one was."""
        found = await eventually(lambda: self.delivered(queue), lambda counts: len(counts) >= len(ids))
        assert found == dict.fromkeys(ids, 1)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "faust", "-A", "app", *arguments],
            cwd=self.worker.directory, env=self.worker._environment, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    async def run(self, *arguments: str, answer: str = "") -> tuple[int, str, str]:
        """Run a command to its end; return its exit code and what it printed."""
        process = self.start(*arguments)
        out, errors = await asyncio.to_thread(process.communicate, answer, 60)
        assert "Traceback" not in errors, errors
        return process.returncode, out, errors


@asynccontextmanager
async def yard_of(worker: Worker, broker: EmbeddedBroker) -> AsyncIterator[Yard]:
    servers = broker.bootstrap_servers
    async with (
        Installation(servers, worker.names) as installation,
        marq.DeadLetters(servers, prefix=worker.names.prefix) as letters,
    ):
        yield Yard(worker, installation, letters)


# Fourteen processes, each of which imports all of the application.
@pytest.mark.timeout(900)
async def test_commands_show_count_delete_and_redrive(new_worker: Make, broker: EmbeddedBroker) -> None:
    worker = await new_worker().start().ready()
    async with yard_of(worker, broker) as yard:
        await yard.bury("q", 3)
        await yard.bury("q", 2, partition=1, reason="[red]odd[/red]")
        await yard.bury("other", 1)

        code, out, _ = await yard.run("dead", "--json")
        assert code == 0
        assert json.loads(out) == [
            {"queue": "q", "reason": "no good", "letters": 3},
            {"queue": "q", "reason": "[red]odd[/red]", "letters": 2},
            {"queue": "other", "reason": "no good", "letters": 1},
        ]
        code, out, _ = await yard.run("dead", "q", "--count", "--reason", "ODD")
        assert code == 0
        assert "[red]odd[/red]" in out
        code, out, _ = await yard.run("dead", "q", "--json", "--limit", "2", "--header", "tenant=acme")
        assert (code, [each["value"] for each in json.loads(out)]) == (0, ["0", "0"])
        code, out, _ = await yard.run("dead", "q", "--limit", "1")
        assert (code, "the 1 that died first" in out) == (0, True)
        code, out, _ = await yard.run("dead", "nobody")
        assert (code, out) == (0, "queue 'nobody' has no such dead letters\n")

        code, _, errors = await yard.run("dead", "q", "--delete", "--reason", "odd", answer="n\n")
        assert code == 1
        assert "Delete 2 dead letters of queue 'q' for good? [y/N]" in errors
        assert "nothing was changed" in errors
        code, out, _ = await yard.run("dead", "q", "--delete", "--reason", "odd", "--dry-run")
        assert (code, out) == (0, "2 dead letters would be deleted; nothing was changed\n")
        code, out, _ = await yard.run("dead", "q", "--delete", "--reason", "odd", "--yes")
        assert (code, out) == (0, "2 of 2 dead letters deleted\n")

        code, out, _ = await yard.run("redrive", "q", "--dry-run", "--limit", "2", "--json")
        assert (code, json.loads(out)["chosen"], json.loads(out)["redriven"]) == (0, 2, 0)
        code, _, errors = await yard.run("redrive", "q", "--to", "hospital", answer="n\n")
        assert code == 1
        assert "queue 'hospital' is unknown" in errors
        assert "Send 3 dead letters of queue 'q' to queue 'hospital'? [y/N]" in errors
        code, out, _ = await yard.run("redrive", "q", "--to", "hospital", "--allow-unknown", "--yes", "--json")
        assert code == 0
        assert json.loads(out) == {
            "queue": "q", "to": "hospital", "chosen": 3, "asked": 3, "redriven": 3, "already_settled": 0,
            "dry_run": False, "interrupted": False,
        }  # fmt: skip
        code, out, _ = await yard.run("redrive", "q")
        assert (code, out) == (0, "0 of 0 dead letters redriven\n")
        assert len(await yard.delivered("hospital")) == 3

        code, _, errors = await yard.run("redrive", "q", "--rate", "0")
        assert (code, errors.strip()[:12]) == (1, "marq: rate=0")
        code, _, errors = await yard.run("dead", "q", "--older", "soon")
        assert (code, errors.strip()[:18]) == (1, "marq: --older soon")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_a_redrive_that_is_killed_in_the_middle_is_called_again_and_nothing_comes_twice(
    new_worker: Make, broker: EmbeddedBroker, number: signal.Signals
) -> None:
    worker = await new_worker().start().ready()
    async with yard_of(worker, broker) as yard:
        ids = await yard.bury("q", 600)
        process = yard.start("redrive", "q", "--rate", "100", "--yes")
        await eventually(lambda: yard.delivered("q"), lambda counts: len(counts) > 50)

        os.kill(process.pid, number)
        out, _ = await asyncio.to_thread(process.communicate, None, 30)
        assert len(await yard.delivered("q")) < 600
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert "the same command again does the rest" in out

        code, out, _ = await yard.run("redrive", "q", "--json", "--yes")

        again = json.loads(out)
        assert (code, again["chosen"]) == (0, again["redriven"] + again["already_settled"])
        assert 0 < again["redriven"] < 600
        await yard.each_once("q", ids)
        assert await yard.letters.count("q") == []


async def test_a_worker_is_killed_and_started_again_in_the_middle_of_two_redrives(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = await new_worker(environment={"MARQ_FLUSH_INTERVAL": "0.5"}).start().ready()
    async with yard_of(worker, broker) as yard:
        ids = await yard.bury("q", 1_000) | await yard.bury("q", 1_000, partition=1)
        calls = [asyncio.create_task(yard.letters.redrive("q", rate=rate)) for rate in (600, 900)]
        await eventually(lambda: yard.delivered("q"), lambda counts: len(counts) > 200)

        worker.kill()
        later = await new_worker(like=worker).start().ready()

        one, two = await asyncio.gather(*calls)
        assert one.redriven + two.redriven == 2_000
        assert one.already_settled + two.already_settled == 2_000
        await yard.each_once("q", ids)

        later.kill()
        await new_worker(like=worker).start().ready()
        assert (await yard.letters.redrive("q")).chosen == 0
        assert await yard.letters.count() == []


@pytest.mark.parametrize("seed", [1, 2])
async def test_redrives_and_deletions_at_random_with_kills_settle_each_letter_in_one_way(
    new_worker: Make, broker: EmbeddedBroker, seed: int
) -> None:
    chance = random.Random(seed)
    worker = await new_worker(environment={"MARQ_FLUSH_INTERVAL": "1"}).start().ready()
    async with yard_of(worker, broker) as yard:
        ids = await yard.bury("q", 800) | await yard.bury("q", 800, partition=1)
        results: list[marq.Redriven | marq.Deleted] = []

        async def settle(number: int) -> None:
            """Settle some of the letters, at some rate; every third call is cancelled on its way."""
            filters: dict[str, Any] = {"limit": chance.randint(100, 900)} if number % 2 else {}
            call = (
                yard.letters.delete("q", reason="no good", **filters)
                if number % 4 == 3
                else yard.letters.redrive(
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
        results.append(await yard.letters.redrive("q", to="q0", allow_unknown=True))

        assert await yard.letters.count("q") == []
        notes = await yard.notes()
        delivered = await eventually(
            lambda: yard.delivered_of("q0", "q1", "q2"), lambda counts: len(counts) >= notes["redriven"]
        )
        assert set(delivered.values()) == {1}
        assert delivered.keys() <= ids
        assert len(delivered) == notes["redriven"]
        assert notes["redriven"] + notes["deleted"] == len(ids)
        assert min(notes["redriven"], notes["deleted"]) > 0
        assert all(done(each) + each.already_settled == each.chosen for each in results)


def done(result: marq.Redriven | marq.Deleted) -> int:
    return result.redriven if isinstance(result, marq.Redriven) else result.deleted


async def test_without_a_worker_a_redrive_says_so_and_happens_when_one_comes(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = await new_worker().start().ready()
    async with yard_of(worker, broker) as yard:
        ids = await yard.bury("q", 5)
        await worker.stop()
        options: dict[str, Any] = {"prefix": worker.names.prefix, "request_timeout": 1}
        async with marq.DeadLetters(broker.bootstrap_servers, **options) as letters:
            with pytest.raises(marq.BrokerUnavailable, match="no worker has answered within 1 s"):
                await letters.redrive("q")

        await new_worker(like=worker).start().ready()

        await yard.each_once("q", ids)
        await eventually(yard.letters.count, lambda counts: not counts)


async def test_markers_about_places_that_do_not_exist_do_no_harm(new_worker: Make, broker: EmbeddedBroker) -> None:
    worker = await new_worker().start().ready()
    async with yard_of(worker, broker) as yard:
        ids = await yard.bury("q", 1)
        for topic, partition in [(worker.names.dead_letters, 77), ("nowhere", 0), (worker.names.messages, 0)]:
            for where in (0, 1):
                await yard._installation.mark(Discard("q", 7, Source(topic, partition), [2**40]), where)

        assert (await yard.letters.redrive("q")).redriven == 1
        await yard.each_once("q", ids)


@pytest.mark.timeout(900)
async def test_a_hundred_thousand_scattered_letters_are_redriven_and_the_others_stay(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = await new_worker().start().ready()
    async with yard_of(worker, broker) as yard:
        producer, topic = yard._installation.producer, worker.names.dead_letters
        sent = [
            await producer.send(topic, b"%d" % number, b"mine" if number % 2 else b"other", partition=0)
            for number in range(200_000)
        ]
        await asyncio.gather(*sent[-1:])
        began_s = time.monotonic()

        result = await yard.letters.redrive("mine")

        assert time.monotonic() - began_s < MANY_SECONDS
        assert result == marq.Redriven(100_000, 100_000, 100_000, 0)
        assert [(each.queue, each.letters) for each in await yard.letters.count()] == [("other", 100_000)]
        again = await yard.letters.redrive("mine")
        assert again.chosen == 0
