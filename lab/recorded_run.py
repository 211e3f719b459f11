"""Programs of one namespace under load and faults, and one history of their operations and the topics."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from lab.program import Program, RunError, Worker, stop_all
from lab.proof.history import Event, History
from lab.topics import TopicReader, read_logs
from marq.kafka.connection import admin_client
from marq.settings.client import ClientSettings

#: Session timeout of workers and consumers, and so the length of a take-over after kill -9.
SESSION_SECONDS = 6.0
#: Default time limit of a wait.
LIMIT_SECONDS = 120.0
DRAIN_SECONDS = 240.0
POLL_SECONDS = 0.1
#: Deliveries before, between and after faults.
SOME = 300


class Stage:
    """All programs of one run.

    Args:
        settings: broker and prefix.
        folder: directory of logs, data and histories.
        queues: the queues that consumers read.
        partitions: number of markers partitions.
    """

    def __init__(self, settings: ClientSettings, folder: Path, queues: Sequence[str], partitions: int) -> None:
        self.settings = settings
        self.folder = folder
        self.queues = queues
        self.servers = settings.bootstrap_servers
        self.prefix = settings.names.prefix
        self.workers: list[Worker] = []
        self.consumers: list[Program] = []
        #: The history so far.
        self.events: list[Event] = []
        #: Deliveries, and first deliveries of messages.
        self.delivered = self.received = 0
        self.ready: set[str] = set()
        self._load: asyncio.Task[None] | None = None
        self._newest_messages: dict[int, int] = {}
        self._partitions = partitions

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_load()
        for program in self.everybody:
            program.resume()
            program.kill()

    @property
    def everybody(self) -> list[Program]:
        return [*self.workers, *self.consumers]

    def load_with(self, load: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as the load, until it ends or the run does."""
        self._load = asyncio.create_task(load)

    async def stop_load(self) -> None:
        if self._load is not None:
            self._load.cancel()
            await asyncio.gather(self._load, return_exceptions=True)

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

    # --- faults -------------------------------------------------------------------------------------------------------

    def note(self, type_: str, op: str, *, process: str = "nemesis", **fields: Any) -> None:
        """Add an event to the history."""
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
        await asyncio.to_thread(program.join)

    async def pause(self, program: Program, seconds: float) -> None:
        """Send SIGSTOP, and SIGCONT after this time."""
        with self.fault("pause", program.name):
            program.pause()
            await self.play(seconds)
            program.resume()

    async def dead(self, program: Program) -> None:
        """Wait until a program has killed itself."""
        await self.until(lambda: not program.running, f"{program.name} has killed itself")

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def play(self, seconds: float) -> None:
        """Let time pass, and check all programs meanwhile."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.look()
            await asyncio.sleep(POLL_SECONDS)

    async def delivered_more(self, count: int = SOME, limit: float = LIMIT_SECONDS) -> None:
        """Wait for this many more deliveries."""
        wanted = self.delivered + count
        await self.until(lambda: self.delivered >= wanted, f"{count} more messages are delivered", limit)

    def progress(self) -> object:
        """Return a value that changes whenever the run makes progress; each change restarts the limit of a wait."""
        return None

    async def until(
        self, condition: Callable[[], bool | Awaitable[bool]], what: str, limit: float = LIMIT_SECONDS
    ) -> None:
        """Wait for a condition.

        Raises:
            RunError: it does not hold within the limit, or a program ended by itself.
        """
        progress, until_s = self.progress(), time.monotonic() + limit
        while True:
            self.look()
            if progress != self.progress():
                progress, until_s = self.progress(), time.monotonic() + limit
            met = condition()
            if met if isinstance(met, bool) else await met:
                return
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
        """Add an event of a program to the history."""
        if event["op"] == "ready":
            self.ready.add(event["process"])
            return
        self.events.append(event)
        self.delivered += event["op"] == "deliver"
        self.received += event["op"] == "deliver" and event["attempt"] == 1

    def log_tails(self) -> str:
        return "\n".join(program.log_tail() for program in self.everybody)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def finish(self, readable: Callable[[bytes], bytes] = bytes, limit: float = DRAIN_SECONDS) -> None:
        """Stop the load, wait until each message has ended, stop the consumers, and read the topics."""
        await self.stop_load()
        await self.drain(limit)
        await asyncio.to_thread(stop_all, self.consumers)
        self.look()
        self.events.sort(key=lambda event: float(event["at_ms"]))
        self.events += await read_logs(self.settings, readable, self.show_read)

    async def drain(self, limit: float = DRAIN_SECONDS) -> None:
        """Wait until each message has ended."""
        async with (
            TopicReader(self.settings, self.settings.names.messages) as messages,
            TopicReader(self.settings, self.settings.names.markers) as markers,
            admin_client(self.settings) as admin,
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
                return (
                    read and len(partitions) == self._partitions and all(_is_done(part, newest) for part in partitions)
                )

            await self.until(drained, "each message has come to its end", limit)

    async def _all_read(self, admin: AIOKafkaAdminClient, messages: TopicReader) -> bool:
        """Return whether each queue's group has committed past the newest message of the queue."""
        committed: dict[tuple[str, int], int] = {}
        for queue in self.queues:
            offsets = await admin.list_consumer_group_offsets(self.settings.names.group(queue))
            committed |= {(queue, tp.partition): at.offset for tp, at in offsets.items()}
        async for record in messages.to_end():
            self._newest_messages[record.partition] = record.offset
        return all(
            committed.get((queue, partition), 0) > offset
            for partition, offset in self._newest_messages.items()
            for queue in self.queues
        )

    def show_read(self, events: int) -> None:
        """Show the number of events that were read from the topics."""

    def write(self, path: Path) -> None:
        """Write the history to a file."""
        told = History()
        told.events = self.events
        told.write(path)

    def forget(self) -> None:
        """Delete the files of the run."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_done(part: dict[str, Any], newest: dict[int, int]) -> bool:
    applied: int = part["applied_offset"]
    empty = part["state"] == "owner" and part["unfinished"] == 0
    return part["state"] == "stopped" or (empty and applied >= newest.get(part["partition"], -1))
