"""One namespace on a broker: workers, consumers, a load, faults, and one history of operations and topics."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import math
import time
import uuid
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

import marq
from lab.consumer import HISTORY_VARIABLE, LEASE_SECONDS
from lab.program import STOP_SECONDS, Program, RunError, Worker, recorded, stop_all
from lab.proof import history
from lab.proof.evidence import EVERYBODY
from lab.proof.history import Event
from lab.topics import TopicScan, read_logs
from marq.kafka.connection import admin_client
from marq.settings.client import ClientSettings
from marq_worker.config.queues import load_queues

QUEUE, ORDERED = "checked", "ordered"
PARTITIONS = 2
#: Every third message goes to the ordered queue, every seventh without a key. These numbers and the consumers' KINDS
#: have no common factors, so each key gets messages with each outcome.
ORDERED_SHARE, UNKEYED_SHARE, KEYS = 3, 7, 31
#: High enough that faults alone cause no dead letters.
MAX_ATTEMPTS = 100
QUICK_BACKOFF = "backoff = { base = 0.1, factor = 2, max = 0.2, jitter = true }\n"
#: Messages that the load sends per second; steps per second, and the most messages of one.
RATE, STEPS, STEP = 200, 10, 20
#: Session timeout of workers and consumers, and so the length of a take-over after kill -9.
SESSION_SECONDS = 6.0
#: Default time limit of a wait.
LIMIT_SECONDS = 120.0
DRAIN_SECONDS = 240.0
POLL_SECONDS = 0.1
#: Deliveries before, between and after faults.
SOME = 300


class Stage:
    """All programs of one run, with logs, data and histories in ``folder``.

    Consumers read two queues unless ``queues`` names others, and one of the two is ordered by key. ``partitions`` is
    the number of markers partitions. ``environment`` has variables of all programs (default: both topics have
    PARTITIONS). ``place`` is what the steps of a scenario act on besides programs: a broker, a cluster, or proxies.
    ``seed`` is that of steps that act at random.
    """

    def __init__(
        self,
        servers: str,
        folder: Path,
        queues: Sequence[str] = (QUEUE, ORDERED),
        *,
        prefix: str = "",
        partitions: int = PARTITIONS,
        environment: Mapping[str, str] | None = None,
        place: Any = None,
        seed: int = 1,
    ) -> None:
        prefix = prefix or f"f{uuid.uuid4().hex[:10]}"
        self.settings = ClientSettings.read(servers, {"prefix": prefix}, owner="faults")
        self.servers, self.prefix, self.folder, self.queues = servers, prefix, folder, queues
        self.place, self.seed = place, seed
        self.workers: list[Worker] = []
        self.consumers: list[Program] = []
        #: The group of the queues if they share one.
        self.group = ""
        #: The history so far.
        self.events: list[Event] = []
        #: Deliveries, and first deliveries of messages.
        self.delivered = self.received = 0
        self.ready: set[str] = set()
        #: Messages that are known to be in the topic, by queue.
        self.accepted_by: Counter[str] = Counter()
        #: False when the load must end.
        self.sending = True
        self._load: asyncio.Task[None] | None = None
        self._partitions = partitions
        self._numbers = itertools.count()
        self._names: Counter[str] = Counter()
        self._queues_file = folder / "queues.toml"
        self.environment = {
            "MARQ_BOOTSTRAP_SERVERS": servers,
            "MARQ_PREFIX": prefix,
            "MARQ_QUEUES_FILE": str(self._queues_file),
            "MARQ_SESSION_TIMEOUT": str(int(SESSION_SECONDS)),
            "MARQ_WEB_BIND": "127.0.0.1",
            **({"MARQ_PARTITIONS": str(PARTITIONS)} if environment is None else environment),
        }
        #: How far the brokers' clock is ahead of this machine's, in ms, from each moment on; None if that is unknown.
        self._ahead_ms: list[tuple[float, float | None]] = [(0.0, 0.0)]
        self.define()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._load is not None:
            self._load.cancel()
            await asyncio.gather(self._load, return_exceptions=True)
        for program in self.everybody:
            program.resume()
            program.kill()

    @property
    def everybody(self) -> list[Program]:
        return [*self.workers, *self.consumers]

    # --- setup --------------------------------------------------------------------------------------------------------

    def define(self, lines: str = QUICK_BACKOFF, own: str = "", max_attempts: int = MAX_ATTEMPTS) -> None:
        """Define the two queues, before any program starts, by lines of queues.toml.

        ``own`` has lines for the queue without ordering, and anything that follows it in the file.
        """
        both = f"lease = {LEASE_SECONDS}\nmax_attempts = {max_attempts}\n{lines}"
        self.define_all(f'[queues.{ORDERED}]\nordering = "key"\n{both}\n[queues.{QUEUE}]\n{both}{own}')

    def define_group(self, group: str, lines: Mapping[str, str]) -> None:
        """Define queues of one group instead of the two, like :meth:`define`, by the lines of each."""
        self.group, self.queues = group, tuple(lines)
        both = f'group = "{group}"\nlease = {LEASE_SECONDS}\nmax_attempts = {MAX_ATTEMPTS}\n{QUICK_BACKOFF}'
        self.define_all("".join([f"[queues.{queue}]\n{both}{own}" for queue, own in lines.items()]))

    def define_all(self, text: str) -> None:
        """Write queues.toml, and tell the checker the queues' settings."""
        self._queues_file.write_text(text)
        definitions = load_queues(self._queues_file, None).definitions
        settings = {queue: history.settings_of(definitions, queue) for queue in (EVERYBODY, *definitions.names())}
        self.note("ok", "settings", process="queues", version=1, queues=settings)

    async def worker(self, *options: str, data: Path | None = None, ready: bool = True, **environment: str) -> Worker:
        """Start a worker; return when all partitions have an owner, or at once unless ``ready``.

        A worker that kills itself may be dead by then. ``options`` are those of :mod:`lab.worker`.
        """
        name = self._name("worker")
        settings = {HISTORY_VARIABLE: str(self.folder / f"{name}.jsonl"), **self.environment, **environment}
        command = recorded(name, self.folder, "lab.worker", options)
        worker = Worker(name, self.folder, settings, command=command, data=data, temporary=[self.folder]).start()
        self.workers.append(worker)

        async def owned_or_killed() -> bool:
            return worker.has_killed_itself or await self.all_owned()

        if ready:
            await self.until(owned_or_killed, "each markers partition has an owner")
        return worker

    async def consumer(self, *options: str, ready: bool = True, **environment: str) -> Program:
        """Start a consumer of all queues; return when it has joined their groups or killed itself, or at once."""
        name, group = self._name("consumer"), [f"--group={self.group}"] if self.group else []
        command = recorded(name, self.folder, "lab.consumer", [",".join(self.queues), *group, *options])
        settings = {**self.environment, **environment}
        consumer = Program(name, command, settings, self.folder / f"{name}.log", temporary=[self.folder])
        self.consumers.append(consumer.start())
        if ready:
            await self.until(lambda: name in self.ready or consumer.has_killed_itself, f"{name} is ready")
        return consumer

    def _name(self, kind: str) -> str:
        self._names[kind] += 1
        return f"{kind}-{self._names[kind]}"

    # --- load ---------------------------------------------------------------------------------------------------------

    def load(self, load: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as the load; it must end soon when `sending` is False."""
        self._load = asyncio.create_task(load)

    async def end_load(self) -> None:
        """Let the load end, and wait for the outcomes of its last messages."""
        self.sending = False
        if self._load is not None:
            await self.until(self._load.done, "the load has ended")

    async def send(
        self, rate: float = RATE, servers: str | None = None, messages: Iterable[Mapping[str, Any]] | None = None
    ) -> None:
        """Send at this rate, in messages a second, until the load ends.

        ``messages`` has the arguments of :meth:`send_one` for each (default: none, for messages without end).
        """
        left, step = iter(messages or itertools.repeat({})), max(1, int(min(STEP, rate / STEPS)))
        async with marq.Producer(servers or self.servers, prefix=self.prefix) as producer:
            next_s = time.monotonic()
            while self.sending and (chosen := list(itertools.islice(left, step))):
                await asyncio.gather(*[self.send_one(producer, **message) for message in chosen])
                # The load does not catch up after an outage.
                next_s = max(next_s + step / rate, time.monotonic() - 1)
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
        names |= {"ordering_key": options["ordering_key"]} if "ordering_key" in options else {}
        self.note("invoke", "send", **names)
        try:
            receipt: marq.Receipt = await producer.send(queue, value, headers=headers, **options)
        except marq.MarqError:
            self.note("unknown", "send", **names)
            return None
        self.note("ok", "send", **names, record=receipt.id)
        self.accepted_by[queue] += 1
        return receipt

    # --- faults -------------------------------------------------------------------------------------------------------

    def note(self, type_: str, op: str, *, process: str = "nemesis", **fields: Any) -> None:
        self.events.append({"process": process, "type": type_, "op": op, "at_ms": time.monotonic() * 1000, **fields})

    @contextlib.contextmanager
    def fault(self, op: str, target: str) -> Iterator[None]:
        """Record a fault that lasts until this context ends; lab/proof/history.py lists the faults."""
        self.note("invoke", op, target=target)
        try:
            yield
        finally:
            self.note("ok", op, target=target)

    async def kill(self, program: Program) -> None:
        self.note("info", "kill", target=program.name)
        await asyncio.to_thread(program.kill)

    async def stop(self, program: Program) -> None:
        """Send SIGTERM, and wait for the exit."""
        self.note("info", "stop", target=program.name)
        program.terminate()
        await asyncio.to_thread(program.join, STOP_SECONDS)

    async def pause(self, program: Program, seconds: float) -> None:
        """Send SIGSTOP, and SIGCONT after this time."""
        with self.fault("pause", program.name):
            program.pause()
            await self.play(seconds)
            program.resume()

    async def dead(self, program: Program) -> None:
        """Wait until a program has killed itself."""
        await self.until(lambda: not program.running, f"{program.name} has killed itself")

    async def churn(self, join: Callable[[], Awaitable[Program]], seconds: float, every_seconds: float) -> None:
        """Let programs join and leave, one after the other, every second time by SIGTERM instead of kill -9."""
        until_s, ends = time.monotonic() + seconds, itertools.cycle((self.kill, self.stop))
        while time.monotonic() < until_s:
            guest = await join()
            await self.play(every_seconds)
            await next(ends)(guest)
            await self.play(every_seconds / 2)

    def move_brokers_clock(self, ahead_s: float, within_s: float) -> None:
        """Note that the brokers' clock will be this far ahead within ``within_s``."""
        now_ms = time.monotonic() * 1000
        self._ahead_ms += [(now_ms, None), (now_ms + within_s * 1000, ahead_s * 1000)]

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def play(self, seconds: float) -> None:
        """Let time pass, and check all programs meanwhile."""
        until_s = time.monotonic() + seconds
        await self.until(lambda: time.monotonic() >= until_s, "time has passed", math.inf)

    async def delivered_more(self, count: int = SOME, limit: float = LIMIT_SECONDS) -> None:
        """Wait for this many more deliveries."""
        wanted = self.delivered + count
        await self.until(lambda: self.delivered >= wanted, f"{count} more messages are delivered", limit)

    async def owned(self, limit: float = LIMIT_SECONDS) -> None:
        """Wait until each markers partition has an owner among the workers."""
        await self.until(self.all_owned, "each markers partition has an owner", limit)

    async def all_owned(self) -> bool:
        states = [part["state"] for part in await self.partitions()]
        return len(states) == self._partitions and set(states) <= {"owner", "stopped"}

    async def partitions(self) -> list[dict[str, Any]]:
        """Return the statistics of the markers partitions of all workers that answer."""
        running = [worker for worker in self.workers if worker.running]
        owned = await asyncio.gather(*[asyncio.to_thread(worker.owned) for worker in running])
        return [part for parts in owned for part in parts.values()]

    def progress(self) -> object:
        """Return a value that changes whenever the run makes progress; each change restarts the limit of a wait."""
        return None

    async def until(self, condition: Callable[[], Any], what: str, limit: float = LIMIT_SECONDS) -> Any:
        """Wait until a condition, perhaps of an awaitable, returns something true; return that.

        Raise RunError if it does not within the limit, or a program ended by itself.
        """
        progress, until_s = self.progress(), time.monotonic() + limit
        while True:
            self.look()
            if progress != self.progress():
                progress, until_s = self.progress(), time.monotonic() + limit
            met = condition()
            if met := await met if inspect.isawaitable(met) else met:
                return met
            if time.monotonic() > until_s:
                raise RunError(f"time ran out before {what}: no progress for {limit:g} s\n{self.log_tails()}")
            await asyncio.sleep(POLL_SECONDS)

    def look(self) -> None:
        """Read new events, and raise if a program or the load has failed."""
        for program in self.everybody:
            for event in program.new_events():
                self.take(event)
            program.check()
        if self._load is not None and self._load.done() and not self._load.cancelled():
            self._load.result()

    def take(self, event: Event) -> None:
        """Add an event of a program to the history; a delivery gets the time that the markers' log had then."""
        if event["op"] == "ready":
            self.ready.add(event["process"])
            return
        self.events.append(event)
        if event["op"] == "deliver":
            at_ms = event["at_ms"]
            _, ahead_ms = self._ahead_ms[bisect_right(self._ahead_ms, at_ms, key=lambda moment: moment[0]) - 1]
            if ahead_ms is not None:
                # Rounded up: a marker of the same millisecond counts as written before.
                event["time_ms"] = math.ceil(at_ms + history.wall_clock_ahead_s() * 1000 + ahead_ms)
            self.delivered += 1
            self.received += event["attempt"] == 1

    def log_tails(self) -> str:
        return "\n".join(program.log_tail() for program in self.everybody)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """End the load, wait until each message has ended, and collect the events."""
        await self.end_load()
        await self.drain()
        await self.collect()

    async def collect(self) -> None:
        """Stop the consumers, and read the topics."""
        await asyncio.to_thread(stop_all, self.consumers)
        self.look()
        self.events.sort(key=lambda event: float(event["at_ms"]))
        self.events += await read_logs(self.settings)

    async def drain(self, limit: float = DRAIN_SECONDS) -> None:
        """Wait until each message has ended."""
        async with (
            TopicScan(self.settings, self.settings.names.messages) as messages,
            TopicScan(self.settings, self.settings.names.markers) as markers,
            admin_client(self.settings) as admin,
        ):
            newest_message, newest_marker = dict[int, int](), dict[int, int]()

            async def drained() -> bool:
                try:
                    # Before the ends of the topics, which may grow.
                    committed = await self._committed(admin)
                    for scan, newest in ((messages, newest_message), (markers, newest_marker)):
                        async for record in scan.to_end():
                            newest[record.partition] = record.offset
                except KafkaError:
                    return False
                read = all(own.get(number, 0) > at for own in committed for number, at in newest_message.items())
                partitions = await self.partitions()
                done = len(partitions) == self._partitions and all(_is_done(part, newest_marker) for part in partitions)
                return read and done

            await self.until(drained, "each message has come to its end", limit)

    async def _committed(self, admin: AIOKafkaAdminClient) -> list[dict[int, int]]:
        """Return the offsets that each group has committed, by partition."""
        names = self.settings.names
        groups = [names.named_group(self.group)] if self.group else [names.group(queue) for queue in self.queues]
        offsets = [await admin.list_consumer_group_offsets(group) for group in groups]
        return [{tp.partition: at.offset for tp, at in own.items()} for own in offsets]


def _is_done(part: dict[str, Any], newest: dict[int, int]) -> bool:
    applied: int = part["applied_offset"]
    empty = part["state"] == "owner" and part["unfinished"] == 0
    return part["state"] == "stopped" or (empty and applied >= newest.get(part["partition"], -1))


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
