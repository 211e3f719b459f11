"""The stage of a scenario: workers, consumers and a steady load on two queues, one of which is ordered by key."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
import uuid
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import lab.recorded_run
import marq
from lab.faults.consumer import HISTORY_VARIABLE, LEASE_SECONDS
from lab.program import Program, RunError, Worker, recorded
from lab.proof import history
from lab.proof.history import Event
from lab.recorded_run import SESSION_SECONDS
from marq.settings.client import ClientSettings

QUEUE, ORDERED = "checked", "ordered"
PARTITIONS = 2
#: Every third message goes to the ordered queue, every seventh without a key. These numbers and the consumers' KINDS
#: have no common factors, so each key gets messages with each outcome.
ORDERED_SHARE, UNKEYED_SHARE, KEYS = 3, 7, 31
#: Environment variable with the seed of random scenarios.
SEED_VARIABLE = "MARQ_FAULTS_SEED"
#: High enough that faults alone cause no dead letters.
MAX_ATTEMPTS = 100
SETTINGS: dict[str, Any] = {
    "max_attempts": MAX_ATTEMPTS,
    "dead_letter": True,
    "group": None,
    "backoff": [100, 2, 200, True],
}
QUICK_BACKOFF = "backoff = { base = 0.1, factor = 2, max = 0.2, jitter = true }\n"
#: Messages that the load sends per second, and in one step.
RATE, STEP = 200, 20


class Stage(lab.recorded_run.Stage):
    """Two queues, ``checked`` and ``ordered``, and a steady load."""

    def __init__(self, servers: str, folder: Path) -> None:
        settings = ClientSettings.read(servers, {"prefix": f"f{uuid.uuid4().hex[:10]}"}, owner="faults")
        super().__init__(settings, folder, [QUEUE, ORDERED], PARTITIONS)
        #: Seed of scenarios that act at random.
        self.seed = int(os.environ.get(SEED_VARIABLE, "1"))
        #: Messages that are known to be in the topic, by queue.
        self.accepted_by: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._names = itertools.count(1)
        self._queues_file = folder / "queues.toml"
        #: How far the brokers' clock is ahead of this machine's, in ms, from each moment on; None if that is unknown.
        self._ahead_ms: list[tuple[float, float | None]] = [(0.0, 0.0)]
        self.define()

    @property
    def accepted(self) -> int:
        """The number of messages that are known to be in the topic."""
        return self.accepted_by.total()

    def define(self, lines: str = QUICK_BACKOFF, own: str = "", **settings: Any) -> None:
        """Define the queues, before any program starts: by lines of queues.toml, and for the checker.

        Args:
            lines: for both queues.
            own: lines for the queue without ordering only, and anything that follows it in the file.
            settings: for the checker; those that are not in SETTINGS apply only to the queue without ordering.
        """
        settings = SETTINGS | settings
        both = f"lease = {LEASE_SECONDS}\nmax_attempts = {settings['max_attempts']}\n{lines}"
        text = f'[queues.{ORDERED}]\nordering = "key"\n{both}\n[queues.{QUEUE}]\n{both}{own}'
        self._queues_file.write_text(text)
        ordered = {name: settings[name] for name in SETTINGS} | {"ordering": "key"}
        self.note("ok", "settings", process="queues", version=1, queues={QUEUE: settings, ORDERED: ordered})

    def move_brokers_clock(self, ahead_s: float, within_s: float) -> None:
        """Note that the brokers' clock will be this far ahead within ``within_s``."""
        now_ms = time.monotonic() * 1000
        self._ahead_ms += [(now_ms, None), (now_ms + within_s * 1000, ahead_s * 1000)]

    def take(self, event: Event) -> None:
        """Add an event; a delivery gets the time that the markers' log had at that moment."""
        if event["op"] == "deliver":
            at_ms = event["at_ms"]
            _, ahead_ms = self._ahead_ms[bisect_right(self._ahead_ms, at_ms, key=lambda each: each[0]) - 1]
            if ahead_ms is not None:
                # Rounded up: a marker of the same millisecond counts as written before.
                event["time_ms"] = math.ceil(at_ms + (time.time() - time.monotonic()) * 1000 + ahead_ms)
        super().take(event)

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "MARQ_BOOTSTRAP_SERVERS": self.servers,
            "MARQ_PREFIX": self.prefix,
            "MARQ_PARTITIONS": str(PARTITIONS),
            "MARQ_QUEUES_FILE": str(self._queues_file),
            "MARQ_SESSION_TIMEOUT": str(int(SESSION_SECONDS)),
        }

    async def worker(self, *options: str, data: Path | None = None, ready: bool = True, **environment: str) -> Worker:
        """Start a worker; return when all partitions have an owner, or at once unless ``ready``.

        A worker that kills itself may be dead by then.
        """
        name = f"worker-{next(self._names)}"
        data = data or self.folder / name / "data"
        own = {HISTORY_VARIABLE: str(self.folder / f"{name}.jsonl"), "MARQ_WEB_BIND": "127.0.0.1"}
        settings = {**own, **self._environment, **environment}
        command = recorded(name, self.folder, "lab.faults.worker", options)
        worker = Worker(name, self.folder, settings, command=command, data=data, temporary=[self.folder]).start()
        self.workers.append(worker)
        if ready:
            await self.until(lambda: self._owned_or_killed(worker), "each markers partition has an owner")
        return worker

    async def _owned_or_killed(self, worker: Worker) -> bool:
        return worker.has_killed_itself or await self.all_owned()

    async def consumer(self, *options: str, **environment: str) -> Program:
        """Start a consumer of all queues; return when it has joined their groups, or has killed itself."""
        name = f"consumer-{next(self._names)}"
        command = recorded(name, self.folder, "lab.faults.consumer", [",".join(self.queues), *options])
        settings = {**self._environment, **environment}
        consumer = Program(name, command, settings, self.folder / f"{name}.log", temporary=[self.folder])
        self.consumers.append(consumer.start())
        await self.until(lambda: name in self.ready or consumer.has_killed_itself, f"{name} is ready")
        return consumer

    async def begin(self, consumers: int = 2, **settings: Any) -> Worker:
        """Start a worker, the load and consumers, and wait for some deliveries; return the worker."""
        worker = await self.worker(**settings)
        self.load()
        for _ in range(consumers):
            await self.consumer()
        await self.delivered_more()
        return worker

    async def churn(self, join: Callable[[], Awaitable[Program]], seconds: float, every_seconds: float) -> None:
        """Let programs join and leave, one after the other, every second time by SIGTERM instead of kill -9."""
        until_s, ends = time.monotonic() + seconds, itertools.cycle((self.kill, self.stop))
        while time.monotonic() < until_s:
            guest = await join()
            await self.play(every_seconds)
            await next(ends)(guest)
            await self.play(every_seconds / 2)

    async def replaced(self, program: Program, limit: float) -> None:
        """Wait until a program has stopped because another one uses its instance id."""
        program.ended_by_us = True
        await self.until(lambda: not program.running, f"{program.name} has stopped", limit)
        self.note("info", "stop", target=program.name)
        if "joined" not in program.log():
            raise RunError(f"{program.name} does not say why it stopped:\n{program.log_tail()}")

    def load(self, rate: int = RATE, servers: str | None = None) -> None:
        """Send at this rate, in messages a second, until the end of the scenario."""
        self.load_with(self._send(rate, servers or self.servers))

    async def _send(self, rate: int, servers: str) -> None:
        async with marq.Producer(servers, prefix=self.prefix) as producer:
            next_s = time.monotonic()
            while True:
                await asyncio.gather(*[self.send_one(producer) for _ in range(STEP)])
                # The load does not catch up after an outage.
                next_s = max(next_s + STEP / rate, time.monotonic() - 1)
                await asyncio.sleep(max(0, next_s - time.monotonic()))

    async def send_one(
        self, producer: marq.Producer, queue: str = "", like: int | None = None, **options: Any
    ) -> marq.Receipt | None:
        """Send the next message and record it; return its receipt, or None if the outcome is unknown.

        Without a ``queue``, the message's number determines its queue and ordering key; ``like`` replaces the number.
        """
        number = next(self._numbers)
        value = b"%d" % number
        place = number if like is None else like
        if not queue:
            queue = QUEUE if place % ORDERED_SHARE else ORDERED
        if queue == ORDERED and place % UNKEYED_SHARE:
            options["ordering_key"] = f"customer-{place % KEYS}"
        headers = {"tenant": b"acme"} if number % 2 else {}
        names = {"process": "sender", "message": str(number), "queue": queue}
        names["content"] = history.content(queue, None, value, tuple(headers.items()))
        self.note("invoke", "send", **names)
        try:
            receipt = await producer.send(queue, value, headers=headers, **options)
        except marq.MarqError:
            self.note("unknown", "send", **names)
            return None
        self.note("ok", "send", **names, record=receipt.id)
        self.accepted_by[queue] += 1
        return receipt


def recovery_seconds(events: Sequence[Event]) -> float | None:
    """Return the time from the end of the last fault until all earlier messages were done; None without a fault."""
    faults = [event["at_ms"] for event in events if event["process"] == "nemesis" or event["op"] == "kill"]
    if not faults:
        return None
    last = max(faults)
    sent = {e["record"] for e in events if e["op"] == "send" and e["type"] == "ok" and e["at_ms"] <= last}
    ends: dict[str, float] = {}
    for event in events:
        if event["op"] in {"ack", "reject"} and event["type"] == "ok":
            for offset in event["offsets"]:
                ends.setdefault(f"{event['source']}/{offset}", event["at_ms"])
    # A copy's offset differs from its message's.
    copies = {f"{e['process']}/{e['offset']}": e["id"] for e in events if e["op"] == "record" and "id" in e}
    done = {copies.get(record, record): at_ms for record, at_ms in ends.items()}
    return max(0.0, max((done[record] - last for record in sent if record in done), default=0.0)) / 1000
