"""The actions of operators on pages: their table, and their audited execution.

Every action is a POST that a second one confirms. Only the role ``operator`` may send POSTs. The table says which
fields the form of an action has, and how it runs; actions on many messages and dead letters, and purges, are tasks with
a progress (:mod:`marq_worker.web.dashboard.tasks`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from marq.admin.purge import Extent
from marq.dead_letters.dead_letters import Deleted, Redriven
from marq.dead_letters.snapshots import Snapshot
from marq.wire.errors import ConfigError
from marq_worker.web.dashboard.actor import Actor, DeadLetterSelection
from marq_worker.web.dashboard.forms import MAX_IDS, read_pause
from marq_worker.web.dashboard.tasks import Reached, Tasks
from marq_worker.web.dashboard.worker_commands import CANCEL, COMMAND_FIELDS, QUIET, UNQUIET, WORKER

#: One line of JSON for each action, whether it was done or rejected.
audit_log = logging.getLogger("marq.audit")


class NotThere(ConfigError):
    """An address names an action or a task that does not exist."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a confirmation that the operator fills in; ``kind`` and ``attributes`` of the HTML element."""

    name: str
    label: str
    kind: str = "text"
    attributes: Mapping[str, str] = field(default_factory=dict)


#: Carries out an action with the values of its form, in the name of an operator. Returns more for the audit log, such
#: as the id of a message that was ``sent``. Raises MarqError.
Run = Callable[[Actor, Mapping[str, str], str], Awaitable[Mapping[str, Any] | None]]
#: Returns the first content of the field ``value``.
Preview = Callable[[Actor, Mapping[str, str]], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Action:
    """``question``: {} stands for the target; ``on``: messages, dead letters, queue, or worker; ``past``: the
    participle.

    ``fields``: those that the operator fills in; ``hidden``: those that a page sets; ``run``: how an action on one
    target is carried out, None for actions that are tasks. It needs all hidden fields, and the question may name them.
    ``preview``: the first content of the field ``value``, if the operator changes what there is.
    """

    name: str
    label: str
    question: str
    consequence: str
    on: str
    past: str
    fields: Sequence[Field] = ()
    hidden: frozenset[str] = frozenset()
    run: Run | None = None
    preview: Preview | None = None

    @property
    def names(self) -> frozenset[str]:
        """The names of all fields of its form."""
        return self.hidden | {form_field.name for form_field in self.fields}


_QUEUE, _WORKER, _SCHEDULE = frozenset({"queue"}), frozenset({WORKER}), frozenset({"schedule"})
_FILTERED = frozenset({"queue", "id", "selected", "match", "state", "error", "minutes"})
_OPEN = _FILTERED | {"attempts", "places"}
_DEAD = _FILTERED | {"kind", "reason", "as_of", "to", "unknown", "limit", "rate"}


def _command(command: str) -> Run:
    """Return how a command to a worker is carried out."""
    return lambda actor, form, who: actor.command(
        form[WORKER], command, {name: value for name, value in form.items() if name != WORKER}, who
    )


ACTIONS: Mapping[str, Action] = {
    action.name: action
    for action in (
        Action(
            "deliver-now", "Deliver now", "Deliver {} now?",
            "They are due now. A paused queue delivers them when it is resumed.", "messages", "due now", hidden=_OPEN,
        ),
        Action(
            "cancel", "Cancel", "Cancel {}?",
            "They will never be delivered. This can't be undone.", "messages", "cancelled", hidden=_OPEN,
        ),
        Action(
            "release", "Release", "Release {}?",
            "Their leases end and they are redelivered at once; the attempt does not count. A handler that is running"
            " is not stopped, so its message may be handled twice.", "messages", "requested to be released",
            hidden=_OPEN,
        ),
        Action(
            "redrive", "Redrive", "Send {} back to their queue?",
            "They are delivered again, starting with their first attempt.", "dead letters", "redriven",
            (
                Field("to", "To another queue (empty: their own)"),
                Field("limit", "At most N messages, oldest first (empty: all)", "number", {"min": "1"}),
                Field("rate", "At most N messages per second (empty: no limit)", "number",
                      {"min": "0.1", "step": "any"}),
            ),
            _DEAD,
        ),
        Action(
            "delete", "Delete", "Delete {}?",
            "They can no longer be listed or redriven. This can't be undone.", "dead letters", "deleted",
            hidden=_DEAD,
        ),
        Action(
            "resend", "Edit and resend", "Send message {id} of queue {queue} with another payload?",
            "A new message is sent, with the same headers and ordering key, and the dead letter is deleted.",
            "queue", "sent",
            (
                Field("value", "Payload", "textarea", {"rows": "12", "spellcheck": "false"}),
                Field("to", "To another queue (empty: its own)"),
                Field("keep", "Keep the dead letter", "checkbox", {"value": "yes"}),
            ),
            _QUEUE | {"id"},
            lambda actor, form, who: actor.sender.resend(form["queue"], form["id"], form),
            lambda actor, form: actor.sender.editable(form["queue"], form["id"]),
        ),
        Action(
            "send", "Send a message", "Send a message to {}?",
            "Its handler or consumer processes it like any other.", "queue", "sent",
            (
                Field("value", "Payload, as text", "textarea", {"rows": "6", "spellcheck": "false"}),
                Field("headers", "Headers, one per line as name: value", "textarea",
                      {"rows": "2", "spellcheck": "false"}),
                Field("type", "Type, which chooses the handler in a queue with several (empty: none)"),
                Field("delay", "Delay, such as 10m or 2h (empty: none)"),
                Field("ordering_key", "Ordering key (empty: none)"),
            ),
            _QUEUE, lambda actor, form, who: actor.sender.send(form["queue"], form),
        ),
        Action(
            "set", "Change", "Change {key} of {}?",
            "All workers and clients apply it at once, and it overrides marq.toml. After a change of group, topic or"
            " handler, other consumers may read the queue.",
            "queue", "setting changed",
            (
                Field("value", "Value, as in marq.toml (empty: undo the change made here or with marq queue --set)"),
                Field("reason", "Reason, for the audit log", attributes={"required": "required", "maxlength": "500"}),
            ),
            _QUEUE | {"key"},
            lambda actor, form, who: actor.change_setting(form["queue"], form["key"], form.get("value", "").strip()),
            lambda actor, form: actor.setting(form["queue"], form["key"]),
        ),
        Action(
            "run-schedule", "Run now", "Run {} now?",
            "A message with the schedule's value and headers is sent to its queue, in addition to those at its times.",
            "schedule", "sent", hidden=_SCHEDULE,
            run=lambda actor, form, who: actor.run_schedule(form["schedule"]),
        ),
        Action(
            "pause-schedule", "Pause", "Pause {}?",
            "It sends nothing until you resume it. Times that pass meanwhile are skipped.",
            "schedule", "schedule paused", hidden=_SCHEDULE,
            run=lambda actor, form, who: actor.switch_schedule(form["schedule"], enabled=False),
        ),
        Action(
            "resume-schedule", "Resume", "Resume {}?",
            "It sends messages again, from its next time on. Times that have passed are skipped.",
            "schedule", "schedule resumed", hidden=_SCHEDULE,
            run=lambda actor, form, who: actor.switch_schedule(form["schedule"], enabled=True),
        ),
        Action(
            "pause", "Pause", "Pause {}?",
            "No message is delivered until the pause ends or the queue is resumed. Messages in flight are finished, and"
            " new ones may be sent.",
            "queue", "paused",
            (Field("for", "For how long, such as 10m or 2h (empty: until it is resumed)"),), _QUEUE,
            lambda actor, form, who: actor.pause(form["queue"], read_pause(form)),
        ),
        Action(
            "resume", "Resume", "Resume {}?", "Its messages are delivered again.", "queue", "resumed", hidden=_QUEUE,
            run=lambda actor, form, who: actor.resume(form["queue"]),
        ),
        Action(
            "purge", "Purge", "Purge all waiting messages from {}?",
            "Waiting messages, and those that wait for redelivery, will never be delivered. Messages in flight are not"
            " affected. This can't be undone.", "queue", "purged",
            (
                Field("delayed", "Also delayed messages", "checkbox", {"value": "yes"}),
                Field("typed", "Type the name of the queue", attributes={"required": "required"}),
            ),
            _QUEUE | {"minutes", "extent"},
        ),
        Action(
            CANCEL, "Cancel handler", "Cancel the handler of message {id} of queue {queue}?",
            "The coroutine gets a CancelledError, as when its worker stops. Its message is delivered again at once, and"
            " the attempt does not count. If you count it as failed, the queue's backoff and max_attempts apply. A"
            " message of an at-most-once queue becomes a dead letter.",
            "worker", "handler is being cancelled",
            (Field("counted", "Count the attempt as failed", "checkbox", {"value": "yes"}),),
            frozenset({WORKER, "queue", "id"}), _command(CANCEL),
        ),
        Action(
            QUIET, "Quiet", "Let {} take no more messages?",
            "Its running handlers continue, without a limit. New messages in its partitions wait until you let it take"
            " messages again, or until it stops.",
            "worker", "worker takes no more messages", hidden=_WORKER, run=_command(QUIET),
        ),
        Action(
            UNQUIET, "Resume", "Let {} take messages again?", "Its handlers get messages again.",
            "worker", "worker takes messages again", hidden=_WORKER, run=_command(UNQUIET),
        ),
    )
}  # fmt: skip


def at_least_old(minutes: int) -> str:
    """Return the words that limit a purge to messages of an age; nothing for 0."""
    return f" that are at least {minutes:,} minute{'' if minutes == 1 else 's'} old" if minutes else ""


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
        call = {"cancel": self.actor.cancel, "deliver-now": self.actor.deliver_now, "release": self.actor.release}
        with audited(action.name, who, queue=queue or None, ids=list(ids)) as results:
            done = sum(await call[action.name](queue, ids))
            results.update(done=done, too_late=len(ids) - done)
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

    async def run(self, action: Action, form: Mapping[str, str], who: Mapping[str, str]) -> Mapping[str, Any]:
        """Carry out an action that is not a task, with the values of its form; return the outcome."""
        assert action.run is not None, "the caller checks it"
        # Never log payloads. Empty fields are those that the operator left out.
        texts = {form_field.name for form_field in action.fields if form_field.kind == "textarea"}
        details = {name: value for name, value in form.items() if value and name not in texts}
        with audited(action.name, who, **details) as results:
            results.update(await action.run(self.actor, form, who["who"]) or {})
        return results

    async def carry_out(self, command: str, query: Mapping[str, str], who: Mapping[str, str]) -> Mapping[str, Any]:
        """Carry out a command here that another worker passes on; raise as :meth:`WorkerCommands.send`."""
        # Other names would overwrite what the audit log says.
        if unknown := query.keys() - COMMAND_FIELDS:
            raise ConfigError(f"command {command}: unknown field {min(unknown)!r}")
        with audited(command, who, **query):
            return await self.actor.carry_out(command, query)

    def purge(
        self, action: Action, queue: str, who: Mapping[str, str], *, delayed: bool, minutes: int, extent: Extent | None
    ) -> str:
        """Start to purge a queue; return the id of its task; raise as :meth:`to_dead_letters`.

        ``minutes``: for the audit log, the least age of the messages in the extent; 0 for all.
        """
        details = {"delayed": delayed, **({"minutes": minutes} if minutes else {})}

        async def work(_: Callable[[Reached], None]) -> Reached:
            with audited(action.name, who, queue=queue, **details) as results:
                purged = await self.actor.purge(queue, delayed=delayed, extent=extent)
                results.update(asdict(purged))
            return purged

        what = f"waiting{' and delayed' if delayed else ''} messages of queue {queue}{at_least_old(minutes)}"
        task = self.tasks.begin(action.name, queue, what, Deleted(0), work)
        audit(action.name, who, task=task.id, queue=queue, **details)
        return task.id

    def to_dead_letters(
        self, action: Action, selection: DeadLetterSelection, chosen: int, who: Mapping[str, str]
    ) -> str:
        """Start an action on dead letters; return the id of its task. Raises TooManyTasks."""
        reached = Redriven(chosen) if action.name == "redrive" else Deleted(chosen)
        filters = {
            name: str(value) if isinstance(value, Snapshot) else value for name, value in selection.filters.items()
        }
        details: dict[str, Any] = {"queue": selection.queue, "filters": filters, "to": selection.to}

        async def work(progress: Callable[[Reached], None]) -> Reached:
            with audited(action.name, who, **details) as results:
                settled = await self.actor.settle(action.name, selection, progress)
                results.update(done=settled.done, chosen=settled.chosen)
            return settled

        task = self.tasks.begin(action.name, selection.queue, str(selection), reached, work)
        audit(action.name, who, task=task.id, **details)
        return task.id


@contextmanager
def audited(action: str, who: Mapping[str, str], **details: Any) -> Iterator[dict[str, Any]]:
    """Write to the audit log how an action ended; results that the block adds to the dictionary are written, too."""
    try:
        yield details
    except BaseException as error:
        audit(action, who, **details, error=str(error) or type(error).__name__)
        raise
    audit(action, who, **details)


def audit(action: str, who: Mapping[str, str], **details: Any) -> None:
    """Write one line, as a warning, so that no usual log level omits it."""
    audit_log.warning("%s", json.dumps({"audit": action, **who, **details}, ensure_ascii=False))
