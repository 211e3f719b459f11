"""Long actions: redrives and deletions of dead letters, purges of queues, and their progress.

They run in the worker on whose page they were started, and end with it. Requests made by then are still carried out;
repeating the action does the rest. Ids are unique among workers, so any worker can show a task.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from marq.dead_letters.dead_letters import Deleted, Redriven
from marq.wire.errors import MarqError

log = logging.getLogger("marq.web")

#: Maximum number of running tasks, and of finished ones to remember.
MAX_RUNNING, MAX_KEPT = 4, 50
_ID_BYTES = 4


Reached = Redriven | Deleted
Work = Callable[[Callable[[Reached], None]], Awaitable[Reached]]


class TooManyTasks(MarqError):
    """The maximum number of tasks is running."""


@dataclass(eq=False)
class Task:
    """``state``: running, done, failed (see ``error``) or stopped."""

    id: str
    action: str
    queue: str | None
    #: Description.
    what: str
    began: float
    reached: Reached
    state: str = "running"
    error: str = ""
    running: asyncio.Task[None] | None = field(default=None, repr=False)

    def told(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "action": self.action,
            "queue": self.queue,
            "what": self.what,
            "began": self.began,
            "state": self.state,
            "error": self.error,
            "done": self.reached.done,
            **asdict(self.reached),
        }


class Tasks:
    """The tasks of this worker."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}

    def begin(self, action: str, queue: str | None, what: str, reached: Reached, work: Work) -> Task:
        """Start a task. Raises TooManyTasks."""
        if sum(task.state == "running" for task in self._tasks.values()) >= MAX_RUNNING:
            raise TooManyTasks(
                f"{MAX_RUNNING} redrives, deletions and purges are running on this worker: wait until one has finished"
            )
        task = Task(secrets.token_hex(_ID_BYTES), action, queue, what, time.time(), reached)
        self._tasks[task.id] = task
        task.running = asyncio.create_task(self._run(task, work), name=f"{action} {task.id}")
        for old in [task.id for task in self._tasks.values() if task.state != "running"][:-MAX_KEPT]:
            del self._tasks[old]
        return task

    async def _run(self, task: Task, work: Work) -> None:
        def progress(reached: Reached) -> None:
            task.reached = reached

        try:
            task.reached = await work(progress)
            task.state = "done"
        except asyncio.CancelledError:
            task.state = "stopped"
        except MarqError as error:
            task.state, task.error = "failed", str(error)
        except Exception as error:
            log.exception("%s of queue %s", task.action, task.queue)
            task.state, task.error = "failed", f"a defect of marq: {error!r}; the worker's log has the details"

    def all(self) -> list[Task]:
        """Return all tasks, newest first."""
        return list(reversed(self._tasks.values()))

    async def stop_one(self, identity: str) -> Task | None:
        """Stop a task; return it when it has stopped."""
        task = self._tasks.get(identity)
        if task is not None and task.running is not None and task.state == "running":
            task.running.cancel()
            await asyncio.wait([task.running])
            # A task that was stopped before its start has not set its state.
            if task.state == "running":
                task.state = "stopped"
        return task

    async def stop(self) -> None:
        for identity in list(self._tasks):
            await self.stop_one(identity)
