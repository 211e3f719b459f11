"""Turns: work that a part of a process hands to a Faust agent, and whose end it waits for.

The agent begins each turn in a task and waits for none, so a slow turn holds up neither the other turns nor the agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any

import faust
from aiokafka.errors import KafkaError
from mode.utils.queues import FlowControlEvent, ThrowableQueue


class Turn:
    """One turn; ``over`` completes with the outcome of its work."""

    def __init__(self, work: Callable[[], Awaitable[Any]]) -> None:
        self.over = asyncio.get_running_loop().create_future()
        self._work = work
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Work in a task, which ends if the caller gives up."""
        if self._task is None and not self.over.done():
            self._task = task = asyncio.create_task(self._live())
            self.over.add_done_callback(lambda _: task.cancel())

    def expire(self) -> None:
        """End the turn unless it has begun; it never begins after that."""
        if self._task is None and not self.over.done():
            self.over.set_exception(KafkaError("the agent has not begun the turn in time"))

    async def _live(self) -> None:
        try:
            result = await self._work()
        except BaseException as error:
            if not self.over.done():
                # The caller waits for this turn, so every way in which it ends must complete `over`.
                lost = KafkaError("the turn was cancelled") if isinstance(error, asyncio.CancelledError) else error
                self.over.set_exception(lost)
            if not isinstance(error, Exception):
                raise
            return
        if not self.over.done():
            self.over.set_result(result)

    async def end(self) -> None:
        """Cancel the task and wait until it has stopped working."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])


class TurnChannel(faust.Channel[Turn]):
    """An in-memory channel of turns to one agent.

    A rebalance clears Faust's own channels; callers would then wait forever.
    """

    #: Without a name, `faust agents` hides the agent.
    shown = "<turns>"

    @cached_property
    def queue(self) -> ThrowableQueue[Turn]:
        return ThrowableQueue(flow_control=FlowControlEvent(initially_suspended=False))

    def get_topic_name(self) -> str:
        return self.shown

    async def run(self, work: Callable[[], Awaitable[Any]], begin_s: float | None = None) -> Any:
        """Let the agent do some work; return its result when it is done.

        Raises KafkaError if the agent does not begin within ``begin_s``.
        """
        turn = Turn(work)
        expiry = None if begin_s is None else asyncio.get_running_loop().call_later(begin_s, turn.expire)
        await self.put(turn)  # type: ignore[arg-type]  # a channel takes plain values, too
        try:
            return await turn.over
        finally:
            if expiry is not None:
                expiry.cancel()
            await turn.end()
