"""One run of the demo on a broker: starts the processes, sends, kills, waits for the end of each message.

A message is identified by its number, and numbers alternate between the queues.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiokafka.errors import KafkaError

import marq
from lab.cpu_waits import BrokerWatch
from lab.demo.progress import Display
from lab.program import START_SECONDS, Program, RunError
from lab.proof import history
from lab.proof.evidence import EVERYBODY
from lab.proof.history import Event
from lab.stage import Stage
from marq_worker.broker import EmbeddedBroker

VALUE_BYTES = 200
#: Digits of a message's number, with which its value begins.
NUMBER_DIGITS = 8
LEAST_LEASE_SECONDS = 0.5
#: One day, because clients also use the limit as their timeout, in milliseconds.
MOST_LIMIT_SECONDS = 86_400.0
#: Messages in handlers at a time, of each queue and consumer.
AT_ONCE = 250
#: The backoff is short, so that failed messages come back during the run.
QUEUES = """[defaults]
lease = 5
max_attempts = 5
backoff = { base = 0.2, factor = 2, max = 2, jitter = true }
"""


@dataclass(frozen=True)
class DemoPlan:
    """Sizes of a run.

    ``least_held`` is the number of leases that the killed consumer must hold. ``limit_seconds`` is the longest time
    without progress, so that a run on a busy machine may take longer.
    """

    messages: int = 100_000
    queues: int = 20
    consumers: int = 3
    lease_seconds: float = 5.0
    least_held: int = 100
    limit_seconds: float = 240.0

    @property
    def queue_names(self) -> list[str]:
        return [f"demo-{index:02d}" for index in range(self.queues)]

    @property
    def consumer_options(self) -> list[str]:
        """Options of :mod:`lab.consumer`; forgotten messages are redelivered, because no lease is renewed."""
        lease = f"{self.lease_seconds:g}"
        return ["--manner=demo", "--work=0", f"--at-once={AT_ONCE}", f"--lease={lease}", f"--max-lease={lease}"]


def make_value(number: int) -> bytes:
    return b"%0*d" % (NUMBER_DIGITS, number) + b"x" * (VALUE_BYTES - NUMBER_DIGITS)


#: Options by name: field, type, text, least and most; there is a queue for each message at most.
_OPTIONS: Mapping[str, tuple[str, type, str, float, float]] = {
    "messages": ("messages", int, "messages to send", 1, 10**NUMBER_DIGITS - 1),
    "queues": ("queues", int, "queues to spread them over", 1, 10**NUMBER_DIGITS - 1),
    "lease": ("lease_seconds", float, "seconds of a lease", LEAST_LEASE_SECONDS, sys.float_info.max),
    "held": ("least_held", int, "leases that the killed consumer must hold", 0, 10**NUMBER_DIGITS),
    "limit": ("limit_seconds", float, "longest time without progress, in seconds", 0.1, MOST_LIMIT_SECONDS),
}


def read_plan(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> DemoPlan:
    """Return the plan from the command line, else from ``DEMO_…`` in the environment, else from the defaults."""
    parser = ArgumentParser(prog="python -m lab.demo", description="Run the main job: send, kill, account for all.")
    for option, (field, kind, text, _, _) in _OPTIONS.items():
        variable = f"DEMO_{option.upper()}"
        default = environment.get(variable) or getattr(DemoPlan, field)
        about = f"{text} (default: ${variable}, else {getattr(DemoPlan, field):g})"
        # A text default is parsed as if it had been typed, mistakes included.
        parser.add_argument(f"--{option}", dest=field, type=kind, default=default, help=about)
    plan = DemoPlan(**vars(parser.parse_args(arguments)))
    for option, (field, _, _, least, most) in _OPTIONS.items():
        most = plan.messages if option == "queues" else most
        if not least <= getattr(plan, field) <= most:
            parser.error(f"--{option}: expected {least:g} to {most:g}, got {getattr(plan, field):g}")
    return plan


# --- the run ----------------------------------------------------------------------------------------------------------

WORKERS = 2
#: Messages per call of send_many.
SEND_CHUNK = 2_000
#: Share of the messages that is acknowledged when a consumer is killed, and when a worker is.
CONSUMER_KILL_SHARE, WORKER_KILL_SHARE = 0.1, 0.4
#: Share at which they are killed even if they hold less than they must: the demo then fails, and says so.
LATE_SHARE = 0.9
#: A lease with less than this left may end before its consumer is killed.
_MARGIN_SECONDS = 1.0


class DemoRun(Stage):
    """A run; ``broker`` is the embedded broker, or None."""

    def __init__(
        self,
        plan: DemoPlan,
        servers: str,
        prefix: str,
        folder: Path,
        partitions: int,
        display: Display,
        broker: EmbeddedBroker | None,
    ) -> None:
        # On a busy machine, the new broker responds late. No program may give up before the demo does.
        patience = {"MARQ_CONNECT_TIMEOUT": f"{max(START_SECONDS, plan.limit_seconds):g}"}
        super().__init__(servers, folder, plan.queue_names, prefix=prefix, partitions=partitions, environment=patience)
        self.define_all(QUEUES)
        self._plan = plan
        self._limit_s = plan.limit_seconds
        self._display = display
        self._broker = broker
        threads = Path(f"/proc/{broker.pid if broker is not None else None}/task")
        self._broker_watch = BrokerWatch(threads, plan.lease_seconds)
        self._began_s = time.monotonic()
        self._sent = self._owned = 0
        #: The content of each record that was delivered and not acknowledged yet, and all that was acknowledged: a
        #: message that is delivered twice may be acknowledged twice.
        self._delivered_content: dict[str, str] = {}
        self._acked_content: set[str] = set()
        #: Numbers of dead letters and redeliveries, from the workers' statistics.
        self._counts: tuple[int, ...] = ()
        #: Times of the messages that each consumer forgot, by its name.
        self._forgotten: dict[str, list[float]] = defaultdict(list)
        self._asking: asyncio.Task[dict[str, Any]] | None = None
        #: Leases of the consumer that was killed, and open rows of the worker that was.
        self.held_at_kill = self.rows_at_kill = 0
        self.seconds = 0.0

    async def carry_out(self) -> None:
        """Carry out the run, and end all programs.

        Raise RunError if a program ended by itself, or there was no progress within the plan's limit.
        """
        async with self:
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
        plan, phase = self._plan, self._display.phase
        phase("start workers and consumers")
        for _ in range(WORKERS):
            await self.worker(ready=False)
        for _ in range(plan.consumers):
            await self.consumer(*plan.consumer_options, ready=False)
        await self.until(self._all_ready, "workers and consumers are ready", self._limit_s)
        self._display.say(f"{len(self.workers)} workers and {len(self.consumers)} consumers are ready")
        async with marq.Producer(self.servers, prefix=self.prefix) as producer:
            phase(f"send {plan.messages:,} messages to {plan.queues} queues, and receive them")
            self.load(self._send_all(producer))
            await self._kill_consumer()
            await self._kill_worker()
            await self.until(lambda: self._sent == plan.messages, "all messages are sent", self._limit_s)
        phase("drain: wait until each message is acknowledged or dead-lettered")
        await self.drain(self._limit_s)
        self.seconds = time.monotonic() - self._began_s
        phase("stop the consumers, and read the topics")
        await self.collect()

    async def _all_ready(self) -> bool:
        # Each worker must own partitions, so that killing one takes some of them away and leaves others.
        owned = await asyncio.gather(*[asyncio.to_thread(worker.owned) for worker in self.workers])
        self._owned = max(self._owned, sum(map(len, owned)))
        return len(self.ready) == len(self.consumers) and all(owned) and await self.all_owned()

    async def _send_all(self, producer: marq.Producer) -> None:
        """Send a part of each queue's messages in turn, so that all of them have work from the beginning."""
        plan = self._plan
        step = SEND_CHUNK * plan.queues
        for start in range(0, plan.messages, step):
            for index, queue in enumerate(plan.queue_names):
                if numbers := range(start + index, min(start + step, plan.messages), plan.queues):
                    await self._send_some(producer, queue, numbers)

    async def _send_some(self, producer: marq.Producer, queue: str, numbers: range) -> None:
        values = [make_value(number) for number in numbers]
        sends = [
            {"message": str(number), "queue": queue, "content": history.content(queue, None, value, ())}
            for number, value in zip(numbers, values, strict=True)
        ]
        for send in sends:
            self.note("invoke", "send", process="sender", **send)
        receipts = await producer.send_many(queue, values)
        for send, receipt in zip(sends, receipts, strict=True):
            self.note("ok", "send", process="sender", **send, record=receipt.id)
        self._sent += len(receipts)

    # --- kills --------------------------------------------------------------------------------------------------------

    async def _kill_consumer(self) -> None:
        """Send kill -9 to the consumer that holds the most leases, once it holds enough."""
        needed = self._plan.least_held

        def enough() -> bool:
            share = self._acked / self._plan.messages
            return share >= LATE_SHARE or (share >= CONSUMER_KILL_SHARE and self._most_held()[0] >= needed)

        await self.until(enough, f"a consumer holds {needed} leases", self._limit_s)
        self.held_at_kill, consumer = self._most_held()
        await self.kill(consumer)
        held = f"holds at least {self.held_at_kill} leases according to its own history"
        self._display.phase(f"kill -9 {consumer.name}, which {held}")

    def _most_held(self) -> tuple[int, Program]:
        since_s = time.monotonic() - self._plan.lease_seconds + _MARGIN_SECONDS
        held = [(sum(at_s >= since_s for at_s in self._forgotten[one.name]), one) for one in self.consumers]
        return max(held, key=lambda pair: pair[0])

    async def _kill_worker(self) -> None:
        """Send kill -9 to the worker with the most open rows, by its statistics."""
        rows: dict[str, int] = {}

        async def enough() -> bool:
            if self._acked < self._plan.messages * WORKER_KILL_SHARE:
                return False
            for worker in self.workers:
                parts = await asyncio.to_thread(worker.owned)
                rows[worker.name] = sum(part["unfinished"] for part in parts.values())
            return max(rows.values()) > 0 or self._acked >= self._plan.messages * LATE_SHARE

        await self.until(enough, "a worker has open rows", self._limit_s)
        worker = max(self.workers, key=lambda program: rows[program.name])
        self.rows_at_kill = rows[worker.name]
        await self.kill(worker)
        self._display.phase(f"kill -9 {worker.name}, which has {self.rows_at_kill} open rows according to /api/queues")

    # --- progress -----------------------------------------------------------------------------------------------------

    @property
    def _acked(self) -> int:
        return len(self._acked_content)

    def progress(self) -> object:
        return self._sent, self._acked, self._owned, len(self.ready), self.delivered, self._counts

    def _check_broker(self) -> None:
        if self._broker is not None and not self._broker.running:
            raise RunError(self._broker.why_it_ended())

    def take(self, event: Event) -> None:
        super().take(event)
        if event["op"] == "deliver":
            self._delivered_content[event["record"]] = event["content"]
        elif event["op"] == "ack" and event["type"] == "ok":
            for offset in event["offsets"]:
                content = self._delivered_content.pop(f"{event['source']}/{offset}", None)
                if content is not None:
                    self._acked_content.add(content)
        elif event["op"] == "hang":
            self._forgotten[event["process"]].append(event["at_ms"] / 1000)

    def look(self) -> None:
        self._check_broker()
        if (since_s := self._broker_watch.look()) is not None:
            self.note("invoke", "pause", target=EVERYBODY, at_ms=since_s * 1000)
            self.note("ok", "pause", target=EVERYBODY)
        super().look()
        self._display.show(sent=self._sent, acked=self._acked)
        # Does not wait for the answer.
        if self._asking is not None and self._asking.done():
            self._counts = self._display.statistics(self._asking.result().get("queues", {}))
            self._asking = None
        worker = next((worker for worker in self.workers if worker.running), None)
        self._display.place("" if worker is None or not self._owned else worker.url)
        if self._asking is None and worker is not None:
            self._asking = asyncio.create_task(asyncio.to_thread(worker.statistics))
