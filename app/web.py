"""The worker's web pages: figures of all queues, for the whole installation, from any of its workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any
from urllib.parse import quote

import faust
from faust.web.drivers.aiohttp import Web
from faust.web.views import View
from yarl import URL

from agents.listing import open_messages, read_choice
from agents.schedules import described
from agents.statistics import Statistics, add_up
from app.members import Group
from app.peers import ask_each
from marq.core.errors import ConfigError

_NOTHING: dict[str, Any] = {"queues": {}, "partitions": [], "handlers": []}


class MarqWeb(Web):
    """Faust's web server without its own pages, some of which show table data to anybody."""

    default_blueprints = ()
    production_blueprints = ()


@dataclass(frozen=True)
class Figures:
    """Where the pages' figures come from: this process, and the trackers that the group has."""

    statistics: Statistics
    group: Group
    #: What handlers processes this worker has.
    handlers: Callable[[], list[dict[str, Any]]]

    def local(self) -> dict[str, Any]:
        """Figures of this worker alone."""
        return {**self.statistics.local(), "handlers": self.handlers()}

    async def all(self, app: faust.App) -> dict[str, Any]:
        """Figures of all trackers, and of this worker; ``complete`` says whether each tracker is known and answered."""
        own = URL(app.conf.canonical_url)
        members = await self.group.members()
        peers = list(members.urls)
        if own in peers:
            peers.remove(own)
        answers = await ask_each(app.http_client, peers, "api/queues", {}, own=own)
        workers = [_worker(own, self.local()), *map(_worker, peers, answers)]
        answered = [worker for worker in workers if worker["answered"]]
        return {
            "complete": members.settled and len(answered) == len(workers),
            "queues": add_up(answered),
            "workers": [{name: value for name, value in worker.items() if name != "queues"} for worker in workers],
        }

    async def messages(self, app: faust.App, queue: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Open messages of a queue, of all trackers or (``scope=worker``) of this one.

        Raises:
            ConfigError: the query asks for something that there is not.
        """
        choice = read_choice(queue, query)
        local = {"messages": await open_messages(self.statistics.owners, choice)}
        if query.get("scope") == "worker":
            return local
        own, members = URL(app.conf.canonical_url), await self.group.members()
        peers = [url for url in members.urls if url != own]
        path = f"api/queues/{quote(queue, safe='')}/messages"
        answers = await ask_each(app.http_client, peers, path, dict(query), own=own)
        return merged([local, *answers], choice.limit, complete=members.settled)

    async def schedules(self, app: faust.App, query: Mapping[str, str]) -> dict[str, Any]:
        """All schedules, of all trackers or (``scope=worker``) of this one."""
        local = {"schedules": described(self.statistics.owners.owned.values())}
        if query.get("scope") == "worker":
            return local
        own, members = URL(app.conf.canonical_url), await self.group.members()
        peers = [url for url in members.urls if url != own]
        answers = await ask_each(app.http_client, peers, "api/schedules", {}, own=own)
        return by_name([local, *answers], complete=members.settled)


def by_name(answers: Sequence[dict[str, Any] | None], *, complete: bool) -> dict[str, Any]:
    """Return the schedules of several answers; None stands for a worker that gave none."""
    found = {each["name"]: each for answer in answers if answer is not None for each in answer["schedules"]}
    return {"complete": complete and None not in answers, "schedules": [each for _, each in sorted(found.items())]}


def merged(answers: Sequence[dict[str, Any] | None], limit: int, *, complete: bool) -> dict[str, Any]:
    """Return the first messages of several answers, by due time; None stands for a worker that gave none."""
    messages = [message for answer in answers if answer is not None for message in answer["messages"]]
    messages.sort(key=lambda message: message["due"])
    return {"complete": complete and None not in answers, "messages": messages[:limit]}


def _worker(url: URL, answer: dict[str, Any] | None) -> dict[str, Any]:
    return {"url": str(url), "answered": answer is not None, **(answer or _NOTHING)}


_COLUMNS = (
    "in_flight",
    "waiting_for_redelivery",
    "acked",
    "redelivered",
    "dead",
    "acked_per_second",
    "oldest_lease_seconds",
)


def _page(found: dict[str, Any]) -> str:
    heads = "".join(f"<th scope=col>{name.replace('_', ' ')}</th>" for name in _COLUMNS)
    rows = "".join(
        f"<tr><th scope=row>{escape(queue)}</th>" + "".join(f"<td>{row[name]:,.6g}</td>" for name in _COLUMNS) + "</tr>"
        for queue, row in sorted(found["queues"].items())
    )
    empty = "" if rows else "<p>No queue has had a message yet. Send one with <code>marq.Producer</code>.</p>"
    alarms = "".join(
        f"<p role=alert>Markers partition {part['partition']} stands still: {escape(part['alarm'])}</p>"
        for worker in found["workers"]
        for part in worker["partitions"]
        if part["alarm"]
    )
    breakers = "".join(
        f"<p role=alert>The circuit breaker of {escape(queue)} is {escape(each['state'])}: {escape(worker['url'])}</p>"
        for worker in found["workers"]
        for process in worker.get("handlers", ())
        for queue, each in process.get("breakers", {}).items()
        if each["state"] != "closed"
    )
    missing = [escape(worker["url"]) for worker in found["workers"] if not worker["answered"]]
    why = f"no answer from {', '.join(missing)}" if missing else "it is not known now which workers there are"
    partial = "" if found["complete"] else f"<p role=alert>Figures are not complete: {why}.</p>"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Marq</title>"
        "<style>body{font:16px system-ui;margin:2rem}td,th{padding:.2rem .8rem;text-align:right}"
        "th[scope=row]{text-align:left}</style>"
        f"<h1>Queues</h1>{partial}{alarms}{breakers}<table><thead><tr><th scope=col>queue</th>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table>{empty}"
    )


def attach(app: faust.App, figures: Figures) -> None:
    """Add the pages to an application."""

    @app.page("/api/queues", name="queues")
    async def queues(self: View, request: Any) -> Any:
        local = request.query.get("scope") == "worker"
        return self.json(figures.local() if local else await figures.all(app))

    @app.page("/api/queues/{queue}/messages", name="messages")
    async def messages(self: View, request: Any, queue: str) -> Any:
        try:
            return self.json(await figures.messages(app, queue, request.query))
        except ConfigError as error:
            return self.json({"error": str(error)}, status=400)

    @app.page("/api/schedules", name="schedules")
    async def schedules(self: View, request: Any) -> Any:
        return self.json(await figures.schedules(app, request.query))

    @app.page("/", name="index")
    async def index(self: View, request: Any) -> Any:
        return self.html(_page(await figures.all(app)))
