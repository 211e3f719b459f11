"""The worker's web pages: figures of all queues, for the whole installation, from any of its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import faust
from aiohttp import ClientError, ClientTimeout
from faust.web.drivers.aiohttp import Web
from faust.web.views import View
from yarl import URL

from agents.statistics import Statistics, add_up
from app.members import Group

#: How long another worker may take to answer before its figures are said to be missing.
PEER_SECONDS = 1.0

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
        answers = await _ask_each(app, own, peers)
        workers = [_worker(own, self.local()), *map(_worker, peers, answers)]
        answered = [worker for worker in workers if worker["answered"]]
        return {
            "complete": members.settled and len(answered) == len(workers),
            "queues": add_up(answered),
            "workers": [{name: value for name, value in worker.items() if name != "queues"} for worker in workers],
        }


def _worker(url: URL, answer: dict[str, Any] | None) -> dict[str, Any]:
    return {"url": str(url), "answered": answer is not None, **(answer or _NOTHING)}


async def _ask_each(app: faust.App, own: URL, urls: Sequence[URL]) -> list[dict[str, Any] | None]:
    """Ask each address once: of several workers that gave the same one (or ours), the others can't be reached."""
    different = {url: place for place, url in reversed(list(enumerate(urls))) if url != own}
    answers = dict(zip(different, await asyncio.gather(*(_ask(app, url) for url in different)), strict=True))
    return [answers[url] if different.get(url) == place else None for place, url in enumerate(urls)]


async def _ask(app: faust.App, url: URL) -> dict[str, Any] | None:
    try:
        timeout = ClientTimeout(total=PEER_SECONDS)
        async with app.http_client.get(url / "api/queues" % {"scope": "worker"}, timeout=timeout) as response:
            answer: dict[str, Any] = await response.json()
            return answer if response.status == 200 else None
    except (ClientError, TimeoutError, ValueError):
        return None


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
    missing = [escape(worker["url"]) for worker in found["workers"] if not worker["answered"]]
    why = f"no answer from {', '.join(missing)}" if missing else "it is not known now which workers there are"
    partial = "" if found["complete"] else f"<p role=alert>Figures are not complete: {why}.</p>"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Marq</title>"
        "<style>body{font:16px system-ui;margin:2rem}td,th{padding:.2rem .8rem;text-align:right}"
        "th[scope=row]{text-align:left}</style>"
        f"<h1>Queues</h1>{partial}{alarms}<table><thead><tr><th scope=col>queue</th>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table>{empty}"
    )


def attach(app: faust.App, figures: Figures) -> None:
    """Add the pages to an application."""

    @app.page("/api/queues", name="queues")
    async def queues(self: View, request: Any) -> Any:
        local = request.query.get("scope") == "worker"
        return self.json(figures.local() if local else await figures.all(app))

    @app.page("/", name="index")
    async def index(self: View, request: Any) -> Any:
        return self.html(_page(await figures.all(app)))
