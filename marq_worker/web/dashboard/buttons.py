"""Handles the buttons of the pages: each POST returns a question, and the action runs when the user confirms it.

A question that counts messages carries what it counted: the snapshot of the dead letters, the places of open messages,
or the extent of a purge. The confirmation returns it, so that the action does not affect messages that came later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from aiohttp import web

from marq.admin.purge import Extent
from marq.wire.errors import ConfigError, MarqError, UnknownQueue
from marq.wire.markers import ANY_QUEUE
from marq.wire.names import check_queue_name
from marq_worker.web.dashboard.actions import Action, AuditedActions, at_least_old, audit, read_action
from marq_worker.web.dashboard.actor import DeadLetterSelection
from marq_worker.web.dashboard.forms import (
    read_dead_letters,
    read_form,
    read_ids,
    read_places,
    refuse_unknown_fields,
    write_places,
)
from marq_worker.web.dashboard.queries import DashboardQueries
from marq_worker.web.message_listing import MAX_MINUTES, MAX_PLACES, read_number
from marq_worker.web.security import VISITOR

#: Time limit for counting dead letters for a page.
DEAD_LETTERS_LIMIT_S = 10.0

Data = dict[str, Any]
Render = Callable[[web.Request, str, Data], web.Response]


class Buttons:
    """Answers POSTs.

    ``render`` renders a template; ``task_of`` returns a task of any worker, or raises NotThere.
    """

    def __init__(
        self,
        namespace: DashboardQueries,
        actions: AuditedActions,
        render: Render,
        task_of: Callable[[str], Awaitable[Data]],
    ) -> None:
        self._namespace = namespace
        self._actions = actions
        self._render = render
        self._task_of = task_of

    async def act(self, request: web.Request, action: str) -> web.StreamResponse:
        chosen = read_action(action)
        fields = [(name, value) for name, value in (await read_form(request)).items() if isinstance(value, str)]
        form, ids = dict(fields), [value for name, value in fields if name == "id"]
        confirmed = form.pop("confirmed", "") == "yes"
        back = inside(form.pop("back", "/"))
        refuse_unknown_fields(chosen, form)
        if chosen.run is not None:
            return await self._run(request, chosen, form, back, confirmed=confirmed)
        if chosen.on == "queue":
            return await self._purge(request, chosen, form, back, confirmed=confirmed)
        if form.pop("selected", ""):
            # Without ids, a form for dead letters would act on all of them.
            ids = read_ids(ids)
        if chosen.on == "dead letters":
            return await self._act_on_dead_letters(request, chosen, form, ids, back, confirmed=confirmed)
        if form.get("match"):
            return await self._act_on_matching(request, chosen, form, back, confirmed=confirmed)
        ids, queue = read_ids(ids), await self._known_queue(form) if form.get("queue") else ANY_QUEUE
        if not confirmed:
            selection = "this message" if len(ids) == 1 else f"these {len(ids):,} messages"
            fields = [("id", message_id) for message_id in ids]
            if queue != ANY_QUEUE:
                selection, fields = f"{selection} of queue {queue}", [("queue", queue), *fields]
            return self._ask(request, chosen, ids, back, selection, fields)
        done, late = await self._actions.to_messages(chosen, queue, ids, _who(request))
        return see(back, {"did": chosen.name, "done": str(done), "late": str(late)})

    async def _act_on_matching(
        self, request: web.Request, action: Action, form: Mapping[str, str], back: str, *, confirmed: bool
    ) -> web.StreamResponse:
        """Act on all open messages that match a filter; if there are too many, on those that are due first.

        The question carries the places of these messages, so that the action affects no others.
        """
        queue = await self._known_queue(form)
        if confirmed and "places" in form:
            ids = read_places(form["places"])
            return see(f"/tasks/{self._actions.to_matching(action, queue, ids, _who(request))}", {})
        query = {name: form[name] for name in ("state", "error", "attempts", "minutes") if form.get(name)}
        matching = await self._namespace.messages(queue, {**query, "only": "places", "limit": str(MAX_PLACES)})
        ids = [message["place"] for message in matching["messages"]]
        if not confirmed:
            what = (
                f"{'the first ' if len(ids) == MAX_PLACES else 'all '}{len(ids):,} messages of queue {queue} that match"
            )
            if not matching["complete"]:
                what += " (a worker that did not respond may have more)"
            fields = [*form.items(), ("places", write_places(ids))]
            return self._ask(request, action, [], back, what, fields, len(ids))
        return see(f"/tasks/{self._actions.to_matching(action, queue, ids, _who(request))}", {})

    async def _run(
        self, request: web.Request, action: Action, form: Mapping[str, str], back: str, *, confirmed: bool
    ) -> web.StreamResponse:
        """Act on one target, which a field of the form names."""
        if missing := sorted(name for name in action.hidden if not form.get(name)):
            raise ConfigError(f"{action.name}: which {missing[0]}? The form names none, so nothing was done")
        target = await self._known_queue(form) if action.on == "queue" else form[action.on]
        if form.get("to"):
            await self._namespace.check_known(check_queue_name(form["to"]))
        if not confirmed:
            if action.preview is not None:
                form = {"value": await in_time(action.preview(self._actions.actor, form)), **form}
            return self._ask(request, action, [], back, f"{action.on} {target}", list(form.items()))
        for field in action.fields:
            if "required" in field.attributes and not form.get(field.name, "").strip():
                raise ConfigError(
                    f"{action.name}: {field.label}: it is empty, so nothing was done; go back and fill it in"
                )
        outcome = await self._actions.run(action, form, _who(request))
        if "sent" in outcome:
            back = f"/message?{urlencode({'id': outcome['sent'], 'queue': outcome['to']})}"
        return see(back, {"did": action.name, "done": "1", "late": "0"})

    async def command(self, request: web.Request, command: str) -> dict[str, Any]:
        """Carry out the command that another worker passes on for an operator."""
        return dict(await self._actions.carry_out(command, request.query, _who(request)))

    async def _purge(
        self, request: web.Request, action: Action, form: Mapping[str, str], back: str, *, confirmed: bool
    ) -> web.StreamResponse:
        queue = await self._known_queue(form)
        minutes = read_number(form, "minutes", 0, MAX_MINUTES, least=0)
        if not confirmed:
            fields = [("queue", queue), ("extent", str(await self._extent(queue, minutes)))]
            if minutes:
                fields.append(("minutes", str(minutes)))
            return self._ask(request, action, [], back, f"queue {queue}{at_least_old(minutes)}", fields)
        if form.get("typed", "").strip() != queue:
            raise ConfigError(
                f"queue {queue}: nothing was purged, because the typed name differs; go back and retype it"
            )
        extent = Extent.parse(form["extent"]) if "extent" in form else None
        if extent is None and minutes:
            extent = await self._extent(queue, minutes)
        delayed = form.get("delayed") == "yes"
        task = self._actions.purge(action, queue, _who(request), delayed=delayed, minutes=minutes, extent=extent)
        return see(f"/tasks/{task}", {})

    async def _known_queue(self, form: Mapping[str, str]) -> str:
        queue = check_queue_name(form.get("queue", ""))
        await self._namespace.check_known(queue)
        return queue

    async def _extent(self, queue: str, minutes: int) -> Extent:
        workers = (await self._namespace.statistics())["workers"]
        clocks = {
            part["partition"]: part["clock_ms"]
            for worker in workers
            for part in worker["partitions"]
            # Workers of older versions report no clock, and a tracker that is still reading reports an earlier time.
            if "clock_ms" in part and part["state"] == "owner"
        }
        before_ms = int(time.time() * 1000) - minutes * 60_000 if minutes else None
        return await self._actions.actor.extent(queue, clocks, before_ms)

    async def _act_on_dead_letters(
        self, request: web.Request, action: Action, form: Mapping[str, str], ids: Sequence[str], back: str, *,
        confirmed: bool,
    ) -> web.StreamResponse:  # fmt: skip
        if "as_of" not in form:
            form = {**form, "as_of": str(await in_time(self._actions.actor.snapshot()))}
        selection = read_dead_letters(form, ids)
        if selection.queue is not None:
            await self._namespace.check_known(selection.queue)
        unknown = await self._unknown_target(selection)
        # The target was checked here, so the count need not check it again.
        counted = replace(selection, to=None)
        chosen = await in_time(self._actions.actor.count(action.name, counted))
        if not confirmed or unknown is not None:
            fields = [(name, value) for name, value in form.items() if name not in ("id", "unknown")]
            fields += [("id", message_id) for message_id in ids]
            return self._ask(request, action, ids, back, f"{chosen:,} {counted}", fields, chosen, unknown=unknown)
        return see(f"/tasks/{self._actions.to_dead_letters(action, selection, chosen, _who(request))}", {})

    async def _unknown_target(self, selection: DeadLetterSelection) -> UnknownQueue | None:
        """Return why a redrive must be confirmed once more; None if its target is known or was confirmed."""
        if selection.to is None or selection.to == selection.queue or selection.allow_unknown:
            return None
        try:
            await self._namespace.check_known(selection.to)
        except UnknownQueue as error:
            return error
        return None

    def _ask(
        self, request: web.Request, action: Action, ids: Sequence[str], back: str, what: str,
        fields: Sequence[tuple[str, str]], chosen: int | None = None, *, unknown: UnknownQueue | None = None,
    ) -> web.StreamResponse:  # fmt: skip
        adjusted = {field.name for field in action.fields}
        data = {
            "action": action,
            "question": action.question.format(what, **dict(fields)),
            "ids": ids[:20],
            "more": max(0, len(ids) - 20),
            "back": back,
            "fields": [(name, value) for name, value in fields if name not in adjusted],
            "adjusted": {name: value for name, value in fields if name in adjusted},
            "nothing": chosen == 0,
            "unknown": unknown,
            # Messages that were selected one by one can't change.
            "binds": action.name == "purge" or ((action.on == "dead letters" or chosen is not None) and not ids),
        }
        return self._render(request, "confirm.html", data)

    async def stop_task(self, request: web.Request, task: str) -> web.StreamResponse:
        stopped = await self._actions.tasks.stop_one(task)
        audit("stop", _who(request), task=task, known=stopped is not None)
        if stopped is None and (elsewhere := await self._task_of(task))["state"] == "running":
            raise ConfigError(
                f"task {task} was not stopped: it runs on another worker; stop it there:"
                f" {elsewhere['worker']}/tasks/{task}"
            )
        return see(f"/tasks/{quote(task, safe='')}", {})


async def in_time(reading: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(DEAD_LETTERS_LIMIT_S):
            return await reading
    except TimeoutError:
        raise MarqError(
            f"the dead letters could not be read within {DEAD_LETTERS_LIMIT_S:g} s. Without filters, reading continues:"
            " try again in a moment; with filters, use marq dead --count, or the pipeline"
        ) from None


def _who(request: web.Request) -> dict[str, str]:
    """Return the visitor, for the audit log."""
    visitor = request.get(VISITOR)
    return {"who": "" if visitor is None else visitor.name, "from": request.remote or ""}


def inside(address: str) -> str:
    """Return an address if it is one of ours; else the first page."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return "/"
    ours = address.startswith("/") and not address.startswith(("//", "/\\")) and not parts.netloc
    return address if ours and address.isprintable() else "/"


def see(address: str, outcome: Mapping[str, str]) -> web.Response:
    """Answer a POST with a redirect to a page that shows the outcome."""
    parts = urlsplit(address)
    kept = [(name, value) for name, value in parse_qsl(parts.query) if name not in ("did", "done", "late")]
    query = urlencode([*kept, *outcome.items()])
    return web.Response(status=303, headers={"Location": f"{parts.path}?{query}" if query else parts.path})
