"""What a scenario plays on: workers, consumers and a steady load on a real broker, and one history of all of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Self

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

import marq
from demo.errors import DemoError
from demo.history import TopicReader
from faults import newer
from faults.processes import ConsumerProcess, Participant, WorkerProcess
from marq.core.errors import CorruptMarker
from marq.core.marker_codec import decode
from marq.core.markers import Source
from marq.core.notes import is_note
from marq.settings import ClientSettings
from proof import history
from proof.history import Event, History

QUEUE = "checked"
PARTITIONS = 2
#: In the environment: the seed of scenarios that act by chance.
SEED_VARIABLE = "MARQ_FAULTS_SEED"
LEASE_SECONDS = 3.0
#: Faults bring messages back again and again; none is to die of it.
MAX_ATTEMPTS = 100
SETTINGS: dict[str, Any] = {
    "max_attempts": MAX_ATTEMPTS,
    "dead_letter": True,
    "group": None,
    "backoff": [100, 2, 200, True],
}
QUEUES = f"""
[queues.{QUEUE}]
lease = {LEASE_SECONDS}
"""
QUICK_BACKOFF = "backoff = { base = 0.1, factor = 2, max = 0.2, jitter = true }\n"
#: Seconds: of a worker's membership, and so of a take-over after kill -9.
SESSION_SECONDS = 6.0
#: How long anything may take that is not limited by what the scenario is about.
LIMIT_SECONDS = 60.0
DRAIN_SECONDS = 120.0
POLL_SECONDS = 0.1
#: Messages of the load in a second, and in one step of it.
RATE, STEP = 200, 20


class FaultError(Exception):
    """A scenario could not be played to its end."""


class Stage:
    """Everything of one scenario; ``servers`` is what clients connect to."""

    def __init__(self, servers: str, folder: Path) -> None:
        self.folder = folder
        self.servers = servers
        self.prefix = f"f{uuid.uuid4().hex[:10]}"
        self.settings = ClientSettings.read(servers, {"prefix": self.prefix}, owner="faults")
        self.workers: list[WorkerProcess] = []
        self.consumers: list[ConsumerProcess] = []
        #: Everything that processes have told so far, and what this one tells.
        self.events: list[Event] = []
        #: What whoever acts by chance draws from.
        self.seed = int(os.environ.get(SEED_VARIABLE, "1"))
        #: Messages that are known to be in the topic; deliveries, and those of them that were a message's first.
        self.accepted = self.delivered = self.received = 0
        self._numbers = itertools.count()
        self._names = itertools.count(1)
        self._load: asyncio.Task[None] | None = None
        self._newest_messages: dict[int, int] = {}
        self._ready: set[str] = set()
        self._queues_file = folder / "queues.toml"
        self.define()

    def define(self, lines: str = QUICK_BACKOFF, **settings: Any) -> None:
        """Say what holds for the queue, before anybody starts: lines of queues.toml, and for the checker the same."""
        settings = SETTINGS | settings
        self._queues_file.write_text(f"{QUEUES}max_attempts = {settings['max_attempts']}\n{lines}")
        self.note("ok", "settings", process="queues", version=1, queues={QUEUE: settings})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_load()
        for child in self.everybody:
            with contextlib.suppress(ProcessLookupError):
                child.resume()
            child.kill()

    @property
    def everybody(self) -> list[Participant]:
        return [*self.workers, *self.consumers]

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "MARQ_BOOTSTRAP_SERVERS": self.servers,
            "MARQ_PREFIX": self.prefix,
            "MARQ_PARTITIONS": str(PARTITIONS),
            "MARQ_QUEUES_FILE": str(self._queues_file),
            "MARQ_SESSION_TIMEOUT": str(int(SESSION_SECONDS)),
        }

    # --- who takes part -----------------------------------------------------------------------------------------------

    async def worker(
        self, *options: str, data: Path | None = None, ready: bool = True, **environment: str
    ) -> WorkerProcess:
        """Start a worker; return when all partitions have an owner, unless it need not be ``ready``.

        One that is going to kill itself may do so before its partitions are seen: then it is dead on return.
        """
        name = f"worker-{next(self._names)}"
        worker = WorkerProcess(
            name, data or self.folder / name / "data", options, {**self._environment, **environment}, self.folder
        )
        self.workers.append(worker)
        if ready:
            await self.until(lambda: self._owned_or_killed(worker), "each markers partition has an owner")
        return worker

    async def consumer(self, *options: str, **environment: str) -> ConsumerProcess:
        """Start a consumer; return when it has joined its group. One that is going to kill itself may be dead then."""
        name = f"consumer-{next(self._names)}"
        consumer = ConsumerProcess(name, QUEUE, options, {**self._environment, **environment}, self.folder)
        self.consumers.append(consumer)
        await self.until(lambda: name in self._ready or consumer.has_killed_itself, f"{name} is ready")
        return consumer

    async def owned(self, limit: float = LIMIT_SECONDS) -> None:
        """Wait until each markers partition has one owner among the workers."""
        await self.until(self._all_owned, "each markers partition has an owner", limit)

    async def _owned_or_killed(self, worker: WorkerProcess) -> bool:
        return worker.has_killed_itself or await self._all_owned()

    async def _all_owned(self) -> bool:
        found = [part["state"] for part in await self.partitions()]
        return len(found) == PARTITIONS and set(found) <= {"owner", "stopped"}

    async def partitions(self) -> list[dict[str, Any]]:
        """Return the figures of the markers partitions of all workers that answer."""
        running = [worker for worker in self.workers if worker.running]
        found = await asyncio.gather(*[asyncio.to_thread(worker.partitions) for worker in running])
        return [part for parts in found for part in parts.values()]

    # --- load ---------------------------------------------------------------------------------------------------------

    def load(self, rate: int = RATE, servers: str | None = None) -> None:
        """Send from now on, so many messages a second, until the end of the scenario."""
        self.load_with(self._send(rate, servers or self.servers))

    def load_with(self, load: Coroutine[Any, Any, None]) -> None:
        """The same, with a load of the scenario's own."""
        self._load = asyncio.create_task(load)

    async def _send(self, rate: int, servers: str) -> None:
        async with marq.Producer(servers, prefix=self.prefix) as producer:
            next_s = time.monotonic()
            while True:
                await asyncio.gather(*[self.send_one(producer) for _ in range(STEP)])
                # What an outage has held up is not made up for.
                next_s = max(next_s + STEP / rate, time.monotonic() - 1)
                await asyncio.sleep(max(0, next_s - time.monotonic()))

    async def send_one(self, producer: marq.Producer, queue: str = QUEUE) -> None:
        """Send the next message, and write that into the history."""
        number = next(self._numbers)
        value = b"%d" % number
        headers = {"tenant": b"acme"} if number % 2 else {}
        said = {"message": str(number), "queue": queue}
        said["content"] = history.content(queue, None, value, tuple(headers.items()))
        self.note("invoke", "send", process="sender", **said)
        try:
            receipt = await producer.send(queue, value, headers=headers)
        except marq.MarqError:
            self.note("unknown", "send", process="sender", **said)
        else:
            self.note("ok", "send", process="sender", **said, record=receipt.id)
            self.accepted += 1

    async def stop_load(self) -> None:
        """Send no more."""
        if self._load is not None:
            self._load.cancel()
            await asyncio.gather(self._load, return_exceptions=True)

    # --- faults -------------------------------------------------------------------------------------------------------

    def note(self, type_: str, op: str, *, process: str = "nemesis", **fields: Any) -> None:
        """Write an event into the history."""
        self.events.append({"process": process, "type": type_, "op": op, "at_ms": time.monotonic() * 1000, **fields})

    @contextlib.contextmanager
    def fault(self, op: str, target: str) -> Any:
        """Say that a fault lasts for as long as this is open; see proof/history.py for what there is."""
        self.note("invoke", op, target=target)
        try:
            yield
        finally:
            self.note("ok", op, target=target)

    async def kill(self, participant: Participant) -> None:
        """kill -9."""
        self.note("info", "kill", target=participant.name)
        await asyncio.to_thread(participant.kill)

    async def stop(self, participant: Participant) -> None:
        """SIGTERM, and wait for its end."""
        self.note("info", "stop", target=participant.name)
        participant.terminate()
        await asyncio.to_thread(participant.join)

    async def pause(self, participant: Participant, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        with self.fault("pause", participant.name):
            participant.pause()
            await self.play(seconds)
            participant.resume()

    async def dead(self, participant: Participant) -> None:
        """Wait until a participant has killed itself."""
        await self.until(lambda: not participant.running, f"{participant.name} has killed itself")

    async def replaced(self, participant: Participant, limit: float) -> None:
        """Wait until a participant has stopped because another one uses its instance id."""
        participant.replaced = True
        await self.until(lambda: not participant.running, f"{participant.name} has stopped", limit)
        self.note("info", "stop", target=participant.name)
        if "joined" not in participant.log_file.read_text(errors="replace"):
            raise FaultError(f"{participant.name} does not say why it stopped:\n{participant.log_tail()}")

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def play(self, seconds: float) -> None:
        """Let time go by, and look after everybody."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._look()
            await asyncio.sleep(POLL_SECONDS)

    async def delivered_more(self, count: int, limit: float = LIMIT_SECONDS) -> None:
        """Wait until so many messages more have been delivered."""
        wanted = self.delivered + count
        await self.until(lambda: self.delivered >= wanted, f"{count} more messages are delivered", limit)

    async def until(
        self, condition: Callable[[], bool | Awaitable[bool]], what: str, limit: float = LIMIT_SECONDS
    ) -> None:
        """Wait until a condition holds.

        Raises:
            FaultError: it does not within the limit, or somebody has ended meanwhile.
        """
        until_s = time.monotonic() + limit
        while True:
            self._look()
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            if time.monotonic() > until_s:
                raise FaultError(f"not within {limit:g} s: {what}\n{self._log_tails()}")
            await asyncio.sleep(POLL_SECONDS)

    def _look(self) -> None:
        for participant in self.everybody:
            for event in participant.new_events():
                if event["op"] == "ready":
                    self._ready.add(event["process"])
                    continue
                self.events.append(event)
                self.delivered += event["op"] == "deliver"
                self.received += event["op"] == "deliver" and event["attempt"] == 1
            try:
                participant.check()
            except DemoError as error:
                raise FaultError(str(error)) from None
        if self._load is not None and self._load.done() and not self._load.cancelled():
            self._load.result()

    def _log_tails(self) -> str:
        return "\n".join(participant.log_tail() for participant in self.everybody)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """End the load, wait until each message has come to its end, stop the consumers, and read the logs."""
        await self.stop_load()
        await self.drain()
        for consumer in self.consumers:
            if consumer.running:
                consumer.terminate()
        for consumer in self.consumers:
            await asyncio.to_thread(consumer.join)
        self._look()
        self.events.sort(key=lambda event: float(event["at_ms"]))
        await self._read_logs()

    async def drain(self) -> None:
        """Wait until each message has come to its end."""
        async with (
            TopicReader(self.settings, self.settings.names.messages) as messages,
            TopicReader(self.settings, self.settings.names.markers) as markers,
            self._admin() as admin,
        ):
            newest: dict[int, int] = {}

            async def drained() -> bool:
                try:
                    read = await self._all_read(admin, messages)
                    async for record in markers.to_end():
                        newest[record.partition] = max(newest.get(record.partition, -1), record.offset)
                except KafkaError:
                    return False
                partitions = await self.partitions()
                return read and len(partitions) == PARTITIONS and all(_is_done(part, newest) for part in partitions)

            await self.until(drained, "each message has come to its end", DRAIN_SECONDS)

    @contextlib.asynccontextmanager
    async def _admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.servers)
        await admin.start()
        try:
            yield admin
        finally:
            await admin.close()

    async def _all_read(self, admin: AIOKafkaAdminClient, messages: TopicReader) -> bool:
        offsets = await admin.list_consumer_group_offsets(self.settings.names.group(QUEUE))
        committed = {tp.partition: at.offset for tp, at in offsets.items()}
        async for record in messages.to_end():
            self._newest_messages[record.partition] = record.offset
        return all(committed.get(partition, 0) > offset for partition, offset in self._newest_messages.items())

    async def _read_logs(self) -> None:
        names = self.settings.names
        for topic, op in ((names.messages, "record"), (names.dead_letters, "dead")):
            committed = {(each.partition, each.offset) async for each in self._records(topic)}
            # Consumers don't wait for the end of transactions, so a copy may reach them although it was taken back.
            async for each in self._records(topic, committed=False):
                if op == "dead" and is_note(each.headers):
                    if (each.partition, each.offset) in committed:
                        self.events.append(history.note(history.log_name(Source(topic, each.partition)), each.value))
                    continue
                log, whole = history.log_name(Source(topic, each.partition)), (each.partition, each.offset) in committed
                fields = (each.offset, each.timestamp, (each.key or b"").decode(), each.key, each.value, each.headers)
                self.events.append(history.record(log, *fields, committed=whole, op=op))
        async for each in self._records(names.markers):
            log = history.log_name(Source(names.markers, each.partition))
            try:
                batch = decode(newer.readable(each.value))
            except CorruptMarker:
                batch = None
            self.events.append(history.marker(log, each.offset, each.timestamp, batch, each.value))
        async for each in self._records(names.quarantine):
            origin = dict(each.headers)["marq-origin"].decode()
            log = history.log_name(Source(names.quarantine, each.partition))
            content = history.digest(each.value)
            self.events.append({"process": log, "type": "ok", "op": "quarantine", "origin": origin, "content": content})

    async def _records(self, topic: str, *, committed: bool = True) -> AsyncIterator[Any]:
        async with TopicReader(self.settings, topic, committed=committed) as reader:
            async for record in reader.to_end():
                yield record

    def write(self, path: Path) -> None:
        """Write the history, to be looked at."""
        told = History()
        told.events = self.events
        told.write(path)

    def forget(self) -> None:
        """Delete the files of a scenario that went well."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_done(part: dict[str, Any], newest: dict[int, int]) -> bool:
    return part["state"] == "stopped" or (
        part["state"] == "owner" and part["open"] == 0 and part["applied_offset"] >= newest.get(part["partition"], -1)
    )


def recovery_seconds(events: Sequence[Event]) -> float | None:
    """How long after the last fault's end all that had been sent before it was done; None without a fault."""
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
    # A copy has another place than the message that it is of.
    copies = {f"{e['process']}/{e['offset']}": e["id"] for e in events if e["op"] == "record" and "id" in e}
    done = {copies.get(place, place): at_ms for place, at_ms in ends.items()}
    return max(0.0, max((done[record] - last for record in sent if record in done), default=0.0)) / 1000
