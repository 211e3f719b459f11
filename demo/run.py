"""One run of the demo on a broker: starts the processes, sends, kills, waits for the end of each message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from aiokafka.errors import KafkaError

import marq
from demo.account import Account, Evidence, draw_up, holders_of, unfounded_copies
from demo.errors import DemoError
from demo.history import History, TopicReader, dead_letter, find_aborted, read_dead_letters
from demo.plan import Plan, make_value
from demo.processes import Cast, ConsumerProcess, Worker
from demo.progress import Display
from demo.tally import Tally
from demo.trails import Key, Trail, Trails
from marq.settings import ClientSettings

POLL_SECONDS = 0.1
START_SECONDS = 60.0
#: How long after the last message ended the tracker may take to have no open row.
DRAIN_SECONDS = 20.0
#: Messages whose deliveries are listed when time runs out.
MAX_TOLD = 10
#: Messages of one send_many.
SEND_CHUNK = 2_000
#: Which share of the messages has ended when a consumer is killed, and when a worker is.
CONSUMER_KILL_SHARE, WORKER_KILL_SHARE = 0.1, 0.4

_CONSUMER_KILL, _WORKER_KILL = "consumer kill", "worker kill"


@dataclass(frozen=True)
class Result:
    """What a run found; ``broken`` says what was promised and could not be done."""

    account: Account
    trails: Trails
    tally: Tally
    held_at_kill: int
    rows_at_worker_kill: int
    open_at_end: int
    broken: list[str]
    seconds: float


class Run:
    """A run; ``check_broker`` raises when the broker is gone."""

    def __init__(
        self, plan: Plan, settings: ClientSettings, cast: Cast, display: Display, check_broker: Callable[[], None]
    ) -> None:
        self._plan = plan
        self._settings = settings
        self._cast = cast
        self._display = display
        self._check_broker = check_broker
        self._tally = Tally(plan)
        self._began_s = time.monotonic()
        self._figures: dict[str, Any] = {}
        self._asking: asyncio.Task[dict[str, Any]] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._killed: ConsumerProcess | None = None
        self._victim_partitions: list[int] = []
        self._broken: list[str] = []

    async def play(self) -> Result:
        """Carry the run through.

        Raises:
            DemoError: it could not be.
        """
        try:
            async with AsyncExitStack() as stack:
                return await self._play(stack)
        except (marq.MarqError, KafkaError) as error:
            self._check_broker()
            raise DemoError(f"{error or type(error).__name__}\n{self._cast.log_tails()}") from error
        finally:
            for task in (self._sending, self._asking):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

    async def _play(self, stack: AsyncExitStack) -> Result:
        self._cast.start()
        await self._until(self._all_ready, "workers and consumers are ready", START_SECONDS)
        self._display.say(f"{len(self._cast.workers)} workers and {len(self._cast.consumers)} consumers are ready")
        names, settings = self._settings.names, self._settings
        self._dead = await stack.enter_async_context(TopicReader(settings, names.dead_letters))
        self._ends = await stack.enter_async_context(TopicReader(settings, names.markers, committed=False))
        self._history = History(await stack.enter_async_context(TopicReader(settings, names.markers)))
        producer = await stack.enter_async_context(marq.Producer(settings.bootstrap_servers, prefix=names.prefix))
        self._sending = asyncio.create_task(self._send(producer))
        await self._kill_consumer()
        await self._kill_worker()
        await self._until(self._all_ended, "each message is acked or dead-lettered")
        drained = await self._drain()
        seconds = time.monotonic() - self._began_s
        await asyncio.to_thread(self._cast.stop, [each for each in self._cast.consumers if not each.killed])
        return await self._find(drained, seconds)

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def _until(self, condition: Callable[[], Any], what: str, limit_s: float | None = None) -> None:
        """Return when a condition holds; look after everything else meanwhile."""
        until_s = self._began_s + self._plan.limit_seconds
        if limit_s is not None:
            until_s = min(until_s, time.monotonic() + limit_s)
        while not await condition():
            if time.monotonic() > until_s:
                raise DemoError(f"time ran out before {what}: {await self._state()}\n{self._cast.log_tails()}")
            await asyncio.sleep(POLL_SECONDS)
            self._look()
            if self._tally.sent:
                self._tally.enter_dead(map(dead_letter, await self._dead.new()))

    def _look(self) -> None:
        self._check_broker()
        self._cast.check()
        for consumer in self._cast.consumers:
            self._tally.enter(consumer.name, consumer.journal.read())
        if self._sending is not None and self._sending.done():
            self._sending.result()
        self._take_figures()
        tally = self._tally
        self._display.show(sent=tally.sent, acked=len(tally.acked), dead=len(tally.dead))

    def _take_figures(self) -> None:
        """Ask a worker for its figures, without waiting for the answer."""
        if self._asking is not None and self._asking.done():
            self._figures = self._asking.result() or self._figures
            self._display.figures(self._figures.get("queues", {}))
            self._asking = None
        worker = next((worker for worker in self._cast.workers if not worker.killed), None)
        if self._asking is None and worker is not None:
            self._asking = asyncio.create_task(asyncio.to_thread(worker.figures))

    async def _state(self) -> str:
        """Say how far the run has come, and what the log says of some messages that have not ended."""
        tally, plan = self._tally, self._plan
        lines = [f"sent {tally.sent}, acked {len(tally.acked)}, dead {len(tally.dead)} of {plan.messages}"]
        if tally.sent == plan.messages:
            trails = await self._history.read()
            lines += [f"    {line}" for line in trails.told(tally.rest(), MAX_TOLD)]
        return "\n".join(lines)

    async def _all_ready(self) -> bool:
        if len(self._tally.ready) < len(self._cast.consumers):
            return False
        # Each worker has partitions: killing one then takes some of them, and leaves some.
        found = await asyncio.gather(*[asyncio.to_thread(worker.partitions) for worker in self._cast.workers])
        return all(found) and all(part["state"] == "owner" for parts in found for part in parts)

    # --- the run ------------------------------------------------------------------------------------------------------

    async def _send(self, producer: marq.Producer) -> None:
        """Send a part of each queue's messages in turn, so that all of them have work from the beginning."""
        plan = self._plan
        step = SEND_CHUNK * plan.queues
        for start in range(0, plan.messages, step):
            for index in range(plan.queues):
                numbers = range(start + index, min(start + step, plan.messages), plan.queues)
                if numbers:
                    values = [make_value(number) for number in numbers]
                    self._tally.sent += len(await producer.send_many(plan.queue(start + index), values))

    async def _kill_consumer(self) -> None:
        """kill -9 to the consumer that holds most, once that is enough by its own journal."""
        needed, tally = self._plan.least_held, self._tally

        def most() -> tuple[int, ConsumerProcess]:
            now_ms = int(time.time() * 1000)
            found = [(tally.held(consumer.name, now_ms), consumer) for consumer in self._cast.consumers]
            return max(found, key=lambda each: each[0])

        async def enough() -> bool:
            return tally.open == 0 or (tally.share >= CONSUMER_KILL_SHARE and most()[0] >= needed)

        await self._until(enough, f"a consumer holds {needed} leases")
        held, consumer = most()
        consumer.kill()
        self._killed = consumer
        self._history.mark(_CONSUMER_KILL, await self._ends.end())
        self._display.say(f"kill -9 {consumer.name}, which holds at least {held} leases by its own journal")

    async def _kill_worker(self) -> None:
        """kill -9 to the worker that has most rows open, by its figures."""
        found: list[tuple[int, Worker, list[int]]] = []

        async def enough() -> bool:
            if self._tally.share < WORKER_KILL_SHARE:
                return False
            found[:] = [await asyncio.to_thread(_open_rows, worker) for worker in self._cast.workers]
            return max(rows for rows, _, _ in found) > 0 or self._tally.open == 0

        await self._until(enough, "a worker has rows open")
        rows, worker, self._victim_partitions = max(found, key=lambda each: each[0])
        worker.kill()
        self._history.mark(_WORKER_KILL, await self._ends.end())
        self._display.say(f"kill -9 {worker.name}, which has {rows} rows open by /api/queues")

    async def _all_ended(self) -> bool:
        tally, killed = self._tally, self._killed
        assert killed is not None
        if tally.open == 0 or tally.sent < self._plan.messages:
            return tally.open == 0
        if tally.in_doubt(killed.name):
            # It had handled them, and died before it could note whether their acks were durable: the log knows.
            trails = await self._history.read()
            tally.settle(killed.name, [key for key, trail in trails.by_record.items() if trail.acked_ms is not None])
        return tally.open == 0

    async def _drain(self) -> bool:
        """Whether the trackers' tables became empty: until then a message may come once more."""
        until_s = time.monotonic() + DRAIN_SECONDS

        async def empty() -> bool:
            return time.monotonic() > until_s or _is_empty(self._figures)

        self._figures = {}
        await self._until(empty, "the trackers' tables are empty")
        return _is_empty(self._figures)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _find(self, drained: bool, seconds: float) -> Result:
        assert self._killed is not None
        self._look()
        trails = await self._history.read()
        by_record = trails.by_record
        async with TopicReader(self._settings, self._settings.names.dead_letters) as reader:
            letters = await read_dead_letters(reader)
        evidence = Evidence(
            sent=range(self._plan.messages),
            journals=self._tally.journals,
            dead_letters=letters,
            trails=by_record,
            killed={self._killed.name},
            aborted=await find_aborted(self._settings, unfounded_copies(trails)),
        )
        open_at_end = sum(trails.open_rows(partition) for partition in await self._ends.end())
        return Result(
            account=draw_up(evidence),
            trails=trails,
            tally=self._tally,
            held_at_kill=self._held_at_kill(by_record),
            rows_at_worker_kill=self._rows_at_worker_kill(),
            open_at_end=open_at_end,
            broken=self._broken_promises(by_record, drained, open_at_end),
            seconds=seconds,
        )

    def _held_at_kill(self, by_record: Mapping[Key, Trail]) -> int:
        """By the log: what was leased, not over and not ended when the consumer was gone."""
        assert self._killed is not None
        holders = holders_of(self._tally.journals[self._killed.name], by_record)
        return sum(count for holder, count in self._history.held[_CONSUMER_KILL].items() if holder in holders)

    def _rows_at_worker_kill(self) -> int:
        found = self._history.open_rows[_WORKER_KILL]
        return sum(found[partition] for partition in self._victim_partitions)

    def _broken_promises(self, by_record: Mapping[Key, Trail], drained: bool, open_at_end: int) -> list[str]:
        broken = []
        held, needed = self._held_at_kill(by_record), self._plan.least_held
        if held < needed:
            broken.append(f"the consumer that was killed held {held} leases, not at least {needed}")
        if not self._rows_at_worker_kill():
            broken.append("the worker that was killed had no row open")
        if not drained:
            broken.append(
                f"{DRAIN_SECONDS:g} s after the last message ended the trackers still had open rows"
                f" ({open_at_end} by the log)"
            )
        return broken


def _open_rows(worker: Worker) -> tuple[int, Worker, list[int]]:
    parts = worker.partitions()
    return sum(part["open"] for part in parts), worker, [part["partition"] for part in parts]


def _is_empty(figures: Mapping[str, Any]) -> bool:
    rows = figures.get("queues", {}).values()
    gauges = ("in_flight", "waiting_for_redelivery", "waiting_for_dead_letters")
    return bool(figures.get("complete") and rows and not any(row[name] for row in rows for name in gauges))
