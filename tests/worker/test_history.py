"""The checker on a real broker: what a real producer, consumer and worker did is a history without a finding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import marq
from marq.core.marker_codec import decode
from marq.core.markers import Source
from marq.core.names import Names
from marq.core.notes import is_note
from proof import history
from proof.checker import check
from proof.history import History
from tests.worker.harness import Installation, Worker, eventually

QUEUE, LEASE, MAX_ATTEMPTS, MESSAGES = "checked", 2.0, 3, 60
QUEUES = f"""
[queues.{QUEUE}]
lease = {LEASE}
max_attempts = {MAX_ATTEMPTS}
backoff = {{ base = 0.1, factor = 2, max = 0.2, jitter = true }}
"""
SETTINGS = {"max_attempts": MAX_ATTEMPTS, "dead_letter": True, "group": None, "backoff": [100, 2, 200, True]}


@pytest.fixture
async def worker(servers: str, names: Names, tmp_path: Path) -> AsyncIterator[Worker]:
    worker = Worker(servers, tmp_path, prefix=names.prefix, queues=QUEUES)
    try:
        yield await worker.start().ready()
    finally:
        worker.close()


class Observed:
    """A consumer's handlers, who write down what they do."""

    def __init__(self, told: History) -> None:
        self._told = told
        self._source = ""
        self.ended: set[int] = set()
        #: From then on all is acknowledged.
        self.mended = False

    async def handle(self, message: marq.Message) -> None:
        """Acknowledge, release, reject or forget, by the number that the message has."""
        self._say("deliver", message, record=self._place(message), attempt=message.attempt, group="g", queue=QUEUE)
        number = int(message.value)
        choice = 0 if self.mended else number % 5
        if choice == 1 and message.attempt == 1:
            await self._settle("release", message)
        elif choice == 2:
            await self._settle("reject", message)
        elif choice == 3 and message.attempt < MAX_ATTEMPTS:
            self._told.add("consumer", "ok", "hang", record=self._place(message))
        else:
            await self._settle("ack", message)

    async def _settle(self, op: str, message: marq.Message) -> None:
        source = history.log_name(message._lease.source)
        names = {"holder": history.holder_name(message._lease.holder), "source": source, "offsets": [message.offset]}
        self._told.add("consumer", "invoke", op, **names)
        try:
            await getattr(message, op)()
        except marq.LeaseLost:
            # On a busy machine; an ack was written all the same, another outcome perhaps.
            lost = {"lost": [message.offset]} if op == "ack" else {}
            self._told.add("consumer", "ok" if op == "ack" else "unknown", op, **names, **lost)
            return
        self._told.add("consumer", "ok", op, **names)
        if op != "release":
            self.ended.add(int(message.value))

    def _say(self, op: str, message: marq.Message, **fields: object) -> None:
        record = message._record
        content = history.content(QUEUE, record.key, message.value, record.headers)
        holder = history.holder_name(message._lease.holder)
        self._told.add("consumer", "ok", op, holder=holder, content=content, **fields)

    @staticmethod
    def _place(message: marq.Message) -> str:
        return history.name_of(message._lease.source, message.offset)


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
    redriven = sum(each.redriven for each in calls)
    assert (deleted.deleted, redriven) == (3, calls[0].chosen)
    observed.mended = True
    observed.ended.clear()
    async with marq.Consumer(QUEUE, servers, prefix=prefix, max_lease=LEASE) as consumer, asyncio.timeout(180):
        while len(observed.ended) < redriven:
            await asyncio.gather(*map(observed.handle, await consumer.receive(MESSAGES, wait=0.5)))


async def all_ended(worker: Worker) -> bool:
    figures = await worker.queue(QUEUE)
    return not any(figures[name] for name in ("in_flight", "waiting_for_redelivery", "waiting_for_dead_letters"))


async def read_logs(told: History, servers: str, names: Names) -> None:
    async with Installation(servers, names) as marq_:
        for topic, op in ((names.messages, "record"), (names.dead_letters, "dead")):
            for each in await marq_.records(topic):
                log = history.log_name(Source(topic, each.partition))
                if is_note(each.headers):
                    told.events.append(history.note(log, each.value))
                    continue
                fields = (each.offset, each.timestamp, (each.key or b"").decode(), each.key, each.value, each.headers)
                told.events.append(history.record(log, *fields, op=op))
        for each in await marq_.records(names.markers):
            log = history.log_name(Source(names.markers, each.partition))
            told.events.append(history.marker(log, each.offset, each.timestamp, decode(each.value)))


async def test_what_real_clients_and_a_real_worker_did_is_a_history_without_a_finding(
    worker: Worker, servers: str, names: Names, tmp_path: Path
) -> None:
    told = History()
    told.add("queues", "ok", "settings", version=1, queues={QUEUE: SETTINGS})

    await send(told, servers, names.prefix)
    observed = Observed(told)
    await receive(observed, servers, names.prefix)
    await eventually(lambda: all_ended(worker))
    await redrive(told, observed, servers, names.prefix)
    await eventually(lambda: all_ended(worker))
    await read_logs(told, servers, names)

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
