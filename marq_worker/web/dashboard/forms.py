"""Parses and checks the forms of the pages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from marq.client.receipt import Receipt
from marq.dead_letters.filters import Filters
from marq.dead_letters.snapshots import Snapshot
from marq.wire.errors import ConfigError
from marq.wire.names import check_queue_name
from marq_worker.readable import DURATION_FORM, read_duration
from marq_worker.web.dashboard.actor import DeadLetterSelection
from marq_worker.web.message_listing import MAX_MINUTES, MAX_PLACES, read_number

if TYPE_CHECKING:
    from marq_worker.web.dashboard.actions import Action

#: Messages that can be selected one by one, and in one request to the cluster.
MAX_IDS = 1_000
#: Time limit for receiving a form.
FORM_LIMIT_S = 10.0
_FORM = "application/x-www-form-urlencoded"
#: Largest limit of an action on dead letters.
MAX_LIMIT = 10**12 - 1


def read_ids(ids: Sequence[str]) -> list[str]:
    """Return ids of messages, without duplicates."""
    selected = list(dict.fromkeys(text for field in ids if (text := field.strip())))
    if not selected:
        raise ConfigError("no message is selected: go back and select at least one")
    if len(selected) > MAX_IDS:
        raise ConfigError(f"{len(selected):,} messages are selected; select at most {MAX_IDS:,}")
    return [Receipt.of(text).id for text in selected]


def write_places(ids: Sequence[str]) -> str:
    """Return the places of many messages as one form field, with each source only once to keep it small."""
    places: dict[str, list[str]] = {}
    for message_id in ids:
        source, _, number = message_id.rpartition("/")
        places.setdefault(source, []).append(number)
    return "\n".join(f"{source}/{','.join(numbers)}" for source, numbers in places.items())


def read_places(text: str) -> list[str]:
    """Return the ids in a field that :func:`write_places` wrote."""
    ids = []
    for line in text.split():
        source, _, numbers = line.rpartition("/")
        ids += [f"{source}/{number}" for number in numbers.split(",")]
    if not 0 < len(ids) <= MAX_PLACES:
        raise ConfigError(f"{len(ids):,} messages are selected; select 1 to {MAX_PLACES:,}")
    return [Receipt.of(message_id).id for message_id in ids]


def refuse_unknown_fields(action: Action, form: Mapping[str, str]) -> None:
    """Reject unknown fields: with a mistyped filter an action would affect more messages."""
    unknown = sorted(form.keys() - action.names)
    if unknown:
        raise ConfigError(
            f"{action.name}: unknown field {unknown[0]!r}, so nothing was done; expected"
            f" {', '.join(sorted(action.names))}"
        )


def read_pause(form: Mapping[str, str]) -> float | None:
    """Return the seconds after which a pause ends; None for a pause without an end."""
    text = form.get("for", "").strip()
    duration_s = read_duration(text)
    if text and duration_s is None:
        raise ConfigError(f"for={text}: expected {DURATION_FORM}")
    return duration_s


def read_dead_letters(form: Mapping[str, str], ids: Sequence[str]) -> DeadLetterSelection:
    """Return the dead letters that a form selects."""
    filters = read_filters(form, ids)
    queue = check_queue_name(form["queue"]) if form.get("queue") else None
    to = check_queue_name(form["to"]) if form.get("to") else None
    if queue is None and not filters.keys() - {"as_of"}:
        raise ConfigError("which dead letters? name a queue or set a filter")
    limit = read_number(form, "limit", 1, MAX_LIMIT) if form.get("limit") else None
    # The form repeats the name, so that a confirmation for one unknown queue does not apply to another.
    return DeadLetterSelection(queue, filters, to, limit, _rate(form), to is not None and form.get("unknown") == to)


def read_filters(form: Mapping[str, str], ids: Sequence[str]) -> Filters:
    """Return the filters of dead letters in a form or an address."""
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


def _rate(form: Mapping[str, str]) -> float | None:
    text = form.get("rate", "").strip()
    try:
        return float(text) if text else None
    except ValueError:
        raise ConfigError(f"rate={text}: expected messages per second") from None


async def read_form(request: web.Request) -> Mapping[str, Any]:
    """Read a form. Raises HTTPRequestTimeout if it did not arrive in time."""
    # No multipart forms: nothing is uploaded.
    if request.can_read_body and request.content_type != _FORM:
        raise ConfigError(f"the form can't be read as {request.content_type}; send it as {_FORM}")
    try:
        async with asyncio.timeout(FORM_LIMIT_S):
            return await request.post()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except (LookupError, ValueError, web.RequestPayloadError) as error:
        raise ConfigError(f"the form can't be read: {error}; send it in UTF-8") from error
