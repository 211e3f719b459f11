"""The actions of operators on pages: their catalogue, and their audited execution.

Every action is a POST that a second one confirms. Only the role ``operator`` may send POSTs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from marq.admin.purge_extent import Extent
from marq.dead_letters.dead_letters import Deleted, Redriven
from marq.dead_letters.filters import Filters
from marq.dead_letters.snapshots import Snapshot
from marq.wire.errors import ConfigError, MarqError
from marq_worker.app.web.dashboard.actor import Actor, DeadLetterSelection
from marq_worker.app.web.dashboard.tasks import Reached, Tasks

#: One line of JSON for each action, whether it was done or rejected.
audit_log = logging.getLogger("marq.audit")

#: Messages that can be selected one by one, and in one request to the cluster.
MAX_IDS = 1_000


class NotThere(ConfigError):
    """An address names an action or a task that does not exist."""


@dataclass(frozen=True, slots=True)
class Action:
    """``question``: {} stands for the target; ``on``: messages, dead letters, or queue; ``past``: the participle."""

    name: str
    label: str
    question: str
    consequence: str
    on: str
    past: str


ACTIONS: Mapping[str, Action] = {
    action.name: action
    for action in (
        Action(
            "deliver-now", "Deliver now", "Deliver {} now?",
            "They go to their queue at once.", "messages", "delivered",
        ),
        Action(
            "cancel", "Cancel", "Cancel {}?",
            "They will never be delivered. This can't be undone.", "messages", "cancelled",
        ),
        Action(
            "release", "Release", "Release {}?",
            "Their leases end and they are redelivered at once; the attempt does not count. A handler that is running"
            " is not stopped, so its message may be handled twice.", "messages", "requested to be released",
        ),
        Action(
            "redrive", "Redrive", "Send {} back to their queue?",
            "They are delivered again, starting with their first attempt.", "dead letters", "redriven",
        ),
        Action(
            "delete", "Delete", "Delete {}?",
            "They can no longer be listed or redriven. This can't be undone.", "dead letters", "deleted",
        ),
        Action(
            "pause", "Pause", "Pause {}?",
            "No message is delivered until the pause ends or the queue is resumed. Messages in flight are finished, and"
            " new ones may be sent.",
            "queue", "paused",
        ),
        Action("resume", "Resume", "Resume {}?", "Its messages are delivered again.", "queue", "resumed"),
        Action(
            "purge", "Purge", "Purge all waiting messages from {}?",
            "Waiting messages, and those that wait for redelivery, will never be delivered. Messages in flight are not"
            " affected. The queue is paused meanwhile. This can't be undone.", "queue", "purged",
        ),
    )
}  # fmt: skip


def read_action(name: str) -> Action:
    if name not in ACTIONS:
        raise NotThere(f"unknown action {name!r}; expected one of {', '.join(ACTIONS)}")
    return ACTIONS[name]


class AuditedActions:
    """Executes actions and writes each to the audit log, done or failed."""

    def __init__(self, actor: Actor, tasks: Tasks) -> None:
        self.actor = actor
        self.tasks = tasks

    async def to_messages(
        self, action: Action, queue: str, ids: Sequence[str], who: Mapping[str, str]
    ) -> tuple[int, int]:
        """Return for how many messages the action was done, and for how many it was too late.

        ``queue``: that of the messages, or ANY_QUEUE as in :class:`Actor`.
        """
        details = {"queue": queue or None, "ids": list(ids)}
        call = {"cancel": self.actor.cancel, "deliver-now": self.actor.deliver_now, "release": self.actor.release}
        try:
            outcomes = await call[action.name](queue, ids)
        except MarqError as error:
            audit(action.name, who, **details, error=str(error))
            raise
        done = sum(outcomes)
        audit(action.name, who, **details, done=done, too_late=len(ids) - done)
        return done, len(ids) - done

    def to_matching(self, action: Action, queue: str, ids: Sequence[str], who: Mapping[str, str]) -> str:
        """Start an action on many messages; return the id of its task; raise as :meth:`to_dead_letters`."""

        async def work(progress: Callable[[Reached], None]) -> Reached:
            reached = Deleted(len(ids))
            for start in range(0, len(ids), MAX_IDS):
                some = ids[start : start + MAX_IDS]
                done, late = await self.to_messages(action, queue, some, who)
                reached = Deleted(len(ids), start + len(some), reached.deleted + done, reached.already_settled + late)
                progress(reached)
            return reached

        return self.tasks.begin(action.name, queue, f"messages of queue {queue}", Deleted(len(ids)), work).id

    async def to_queue(
        self, action: Action, queue: str, who: Mapping[str, str], duration_s: float | None = None
    ) -> None:
        """Pause a queue, for ``duration_s`` if that is not None, or resume it."""
        details = {"queue": queue} if duration_s is None else {"queue": queue, "seconds": duration_s}
        try:
            if action.name == "pause":
                await self.actor.pause(queue, duration_s)
            else:
                await self.actor.resume(queue)
        except MarqError as error:
            audit(action.name, who, **details, error=str(error))
            raise
        audit(action.name, who, **details)

    def purge(self, action: Action, queue: str, who: Mapping[str, str], *, delayed: bool, extent: Extent | None) -> str:
        """Start to purge a queue; return the id of its task; raise as :meth:`to_dead_letters`."""

        async def work(progress: Callable[[Reached], None]) -> Reached:
            try:
                purged = await self.actor.purge(queue, progress, delayed=delayed, extent=extent)
            except BaseException as error:
                audit(action.name, who, queue=queue, delayed=delayed, error=str(error) or type(error).__name__)
                raise
            audit(action.name, who, queue=queue, delayed=delayed, **asdict(purged))
            return purged

        what = f"waiting{' and delayed' if delayed else ''} messages of queue {queue}"
        task = self.tasks.begin(action.name, queue, what, Deleted(0), work)
        audit(action.name, who, task=task.id, queue=queue, delayed=delayed)
        return task.id

    def to_dead_letters(
        self, action: Action, selection: DeadLetterSelection, chosen: int, who: Mapping[str, str]
    ) -> str:
        """Start an action on dead letters; return the id of its task. Raises TooManyTasks."""
        reached = Redriven(chosen) if action.name == "redrive" else Deleted(chosen)

        async def work(progress: Callable[[Reached], None]) -> Reached:
            details: dict[str, Any] = {
                "queue": selection.queue,
                "filters": _audited(selection.filters),
                "to": selection.to,
            }
            try:
                settled = await self.actor.settle(action.name, selection, progress)
            except BaseException as error:
                audit(action.name, who, **details, error=str(error) or type(error).__name__)
                raise
            audit(action.name, who, **details, done=getattr(settled, action.past), chosen=settled.chosen)
            return settled

        task = self.tasks.begin(action.name, selection.queue, str(selection), reached, work)
        audit(
            action.name, who, task=task.id, queue=selection.queue, filters=_audited(selection.filters), to=selection.to
        )
        return task.id


def _audited(filters: Filters) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Snapshot) else value for name, value in filters.items()}


def audit(action: str, who: Mapping[str, str], **details: Any) -> None:
    """Write one line, as a warning, so that no usual log level omits it."""
    audit_log.warning("%s", json.dumps({"audit": action, **who, **details}, ensure_ascii=False))
