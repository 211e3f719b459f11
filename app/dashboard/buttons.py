"""Handles the buttons of the pages: each POST returns a question, and the action runs when the user confirms it.

A question that counts messages carries what it counted: the snapshot of the dead letters, the places of open messages,
or the extent of a purge. The confirmation returns it, so that the action does not affect messages that came later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from aiohttp import web

from agents.listing import MAX_PLACES
from app.dashboard.actions import (
    Action,
    Doing,
    Letters,
    audit,
    in_words,
    read_action,
    read_ids,
    read_letters,
    read_places,
    refuse_unknown_fields,
    write_places,
)
from app.dashboard.installation import Installation
from app.web_security import VISITOR
from marq.core.errors import ConfigError, MarqError, UnknownQueue
from marq.core.names import check_queue_name
from marq.purging import Extent

#: Time limit for counting dead letters for a page.
LETTERS_LIMIT_S = 10.0
#: Time limit for receiving a form.
FORM_LIMIT_S = 10.0
_FORM = "application/x-www-form-urlencoded"
#: Fields of a redrive that the user fills in on the confirmation page.
_ADJUSTED = ("to", "limit", "rate")

Data = dict[str, Any]
Render = Callable[[web.Request, str, Data], web.Response]


class Buttons:
    """Answers POSTs; ``render`` renders a template, ``task_of`` returns the task that a request names."""

    def __init__(
        self,
        installation: Installation,
        doing: Doing,
        render: Render,
        task_of: Callable[[web.Request], Awaitable[Data]],
    ) -> None:
        self._installation = installation
        self._doing = doing
        self._render = render
        self._task_of = task_of

    async def act(self, request: web.Request) -> web.StreamResponse:
        action = read_action(request.match_info["action"])
        form = await read_form(request)
        fields = [(name, value) for name, value in form.items() if isinstance(value, str)]
        said, ids = dict(fields), [value for name, value in fields if name == "id"]
        confirmed = said.pop("confirmed", "") == "yes"
        back = inside(said.pop("back", "/"))
        refuse_unknown_fields(action, said)
        if action.on == "queue":
            return await self._act_on_queue(request, action, said, back, confirmed=confirmed)
        if action.on == "letters":
            return await self._act_on_letters(request, action, said, ids, back, confirmed=confirmed)
        if said.get("match"):
            return await self._act_on_matching(request, action, said, back, confirmed=confirmed)
        ids = read_ids(ids)
        if not confirmed:
            return self._ask(request, action, ids, back, messages_in_words(len(ids)), [("id", each) for each in ids])
        done, late = await self._doing.to_messages(action, ids, _who(request))
        return see(back, {"did": action.name, "done": str(done), "late": str(late)})

    async def _act_on_matching(
        self, request: web.Request, action: Action, said: Mapping[str, str], back: str, *, confirmed: bool
    ) -> web.StreamResponse:
        """Act on all open messages that match a filter; if there are too many, on those that are due first.

        The question carries the places of these messages, so that the action affects no others.
        """
        queue = await self._known_queue(said)
        if confirmed and "places" in said:
            ids = read_places(said["places"])
            return see(f"/tasks/{self._doing.to_matching(action, queue, ids, _who(request))}", {})
        query = {name: said[name] for name in ("state", "error", "attempts", "minutes") if said.get(name)}
        found = await self._installation.messages(queue, {**query, "only": "places", "limit": str(MAX_PLACES)})
        ids = [each["place"] for each in found["messages"]]
        if not confirmed:
            what = (
                f"{'the first ' if len(ids) == MAX_PLACES else 'all '}{len(ids):,} messages of queue {queue} that match"
            )
            if not found["complete"]:
                what += " (a worker that did not answer may have more)"
            fields = [*said.items(), ("places", write_places(ids))]
            return self._ask(request, action, [], back, what, fields, len(ids))
        return see(f"/tasks/{self._doing.to_matching(action, queue, ids, _who(request))}", {})

    async def _act_on_queue(
        self, request: web.Request, action: Action, said: Mapping[str, str], back: str, *, confirmed: bool
    ) -> web.StreamResponse:
        queue = await self._known_queue(said)
        if not confirmed:
            fields = [("queue", queue)]
            if action.name == "purge":
                fields.append(("extent", str(await self._extent(queue))))
            return self._ask(request, action, [], back, f"queue {queue}", fields)
        if action.name != "purge":
            await self._doing.to_queue(action, queue, _who(request))
            return see(back, {"did": action.name, "done": "1", "late": "0"})
        if said.get("typed", "").strip() != queue:
            raise ConfigError(
                f"queue {queue}: nothing was purged, because the typed name differs; go back and retype it"
            )
        extent = Extent.parse(said["extent"]) if "extent" in said else None
        task = self._doing.purge(action, queue, _who(request), delayed=said.get("delayed") == "yes", extent=extent)
        return see(f"/tasks/{task}", {})

    async def _known_queue(self, said: Mapping[str, str]) -> str:
        queue = check_queue_name(said.get("queue", ""))
        await self._installation.check_known(queue)
        return queue

    async def _extent(self, queue: str) -> Extent:
        workers = (await self._installation.figures())["workers"]
        clocks = {
            part["partition"]: part["clock_ms"]
            for worker in workers
            for part in worker["partitions"]
            # A worker of an older version does not report it.
            if "clock_ms" in part
        }
        return await self._doing.actor.extent(queue, clocks)

    async def _act_on_letters(
        self, request: web.Request, action: Action, said: Mapping[str, str], ids: Sequence[str], back: str, *,
        confirmed: bool,
    ) -> web.StreamResponse:  # fmt: skip
        if "as_of" not in said:
            said = {**said, "as_of": str(await in_time(self._doing.actor.snapshot()))}
        letters = read_letters(said, ids)
        if letters.queue is not None:
            await self._installation.check_known(letters.queue)
        unknown = await self._unknown_target(letters)
        # The target was checked here, so the count need not check it again.
        counted = replace(letters, to=None)
        chosen = await in_time(self._doing.actor.count(action.name, counted))
        if not confirmed or unknown is not None:
            fields = [(name, value) for name, value in said.items() if name not in ("id", "unknown")]
            fields += [("id", each) for each in ids]
            return self._ask(
                request, action, ids, back, f"{chosen:,} {in_words(counted)}", fields, chosen, unknown=unknown
            )
        return see(f"/tasks/{self._doing.to_letters(action, letters, chosen, _who(request))}", {})

    async def _unknown_target(self, letters: Letters) -> UnknownQueue | None:
        """Return why a redrive must be confirmed once more; None if its target is known or was confirmed."""
        if letters.to is None or letters.to == letters.queue or letters.allow_unknown:
            return None
        try:
            await self._installation.check_known(letters.to)
        except UnknownQueue as error:
            return error
        return None

    def _ask(
        self, request: web.Request, action: Action, ids: Sequence[str], back: str, what: str,
        fields: Sequence[tuple[str, str]], chosen: int | None = None, *, unknown: UnknownQueue | None = None,
    ) -> web.StreamResponse:  # fmt: skip
        adjusts = action.name == "redrive"
        data = {
            "action": action,
            "question": action.question.format(what),
            "ids": ids[:20],
            "more": max(0, len(ids) - 20),
            "back": back,
            "fields": [(name, value) for name, value in fields if not adjusts or name not in _ADJUSTED],
            "adjusted": {name: value for name, value in fields if name in _ADJUSTED},
            "adjusts": adjusts,
            "purges": action.name == "purge",
            "nothing": chosen == 0,
            "unknown": unknown,
            # Messages that were selected one by one can't change.
            "binds": action.name == "purge" or ((action.on == "letters" or chosen is not None) and not ids),
        }
        return self._render(request, "confirm.html", data)

    async def stop_task(self, request: web.Request) -> web.StreamResponse:
        identity = request.match_info["task"]
        task = await self._doing.tasks.stop_one(identity)
        audit("stop", _who(request), task=identity, known=task is not None)
        if task is None and (found := (await self._task_of(request))["task"])["state"] == "running":
            raise ConfigError(
                f"task {identity} was not stopped: it runs on another worker; stop it there:"
                f" {found['worker']}/tasks/{identity}"
            )
        return see(f"/tasks/{quote(identity, safe='')}", {})


async def in_time(reading: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(LETTERS_LIMIT_S):
            return await reading
    except TimeoutError:
        raise MarqError(
            f"the dead letters could not be read within {LETTERS_LIMIT_S:g} s. Without filters they are read on now:"
            " look again in a moment; else use faust -A app dead --count, or the pipeline"
        ) from None


async def read_form(request: web.Request) -> Mapping[str, Any]:
    """Read a form, which a browser sends at once.

    Raises:
        ConfigError: it is no form as browsers send them, or no text in the charset that it names.
        HTTPRequestTimeout: it did not come in time.
    """
    # Not with parts, as files are sent: nothing is uploaded.
    if request.can_read_body and request.content_type != _FORM:
        raise ConfigError(f"the form can't be read as {request.content_type}; send it as {_FORM}")
    try:
        async with asyncio.timeout(FORM_LIMIT_S):
            return await request.post()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except (LookupError, ValueError, web.RequestPayloadError) as error:
        raise ConfigError(f"the form can't be read: {error}; send it in UTF-8") from error


def messages_in_words(count: int) -> str:
    return "this message" if count == 1 else f"these {count:,} messages"


def _who(request: web.Request) -> dict[str, str]:
    """Return who asks, for the audit log."""
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


def see(address: str, said: Mapping[str, str]) -> web.Response:
    """Answer a POST: look there."""
    parts = urlsplit(address)
    kept = [(name, value) for name, value in parse_qsl(parts.query) if name not in ("did", "done", "late")]
    query = urlencode([*kept, *said.items()])
    return web.Response(status=303, headers={"Location": f"{parts.path}?{query}" if query else parts.path})
