"""The data of the pages: statistics of all workers, consumer groups, messages and dead letters."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from marq.client.dead_letter import DeadLetter
from marq.client.lifecycle import to_its_end
from marq.client.receipt import Receipt
from marq.dead_letters.filters import Filters
from marq.kafka.inspector import Inspector
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.settings.effective_settings import queue_document
from marq.settings.queue import settings_document
from marq.wire.errors import ConfigError, MarqError, UnknownQueue
from marq.wire.markers import ANY_QUEUE, Source
from marq.wire.names import closest_name
from marq_worker import busy_keys
from marq_worker.config.settings import AppSettings
from marq_worker.message_uuids import readable_id
from marq_worker.queue_states import is_listed
from marq_worker.web.blocked_keys import blocked_keys, merged_keys
from marq_worker.web.dashboard.dead_letters import DeadLetterIndex
from marq_worker.web.dashboard.descriptions import (
    consumer_of,
    dead_letter_described,
    kind_described,
    markers_partitions,
    names_of_holders,
    open_elsewhere,
    partitions,
)
from marq_worker.web.dashboard.groups import Groups
from marq_worker.web.dashboard.history import MetricsHistory, add_up, slot_now
from marq_worker.web.dashboard.live_history import RANGES, LiveHistory
from marq_worker.web.dashboard.timeline import last_place
from marq_worker.web.dashboard.timeline_reader import TimelineReader
from marq_worker.web.dashboard.waiting_search import WaitingSearch
from marq_worker.web.message_listing import open_message, sources_of, waiting_described
from marq_worker.web.peers import path_segment
from marq_worker.web.statistics import NamespaceStatistics

#: Maximum number of records to read for waiting messages, of all queues that share the topic.
MAX_SCANNED = 200_000
#: Time limit for searching them.
SEARCH_LIMIT_S = 10.0
#: Number of kinds of errors for which a page shows a sample; each may take a request to the broker.
MAX_SAMPLES = 20
#: The charts of samples in memory.
DEFAULT_RANGE = "15m"
#: How long the first page waits for consumers; later answers are shown the next time.
CONSUMERS_WAIT_S = 0.1
#: Settings whose names contain one of these are secrets, and never shown.
_SECRET = ("password", "secret", "token", "key", "auth", "user")


class DashboardQueries:
    """The namespace as a worker sees it: the data of all pages.

    Data of trackers comes from all of them; ``complete`` tells whether all have answered.
    """

    def __init__(
        self,
        statistics: NamespaceStatistics,
        settings: AppSettings,
        client: ClientSettings,
        definitions: Callable[[], Definitions],
        history: MetricsHistory,
    ) -> None:
        self._statistics = statistics
        self._settings = settings
        self._client = client
        self.definitions = definitions
        self._groups = Groups(client)
        self._index = DeadLetterIndex(client, self._describe)
        self._history = history
        data = settings.pipeline_data
        self._live = None if data is None else LiveHistory(data, settings.prefix)

    async def stop(self) -> None:
        await to_its_end(self._index.stop())
        await to_its_end(self._groups.stop())

    async def statistics(self) -> dict[str, Any]:
        return await self._statistics.all()

    async def consumers(self, queues: Sequence[str], wait_s: float) -> dict[str, int]:
        """Return the number of consumers of queues, as far as known within ``wait_s``."""
        group_of = {queue: self._group(queue) for queue in queues}
        members = await self._groups.members(sorted(set(group_of.values())), wait_s)
        return {queue: len(members[group]) for queue, group in group_of.items() if group in members}

    def documents(self, queues: Sequence[str]) -> dict[str, dict[str, Any]]:
        definitions = self.definitions()
        return {queue: settings_document(definitions.settings(queue)) for queue in queues}

    def defined(self) -> Sequence[str]:
        return list(self.definitions().names())

    async def known(self, statistics: Mapping[str, Any]) -> Collection[str] | None:
        """Return the queues with a definition or a consumer group.

        None if these, or how many messages queues have, can't be determined.
        """
        if not (statistics["complete"] and statistics["backlog"]["complete"]):
            return None
        names = set(self.defined())
        if all(is_listed(metrics, known=queue in names) for queue, metrics in statistics["queues"].items()):
            # Without asking the broker, which may be slow or down.
            return names
        groups = await self._groups.names()
        return None if groups is None else names | self._owners(groups)

    async def history(self, queue: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the last 15 minutes of a queue, or of all for an empty name; or a longer ``range`` of live windows."""
        if (wanted := query.get("range", DEFAULT_RANGE)) != DEFAULT_RANGE:
            if wanted not in RANGES:
                raise ConfigError(f"range={wanted}: expected one of {', '.join((DEFAULT_RANGE, *RANGES))}")
            if self._live is None:
                raise ConfigError(f"range={wanted}: set MARQ_PIPELINE_DATA to the data directory of the pipeline")
            return await asyncio.to_thread(self._live.read, queue, wanted, time.time())
        now_slot = slot_now()
        local = self._history.local(queue, now_slot)
        if query.get("scope") == "worker":
            return local
        asked = {"queue": queue} if queue else {}
        complete, answers = await self._statistics.of_others("api/history", asked)
        return {"complete": complete, **add_up([local, *answers], now_slot)}

    def ranges(self) -> Sequence[str]:
        """Return the ranges of charts."""
        return (DEFAULT_RANGE,) if self._live is None else (DEFAULT_RANGE, *RANGES)

    async def queue(self, name: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Return settings, partitions and consumers of a queue."""
        owners, settings = self._statistics.worker.owners, self.definitions().settings(name)
        local = {
            "sources": await sources_of(owners, name),
            "blocked_keys": await blocked_keys(owners, name, settings, self._statistics.redaction),
        }
        if query.get("scope") == "worker":
            return local
        group, definitions = self._group(name), self.definitions()
        topic = settings.topic or self._client.names.messages
        (complete, answers), ends, committed, markers, members, statistics = await asyncio.gather(
            self._statistics.of_others(f"api/queues/{path_segment(name)}", {}),
            self._groups.ends(topic),
            self._groups.committed(group, topic),
            self._groups.ends(self._client.names.markers),
            self._groups.members([group]),
            self.statistics(),
        )
        told = [local, *answers]
        sources = [source for answer in told for source in answer["sources"]]
        reads = definitions.placement(name).reads
        return {
            **queue_document(name, definitions, self._client.names),
            "complete": complete and statistics["complete"],
            "statistics": statistics["queues"].get(name),
            "backlog": statistics["backlog"],
            "handled": statistics["handled"].get(name, []),
            "waited": statistics["waited"].get(name, []),
            "removed_handler": statistics["removed_handlers"].get(name),
            "messages": partitions(
                topic, {number: end for number, end in ends.items() if reads is None or number in reads},
                committed, sources, members.get(group, []),
            ),
            "blocked_keys": merged_keys(told) if settings.ordered else None,
            "keys": busy_keys.of_queue(name, statistics["workers"]) if settings.limited else None,
            "elsewhere": open_elsewhere(topic, sources),
            "markers": markers_partitions(statistics["workers"], markers),
            "consumers": members.get(group),
        }  # fmt: skip

    async def messages(self, queue: str, query: Mapping[str, str]) -> dict[str, Any]:
        listed = await self._statistics.messages(queue, query)
        if query.get("scope") == "worker" or query.get("state") != "in_flight":
            return listed
        members = await self._members_of(queue)
        messages = [{**message, "consumer": consumer_of(message, members)} for message in listed["messages"]]
        return {**listed, "messages": messages}

    async def waiting(self, queue: str, limit: int, search: WaitingSearch) -> dict[str, Any]:
        """Return the waiting messages of a queue that a search asks for, and what was ``searched``."""
        definitions = self.definitions()
        settings, redaction = definitions.settings(queue), self._statistics.redaction
        found = await Inspector(self._client, definitions).search(
            queue, limit, MAX_SCANNED, search.fitting(redaction), search.order(), SEARCH_LIMIT_S
        )
        messages = [{**waiting_described(message, settings, redaction), "error": ""} for message in found.messages]
        searched = {"records": found.scanned, "waiting": found.waiting, "matching": found.matching}
        return {"complete": found.complete, "messages": messages, "searched": searched}

    async def check_known(self, queue: str) -> None:
        """Check that a queue is known: by a definition, a consumer, messages or dead letters.

        Raises UnknownQueue. If that can't be determined, the queue counts as known.
        """
        definitions = self.definitions()
        names = {*definitions.names(), *(self._index.counts() or ())}
        if queue in names:
            return
        statistics, groups = await asyncio.gather(self.statistics(), self._groups.names())
        names |= statistics["queues"].keys()
        names |= self._owners(groups or ())
        if queue in names or groups is None or not statistics["complete"]:
            return
        if (dead := self._index.counts()) is None:
            try:
                await self._index.read()
            except MarqError:
                return
            dead = self._index.counts() or Counter()
        if queue in dead:
            return
        backlog = statistics["backlog"]
        if not (backlog["counted"] and backlog["complete"]) or backlog["unknown_queues"]:
            # The queue may have messages that no worker counts by name.
            waiting, _ = await Inspector(self._client, definitions).peek(queue, 1, MAX_SCANNED)
            if waiting:
                return
        raise UnknownQueue(queue, closest_name(queue, names))

    async def message(self, message_id: str, queue: str, since_ms: int | None) -> dict[str, Any]:
        """Return a message like :meth:`TimelineReader.message`, with its current state (``now``; None if not open)."""
        ends, redaction = await self._groups.ends(self._client.names.markers), self._statistics.redaction
        reader = TimelineReader(self._client, self.definitions(), len(ends), redaction, self._names_of_holders)
        # Clients of the SQS endpoint know messages by other ids.
        story = await reader.message(readable_id(message_id, self._client.names.messages), queue, since_ms)
        now = await self.open_message({"place": last_place(story["events"]) or story["id"], "queue": story["queue"]})
        message = now["message"]
        if message is not None and has_several(story):
            return {**story, "known": True, "complete": now["complete"], "now": None}
        if message is not None and message["holder"]:
            message = {**message, "consumer": consumer_of(message, await self._members_of(message["queue"]))}
        return {**story, "complete": now["complete"], "now": message}

    async def open_message(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return whether all open messages are known (``complete``) and the one at a ``place`` (``message``).

        Several queues may have one there; without a ``queue`` it is the message of any of them.
        """
        receipt = Receipt.of(query.get("place", ""))
        source, queue = Source(receipt.topic, receipt.partition), query.get("queue", ANY_QUEUE)
        local = open_message(self._statistics.worker.owners, queue, source, receipt.offset, self._statistics.redaction)
        if local is not None or query.get("scope") == "worker":
            return {"complete": True, "message": local}
        asked = {"place": receipt.id, "queue": queue}
        complete, answers = await self._statistics.of_others("api/unfinished", asked)
        message = next((answer["message"] for answer in answers if answer["message"] is not None), None)
        return {"complete": complete or message is not None, "message": message}

    async def dead_letters(self, queue: str | None, limit: int, filters: Filters) -> list[dict[str, Any]]:
        """Return the newest dead letters, the newest first."""
        return [self._describe(dead_letter) for dead_letter in await self._index.newest(queue, filters, limit)]

    async def kinds(self, queue: str | None, filters: Filters) -> list[dict[str, Any]]:
        """Return the kinds of errors of dead letters, the newest first; the first ones have a ``sample``."""
        kinds = await self._index.kinds(queue, filters)
        samples = await self._index.samples(kinds[:MAX_SAMPLES])
        return [kind_described(kind, sample) for kind, sample in zip_longest(kinds, samples)]

    def _describe(self, dead_letter: DeadLetter) -> dict[str, Any]:
        return dead_letter_described(dead_letter, self._statistics.redaction)

    def dead_counts(self) -> tuple[Mapping[str, int] | None, float | None]:
        """Return the number of dead letters of each queue, and when they were read; None if not yet."""
        return self._index.counts(), self._index.read_at

    async def running(self, query: Mapping[str, str]) -> dict[str, Any]:
        return await self._statistics.running(query)

    async def schedules(self, query: Mapping[str, str]) -> dict[str, Any]:
        return await self._statistics.schedules(query)

    async def tasks(self, ours: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
        """Return the tasks of all workers, with their ``worker``, and whether they are ``here``."""
        own = [{**task, "worker": str(self._statistics.own), "here": True} for task in ours]
        if query.get("scope") == "worker":
            return {"tasks": own}
        complete, answers = await self._statistics.of_others("api/tasks", {})
        others = [{**task, "here": False} for answer in answers for task in answer["tasks"]]
        tasks = sorted([*own, *others], key=lambda task: -task["began"])
        return {"complete": complete, "tasks": tasks}

    async def markers(self, statistics: Mapping[str, Any]) -> list[dict[str, Any]]:
        return markers_partitions(statistics["workers"], await self._groups.ends(self._client.names.markers))

    async def groups(self) -> list[dict[str, Any]] | None:
        """Return the groups of consumers with their members; None if not known."""
        names = await self._groups.names()
        if names is None:
            return None
        members = await self._groups.members(names)
        return [{"group": name, "members": members.get(name)} for name in names]

    def configuration(self) -> dict[str, Any]:
        """Return the settings of this worker and of its clients, without secrets."""
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

    def _owners(self, groups: Iterable[str]) -> set[str]:
        """Return the queues that have a consumer group of their own among these."""
        return {queue for group in groups if (queue := self._client.names.owner_of_group(group))}

    def _group(self, queue: str) -> str:
        return self.definitions().consumer_group(queue, self._client.names)

    async def _names_of_holders(self, queue: str) -> Mapping[str, str]:
        return names_of_holders(await self._members_of(queue))

    async def _members_of(self, queue: str) -> Sequence[Mapping[str, Any]]:
        group = self._group(queue)
        return (await self._groups.members([group])).get(group, [])


def has_several(story: Mapping[str, Any]) -> bool:
    """Return whether several queues have a message with this id, and the reader named none of them."""
    return not story["queue"] and len(story["queues"]) > 1


def public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without secrets."""
    return {name: value for name, value in settings.items() if not any(word in name for word in _SECRET)}
