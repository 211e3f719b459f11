"""What the pages show, found out: figures of all workers, what the broker says of groups, messages, dead letters.

:class:`Installation` is all that pages know of the world; tests put another one in its place.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import quote

import faust

from agents.listing import SHOWN_BYTES, moment, open_message, sources_of
from agents.shown import Redaction
from app.commands.queue import described
from app.dashboard import history
from app.dashboard.groups import Groups
from app.dashboard.history import History
from app.dashboard.letters import LetterIndex
from app.dashboard.timeline import Reading, last_place
from app.web import Figures
from config.settings import AppSettings
from marq.connection import to_its_end
from marq.core.copies import record_id
from marq.core.definitions import Definitions
from marq.core.errors import MarqError, UnknownQueue
from marq.core.markers import Source
from marq.core.names import closest_name
from marq.core.queue import QueueSettings, settings_document
from marq.dead_letter import DeadLetter
from marq.dead_letters import DeadLetters, Kind
from marq.inspector import Inspector, Peeked
from marq.letter_filter import Filters
from marq.letter_survey import Group
from marq.receipt import Receipt
from marq.settings import ClientSettings

#: Records that are read at the most to find what waits, of all queues that share the topic.
MAX_SCANNED = 200_000
#: How long the first page waits to learn of consumers; what comes later is shown the next time.
CONSUMERS_WAIT_S = 0.1
#: Settings whose names have one of these are secrets, and never on a page.
_SECRET = ("password", "secret", "token", "key", "auth", "user")


class Installation(Protocol):
    """All that pages show. What belongs to trackers is of all of them, and ``complete`` tells whether all answered."""

    async def figures(self) -> dict[str, Any]:
        """Return what :meth:`app.web.Figures.all` does."""

    async def consumers(self, queues: Sequence[str], wait_s: float) -> dict[str, int]:
        """Return how many consumers serve queues, as far as that is known within a time."""

    def documents(self, queues: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the settings of queues."""

    def defined(self) -> Sequence[str]:
        """Return the queues that somebody has defined."""

    async def history(self, queue: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the last quarter of an hour of a queue, of all of them for an empty name."""

    async def queue(self, name: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Return settings, partitions and consumers of a queue."""

    async def messages(self, queue: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Return open messages of a queue; raises ConfigError for a query that can't be answered."""

    async def waiting(self, queue: str, limit: int) -> dict[str, Any]:
        """Return the messages of a queue that waited longest; raises as :meth:`marq.inspector.Inspector.peek`."""

    async def message(self, message_id: str, since_ms: int | None) -> dict[str, Any]:
        """Return a message and what happened to it; raises as :meth:`app.dashboard.timeline.Reading.message`."""

    async def check_known(self, queue: str) -> None:
        """Check that a queue is known: by a definition, a consumer, messages or dead letters.

        Raises:
            UnknownQueue: it is unknown. If that can't be determined, the queue counts as known.
        """

    async def open_message(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return under ``message`` the open message at a ``place``; None: none is, or (not ``complete``) may be."""

    async def letters(self, queue: str | None, limit: int, filters: Filters) -> list[dict[str, Any]]:
        """Return dead letters; raises as :meth:`marq.DeadLetters.peek`."""

    async def kinds(self, queue: str | None, filters: Filters) -> list[Kind]:
        """Return what letters died of; raises as :meth:`marq.DeadLetters.kinds`."""

    def dead_counts(self) -> tuple[Mapping[str, int] | None, float | None]:
        """Return how many dead letters each queue has in their topic, and when that was read; None: not known yet."""

    async def schedules(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return all schedules."""

    async def tasks(self, ours: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
        """Return the tasks of this worker and of all others: of each the ``worker``, and whether it is ``here``."""

    async def markers(self, figures: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the partitions of the markers, with their owners among these figures."""

    async def groups(self) -> list[dict[str, Any]] | None:
        """Return the groups of consumers with their members; None: not known."""

    def configuration(self) -> dict[str, Any]:
        """Return the settings of this worker and of its clients, without secrets."""

    async def stop(self) -> None: ...


class WorkersInstallation:
    """The installation as a worker sees it."""

    def __init__(
        self,
        app: faust.App,
        figures: Figures,
        settings: AppSettings,
        client: ClientSettings,
        definitions: Callable[[], Definitions],
        letters: DeadLetters,
    ) -> None:
        self._app = app
        self._figures = figures
        self._settings = settings
        self._client = client
        self._definitions = definitions
        self._groups = Groups(client)
        self._letters = letters
        self._index = LetterIndex(client)
        self._history = History()
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to keep the history."""
        if self._keeping is None:
            look = self._figures.statistics.recent
            self._keeping = asyncio.create_task(history.keep(self._history, look), name="history of queues")

    async def stop(self) -> None:
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait([keeping])
        await to_its_end(self._index.stop())
        await to_its_end(self._groups.stop())

    async def figures(self) -> dict[str, Any]:
        return await self._figures.all(self._app)

    async def consumers(self, queues: Sequence[str], wait_s: float) -> dict[str, int]:
        group_of = {queue: self._group(queue) for queue in queues}
        members = await self._groups.members(sorted(set(group_of.values())), wait_s)
        return {queue: len(members[group]) for queue, group in group_of.items() if group in members}

    def documents(self, queues: Sequence[str]) -> dict[str, dict[str, Any]]:
        definitions = self._definitions()
        return {queue: settings_document(definitions.settings(queue)) for queue in queues}

    def defined(self) -> Sequence[str]:
        return list(self._definitions().names())

    async def history(self, queue: str, query: Mapping[str, str]) -> dict[str, Any]:
        now_slot = history.slot_now()
        local = self._history.local(queue, now_slot)
        if query.get("scope") == "worker":
            return local
        settled, answers = await self._figures.of_others(self._app, "api/history", {"queue": queue} if queue else {})
        return {"complete": settled and None not in answers, **history.add_up([local, *answers], now_slot)}

    async def queue(self, name: str, query: Mapping[str, str]) -> dict[str, Any]:
        local = {"sources": await sources_of(self._figures.statistics.owners, name)}
        if query.get("scope") == "worker":
            return local
        group, definitions = self._group(name), self._definitions()
        topic = definitions.settings(name).topic or self._client.names.messages
        (settled, answers), ends, committed, markers, members, figures = await asyncio.gather(
            self._figures.of_others(self._app, f"api/queues/{quote(name, safe='')}", {}),
            self._groups.ends(topic),
            self._groups.committed(group, topic),
            self._groups.ends(self._client.names.markers),
            self._groups.members([group]),
            self.figures(),
        )
        sources = [source for answer in [local, *answers] if answer is not None for source in answer["sources"]]
        reads = definitions.placement(name).reads
        return {
            **described(name, definitions, self._client.names),
            "complete": settled and None not in answers and figures["complete"],
            "figures": figures["queues"].get(name),
            "census": figures["census"],
            "handled": figures["handled"].get(name, []),
            "messages": partitions(
                topic, {number: end for number, end in ends.items() if reads is None or number in reads},
                committed, sources, members.get(group, []),
            ),
            "elsewhere": _elsewhere(topic, sources),
            "markers": markers_partitions(figures["workers"], markers),
            "consumers": members.get(group),
        }  # fmt: skip

    async def messages(self, queue: str, query: Mapping[str, str]) -> dict[str, Any]:
        found = await self._figures.messages(self._app, queue, query)
        if query.get("scope") == "worker" or query.get("state") != "in_flight":
            return found
        group = self._group(queue)
        members = (await self._groups.members([group])).get(group, [])
        return {**found, "messages": [{**each, "consumer": consumer_of(each, members)} for each in found["messages"]]}

    async def waiting(self, queue: str, limit: int) -> dict[str, Any]:
        definitions = self._definitions()
        found, complete = await Inspector(self._client, definitions).peek(queue, limit, MAX_SCANNED)
        settings, redaction = definitions.settings(queue), self._figures.redaction
        return {"complete": complete, "messages": [waiting_described(each, settings, redaction) for each in found]}

    async def check_known(self, queue: str) -> None:
        definitions = self._definitions()
        names = {*definitions.names(), *(self._index.counts() or ())}
        if queue in names:
            return
        figures, groups = await asyncio.gather(self.figures(), self._groups.names())
        names |= figures["queues"].keys()
        names |= {name for group in groups or () if (name := self._client.names.owner_of_group(group))}
        if queue in names or groups is None or not figures["complete"]:
            return
        if (dead := self._index.counts()) is None:
            try:
                await self._index.read()
            except MarqError:
                return
            dead = self._index.counts() or Counter()
        if queue in dead:
            return
        census = figures["census"]
        if not (census["counted"] and census["complete"]) or census["others"]:
            # The queue may have messages that no worker counts by name.
            found, _ = await Inspector(self._client, definitions).peek(queue, 1, MAX_SCANNED)
            if found:
                return
        raise UnknownQueue(queue, closest_name(queue, names))

    async def message(self, message_id: str, since_ms: int | None) -> dict[str, Any]:
        names, definitions = self._client.names, self._definitions()
        own = [definitions.settings(queue).topic for queue in definitions.names()]
        ends = await self._groups.ends(names.markers)
        topics = frozenset({names.messages, names.dead_letters, *own})
        reading = Reading(self._client, topics, len(ends), self._figures.redaction)
        found = await reading.message(message_id, since_ms)
        now = await self.open_message({"place": last_place(found["events"]) or found["id"]})
        message = now["message"]
        if message is not None and message["holder"]:
            group = self._group(message["queue"])
            members = (await self._groups.members([group])).get(group, [])
            message = {**message, "consumer": consumer_of(message, members)}
        return {**found, "complete": now["complete"], "now": message}

    async def open_message(self, query: Mapping[str, str]) -> dict[str, Any]:
        receipt = Receipt.of(query.get("place", ""))
        source = Source(receipt.topic, receipt.partition)
        local = open_message(self._figures.statistics.owners, source, receipt.offset, self._figures.redaction)
        if local is not None or query.get("scope") == "worker":
            return {"complete": True, "message": local}
        settled, answers = await self._figures.of_others(self._app, "api/open", {"place": receipt.id})
        found = [answer["message"] for answer in answers if answer is not None and answer["message"] is not None]
        return {"complete": bool(found) or (settled and None not in answers), "message": found[0] if found else None}

    async def letters(self, queue: str | None, limit: int, filters: Filters) -> list[dict[str, Any]]:
        fits = _of_groups(queue, filters)
        if fits is not None:
            found = await self._index.letters(fits, limit)
        else:
            await self._letters.start()
            found = [letter async for letter in self._letters.peek(queue, limit=limit, **filters)]
        return [letter_described(each, self._figures.redaction) for each in sorted(found, key=lambda one: one.died_at)]

    async def kinds(self, queue: str | None, filters: Filters) -> list[Kind]:
        fits = _of_groups(queue, filters)
        if fits is not None:
            return await self._index.kinds(fits)
        await self._letters.start()
        return await self._letters.kinds(queue, **filters)

    def dead_counts(self) -> tuple[Mapping[str, int] | None, float | None]:
        return self._index.counts(), self._index.read_at

    async def schedules(self, query: Mapping[str, str]) -> dict[str, Any]:
        return await self._figures.schedules(self._app, query)

    async def tasks(self, ours: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
        own = [{**task, "worker": str(self._app.conf.canonical_url), "here": True} for task in ours]
        if query.get("scope") == "worker":
            return {"tasks": own}
        settled, answers = await self._figures.of_others(self._app, "api/tasks", {})
        others = [{**task, "here": False} for answer in answers if answer is not None for task in answer["tasks"]]
        told = sorted([*own, *others], key=lambda task: -task["began"])
        return {"complete": settled and None not in answers, "tasks": told}

    async def markers(self, figures: Mapping[str, Any]) -> list[dict[str, Any]]:
        return markers_partitions(figures["workers"], await self._groups.ends(self._client.names.markers))

    async def groups(self) -> list[dict[str, Any]] | None:
        names = await self._groups.names()
        if names is None:
            return None
        members = await self._groups.members(names)
        return [{"group": name, "members": members.get(name)} for name in names]

    def configuration(self) -> dict[str, Any]:
        client = self._client
        return {
            "worker": public(self._settings.model_dump(mode="json")),
            "client": {
                "bootstrap_servers": client.bootstrap_servers,
                "prefix": client.names.prefix,
                "security_protocol": client.security_protocol,
                "connect_timeout": client.connect_timeout_ms / 1000,
                "request_timeout": client.request_timeout_ms / 1000,
                "session_timeout": client.session_timeout_ms / 1000,
            },
        }

    def _group(self, queue: str) -> str:
        group = self._definitions().group(queue)
        names = self._client.names
        return names.group(queue) if group is None else names.named_group(group)


def consumer_of(message: Mapping[str, Any], members: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    """Return the member of the group that has a message in flight; None: it has left, or reports no holders."""
    for member in members:
        if message.get("holder") in member["holders"]:
            return {name: member[name] for name in ("id", "client_id", "host")}
    return None


def _of_groups(queue: str | None, filters: Filters) -> Callable[[Group], bool] | None:
    """Return which groups of letters are meant; None: the letters of a group have to be told apart."""
    if filters.keys() - {"kind"}:
        return None
    kind = filters.get("kind")
    return lambda group: queue in (None, group.queue) and kind in (None, group.reason)


def public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that may be secrets."""
    return {name: value for name, value in settings.items() if not any(word in name for word in _SECRET)}


def partitions(
    topic: str,
    ends: Mapping[int, int],
    committed: Mapping[int, int],
    sources: Sequence[Mapping[str, Any]],
    members: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the partitions that a queue is read from: how far its group is, and what of it is open.

    ``lag``: records that nobody has looked at yet, of any queue; ``gap``: from the first open message to the
    committed offset.
    """
    opened = {source["partition"]: source for source in sources if source["topic"] == topic}
    readers = {number: member for member in members for number in member["partitions"].get(topic, ())}
    return [_partition(number, end, committed.get(number), opened.get(number), readers.get(number))
            for number, end in sorted(ends.items())]  # fmt: skip


def _partition(
    number: int,
    end: int,
    committed: int | None,
    opened: Mapping[str, Any] | None,
    reader: Mapping[str, Any] | None,
) -> dict[str, Any]:
    first = None if opened is None else opened["first_open"]
    return {
        "partition": number,
        "consumer": None if reader is None else reader["client_id"],
        "host": None if reader is None else reader["host"],
        "end": end,
        "committed": committed,
        "lag": None if committed is None else max(0, end - committed),
        "first_open": first,
        "gap": None if first is None or committed is None else max(0, committed - first),
        "in_flight": 0 if opened is None else opened["in_flight"],
        "waiting": 0 if opened is None else opened["waiting"],
        "oldest_seconds": None if opened is None else opened["oldest_seconds"],
    }


def _elsewhere(topic: str, sources: Sequence[Mapping[str, Any]]) -> int:
    """How many open messages are no records of the topic: delayed by senders, redriven, of a former topic."""
    return sum(source["in_flight"] + source["waiting"] for source in sources if source["topic"] != topic)


def markers_partitions(workers: Sequence[Mapping[str, Any]], ends: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return the partitions of the markers, with the workers that own them; ``owner`` None: nobody who answered."""
    owned = {part["partition"]: (worker["url"], part) for worker in workers for part in worker["partitions"]}
    rows = []
    for number in sorted({*ends, *owned}):
        url, part = owned.get(number, (None, {}))
        end, applied = ends.get(number), part.get("applied_offset")
        lag = None if end is None or applied is None else max(0, end - applied - 1)
        rows.append({**part, "partition": number, "owner": url, "end": end, "lag": lag})
    return rows


def waiting_described(message: Peeked, settings: QueueSettings, redaction: Redaction) -> dict[str, Any]:
    """Return a message that nobody has taken yet for pages and programs."""
    row, due_ms = message.row, message.deliver_at_ms(settings)
    return {
        "id": message.id,
        "place": record_id(message.source, row.offset),
        "sent": moment(message.sent_ms),
        "not_before": None if due_ms is None else moment(due_ms),
        "attempt": message.attempt,
        "error": "",
        "bytes": len(row.value or b""),
        "value": redaction.text(row.value, SHOWN_BYTES),
        "headers": redaction.headers(message.headers, SHOWN_BYTES),
    }


def letter_described(letter: DeadLetter, redaction: Redaction) -> dict[str, Any]:
    """Return a dead letter for pages and programs."""
    return {
        "id": letter.id,
        "queue": letter.queue,
        "reason": letter.reason,
        "error": letter.last_error,
        "attempt": letter.attempts,
        "sent": letter.first_sent.isoformat(timespec="milliseconds"),
        "died": letter.died_at.isoformat(timespec="milliseconds"),
        "origin": letter.origin,
        "bytes": len(letter.body),
        "value": redaction.text(letter.body, SHOWN_BYTES),
        "headers": redaction.headers(letter.headers.items(), SHOWN_BYTES),
    }
