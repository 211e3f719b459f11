"""A load of all kinds at random: messages for now and for later, of which some are cancelled and some are moved."""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import time
from collections.abc import Sequence
from typing import Any

import marq
from faults.stage import QUEUE, Stage
from marq.inquiry import Inquiry
from proof import history

#: Messages in a second; the longest delay, in seconds.
RATE = 60
LONGEST_S = 6.0
#: Of the messages, those that are delayed; of these, those that somebody cancels, and that somebody moves.
DELAYED, CANCELLED, MOVED = 0.6, 0.25, 0.25
#: How long whoever asks may take in the end.
ANSWERS_S = 60.0


class Mix:
    """Sends, cancels and moves until :meth:`stop`, as its seed says; ``delayed``: the share of what is for later."""

    def __init__(self, stage: Stage, *, delayed: float = DELAYED) -> None:
        self._stage = stage
        self._delayed = delayed
        self._chance = random.Random(stage.seed)
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        #: Who asks in the log, by the message and the question.
        self._holders: dict[tuple[str, str], str] = {}

    def start(self) -> None:
        self._stage.load_with(self._run())

    async def stop(self) -> None:
        """Send no more, and wait until all that was asked is answered."""
        self._stopping.set()
        await self._stage.until(self._ended.is_set, "each question is answered", ANSWERS_S)

    async def _run(self) -> None:
        stage, number = self._stage, 0
        async with marq.Producer(stage.servers, prefix=stage.prefix) as producer:
            self._watch(producer._inquiry)
            while not self._stopping.is_set():
                self._begin(producer, number)
                number += 1
                await asyncio.sleep(self._chance.expovariate(RATE))
            await asyncio.gather(*self._tasks)
        self._ended.set()

    def _begin(self, producer: marq.Producer, number: int) -> None:
        chance = self._chance
        delay_s = chance.uniform(0, LONGEST_S) if chance.random() < self._delayed else None
        fate = chance.random()
        questions = ["cancel"] * (fate < CANCELLED) + ["reschedule"] * (CANCELLED / 2 < fate < CANCELLED + MOVED)
        chance.shuffle(questions)
        # Some of them too late.
        waits_s = sorted(chance.uniform(0, 1.2 * (delay_s or 0)) for _ in questions)
        plan = [(wait_s, op, chance.uniform(0, LONGEST_S)) for wait_s, op in zip(waits_s, questions, strict=True)]
        absolute = chance.random() < 0.4
        task = asyncio.create_task(self._live(producer, number, delay_s, absolute, plan))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(
        self,
        producer: marq.Producer,
        number: int,
        delay_s: float | None,
        absolute: bool,
        plan: Sequence[tuple[float, str, float]],
    ) -> None:
        """Send one message, and ask what is planned for it."""
        stage, value = self._stage, b"%d" % number
        headers = {"tenant": b"acme"} if number % 2 else {}
        said = {"message": str(number), "queue": QUEUE, "process": "sender"}
        said["content"] = history.content(QUEUE, None, value, tuple(headers.items()))
        when: dict[str, Any] = {}
        if delay_s is not None:
            when = {"at": _from_now(delay_s)} if absolute else {"delay": delay_s}
        stage.note("invoke", "send", **said)
        try:
            receipt = await producer.send(QUEUE, value, headers=headers, **when)
        except marq.MarqError:
            stage.note("unknown", "send", **said)
            return
        stage.note("ok", "send", **said, record=receipt.id)
        stage.accepted += 1
        began_s = time.monotonic()
        for wait_s, op, later_s in plan if delay_s is not None else ():
            await asyncio.sleep(max(0.0, began_s + wait_s - time.monotonic()))
            await self._ask(producer, receipt, op, later_s)

    async def _ask(self, producer: marq.Producer, receipt: marq.Receipt, op: str, later_s: float) -> None:
        names = {"source": f"{receipt.topic}/{receipt.partition}", "offsets": [receipt.offset], "process": "asker"}
        try:
            if op == "cancel":
                in_time = await producer.cancel(receipt)
            else:
                in_time = await producer.reschedule(receipt, delay=later_s)
        except marq.BrokerUnavailable:
            return
        holder = self._holders[receipt.id, op]
        self._stage.note("ok", op, **names, holder=holder, outcomes=["DONE" if in_time else "TOO_LATE"])

    def _watch(self, inquiry: Inquiry) -> None:
        """Note each question as it goes into the log, with the number of whoever asks."""
        records = inquiry._records

        def watched(questions: Any, holders: Any) -> Any:
            for each in questions:
                if not each.future.done():
                    op = "cancel" if each.when is None else "reschedule"
                    holder = history.holder_name(holders.cancelling if each.when is None else holders.moving)
                    self._holders[each.receipt.id, op] = holder
                    source = f"{each.receipt.topic}/{each.receipt.partition}"
                    names = {"source": source, "offsets": [each.receipt.offset], "holder": holder}
                    self._stage.note("invoke", op, process="asker", **names)
            return records(questions, holders)

        inquiry._records = watched  # type: ignore[method-assign]


def _from_now(seconds: float) -> dt.datetime:
    return dt.datetime.now(tz=dt.UTC) + dt.timedelta(seconds=seconds)
