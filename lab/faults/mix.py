"""A random load of all kinds: immediate and delayed messages, some of them cancelled, rescheduled or sent again."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import random
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import marq
from lab.proof import history
from lab.stage import Stage
from marq.producer.delay_control import DelayControl

#: Messages per second; the longest delay, in seconds.
RATE = 60
LONGEST_S = 6.0
#: Share of delayed messages; of these, shares of cancelled and rescheduled ones.
DELAYED, CANCELLED, MOVED = 0.6, 0.25, 0.25
#: Share of messages with a deduplication id. Each is sent until the outcome is known, and then up to twice more, after
#: at most this many seconds each time: only the first of all these is delivered.
WITH_IDS, AGAIN_S = 0.3, 8.0
#: Pause before a message whose outcome is unknown is sent again.
RETRY_S = 0.5


async def mix(stage: Stage, *, delayed: float = DELAYED, with_ids: float = WITH_IDS) -> None:
    """Send, cancel and reschedule, by the stage's seed, until the load ends and all requests are answered.

    ``delayed`` is the share of delayed messages, ``with_ids`` that of messages with a deduplication id.
    """
    await _Mix(stage, delayed, with_ids).run()


class _Mix:
    """One such load."""

    def __init__(self, stage: Stage, delayed: float, with_ids: float) -> None:
        self._stage = stage
        self._delayed = delayed
        self._with_ids = with_ids
        #: Numbers of the deduplication ids.
        self._ids = itertools.count()
        self._chance = random.Random(stage.seed)
        #: Holder of each question in the log, by message and question.
        self._holders: dict[tuple[str, str], str] = {}

    async def run(self) -> None:
        stage = self._stage
        async with marq.Producer(stage.servers, prefix=stage.prefix) as producer, asyncio.TaskGroup() as sending:
            self._watch(producer._started().delay_control)
            while stage.sending:
                sending.create_task(self._next(producer))
                await asyncio.sleep(self._chance.expovariate(RATE))

    def _next(self, producer: marq.Producer) -> Coroutine[Any, Any, None]:
        """Plan the next message; return the coroutine that carries out the plan."""
        chance = self._chance
        delay_s = chance.uniform(0, LONGEST_S) if chance.random() < self._delayed else None
        fate = chance.random()
        questions = ["cancel"] * (fate < CANCELLED) + ["reschedule"] * (CANCELLED / 2 < fate < CANCELLED + MOVED)
        chance.shuffle(questions)
        # Some requests come too late.
        waits_s = sorted(chance.uniform(0, 1.2 * (delay_s or 0)) for _ in questions)
        plan = [(wait_s, op, chance.uniform(0, LONGEST_S)) for wait_s, op in zip(waits_s, questions, strict=True)]
        absolute = chance.random() < 0.4
        again_s = [chance.uniform(0, AGAIN_S) for _ in range(chance.randrange(3))]
        with_id = chance.random() < self._with_ids
        when: dict[str, Any] = {} if delay_s is None else {"delay": delay_s}
        if with_id:
            return self._repeat(producer, next(self._ids), again_s, **when)
        if when and absolute:
            when = {"at": dt.datetime.now(tz=dt.UTC) + dt.timedelta(seconds=when["delay"])}
        return self._live(producer, plan if when else (), **when)

    async def _repeat(self, producer: marq.Producer, number: int, again_s: Sequence[float], **when: Any) -> None:
        """Send a message with a deduplication id, and others with the same id."""
        options = {"deduplication_id": f"id-{number}", "like": number, **when}
        for wait_s in (0.0, *again_s):
            await asyncio.sleep(wait_s)
            receipt = await self._stage.send_one(producer, **options)
            while receipt is None:
                await asyncio.sleep(RETRY_S)
                receipt = await self._stage.send_one(producer, **options)

    async def _live(self, producer: marq.Producer, plan: Sequence[tuple[float, str, float]], **when: Any) -> None:
        """Send one message, and make the requests that are planned for it."""
        receipt = await self._stage.send_one(producer, **when)
        if receipt is None:
            return
        began_s = time.monotonic()
        for wait_s, op, later_s in plan:
            await asyncio.sleep(max(0.0, began_s + wait_s - time.monotonic()))
            await self._ask(producer, receipt, op, later_s)

    async def _ask(self, producer: marq.Producer, receipt: marq.Receipt, op: str, later_s: float) -> None:
        try:
            if op == "cancel":
                in_time = await producer.cancel(receipt)
            else:
                in_time = await producer.reschedule(receipt, delay=later_s)
        except marq.BrokerUnavailable:
            return
        holder = self._holders[receipt.id, op]
        self._stage.note("ok", op, **_names(receipt), holder=holder, outcomes=["DONE" if in_time else "TOO_LATE"])

    def _watch(self, inquiry: DelayControl) -> None:
        """Record each question as it is written to the log, with its holder."""
        records = inquiry._records

        def watched(questions: Any, holders: Any) -> Any:
            for question in questions:
                if not question.future.done():
                    receipt, cancels = question.receipt, question.when is None
                    op = "cancel" if cancels else "reschedule"
                    holder = history.holder_name(holders.cancelling if cancels else holders.moving)
                    self._holders[receipt.id, op] = holder
                    self._stage.note("invoke", op, holder=holder, **_names(receipt))
            return records(questions, holders)

        inquiry._records = watched  # type: ignore[assignment]


def _names(receipt: marq.Receipt) -> dict[str, Any]:
    source = f"{receipt.topic}/{receipt.partition}"
    return {"process": "asker", "queue": receipt.queue, "source": source, "offsets": [receipt.offset]}
