"""What can be done on pages. Each action is a POST, which is confirmed by a second one, and each is audited.

What changes something belongs to the role ``operator``: every POST, and nothing else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from agents.listing import MAX_MINUTES, MAX_PLACES, read_number
from app.dashboard.tasks import Reached, Tasks
from marq import purging
from marq.cluster import cluster_of
from marq.core.errors import ConfigError, MarqError
from marq.core.marker_codec import encode
from marq.core.markers import Release, Source
from marq.core.names import check_queue_name, markers_partition
from marq.dead_letters import DeadLetters, Deleted, Redriven
from marq.letter_filter import Filters, Snapshot
from marq.producer import Producer
from marq.purging import Extent
from marq.queues import Queues
from marq.receipt import Receipt
from marq.settings import ClientSettings
from marq.writer import MarkerRecord

#: One line for each action that was done or refused: JSON.
audit_log = logging.getLogger("marq.audit")

#: Messages of one action at the most; actions on dead letters have no such limit where they are chosen by a filter.
MAX_IDS = 1_000
#: Of a number of messages in a form.
_MAX_DIGITS = 18
#: Fields that a form may have, by the target of its action.
_FIELDS: Mapping[str, frozenset[str]] = {
    "queue": frozenset({"queue", "typed", "delayed", "extent"}),
    "messages": frozenset({"queue", "id", "match", "state", "error", "attempts", "minutes", "places"}),
    "letters": frozenset(
        {
            "queue",
            "id",
            "match",
            "state",
            "kind",
            "reason",
            "error",
            "minutes",
            "as_of",
            "to",
            "unknown",
            "limit",
            "rate",
        }
    ),
}
_STOP_S = 2.0
#: What is told to the next consumer of a message that an operator took from its holder.
_RELEASED = "released by an operator"


class NotThere(ConfigError):
    """An address names an action or a task that does not exist."""


@dataclass(frozen=True, slots=True)
class Action:
    """``question``: asked before it is done, {} is what it is done to; ``on``: messages, dead letters, or a queue."""

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
            "They go to their queue at once, instead of waiting for their time.", "messages", "delivered",
        ),
        Action(
            "cancel", "Cancel", "Cancel {}?",
            "They will never be delivered. This can't be taken back.", "messages", "cancelled",
        ),
        Action(
            "release", "Release", "Take {} from whoever holds them?",
            "Their leases end and they are delivered again at once; the attempt does not count. Whoever works on one of"
            " them is not stopped: it may be done twice.", "messages", "asked to be released",
        ),
        Action(
            "redrive", "Redrive", "Send {} back to their queue?",
            "They are delivered again, from their first attempt on.", "letters", "redriven",
        ),
        Action(
            "delete", "Delete", "Delete {}?",
            "They are listed and redriven no more. This can't be taken back.", "letters", "deleted",
        ),
        Action(
            "pause", "Pause", "Pause {}?",
            "Nothing of it is delivered until it is resumed. What is being worked on ends; messages may be sent.",
            "queue", "paused",
        ),
        Action("resume", "Resume", "Resume {}?", "Its messages are delivered again.", "queue", "resumed"),
        Action(
            "purge", "Purge", "End what waits in {}?",
            "What nobody has taken yet, and what waits to be delivered again, will never be delivered. What is being"
            " worked on goes on. The queue is paused meanwhile. This can't be taken back.", "queue", "ended",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Letters:
    """Which dead letters an action is for: of a queue (None: of all), those that fit the filters."""

    queue: str | None
    filters: Filters
    to: str | None = None
    limit: int | None = None
    rate: float | None = None
    #: The operator confirmed that ``to`` may be an unknown queue.
    allow_unknown: bool = False


class Actor(Protocol):
    """Does what pages ask for; all raise a MarqError when it is not known what came of it, or ConfigError."""

    async def cancel(self, ids: Sequence[str]) -> Sequence[bool]: ...
    async def deliver_now(self, ids: Sequence[str]) -> Sequence[bool]: ...

    async def release(self, ids: Sequence[str]) -> Sequence[bool]:
        """Take messages from their holders; False for those that nobody held."""

    async def pause(self, queue: str) -> None: ...
    async def resume(self, queue: str) -> None: ...

    async def extent(self, queue: str, clocks: Mapping[int, int]) -> Extent:
        """Return what a purge of a queue would end now, given the trackers' clocks by markers partition."""

    async def purge(
        self, queue: str, progress: Callable[[Reached], None], *, delayed: bool, extent: Extent | None
    ) -> Reached:
        """Purge a queue, with ``delayed`` of its delayed messages too; messages outside the extent stay."""

    async def snapshot(self) -> Snapshot:
        """Return which dead letters exist now."""

    async def count(self, action: str, letters: Letters) -> int:
        """Return how many dead letters are meant."""

    async def settle(self, action: str, letters: Letters, progress: Callable[[Reached], None]) -> Reached:
        """Redrive or delete dead letters."""


class ClusterActor:
    """Does it, with clients of its own for each action: they are rare.

    ``look``: returns an open message by its place, with its ``holder``; raises MarqError where that is not known.
    """

    def __init__(
        self,
        client: ClientSettings,
        letters: DeadLetters,
        queues: Queues,
        look: Callable[[str], Coroutine[Any, Any, Mapping[str, Any] | None]],
    ) -> None:
        self._client = client
        self._letters = letters
        self._queues = queues
        self._look = look

    async def cancel(self, ids: Sequence[str]) -> Sequence[bool]:
        async with Producer.of(self._client) as producer:
            return await producer.cancel([Receipt.of(each) for each in ids])

    async def deliver_now(self, ids: Sequence[str]) -> Sequence[bool]:
        async with Producer.of(self._client) as producer:
            return await producer.reschedule([Receipt.of(each) for each in ids], delay=0)

    async def release(self, ids: Sequence[str]) -> Sequence[bool]:
        """Write RELEASEs in the holders' names: only those of messages that they still hold count."""
        groups: dict[tuple[str, int, Source], list[int]] = {}
        held = []
        for each in ids:
            receipt = Receipt.of(each)
            found = await self._look(receipt.id)
            held.append(found is not None and bool(found["holder"]))
            if found is not None and found["holder"]:
                source = Source(receipt.topic, receipt.partition)
                groups.setdefault((found["queue"], found["holder"], source), []).append(receipt.offset)
        if groups:
            await self._write([_release(*group, sorted(set(offsets))) for group, offsets in groups.items()])
        return held

    async def pause(self, queue: str) -> None:
        await self._queues.start()
        await self._queues.pause(queue)

    async def resume(self, queue: str) -> None:
        await self._queues.start()
        await self._queues.resume(queue)

    async def extent(self, queue: str, clocks: Mapping[int, int]) -> Extent:
        await self._queues.start()
        return await purging.extent_now(self._client, self._queues.definitions, queue, clocks)

    async def purge(
        self, queue: str, progress: Callable[[Reached], None], *, delayed: bool, extent: Extent | None
    ) -> Reached:
        found = await purging.purge(
            self._client,
            queue,
            delayed=delayed,
            extent=extent,
            progress=lambda done, of: progress(Deleted(of, of, done)),
        )
        meant = found.total + found.too_late
        return Deleted(meant, meant, found.total, found.too_late)

    async def _write(self, batches: Sequence[Release]) -> None:
        cluster = cluster_of(self._client)
        topics = await cluster.topics()
        writer = cluster.writer(topics)
        await writer.start()
        try:
            records = [
                MarkerRecord(markers_partition(*batch.source, topics.markers_partitions), encode(batch))
                for batch in batches
            ]
            await writer.write(records, self._client.request_timeout_ms / 1000)
        finally:
            await writer.stop(_STOP_S)

    async def snapshot(self) -> Snapshot:
        await self._letters.start()
        return await self._letters.snapshot()

    async def count(self, action: str, letters: Letters) -> int:
        await self._letters.start()
        queue, limit, filters = letters.queue, letters.limit, letters.filters
        if action == "delete":
            return (await self._letters.delete(queue, limit=limit, dry_run=True, **filters)).chosen
        # With the rate, so that an invalid one is refused before the redrive begins.
        return (await self._letters.redrive(queue, limit=limit, rate=letters.rate, dry_run=True, **filters)).chosen

    async def settle(self, action: str, letters: Letters, progress: Callable[[Reached], None]) -> Reached:
        await self._letters.start()
        queue, limit, filters = letters.queue, letters.limit, letters.filters
        if action == "delete":
            return await self._letters.delete(queue, limit=limit, progress=progress, **filters)
        return await self._letters.redrive(
            queue,
            to=letters.to,
            # The page has asked about an unknown queue (Pages._unknown_target).
            allow_unknown=True,
            limit=limit,
            rate=letters.rate,
            progress=progress,
            **filters,
        )


def _release(queue: str, holder: int, source: Source, offsets: Sequence[int]) -> Release:
    count = len(offsets)
    return Release(queue, holder, source, offsets, [0] * count, counted=False, errors=[_RELEASED] * count)


# --- what a form says -------------------------------------------------------------------------------------------------


def read_action(name: str) -> Action:
    """Return the action of an address.

    Raises:
        NotThere: there is no such action.
    """
    if name not in ACTIONS:
        raise NotThere(f"there is no action {name!r}; expected one of {', '.join(ACTIONS)}")
    return ACTIONS[name]


def read_ids(ids: Sequence[str]) -> list[str]:
    """Return ids of messages, each once.

    Raises:
        ConfigError: there is none, there are too many, or one is no id.
    """
    found = list(dict.fromkeys(each.strip() for each in ids if each.strip()))
    if not found:
        raise ConfigError("no message is selected: go back and select at least one")
    if len(found) > MAX_IDS:
        raise ConfigError(f"{len(found):,} messages are selected; select at most {MAX_IDS:,}")
    return [Receipt.of(each).id for each in found]


def write_places(ids: Sequence[str]) -> str:
    """Return the places of many messages as one form field, with each source only once to keep it small."""
    places: dict[str, list[str]] = {}
    for each in ids:
        source, _, number = each.rpartition("/")
        places.setdefault(source, []).append(number)
    return "\n".join(f"{source}/{','.join(numbers)}" for source, numbers in places.items())


def read_places(text: str) -> list[str]:
    """Return the ids in a field that :func:`write_places` wrote.

    Raises:
        ConfigError: one is not the id of a message, or there are too many.
    """
    found = []
    for line in text.split():
        source, _, numbers = line.rpartition("/")
        found += [f"{source}/{number}" for number in numbers.split(",")]
    if not 0 < len(found) <= MAX_PLACES:
        raise ConfigError(f"{len(found):,} messages are selected; select 1 to {MAX_PLACES:,}")
    return [Receipt.of(each).id for each in found]


def refuse_unknown_fields(action: Action, form: Mapping[str, str]) -> None:
    """Check that an action has all of the form's fields: with a mistyped filter it would act on more messages.

    Raises:
        ConfigError: a field is unknown.
    """
    unknown = sorted(form.keys() - _FIELDS[action.on])
    if unknown:
        raise ConfigError(
            f"{action.name}: unknown field {unknown[0]!r}, so nothing was done; expected"
            f" {', '.join(sorted(_FIELDS[action.on]))}"
        )


def read_letters(form: Mapping[str, str], ids: Sequence[str]) -> Letters:
    """Return which dead letters a form means.

    Raises:
        ConfigError: a field can't be read, or it would be all letters of all queues.
    """
    filters = read_filters(form, ids)
    queue = check_queue_name(form["queue"]) if form.get("queue") else None
    to = check_queue_name(form["to"]) if form.get("to") else None
    if queue is None and not filters.keys() - {"as_of"}:
        raise ConfigError("which dead letters? name a queue or set a filter")
    # The form repeats the name, so that a confirmation for one unknown queue does not hold for another.
    return Letters(
        queue, filters, to, _number(form, "limit"), _rate(form), to is not None and form.get("unknown") == to
    )


def read_filters(form: Mapping[str, str], ids: Sequence[str]) -> Filters:
    """Return the filters of dead letters that a form or an address says; raises as :func:`read_ids`."""
    filters: Filters = {}
    if form.get("reason"):
        filters["reason"] = form["reason"]
    if form.get("error"):
        filters["error"] = form["error"]
    if "kind" in form:
        filters["kind"] = form["kind"]
    if form.get("minutes"):
        filters["older_than"] = 60 * read_number(form, "minutes", 0, MAX_MINUTES, least=0)
    if ids:
        filters["id"] = read_ids(ids)
    if form.get("as_of"):
        filters["as_of"] = Snapshot.parse(form["as_of"])
    return filters


def _number(form: Mapping[str, str], name: str) -> int | None:
    text = form.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS or not int(text):
        raise ConfigError(f"{name}={text}: expected a whole number from 1 to {10**_MAX_DIGITS - 1:,}")
    return int(text)


def _rate(form: Mapping[str, str]) -> float | None:
    text = form.get("rate", "").strip()
    try:
        return float(text) if text else None
    except ValueError:
        raise ConfigError(f"rate={text}: expected messages per second") from None


# --- doing ------------------------------------------------------------------------------------------------------------


class Doing:
    """Does actions and writes each of them to the audit log, done or failed; ``who`` is for that log."""

    def __init__(self, actor: Actor, tasks: Tasks) -> None:
        self.actor = actor
        self.tasks = tasks

    async def to_messages(self, action: Action, ids: Sequence[str], who: Mapping[str, str]) -> tuple[int, int]:
        """Return to how many messages it was done, and to how many it came too late."""
        call = {"cancel": self.actor.cancel, "deliver-now": self.actor.deliver_now, "release": self.actor.release}
        try:
            outcomes = await call[action.name](ids)
        except MarqError as error:
            audit(action.name, who, ids=list(ids), error=str(error))
            raise
        done = sum(outcomes)
        audit(action.name, who, ids=list(ids), done=done, too_late=len(ids) - done)
        return done, len(ids) - done

    def to_matching(self, action: Action, queue: str, ids: Sequence[str], who: Mapping[str, str]) -> str:
        """Begin to do it to many messages; return the id of its task; raises as :meth:`to_letters`."""

        async def work(progress: Callable[[Reached], None]) -> Reached:
            reached = Deleted(len(ids))
            for start in range(0, len(ids), MAX_IDS):
                some = ids[start : start + MAX_IDS]
                done, late = await self.to_messages(action, some, who)
                reached = Deleted(len(ids), start + len(some), reached.deleted + done, reached.already_settled + late)
                progress(reached)
            return reached

        return self.tasks.begin(action.name, queue, f"messages of queue {queue}", Deleted(len(ids)), work).id

    async def to_queue(self, action: Action, queue: str, who: Mapping[str, str]) -> None:
        """Do it to a queue."""
        call = {"pause": self.actor.pause, "resume": self.actor.resume}
        try:
            await call[action.name](queue)
        except MarqError as error:
            audit(action.name, who, queue=queue, error=str(error))
            raise
        audit(action.name, who, queue=queue)

    def purge(self, action: Action, queue: str, who: Mapping[str, str], *, delayed: bool, extent: Extent | None) -> str:
        """Begin to purge a queue; return the id of its task; raises as :meth:`to_letters`."""

        async def work(progress: Callable[[Reached], None]) -> Reached:
            try:
                found = await self.actor.purge(queue, progress, delayed=delayed, extent=extent)
            except BaseException as error:
                audit(action.name, who, queue=queue, delayed=delayed, error=str(error) or type(error).__name__)
                raise
            audit(action.name, who, queue=queue, delayed=delayed, **asdict(found))
            return found

        what = f"what waits in queue {queue}{', also for its time' if delayed else ''}"
        task = self.tasks.begin(action.name, queue, what, Deleted(0), work)
        audit(action.name, who, task=task.id, queue=queue, delayed=delayed)
        return task.id

    def to_letters(self, action: Action, letters: Letters, chosen: int, who: Mapping[str, str]) -> str:
        """Begin it; return the id of its task.

        Raises:
            TooManyTasks: so many run already.
        """
        reached = Redriven(chosen) if action.name == "redrive" else Deleted(chosen)

        async def work(progress: Callable[[Reached], None]) -> Reached:
            said: dict[str, Any] = {"queue": letters.queue, "filters": _audited(letters.filters), "to": letters.to}
            try:
                found = await self.actor.settle(action.name, letters, progress)
            except BaseException as error:
                audit(action.name, who, **said, error=str(error) or type(error).__name__)
                raise
            audit(action.name, who, **said, done=getattr(found, action.past), chosen=found.chosen)
            return found

        task = self.tasks.begin(action.name, letters.queue, in_words(letters), reached, work)
        audit(action.name, who, task=task.id, queue=letters.queue, filters=_audited(letters.filters), to=letters.to)
        return task.id


def _audited(filters: Filters) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Snapshot) else value for name, value in filters.items()}


def in_words(letters: Letters) -> str:
    """Say which dead letters are meant."""
    filters = letters.filters
    parts = [f"of queue {letters.queue}" if letters.queue else "of all queues"]
    if "kind" in filters:
        parts.append(f"that died of: {filters['kind'] or '(nothing was said)'}")
    if "older_than" in filters:
        parts.append(f"that died at least {filters['older_than']} s ago")
    parts += [f"with {name} containing: {filters[name]}" for name in ("reason", "error") if filters.get(name)]
    if "id" in filters:
        parts.append("that were selected")
    if letters.to:
        parts.append(f"to queue {letters.to}")
    return "dead letters " + ", ".join(parts)


def audit(action: str, who: Mapping[str, str], **said: Any) -> None:
    """Write one line; it is a warning, so that no usual log level leaves it out."""
    audit_log.warning("%s", json.dumps({"audit": action, **who, **said}, ensure_ascii=False))
