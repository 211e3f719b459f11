"""The dashboard: its views (pages as HTML and JSON, actions, static files), and the clients and tasks behind them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import faust
from aiohttp import web
from faust.web import View
from mode import Service

from marq.dead_letters.dead_letters import DeadLetters
from marq.queues.queues import Queues
from marq.settings.client import ClientSettings
from marq.wire.errors import ConfigError, MarqError, UnknownQueue
from marq_worker.config.settings import AppSettings
from marq_worker.web.credentials import Access, Credentials
from marq_worker.web.dashboard import rows_and_alarms
from marq_worker.web.dashboard.actions import ACTIONS, AuditedActions, NotThere
from marq_worker.web.dashboard.actor import Actor
from marq_worker.web.dashboard.buttons import Buttons
from marq_worker.web.dashboard.history import HistorySampler, MetricsHistory
from marq_worker.web.dashboard.pages import Data, Pages
from marq_worker.web.dashboard.queries import DashboardQueries
from marq_worker.web.dashboard.rendering import STATIC, environment
from marq_worker.web.dashboard.sending import OperatorSender
from marq_worker.web.dashboard.tasks import Tasks
from marq_worker.web.dashboard.waiting_search import WaitingSearch
from marq_worker.web.dashboard.worker_commands import COMMANDS_PATH, Commanded, WorkerCommands
from marq_worker.web.security import SAFE_METHODS, VISITOR
from marq_worker.web.statistics import NamespaceStatistics

#: Parameters of other workers and of commands, which get less than a page shows.
_OF_PROGRAMS = frozenset({"scope", "only"})
#: All files below /static/.
_FILES = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()}
#: aiohttp's own pattern for a part of a path excludes braces, which names of queues may contain.
QUEUE = "/queues/{queue:[^/]+}"
_NAVIGATION = (
    ("/", "Queues"),
    ("/dead-letters", "Dead letters"),
    ("/schedules", "Schedules"),
    ("/workers", "Workers"),
    ("/health", "Health"),
)

#: Returns the data of a page, from the query and the parameters in the path.
PageData = Callable[..., Awaitable[Data]]
#: Any: Faust's views have types of its own for what aiohttp passes and takes.
Handler = Callable[..., Awaitable[Any]]


class PostView(View):
    @classmethod
    def from_handler(cls, fun: Any) -> type[View]:
        return type(fun.__name__, (cls,), {"post": fun})

    def get_methods(self) -> set[str]:
        # Faust's has HEAD, which is for views that answer GETs.
        return {"POST"}


class DashboardViews:
    def __init__(self, namespace: DashboardQueries, actions: AuditedActions) -> None:
        self._namespace = namespace
        self._pages = Pages(namespace, actions.tasks)
        self._templates = environment()
        self._compiling: asyncio.Future[None] | None = None
        self._buttons = Buttons(namespace, actions, self._render, self._pages.task_of_any_worker)

    def attach(self, app: faust.App) -> None:
        pages, namespace = self._pages, self._namespace
        for path, template, data in (
            ("/", "overview.html", pages.overview),
            (QUEUE, "queue.html", pages.queue),
            (f"{QUEUE}/messages", "messages.html", pages.messages),
            ("/message", "message.html", pages.message),
            ("/dead-letters", "dead.html", pages.dead),
            ("/schedules", "schedules.html", namespace.schedules),
            ("/workers", "workers.html", pages.workers),
            ("/health", "health.html", pages.health),
            ("/tasks/{task}", "task.html", pages.task),
        ):
            app.page(path, name=path)(self._html(template, data))
            app.page(twin(path), name=twin(path))(_json(_queried(data)))
        app.page("/api/history")(_json(_queried(pages.history)))
        app.page("/api/unfinished")(_json(_queried(namespace.open_message)))
        app.page("/api/running")(_json(_queried(namespace.running)))
        app.page("/api/tasks")(_json(_queried(pages.tasks)))
        app.page("/actions/{action}", base=PostView)(self._guarded(self._buttons.act))
        app.page(f"/{COMMANDS_PATH}/{{command}}", base=PostView)(_json(self._buttons.command))
        app.page("/tasks/{task}/stop", base=PostView)(self._guarded(self._buttons.stop_task))
        app.page("/static/{file:.+}")(_static)

    def _html(self, template: str, page: PageData) -> Handler:
        async def handler(request: web.Request, **parameters: str) -> web.StreamResponse:
            for name in _OF_PROGRAMS & request.query.keys():
                raise ConfigError(f"{name}=: this parameter is for programs, at {twin(request.rel_url.raw_path)}")
            data = await page(request.query, **parameters)
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
        async def guarded(view: View, request: web.Request, **parameters: str) -> web.StreamResponse:
            began_s = time.perf_counter()
            try:
                response: web.StreamResponse = await handler(request, **parameters)
            except MarqError as error:
                status, read = _status(error), request.method in SAFE_METHODS
                heading = (
                    ("Not found" if status == 404 else "This page can't be shown") if read else "The action failed"
                )
                response = self._render(request, "error.html", {**_error_data(error), "heading": heading}, status)
            response.headers["Server-Timing"] = f"page;dur={(time.perf_counter() - began_s) * 1000:.1f}"
            return response

        return guarded

    def _render(self, request: web.Request, template: str, data: Data, status: int = 200) -> web.Response:
        text = self._templates.get_template(template).render(
            **data,
            navigation=_NAVIGATION,
            path_now=request.path,
            address=request.rel_url.raw_path_qs,
            # The answer to a POST has no address for a GET.
            json_address=_json_address(request) if request.method in SAFE_METHODS else None,
            notice=_notice(request.query),
            actions=ACTIONS,
            may_act=_may_act(request),
        )
        return web.Response(text=text, content_type="text/html", status=status, headers={"Cache-Control": "no-store"})


def twin(path: str) -> str:
    """Return the address of a page's JSON equivalent."""
    return "/api/overview" if path == "/" else f"/api{path}"


def _json_address(request: web.Request) -> str:
    return f"{twin(request.rel_url.raw_path)}?{request.rel_url.raw_query_string}".rstrip("?")


def _error_data(error: MarqError) -> Data:
    suggestion = error.suggestion if isinstance(error, UnknownQueue) else None
    return {"error": str(error), "suggestion": suggestion}


def _queried(page: PageData) -> Callable[..., Awaitable[Data]]:
    """Return the data of a page by a request."""
    return lambda request, **parameters: page(request.query, **parameters)


def _json(answer: Callable[..., Awaitable[Data]]) -> Handler:
    """Answer requests in JSON with what ``answer`` returns for a request and the parameters in its path."""

    async def handler(view: View, request: web.Request, **parameters: str) -> web.StreamResponse:
        try:
            data, status = await answer(request, **parameters), 200
        except MarqError as error:
            data, status = _error_data(error), _status(error)
        return web.json_response(
            data,
            status=status,
            dumps=lambda value: json.dumps(value, default=_plain),
            headers={"Cache-Control": "no-store"},
        )

    return handler


def _plain(value: Any) -> Any:
    """Serialize a value of a type that JSON does not have."""
    return value.query() if isinstance(value, rows_and_alarms.Shown | WaitingSearch) else str(value)


def _status(error: MarqError) -> int:
    # A ConfigError is the caller's fault; all other errors are problems of the server side.
    if isinstance(error, UnknownQueue | NotThere):
        return 404
    return 400 if isinstance(error, ConfigError) else 503


def _may_act(request: web.Request) -> bool:
    visitor = request.get(VISITOR)
    return visitor is None or visitor.access >= Access.OPERATOR


async def _static(view: View, request: Any, file: str) -> Any:
    path = _FILES.get(file)
    if path is None:
        raise web.HTTPNotFound
    # Pages name the version of the files, so browsers may cache them.
    return web.FileResponse(path, headers={"Cache-Control": "public, max-age=31536000, immutable"})


def _notice(query: Mapping[str, str]) -> str:
    """Return the outcome of the last action, in words of ours alone."""
    action = ACTIONS.get(query.get("did", ""))
    done, late = query.get("done", ""), query.get("late", "")
    if action is None or not all(text.isascii() and text.isdigit() and len(text) < 8 for text in (done, late)):
        return ""
    text = f"{int(done):,} {action.past}"
    return f"{text}; {int(late):,} came too late" if int(late) else text


log = logging.getLogger("marq.web")


class Dashboard(Service):
    """Samples the history, and ends with all tasks that were started on its pages."""

    def __init__(
        self,
        app: faust.App,
        statistics: NamespaceStatistics,
        settings: AppSettings,
        client: ClientSettings,
        queues: Queues,
        worker: Commanded,
    ) -> None:
        super().__init__()
        self._dead_letters = DeadLetters.of(client)
        self._queues = queues
        self._tasks_of_pages = Tasks()
        history = MetricsHistory()
        self._namespace = DashboardQueries(statistics, settings, client, lambda: queues.definitions, history)
        workers = WorkerCommands(
            worker,
            lambda: str(app.conf.canonical_url),
            statistics.group,
            lambda: app.http_client,
            Credentials.of(settings),
        )
        sender = OperatorSender(client, self._dead_letters, statistics.redaction)
        actor = Actor(client, self._dead_letters, queues, self._look, workers, sender)
        DashboardViews(self._namespace, AuditedActions(actor, self._tasks_of_pages)).attach(app)
        self.add_dependency(HistorySampler(history, statistics.worker.recent))

    async def on_start(self) -> None:
        try:
            # A worker with the role web alone knows no definitions yet.
            await self._queues.start()
        except MarqError as error:
            log.warning("pages show no queue settings: %s", error)

    async def on_stop(self) -> None:
        await self._tasks_of_pages.stop()
        await self._namespace.stop()
        await self._dead_letters.stop()

    async def _look(self, queue: str, place: str) -> Mapping[str, Any] | None:
        answer = await self._namespace.open_message({"place": place, "queue": queue})
        if not answer["complete"]:
            raise MarqError(
                f"message {place}: whether it is open is not known, because a worker did not respond or workers are"
                " joining and leaving; try again"
            )
        message: Mapping[str, Any] | None = answer["message"]
        return message
