"""Durable tasks on queues: purges, deletions, and moves of dead letters, which outlive the endpoint that began them.

The tasks of a queue are in the record ``sqs-tasks:NAME`` of the queues topic:

``purge``: the last purge or deletion (:class:`PurgeTask`); ``moves``: the last moves, newest first (:class:`MoveTask`);
``runner``: the endpoint that works on them, and when its claim ends unless it is renewed.

A task is in the record before a client gets its answer. An endpoint renews its claim every few seconds; if it dies,
another one continues. Clocks of endpoints may differ, so each endpoint measures with its own monotonic clock how long
a claim has not changed. An endpoint that can't renew its claim in time may still be at work, so two endpoints may run a
task at the same time. That is safe: a purge may be repeated, and only one endpoint can hold the lease of a message that
it moves.

A purge whose time is in the future does not count as recent, so an endpoint with a wrong clock cannot block purges.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from marq.queues.queues import Queues
from marq.settings.definitions import sqs_tasks_key
from marq_worker.sqs.errors import SqsError, invalid

RUNNING, COMPLETED, CANCELLING, CANCELLED, FAILED = "RUNNING", "COMPLETED", "CANCELLING", "CANCELLED", "FAILED"
ACTIVE = (RUNNING, CANCELLING)
#: How many moves of a queue are remembered.
MAX_MOVES = 10
#: A queue is purged at most once in this time.
PURGED_S = 60.0
#: How long a claim lasts after another endpoint has seen its last renewal, and how often it is renewed.
CLAIM_S, RENEWAL_S = 20.0, 5.0
#: Smaller differences between the clocks of endpoints have no effect.
SKEW_S = 5.0

Document = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeTask:
    """A purge, or with ``deletes`` the deletion of a queue; times are seconds since 1970."""

    requested_s: float
    #: The messages at the time of the call (:class:`marq.admin.purge.Extent`), None for all.
    extent: str | None = None
    deletes: bool = False
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveTask:
    """A move of the messages of a dead-letter queue."""

    id: str
    started_ms: int
    #: The queue for all messages; None: each goes back to the queue that it came from.
    destination: str | None = None
    #: Queues that the client may send to.
    allowed: list[str] = field(default_factory=list)
    #: Maximum number of messages per second, None for no limit.
    rate: int | None = None
    to_move: int | None = None
    moved: int = 0
    state: str = RUNNING
    reason: str | None = None


class QueueTasks:
    """Reads and changes the tasks of queues.

    All changes raise MarqError if it is unknown whether they were made.

    Args:
        queues: the definitions, started.
        clock: returns the time in seconds since 1970.
        monotonic: returns the time of a monotonic clock in seconds.
    """

    def __init__(
        self,
        queues: Queues,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queues = queues
        self._clock = clock
        self._monotonic = monotonic
        #: The last claim of each queue's tasks, and when this endpoint first saw it; monotonic seconds.
        self._claims: dict[str, tuple[Document, float]] = {}
        #: The name of this endpoint in claims.
        self.runner = secrets.token_hex(8)

    # --- reading ------------------------------------------------------------------------------------------------------

    def purge(self, queue: str) -> PurgeTask | None:
        """Return the last purge of a queue."""
        return _purge_of(self._queues.definitions.sqs_tasks(queue))

    def moves(self, queue: str) -> list[MoveTask]:
        """Return the moves of a queue's messages, newest first."""
        return _moves_of(self._queues.definitions.sqs_tasks(queue))

    def move(self, queue: str, task_id: str) -> MoveTask | None:
        return next((task for task in self.moves(queue) if task.id == task_id), None)

    def unclaimed(self) -> list[str]:
        """Return the queues with unfinished tasks that no other endpoint works on."""
        names = self._queues.definitions.sqs_tasks_names()
        self._claims = {queue: self._claims[queue] for queue in names if queue in self._claims}
        return [queue for queue in names if self._may_claim(queue, self._read(queue))]

    def is_mine(self, queue: str) -> bool:
        """Return whether this endpoint has the claim on a queue's tasks, as far as it knows."""
        return bool(self._read(queue).get("runner", {}).get("id") == self.runner)

    def _read(self, queue: str) -> Document:
        return self._queues.definitions.sqs_tasks(queue)

    # --- starting -----------------------------------------------------------------------------------------------------

    async def start_purge(self, queue: str, task: PurgeTask) -> None:
        """Begin a purge. Raises SqsError if one was begun a moment ago; a deletion takes over."""

        def merged(document: Document) -> dict[str, Any] | None:
            former = _purge_of(document)
            ended = former is None or (former.done and not is_recent(former.requested_s, task.requested_s, PURGED_S))
            if ended or task.deletes:
                return {**document, "purge": asdict(task), **self._claim()}
            return None

        if not await self._change(queue, merged):
            raise SqsError("PurgeQueueInProgress", f"the queue {queue!r} was purged a moment ago; wait {PURGED_S:g} s")

    async def start_move(self, queue: str, task: MoveTask) -> None:
        """Begin to move a queue's messages. Raises SqsError if they are being moved already."""

        def merged(document: Document) -> dict[str, Any] | None:
            former = _moves_of(document)
            if any(move.state in ACTIVE and move.id != task.id for move in former):
                return None
            moves = [task, *[move for move in former if move.id != task.id]]
            return {**document, "moves": [asdict(move) for move in moves[:MAX_MOVES]], **self._claim()}

        if not await self._change(queue, merged):
            raise invalid(
                "There is already a task running. Only one active task is allowed for a source queue at a given time."
            )

    async def cancel_move(self, queue: str, task_id: str) -> MoveTask:
        """Ask the endpoint that moves messages to stop, and return the task. Raises SqsError if it is not running."""
        task = self.move(queue, task_id)
        if task is None:
            raise SqsError("ResourceNotFoundException", "Task does not exist.")
        if task.state != RUNNING or not await self._change_move(queue, task_id, _cancelled):
            raise invalid("Only active tasks can be cancelled.")
        return task

    # --- running ------------------------------------------------------------------------------------------------------

    async def claim(self, queue: str) -> bool:
        """Claim the unfinished tasks of a queue, or renew the claim; return whether this endpoint has it."""
        await self._change(
            queue, lambda document: {**document, **self._claim()} if self._may_claim(queue, document) else None
        )
        return self.is_mine(queue)

    async def release(self, queue: str) -> None:
        """Let another endpoint continue the unfinished tasks of a queue."""
        await self._change(
            queue,
            lambda document: (
                {**document, "runner": {}} if document.get("runner", {}).get("id") == self.runner else None
            ),
        )

    async def end_purge(self, queue: str, task: PurgeTask) -> None:
        """Note that a purge is done."""

        def merged(document: Document) -> dict[str, Any] | None:
            current = _purge_of(document)
            if current is None or current.requested_s != task.requested_s:
                return None
            return {**document, "purge": asdict(replace(current, done=True))}

        await self._change(queue, merged)

    async def count_moved(self, queue: str, task_id: str, moved: int) -> None:
        """Add to the number of moved messages."""
        await self._change_move(queue, task_id, lambda task: replace(task, moved=task.moved + moved))

    async def end_move(self, queue: str, task_id: str, state: str, reason: str | None = None) -> None:
        """Note that a move has ended."""
        await self._change_move(
            queue, task_id, lambda task: replace(task, state=state, reason=reason) if task.state in ACTIVE else None
        )

    async def forget(self, queue: str) -> None:
        """Forget all tasks of a queue."""
        await self._change(queue, lambda document: {})

    # --- the record ---------------------------------------------------------------------------------------------------

    def _claim(self) -> dict[str, Any]:
        return {"runner": {"id": self.runner, "until": self._clock() + CLAIM_S}}

    def _may_claim(self, queue: str, document: Document) -> bool:
        # Reads the document itself, because this runs often, for all queues.
        unfinished = is_being_purged(document) or any(
            move.get("state", RUNNING) in ACTIVE for move in document.get("moves", ())
        )
        return unfinished and not self._is_claimed(queue, document.get("runner", {}))

    def _is_claimed(self, queue: str, runner: Document) -> bool:
        """Return whether another endpoint has claimed a queue's tasks, or renewed its claim, in the last CLAIM_S."""
        if runner.get("id") in (None, self.runner):
            return False
        now_s = self._monotonic()
        claim, seen_s = self._claims.get(queue, ({}, now_s))
        if claim != runner:
            self._claims[queue] = runner, now_s
            return True
        return now_s - seen_s < CLAIM_S

    async def _change_move(self, queue: str, task_id: str, change: Callable[[MoveTask], MoveTask | None]) -> bool:
        def merged(document: Document) -> dict[str, Any] | None:
            moves = _moves_of(document)
            changed = [change(task) if task.id == task_id else task for task in moves]
            if changed == moves or None in changed:
                return None
            return {**document, "moves": [asdict(task) for task in changed if task is not None]}

        return await self._change(queue, merged)

    async def _change(self, queue: str, merged: Callable[[Document], dict[str, Any] | None]) -> bool:
        """Change the record of a queue to ``merged(record)``, unless that is None; return whether it was changed.

        ``merged`` may be called again if another endpoint has changed the record at the same time.
        """
        changed = False

        def decided(document: Document) -> dict[str, Any]:
            nonlocal changed
            result = merged(document)
            changed = result is not None
            return dict(document) if result is None else result

        await self._queues.merge(
            f"the tasks of queue {queue!r}",
            sqs_tasks_key(queue),
            lambda definitions: definitions.sqs_tasks(queue),
            decided,
        )
        return changed


def is_recent(then_s: float, now_s: float, limit_s: float) -> bool:
    """Return whether less than ``limit_s`` has passed since another endpoint's clock was ``then_s``."""
    return -SKEW_S <= now_s - then_s < limit_s


def _cancelled(task: MoveTask) -> MoveTask | None:
    return replace(task, state=CANCELLING) if task.state == RUNNING else None


def is_being_purged(document: Document) -> bool:
    """Return whether a queue with these tasks is being purged or deleted."""
    purge = document.get("purge")
    return purge is not None and not purge.get("done")


def is_being_deleted(document: Document) -> bool:
    """Return whether a queue with these tasks is being deleted."""
    return is_being_purged(document) and bool(document["purge"].get("deletes"))


def _purge_of(document: Document) -> PurgeTask | None:
    purge = document.get("purge")
    return None if purge is None else _read(PurgeTask, purge)


def _moves_of(document: Document) -> list[MoveTask]:
    return [_read(MoveTask, move) for move in document.get("moves", ())]


def _read(kind: type[T], document: Document) -> T:
    """Return a task without the members that a newer version may have added."""
    known = {member.name for member in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in document.items() if name in known})
