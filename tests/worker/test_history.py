"""The checker on a real broker: what a real producer, consumer and worker did is a history without a finding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

import marq
from lab.consumer import Teller
from lab.cpu_waits import recorded_stalls
from lab.proof import history
from lab.proof.checker import check
from lab.proof.history import History
from lab.topics import read_logs
from marq.settings.client import ClientSettings
from marq.wire.names import Names
from tests.worker.harness import Worker, eventually

pytestmark = pytest.mark.verify

QUEUE, LEASE, MAX_ATTEMPTS, MESSAGES = "checked", 4.0, 3, 60
QUEUES = f"""
[queues.{QUEUE}]
lease = {LEASE}
max_attempts = {MAX_ATTEMPTS}
backoff = {{ base = 0.1, factor = 2, max = 0.2, jitter = true }}
"""
SETTINGS = {"max_attempts": MAX_ATTEMPTS, "dead_letter": True, "group": None, "backoff": [100, 2, 200, True]}


@pytest.fixture
async def worker(servers: str, names: Names, tmp_path: Path) -> AsyncIterator[Worker]:
    with Worker(servers, tmp_path, prefix=names.prefix, queues=QUEUES) as worker:
        yield await worker.ready()


class Observed:
    """A consumer's handlers, which record their calls."""

    def __init__(self, told: History) -> None:
        self._teller = Teller(partial(told.add, "consumer"))
        self.ended: set[int] = set()
        #: Everything is acknowledged after this.
        self.mended = False

    async def handle(self, message: marq.Message) -> None:
        """Acknowledge, release, reject or forget, by the number that the message has."""
        self._teller.deliver(message)
        number = int(message.value)
        choice = 0 if self.mended else number % 5
        if choice == 1 and message.attempt == 1:
            await self._teller.settle("release", message, message.release)
        elif choice == 2:
            await self._end("reject", message, message.reject)
        elif choice == 3 and message.attempt < MAX_ATTEMPTS:
            self._teller.forget(message)
        else:
            await self._end("ack", message, message.ack)

    async def _end(self, op: str, message: marq.Message, settle: Callable[[], Awaitable[None]]) -> None:
        if await self._teller.settle(op, message, settle):
            self.ended.add(int(message.value))


async def send(told: History, servers: str, prefix: str) -> None:
    async with marq.Producer(servers, prefix=prefix) as producer:
        for number in range(MESSAGES):
            value, headers = b"%d" % number, {"tenant": b"acme"} if number % 2 else {}
            said = {"message": str(number), "queue": QUEUE}
            said["content"] = history.content(QUEUE, None, value, tuple(headers.items()))
            told.add("producer", "invoke", "send", **said)
            receipt = await producer.send(QUEUE, value, headers=headers)
            told.add("producer", "ok", "send", **said, record=receipt.id)


async def receive(observed: Observed, servers: str, prefix: str) -> None:
    async with marq.Consumer(QUEUE, servers, prefix=prefix, max_lease=LEASE) as consumer, asyncio.timeout(180):
        while len(observed.ended) < MESSAGES:
            await asyncio.gather(*map(observed.handle, await consumer.receive(MESSAGES, wait=0.5)))


async def redrive(told: History, observed: Observed, servers: str, prefix: str) -> None:
    """Delete some of the dead letters, send back the others by two calls at once, and receive them."""
    async with marq.DeadLetters(servers, prefix=prefix) as letters:
        deleted = await letters.delete(QUEUE, limit=3)
        calls = await asyncio.gather(letters.redrive(QUEUE, rate=200), letters.redrive(QUEUE))
    redriven = sum(call.redriven for call in calls)
    assert (deleted.deleted, redriven) == (3, calls[0].chosen)
    observed.mended = True
    observed.ended.clear()
    async with marq.Consumer(QUEUE, servers, prefix=prefix, max_lease=LEASE) as consumer, asyncio.timeout(180):
        while len(observed.ended) < redriven:
            await asyncio.gather(*map(observed.handle, await consumer.receive(MESSAGES, wait=0.5)))


async def all_ended(worker: Worker) -> bool:
    statistics = await worker.queue(QUEUE)
    return not any(statistics[name] for name in ("in_flight", "waiting_for_redelivery", "waiting_for_dead_letters"))


async def test_what_real_clients_and_a_real_worker_did_is_a_history_without_a_finding(
    worker: Worker, servers: str, names: Names, tmp_path: Path
) -> None:
    told = History()
    told.add("queues", "ok", "settings", version=1, queues={QUEUE: SETTINGS})

    async with recorded_stalls("consumer", partial(told.add, "consumer"), LEASE):
        await send(told, servers, names.prefix)
        observed = Observed(told)
        await receive(observed, servers, names.prefix)
        await eventually(lambda: all_ended(worker))
        await redrive(told, observed, servers, names.prefix)
        await eventually(lambda: all_ended(worker))
    told.events += await read_logs(ClientSettings.read(servers, {"prefix": names.prefix}))

    report = check(told.events)
    told.write(tmp_path / "history.jsonl")
    assert [str(finding) for finding in report.findings] == [], tmp_path
    share = MESSAGES // 5
    assert (report.sent, report.accepted) == (MESSAGES, MESSAGES)
    # Forgotten at the first two of three attempts.
    assert report.causes[2] >= share
    assert report.duplicates == sum(report.causes.values())
    assert report.dead >= share
    assert report.redriven == report.dead - 3
    assert report.redelivered >= 3 * share
