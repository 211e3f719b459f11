"""Statistics of all queues in the namespace, from any of its workers, for pages and programs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import faust
from aiohttp.web import AppRunner
from faust.web.drivers.aiohttp import Web
from faust.web.views import View
from yarl import URL

from marq.core.storage.handling_times import add_counts
from marq_worker.handlers.handler_watch import merged as merged_removals
from marq_worker.process_usage import UNKNOWN, ProcessUsage
from marq_worker.redaction import Redaction
from marq_worker.web.connection_limits import IDLE_S, Connections
from marq_worker.web.message_listing import described_schedules, open_messages, read_choice
from marq_worker.web.partition_statistics import Statistics, add_up, backlog_of, recreated_topics
from marq_worker.web.peers import TrackersGroup, ask_each, path_segment

_NOTHING: dict[str, Any] = {
    "queues": {}, "handled": {}, "waited": {}, "partitions": [], "handlers": [], "backlog": None, "process": {},
    "removed_handlers": {}, "recreated_topics": [],
}  # fmt: skip
#: What the statistics of the namespace have instead of those of its workers.
_ADDED_UP = frozenset(("queues", "handled", "waited", "removed_handlers", "recreated_topics"))


class MarqWeb(Web):
    """Faust's web server without its own pages, some of which show table data without a login."""

    default_blueprints = ()
    production_blueprints = ()

    def __init__(self, app: faust.App, **more: Any) -> None:
        super().__init__(app, **more)
        self._runner = AppRunner(self.web_app, access_log=None, keepalive_timeout=IDLE_S)

    async def start_server(self) -> None:
        """Start the server, with limited connections."""
        await self._runner.setup()
        assert self._runner.server is not None
        Connections().limit(self._runner.server)
        await self._create_site().start()


async def _no_calls() -> list[dict[str, Any]]:
    return []


@dataclass(frozen=True)
class NamespaceStatistics:
    """Collects the statistics of this process, whose application is ``app``, and of all trackers."""

    app: faust.App
    worker: Statistics
    group: TrackersGroup
    #: The handler processes of this worker.
    handlers: Callable[[], list[dict[str, Any]]]
    redaction: Redaction = field(default_factory=Redaction)
    usage: ProcessUsage = field(default_factory=ProcessUsage)
    #: What the handlers of this worker do now, by process.
    calls: Callable[[], Awaitable[list[dict[str, Any]]]] = _no_calls

    @property
    def own(self) -> URL:
        """The address of this worker."""
        return URL(self.app.conf.canonical_url)

    def local(self) -> dict[str, Any]:
        """Return the statistics of this worker alone."""
        return {
            **self.worker.local(),
            "process": {**self.usage.worker(), "loop_lag_seconds": round(self.worker.loop_lag_seconds, 3)},
            "handlers": [{**process, **self.usage.of(process["pid"])} for process in self.handlers()],
        }

    async def all(self) -> dict[str, Any]:
        """Return the statistics of all trackers and this worker; ``complete``: whether each tracker has answered."""
        own, members = self.own, await self.group.members()
        peers = list(members.urls)
        if own in peers:
            peers.remove(own)
        answers = await ask_each(self.app.http_client, peers, "api/queues", {}, own=own)
        workers = [worker_statistics(own, self.local()), *map(worker_statistics, peers, answers)]
        return namespace_statistics(workers, settled=members.settled)

    async def messages(self, queue: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Return unfinished messages of a queue, of all trackers or (``scope=worker``) of this one."""
        choice = read_choice(queue, query)
        local = {"messages": await open_messages(self.worker.owners, choice, self.redaction)}
        if query.get("scope") == "worker":
            return local
        complete, answers = await self.of_others(f"api/queues/{path_segment(queue)}/messages", query)
        return merged([local, *answers], choice.limit, complete=complete)

    async def of_others(self, path: str, query: Mapping[str, str]) -> tuple[bool, list[dict[str, Any]]]:
        """Query all other trackers; return whether all are known and have answered, and the answers."""
        own, members = self.own, await self.group.members()
        peers = [url for url in members.urls if url != own]
        answers = await ask_each(self.app.http_client, peers, path, query, own=own)
        return members.settled and None not in answers, [answer for answer in answers if answer is not None]

    async def running(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return what handlers do now, of all trackers and this worker or (``scope=worker``) of this one.

        ``silent``: groups whose process did not answer, with their worker.
        """
        local = {"processes": [{**process, "worker": str(self.own)} for process in await self.calls()]}
        if query.get("scope") == "worker":
            return local
        complete, answers = await self.of_others("api/running", {})
        processes = [process for answer in [local, *answers] for process in answer["processes"]]
        calls = [
            {**call, "group": process["group"], "worker": process["worker"]}
            for process in processes
            for call in process["calls"] or ()
        ]
        return {
            "complete": complete,
            "calls": sorted(calls, key=lambda call: -call["seconds"]),
            "silent": [
                {"group": process["group"], "worker": process["worker"]}
                for process in processes
                if process["calls"] is None
            ],
        }

    async def schedules(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return all schedules, of all trackers or (``scope=worker``) of this one."""
        local = {"schedules": described_schedules(self.worker.owners.owned.values())}
        if query.get("scope") == "worker":
            return local
        complete, answers = await self.of_others("api/schedules", {})
        return by_name([local, *answers], complete=complete)


def by_name(answers: Sequence[dict[str, Any] | None], *, complete: bool) -> dict[str, Any]:
    """Merge the schedules of several answers; None stands for a worker without an answer."""
    schedules = {
        schedule["name"]: schedule for answer in answers if answer is not None for schedule in answer["schedules"]
    }
    return {
        "complete": complete and None not in answers,
        "schedules": [schedule for _, schedule in sorted(schedules.items())],
    }


def merged(answers: Sequence[dict[str, Any] | None], limit: int, *, complete: bool) -> dict[str, Any]:
    """Merge the first messages of several answers by due time; None stands for a worker without an answer."""
    messages = [message for answer in answers if answer is not None for message in answer["messages"]]
    messages.sort(key=lambda message: message["due"])
    return {"complete": complete and None not in answers, "messages": messages[:limit]}


def worker_statistics(url: URL | str, answer: dict[str, Any] | None) -> dict[str, Any]:
    """Return the statistics of a worker from its answer, None if it did not answer."""
    # A worker of another version may lack some keys.
    worker = {"url": str(url), "answered": answer is not None, **_NOTHING, **(answer or {})}
    return {**worker, "process": {**UNKNOWN, **worker["process"]}}


def namespace_statistics(workers: Sequence[dict[str, Any]], *, settled: bool) -> dict[str, Any]:
    """Add up the statistics of workers; ``settled``: these are all."""
    answered = [worker for worker in workers if worker["answered"]]
    everyone = settled and len(answered) == len(workers)
    return {
        "complete": everyone,
        "queues": add_up(answered),
        "backlog": backlog_of(answered, everyone=everyone),
        "handled": add_counts([worker["handled"] for worker in answered]),
        "waited": add_counts([worker["waited"] for worker in answered]),
        "removed_handlers": merged_removals(answered),
        "recreated_topics": recreated_topics([worker["recreated_topics"] for worker in answered]),
        "workers": [{name: value for name, value in worker.items() if name not in _ADDED_UP} for worker in workers],
    }


def attach(app: faust.App, statistics: NamespaceStatistics) -> None:
    @app.page("/api/queues", name="queues")
    async def queues(self: View, request: Any) -> Any:
        local = request.query.get("scope") == "worker"
        return self.json(statistics.local() if local else await statistics.all())
