"""One run of the demo on a broker: starts the processes, sends, kills, waits for the end of each message."""

from __future__ import annotations

import asyncio
import time
import tomllib
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiokafka.errors import KafkaError

import marq
from lab.demo.plan import QUEUES_FILE, Plan, make_value
from lab.demo.progress import Display
from lab.program import Program, RunError, Worker, recorded
from lab.proof import history
from lab.proof.causes import EVERYBODY
from lab.proof.history import Event
from lab.recorded_run import SESSION_SECONDS, Stage
from lab.recorder import BrokerWatch
from lab.topics import Position, TopicReader
from marq.settings.client import ClientSettings
from marq_worker.broker import EmbeddedBroker

WORKERS = 2
#: Messages per call of send_many.
SEND_CHUNK = 2_000
#: Share of the messages that is acknowledged when a consumer is killed, and when a worker is.
CONSUMER_KILL_SHARE, WORKER_KILL_SHARE = 0.1, 0.4
#: Share at which they are killed even if they hold less than they must: the demo then fails, and says so.
LATE_SHARE = 0.9
#: Minimum time for which workers and consumers try to reach the broker.
START_SECONDS = 180.0
#: A lease with less than this left may end before its consumer is killed.
_MARGIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Kill:
    """A program's kill -9: its markers partitions if it was a worker, and where the markers topic ended."""

    name: str
    at_ms: int
    end: Position
    partitions: tuple[int, ...] = ()


def programs(plan: Plan, folder: Path, environment: Mapping[str, str]) -> tuple[list[Worker], list[Program]]:
    # On a busy machine, the new broker responds late. No program may give up before the demo does.
    connect_seconds = max(START_SECONDS, plan.limit_seconds)
    environment = {"MARQ_CONNECT_TIMEOUT": f"{connect_seconds:g}", **environment}
    settings = {"MARQ_WEB_BIND": "127.0.0.1", "MARQ_QUEUES_FILE": str(QUEUES_FILE), **environment}
    workers = [Worker(f"worker-{n + 1}", folder, settings, temporary=[folder]) for n in range(WORKERS)]
    options = [f"--messages={plan.messages}", f"--queues={plan.queues}", f"--lease={plan.lease_seconds}"]
    consumers = []
    for name in [f"consumer-{n + 1}" for n in range(plan.consumers)]:
        command = recorded(name, folder, "lab.demo.consumer", options)
        consumers.append(Program(name, command, environment, folder / f"{name}.log", temporary=[folder]))
    return workers, consumers


class Run(Stage):
    """A run; ``broker`` is the embedded broker, or None."""

    def __init__(
        self,
        plan: Plan,
        settings: ClientSettings,
        folder: Path,
        partitions: int,
        display: Display,
        broker: EmbeddedBroker | None,
    ) -> None:
        super().__init__(settings, folder, plan.queue_names, partitions)
        self._plan = plan
        self._display = display
        self._broker = broker
        threads = Path(f"/proc/{broker.pid if broker is not None else None}/task")
        self._broker_watch = BrokerWatch(threads, plan.lease_seconds, self._note_slow_broker)
        self._began_s = time.monotonic()
        self._sent = self._acked = self._owned = 0
        #: Numbers of dead letters and redeliveries, from the workers' statistics.
        self._counts: tuple[int, ...] = ()
        #: Times of the messages that each consumer forgot, by its name.
        self._forgotten: dict[str, deque[float]] = defaultdict(deque)
        self._asking: asyncio.Task[dict[str, Any]] | None = None
        self.kills: list[Kill] = []
        self.seconds = 0.0
        self.note("ok", "settings", process="queues", version=1, queues={EVERYBODY: _settings()})

    async def carry_out(self) -> None:
        """Carry out the run.

        Raises:
            RunError: a program ended by itself, or there was no progress within the plan's limit.
        """
        try:
            await self._play()
        except (marq.MarqError, KafkaError) as error:
            self._check_broker()
            raise RunError(f"{error or type(error).__name__}\n{self.log_tails()}") from error
        finally:
            if self._asking is not None:
                self._asking.cancel()
                await asyncio.gather(self._asking, return_exceptions=True)

    async def _play(self) -> None:
        self._display.phase("start workers and consumers")
        await self.start_programs()
        self._display.say(f"{len(self.workers)} workers and {len(self.consumers)} consumers are ready")
        async with (
            TopicReader(self.settings, self.settings.names.markers, committed=False) as markers,
            marq.Producer(self.servers, prefix=self.prefix) as producer,
        ):
            self._display.phase(
                f"send {self._plan.messages:,} messages to {self._plan.queues} queues, and receive them"
            )
            self.load_with(self._send(producer))
            await self._kill_consumer(markers)
            await self._kill_worker(markers)
            await self.until(lambda: self._sent == self._plan.messages, "all messages are sent", self._limit_s)
        self._display.phase("drain: wait until each message is acknowledged or dead-lettered")
        await self.drain(self._limit_s)
        self.seconds = time.monotonic() - self._began_s
        self._display.phase("stop the consumers, and read the topics")
        await self.finish(limit=self._limit_s)
        self.events = history.by_time(self.events, (time.time() - time.monotonic()) * 1000)

    async def start_programs(self) -> None:
        """Start workers and consumers, and wait until each worker has partitions."""
        environment = {"MARQ_BOOTSTRAP_SERVERS": self.servers, "MARQ_PREFIX": self.prefix}
        environment["MARQ_SESSION_TIMEOUT"] = f"{SESSION_SECONDS:g}"
        self.workers, self.consumers = programs(self._plan, self.folder, environment)
        for program in self.everybody:
            program.start()
        await self.until(self._all_ready, "workers and consumers are ready", self._limit_s)

    async def _all_ready(self) -> bool:
        # Each worker must own partitions, so that killing one takes some of them away and leaves others.
        owned = await asyncio.gather(*[asyncio.to_thread(worker.owned) for worker in self.workers])
        self._owned = max(self._owned, sum(map(len, owned)))
        return len(self.ready) == len(self.consumers) and all(owned) and await self.all_owned()

    @property
    def _limit_s(self) -> float:
        return self._plan.limit_seconds

    def progress(self) -> object:
        return self._sent, self._acked, self._owned, len(self.ready), self.delivered, self._counts

    def _check_broker(self) -> None:
        if self._broker is not None and not self._broker.running:
            raise RunError(f"the embedded broker has ended:\n{self._broker.log_tail()}")

    def _note_slow_broker(self, since_s: float) -> None:
        self.note("invoke", "pause", target=EVERYBODY, at_ms=since_s * 1000)
        self.note("ok", "pause", target=EVERYBODY)

    # --- progress -----------------------------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        super().take(event)
        if event["op"] == "ack" and event["type"] == "ok":
            self._acked += 1
        elif event["op"] == "hang":
            self._forgotten[event["process"]].append(event["at_ms"] / 1000)

    def look(self) -> None:
        self._check_broker()
        self._broker_watch.look()
        super().look()
        self._display.show(sent=self._sent, acks=self._acked)
        # Does not wait for the answer.
        if self._asking is not None and self._asking.done():
            self._counts = self._display.statistics(self._asking.result().get("queues", {}))
            self._asking = None
        worker = next((worker for worker in self.workers if worker.running), None)
        if self._asking is None and worker is not None:
            self._asking = asyncio.create_task(asyncio.to_thread(worker.statistics))

    def show_read(self, events: int) -> None:
        self._display.detail(f"read {events:,} records")

    # --- the run ------------------------------------------------------------------------------------------------------

    async def _send(self, producer: marq.Producer) -> None:
        """Send a part of each queue's messages in turn, so that all of them have work from the beginning."""
        plan = self._plan
        step = SEND_CHUNK * plan.queues
        for start in range(0, plan.messages, step):
            for index in range(plan.queues):
                numbers = range(start + index, min(start + step, plan.messages), plan.queues)
                if numbers:
                    await self._send_some(producer, plan.queue(start + index), numbers)

    async def _send_some(self, producer: marq.Producer, queue: str, numbers: range) -> None:
        values = [make_value(number) for number in numbers]
        contents = [history.content(queue, None, value, ()) for value in values]
        told = [
            {"message": str(number), "queue": queue, "content": content}
            for number, content in zip(numbers, contents, strict=True)
        ]
        for said in told:
            self.note("invoke", "send", process="sender", **said)
        receipts = await producer.send_many(queue, values)
        for said, receipt in zip(told, receipts, strict=True):
            self.note("ok", "send", process="sender", **said, record=receipt.id)
        self._sent += len(receipts)

    async def _kill_consumer(self, markers: TopicReader) -> None:
        """Send kill -9 to the consumer that holds the most leases, once it holds enough."""
        needed = self._plan.least_held

        def enough() -> bool:
            share = self._acked / self._plan.messages
            return share >= LATE_SHARE or (share >= CONSUMER_KILL_SHARE and self._most_held()[0] >= needed)

        await self.until(enough, f"a consumer holds {needed} leases", self._limit_s)
        held, consumer = self._most_held()
        await self.kill(consumer)
        self.kills.append(Kill(consumer.name, _now_ms(), await markers.end()))
        self._display.phase(f"kill -9 {consumer.name}, which holds at least {held} leases according to its own history")

    def _most_held(self) -> tuple[int, Program]:
        since_s = time.monotonic() - self._plan.lease_seconds + _MARGIN_SECONDS
        for times in self._forgotten.values():
            while times and times[0] < since_s:
                times.popleft()
        return max(((len(self._forgotten[each.name]), each) for each in self.consumers), key=lambda held: held[0])

    async def _kill_worker(self, markers: TopicReader) -> None:
        """Send kill -9 to the worker with the most open rows, by its statistics."""
        rows: dict[str, int] = {}
        owned: dict[str, tuple[int, ...]] = {}

        async def enough() -> bool:
            if self._acked < self._plan.messages * WORKER_KILL_SHARE:
                return False
            for worker in self.workers:
                parts = await asyncio.to_thread(worker.owned)
                rows[worker.name], owned[worker.name] = sum(part["unfinished"] for part in parts.values()), tuple(parts)
            return max(rows.values()) > 0 or self._acked >= self._plan.messages * LATE_SHARE

        await self.until(enough, "a worker has open rows", self._limit_s)
        worker = max(self.workers, key=lambda each: rows[each.name])
        await self.kill(worker)
        self.kills.append(Kill(worker.name, _now_ms(), await markers.end(), owned[worker.name]))
        self._display.phase(f"kill -9 {worker.name}, which has {rows[worker.name]} open rows according to /api/queues")


def _settings() -> dict[str, Any]:
    """Return the settings in queues.toml, for the checker."""
    defaults = tomllib.loads(QUEUES_FILE.read_text(encoding="utf-8"))["defaults"]
    backoff = defaults["backoff"]
    times_ms = [int(backoff["base"] * 1000), backoff["factor"], int(backoff["max"] * 1000)]
    return {"max_attempts": defaults["max_attempts"], "backoff": [*times_ms, backoff["jitter"]]}


def _now_ms() -> int:
    return int(time.time() * 1000)
