"""Runs the tasks of queues in this endpoint, and those that a dead endpoint has left behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from marq.wire.errors import MarqError
from marq_worker.sqs.tasks import ACTIVE, RENEWAL_S, MoveTask, PurgeTask, QueueTasks

log = logging.getLogger("marq.sqs")

#: Interval between checks for tasks that no endpoint works on, and the pause after an error.
LOOK_S = 2.0
#: How long a stop waits for messages that are being moved, and then for tasks to end and their claims to be released.
STOP_S, END_S = 3.0, 2.0


class TaskRunner:
    """Runs tasks.

    Args:
        purge: ends the messages of a queue, and deletes the queue if the task says so.
        move: moves messages until the task ends or ``stopping`` is set.
    """

    def __init__(
        self,
        tasks: QueueTasks,
        purge: Callable[[str, PurgeTask], Awaitable[None]],
        move: Callable[[str, MoveTask, asyncio.Event], Awaitable[None]],
    ) -> None:
        self._tasks = tasks
        self._purge = purge
        self._move = move
        self._running: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self._woken = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._looking = asyncio.create_task(self._look(), name="marq-sqs-tasks")

    def wake(self) -> None:
        """Look for a task that was just started."""
        self._woken.set()

    async def stop(self) -> None:
        """End the tasks here; another endpoint continues them."""
        self._stopping.set()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        running = dict(self._running)
        if running:
            await asyncio.wait(running.values(), timeout=STOP_S)
        for task in running.values():
            task.cancel()
        ended = asyncio.gather(*running.values(), return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await asyncio.shield(ended)
                # If a claim is not released, another endpoint continues the task when the claim has expired.
                await asyncio.gather(*[self._tasks.release(queue) for queue in running], return_exceptions=True)

    async def _look(self) -> None:
        while True:
            try:
                for queue in self._tasks.unclaimed():
                    if queue not in self._running:
                        self._running[queue] = asyncio.create_task(self._run(queue), name=f"marq-sqs-task-{queue}")
            except Exception:
                log.exception("reading the tasks of queues failed, retrying")
            self._woken.clear()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def _run(self, queue: str) -> None:
        """Run all tasks of a queue, the purge first."""
        working: asyncio.Task[None] | None = None
        try:
            if await self._tasks.claim(queue):
                working = asyncio.create_task(self._work(queue))
                while not (await asyncio.wait([working], timeout=RENEWAL_S))[0]:
                    await self._keep(queue, working)
                await working
        except asyncio.CancelledError:
            if self._stopping.is_set():
                raise
        except MarqError as error:
            log.warning("queue %r: a task failed, trying again: %s", queue, error)
            await asyncio.sleep(LOOK_S)
        except Exception:
            log.exception("queue %r: a task failed with an unexpected error, trying again", queue)
            await asyncio.sleep(LOOK_S)
        finally:
            if working is not None:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
            del self._running[queue]

    async def _keep(self, queue: str, working: asyncio.Task[None]) -> None:
        """Renew the claim; stop the work if another endpoint has it."""
        try:
            if not await self._tasks.claim(queue) and not working.done():
                log.info("queue %r: another endpoint continues its tasks", queue)
                working.cancel()
        except MarqError as error:
            # Without a renewal another endpoint may begin too, which is safe.
            log.debug("queue %r: the claim on its tasks was not renewed: %s", queue, error)

    async def _work(self, queue: str) -> None:
        purge = self._tasks.purge(queue)
        if purge is not None and not purge.done:
            await self._purge(queue, purge)
        for task in reversed(self._tasks.moves(queue)):
            if task.state in ACTIVE and not self._stopping.is_set():
                await self._move(queue, task, self._stopping)
