"""The pages of the dashboard and what they are as JSON: addresses, what each shows, and what a POST does.

Every POST belongs to the role ``operator``, and nothing that is a GET changes anything.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from agents.listing import DEFAULT_MESSAGES, MAX_MESSAGES, STATES, read_number
from app.credentials import Access
from app.dashboard import rows
from app.dashboard.actions import ACTIONS, Doing, NotThere, read_filters
from app.dashboard.buttons import Buttons, in_time
from app.dashboard.installation import CONSUMERS_WAIT_S, Installation
from app.dashboard.rendering import STATIC, environment
from app.web_security import SAFE_METHODS, VISITOR
from marq.core.errors import ConfigError, MarqError, UnknownQueue
from marq.core.names import check_queue_name

#: Kinds of dead letters on the page; the commonest come first.
MAX_KINDS = 200
#: Minutes of the tables beside the charts.
_TABLE_MINUTES = 15
#: What can be done to messages of a state.
_OF_STATE: Mapping[str, Sequence[str]] = {
    "in_flight": ("release",),
    "delayed": ("deliver-now", "cancel"),
    "dead": ("redrive", "delete"),
    "waiting": (),
}
#: Filters for the messages of each state, besides the id.
_FILTERS: Mapping[str, Sequence[str]] = {
    "in_flight": ("error", "attempts", "minutes"),
    "delayed": ("error", "attempts", "minutes"),
    "dead": ("reason", "error", "minutes"),
    "waiting": (),
}
#: Parameters of other workers and of commands, who are told less than a page shows.
_OF_PROGRAMS = frozenset({"scope", "only"})
#: What may be asked for below /static/, and nothing else.
_FILES = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()}
_NAVIGATION = (
    ("/", "Queues"),
    ("/dead", "Dead letters"),
    ("/schedules", "Schedules"),
    ("/workers", "Workers"),
    ("/health", "Health"),
)

Data = dict[str, Any]
View = Callable[[web.Request], Awaitable[Data]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages:
    """Serves them; ``installation`` is where their figures come from, ``doing`` what their buttons do."""

    def __init__(self, installation: Installation, doing: Doing) -> None:
        self._installation = installation
        self._doing = doing
        self._templates = environment()
        self._compiling: asyncio.Future[None] | None = None
        self._buttons = Buttons(installation, doing, self._render, self._task)

    def attach(self, web_app: web.Application) -> None:
        """Add all addresses to a web application."""
        add_get, add_post = web_app.router.add_get, web_app.router.add_post
        for address, template, view in (
            ("/", "overview.html", self._overview),
            ("/queues/{queue}", "queue.html", self._queue),
            ("/queues/{queue}/messages", "messages.html", self._messages),
            ("/message", "message.html", self._message),
            ("/dead", "dead.html", self._dead),
            ("/schedules", "schedules.html", self._schedules),
            ("/workers", "workers.html", self._workers),
            ("/health", "health.html", self._health),
            ("/tasks/{task}", "task.html", self._task),
        ):
            add_get(address, self._html(template, view))
            if address != "/schedules":
                # That one is asked by commands, too, and is beside the figures (app/web.py).
                add_get(twin(address), _json(view))
        add_get("/api/history", _json(self._history))
        add_get("/api/open", _json(self._open))
        add_get("/api/tasks", _json(self._tasks))
        add_post("/actions/{action}", self._guarded(self._buttons.act))
        add_post("/tasks/{task}/stop", self._guarded(self._buttons.stop_task))
        add_get("/static/{file:.+}", _static)

    async def stop(self) -> None:
        """End what runs."""
        await self._doing.tasks.stop()
        await self._installation.stop()

    # --- answers ------------------------------------------------------------------------------------------------------

    def _html(self, template: str, view: View) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            for name in _OF_PROGRAMS & request.query.keys():
                raise ConfigError(f"{name}=: only programs are answered that, at {twin(request.rel_url.raw_path)}")
            data = await view(request)
            await self._compiled()
            return self._render(request, template, data)

        return self._guarded(handler)

    async def _compiled(self) -> None:
        """Compile the templates once, in a thread, when the first page is requested, so that workers start faster."""
        if self._compiling is None:
            self._compiling = asyncio.ensure_future(asyncio.to_thread(self._compile))
        # A cancelled request must not cancel the compilation for the others.
        await asyncio.shield(self._compiling)

    def _compile(self) -> None:
        for name in self._templates.list_templates():
            self._templates.get_template(name)

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            began_s = time.perf_counter()
            try:
                response = await handler(request)
            except MarqError as error:
                status = _status(error)
                response = self._render(request, "error.html", _error_data(error), status)
            response.headers["Server-Timing"] = f"page;dur={(time.perf_counter() - began_s) * 1000:.1f}"
            return response

        return guarded

    def _render(self, request: web.Request, template: str, data: Data, status: int = 200) -> web.Response:
        text = self._templates.get_template(template).render(
            **data,
            navigation=_NAVIGATION,
            path_now=request.path,
            address=request.rel_url.raw_path_qs,
            # The answer to a POST has no address for a GET, neither as a page nor as JSON.
            json_address=_json_address(request) if request.method in SAFE_METHODS else None,
            notice=_notice(request.query),
            actions=ACTIONS,
            may_act=_may_act(request),
        )
        return web.Response(text=text, content_type="text/html", status=status, headers={"Cache-Control": "no-store"})

    # --- what pages show ----------------------------------------------------------------------------------------------

    async def _overview(self, request: web.Request) -> Data:
        # Both at once: a worker that does not answer is waited for once.
        figures, past = await asyncio.gather(self._installation.figures(), self._installation.history("", {}))
        defined = self._installation.defined()
        documents = self._installation.documents(sorted({*figures["queues"], *defined}))
        dead, _ = self._installation.dead_counts()
        found = rows.queue_rows(figures, defined, documents, dead)
        shown = rows.Shown.read(request.query)
        fitting = shown.of(found)
        pages = max(1, -(-len(fitting) // rows.PAGE_ROWS))
        first = (min(shown.page, pages) - 1) * rows.PAGE_ROWS
        here = fitting[first : first + rows.PAGE_ROWS]
        counts = await self._installation.consumers([row["queue"] for row in here], CONSUMERS_WAIT_S)
        for row in here:
            row["consumers"] = counts.get(row["queue"])
        return {
            "complete": figures["complete"],
            "alarms": rows.alarms(figures),
            "totals": rows.totals(found),
            "least": rows.least(figures["census"]),
            "rows": here,
            "fitting": len(fitting),
            "first": first,
            "page": first // rows.PAGE_ROWS + 1,
            "pages": pages,
            "columns": rows.COLUMNS,
            "sortable": rows.KEYS,
            "states": rows.STATES,
            "shown": shown,
            "past": minutes(past),
            "workers": len(figures["workers"]),
        }

    async def _queue(self, request: web.Request) -> Data:
        name = check_queue_name(request.match_info["queue"])
        if request.query.get("scope") == "worker":
            return await self._installation.queue(name, request.query)
        _, found, past = await asyncio.gather(
            self._installation.check_known(name),
            self._installation.queue(name, request.query),
            self._installation.history(name, {}),
        )
        figures = {
            "queues": {name: found["figures"]} if found["figures"] else {},
            "handled": {name: found["handled"]},
            "workers": [],
            "census": found["census"],
        }
        dead, _ = self._installation.dead_counts()
        here = None if dead is None else {name: dead.get(name, 0)}
        [row] = rows.queue_rows(figures, [name], self._installation.documents([name]), here)
        row["consumers"] = None if found["consumers"] is None else len(found["consumers"])
        return {
            **found,
            "alarms": rows.no_consumer_alarms(figures["queues"]) + rows.census_alarms(found["census"]),
            "least": rows.least(found["census"]),
            "row": row,
            "past": minutes(past),
            "possible": _of_queue(row["state"]),
        }

    async def _messages(self, request: web.Request) -> Data:
        name = check_queue_name(request.match_info["queue"])
        # A kind may be empty: of letters that say nothing.
        query = {key: value for key, value in request.query.items() if value or key == "kind"}
        state = query.get("state", "delayed")
        if query.get("scope") == "worker":
            return await self._installation.messages(name, query)
        if state not in _OF_STATE:
            raise ConfigError(f"state={state}: expected one of {', '.join(_OF_STATE)}")
        limit = read_number(query, "limit", DEFAULT_MESSAGES, MAX_MESSAGES)
        _, found = await asyncio.gather(
            self._installation.check_known(name), self._messages_of(name, state, query, limit)
        )
        return {
            "queue": name,
            "state": state,
            "states": ("waiting", "in_flight", "delayed", "dead"),
            "shown": {name: query.get(name, "") for name in ("error", "reason", "id", "attempts", "minutes")}
            | {"kind": query.get("kind"), "limit": limit},
            "filters": _FILTERS[state],
            "possible": _OF_STATE[state],
            **found,
        }

    async def _messages_of(self, queue: str, state: str, query: Mapping[str, str], limit: int) -> Data:
        if state == "waiting":
            return await self._installation.waiting(queue, limit)
        if state == "dead":
            filters = read_filters(query, [query["id"]] if "id" in query else [])
            letters = await in_time(self._installation.letters(queue, limit, filters))
            return {"complete": True, "messages": letters}
        assert state in STATES, "those that trackers list"
        if "id" in query:
            # Not from the list: that has the first ones of maybe many.
            found = await self._installation.message(query["id"].strip(), None)
            fits = _is_open_in(found["now"], queue, state)
            complete = found["complete"] and found["cut"] is None
            return {"complete": complete, "messages": [found["now"]] if fits else []}
        return await self._installation.messages(queue, {**query, "state": state, "limit": str(limit)})

    async def _message(self, request: web.Request) -> Data:
        identity, since = request.query.get("id", "").strip(), request.query.get("since", "")
        since_ms = int(since) if since.isascii() and since.isdigit() and len(since) < 16 else None
        found = await self._installation.message(identity, since_ms)
        letter, looked = await self._letter(found)
        possible = _OF_STATE["dead"] if letter is not None else _possible(found["now"])
        return {**found, "letter": letter, "looked_for_letter": looked, "possible": possible}

    async def _letter(self, found: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, bool]:
        """Return the dead letter of a message, if any, and whether the dead letters could be read."""
        events = [event["kind"] for event in found["events"]]
        if found["now"] is not None or (events and "DEAD_LETTERED" not in events and found["cut"] is None):
            return None, True
        try:
            letters = await in_time(self._installation.letters(found["queue"] or None, 1, {"id": [found["id"]]}))
        except MarqError:
            return None, False
        return (letters[0] if letters else None), True

    async def _dead(self, request: web.Request) -> Data:
        queue = request.query.get("queue", "").strip() or None
        filters = read_filters({key: value for key, value in request.query.items() if value}, [])
        if queue is not None:
            await self._installation.check_known(check_queue_name(queue))
        kinds = await in_time(self._installation.kinds(queue, filters))
        return {
            "queue": queue or "",
            "shown": {name: request.query.get(name, "") for name in ("error", "reason", "minutes")},
            "letters": sum(kind.letters for kind in kinds),
            "count": len(kinds),
            "kinds": [
                {
                    "queue": kind.queue,
                    "kind": kind.kind,
                    "letters": kind.letters,
                    "first_died": kind.first_died.isoformat(timespec="seconds"),
                    "last_died": kind.last_died.isoformat(timespec="seconds"),
                }
                for kind in kinds[:MAX_KINDS]
            ],
            "read_at": self._installation.dead_counts()[1],
            "tasks": (await self._tasks(request))["tasks"],
        }

    async def _schedules(self, request: web.Request) -> Data:
        return await self._installation.schedules(request.query)

    async def _workers(self, request: web.Request) -> Data:
        figures, groups = await asyncio.gather(self._installation.figures(), self._installation.groups())
        return {"complete": figures["complete"], "workers": figures["workers"], "groups": groups}

    async def _health(self, request: web.Request) -> Data:
        figures = await self._installation.figures()
        markers = await self._installation.markers(figures)
        return {
            "checks": rows.checks(figures, markers),
            "markers": markers,
            "configuration": self._installation.configuration(),
        }

    async def _history(self, request: web.Request) -> Data:
        return await self._installation.history(request.query.get("queue", ""), request.query)

    async def _open(self, request: web.Request) -> Data:
        return await self._installation.open_message(request.query)

    async def _tasks(self, request: web.Request) -> Data:
        return await self._installation.tasks([task.told() for task in self._doing.tasks.all()], request.query)

    async def _task(self, request: web.Request) -> Data:
        identity, told = request.match_info["task"], await self._tasks(request)
        found = [task for task in told["tasks"] if task["id"] == identity]
        if not found:
            raise NotThere(
                f"no worker that answers knows of a task {identity}: the one on whose page it was begun has ended, or"
                " is no tracker and was not asked, or has forgotten it. What was asked for happens all the same"
            )
        return {"task": found[0]}


def twin(path: str) -> str:
    """Return the address of a page's JSON equivalent."""
    return "/api/overview" if path == "/" else f"/api{path}"


def _json_address(request: web.Request) -> str:
    return f"{twin(request.rel_url.raw_path)}?{request.rel_url.raw_query_string}".rstrip("?")


def _error_data(error: MarqError) -> Data:
    suggestion = error.suggestion if isinstance(error, UnknownQueue) else None
    return {"error": str(error), "suggestion": suggestion}


def _json(view: View) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            data, status = await view(request), 200
        except MarqError as error:
            data, status = _error_data(error), _status(error)
        return web.json_response(
            data,
            status=status,
            dumps=lambda found: json.dumps(found, default=_plain),
            headers={"Cache-Control": "no-store"},
        )

    return handler


def _plain(value: Any) -> Any:
    """Return what stands for a value that JSON does not have."""
    return value.query() if isinstance(value, rows.Shown) else str(value)


def _status(error: MarqError) -> int:
    # A ConfigError is the caller's fault; all other errors are problems of the server side.
    if isinstance(error, UnknownQueue | NotThere):
        return 404
    return 400 if isinstance(error, ConfigError) else 503


def _of_queue(state: str) -> Sequence[str]:
    return ("resume" if state == "paused" else "pause", "purge")


def _possible(now: Mapping[str, Any] | None) -> Sequence[str]:
    """Return what can be done to an open message."""
    if now is None:
        return ()
    return _OF_STATE["in_flight" if now["state"] in ("leased", "spent") else "delayed"]


def _is_open_in(now: Mapping[str, Any] | None, queue: str, state: str) -> bool:
    """Whether an open message is one of a queue, in a state that trackers list."""
    return now is not None and now["queue"] == queue and now["state"] in [each.name.lower() for each in STATES[state]]


def minutes(past: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the last sample of each minute, the newest first: what the charts show, for who can't see them."""
    found: dict[int, dict[str, Any]] = {}
    for place, time_s in enumerate(past["times"]):
        sample = {name: series[place] for name, series in past["series"].items()}
        if any(value is not None for value in sample.values()):
            found[time_s // 60] = {"time": time_s, **sample}
    return [found[minute] for minute in sorted(found, reverse=True)][:_TABLE_MINUTES]


def _may_act(request: web.Request) -> bool:
    visitor = request.get(VISITOR)
    return visitor is None or visitor.access >= Access.OPERATOR


async def _static(request: web.Request) -> web.StreamResponse:
    path = _FILES.get(request.match_info["file"])
    if path is None:
        raise web.HTTPNotFound
    # Pages name the version of the files, so that a browser need not ask twice.
    return web.FileResponse(path, headers={"Cache-Control": "public, max-age=31536000, immutable"})


def _notice(query: Mapping[str, str]) -> str:
    """Return what the last action came to, in words of ours alone."""
    action = ACTIONS.get(query.get("did", ""))
    done, late = query.get("done", ""), query.get("late", "")
    if action is None or not all(text.isascii() and text.isdigit() and len(text) < 8 for text in (done, late)):
        return ""
    said = f"{int(done):,} {action.past}"
    return f"{said}; {int(late):,} came too late: nothing is left to be done to them" if int(late) else said
