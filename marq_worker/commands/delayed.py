"""``marq delayed NAME``, ``cancel PLACE`` and ``deliver-now PLACE``: messages that wait for their time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from marq.client.receipt import Receipt
from marq.kafka.topics import ensure_topics
from marq.producer.producer import Producer
from marq.queues.queues import Queues
from marq.settings.client import ClientSettings
from marq.wire.errors import BrokerUnavailable, MarqError
from marq.wire.markers import ANY_QUEUE
from marq.wire.names import check_queue_name
from marq_worker.commands.command import JSON, YES, Setup, command, say
from marq_worker.commands.confirmation import confirm
from marq_worker.commands.terminal import WATCH, Column, cell, duration, interval, looked, quoted, show
from marq_worker.commands.unknown import note_if_unknown
from marq_worker.web.message_listing import DEFAULT_MESSAGES, MAX_MESSAGES, read_choice
from marq_worker.web.peers import ask_workers, path_segment
from marq_worker.web.statistics import merged

_COLUMNS = (
    Column("place", cell("place")),
    Column("in", duration("due_in_seconds"), right=True),
    Column("state", cell("state"), rank=2),
    Column("attempt", cell("attempt"), rank=4, right=True),
    Column("bytes", lambda message: str(message.get("bytes", "?")), rank=3, right=True),
    Column("due", cell("due"), rank=5),
    Column("value", lambda message: quoted(message.get("value")), least=10),
)


@command(
    click.argument("name"),
    click.option(
        "--limit",
        default=DEFAULT_MESSAGES,
        show_default=True,
        type=click.IntRange(1, MAX_MESSAGES),
        help="Show at most this many messages.",
    ),
    click.option("--until", metavar="TIME", help="Only those due before TIME: 2030-01-31T08:00:00+00:00."),
    WATCH,
    JSON,
)
async def delayed(setup: Setup, name: str, limit: int, until: str | None, watch: str | None, as_json: bool) -> int:
    """Show the delayed messages of a queue in order of their due times; exit 1 if some may be missing."""
    check_queue_name(name)
    query = {"state": "delayed", "limit": str(limit), **({} if until is None else {"until": until})}
    # Reject a wrong value here, not in each worker.
    read_choice(name, query)
    # Reports an unreachable broker, or another program at its address.
    await ensure_topics(setup.client)
    shown = await looked(
        lambda: _ask(setup.client, name, query, limit), lambda listed: _show(name, listed, limit),
        watch=interval(watch), as_json=as_json,
    )  # fmt: skip
    if not shown["messages"]:
        await note_if_unknown(setup.client, name)
    return 0 if shown["complete"] else 1


async def _ask(client: ClientSettings, name: str, query: dict[str, str], limit: int) -> dict[str, Any]:
    members, answers = await ask_workers(client, f"api/queues/{path_segment(name)}/messages", query)
    if not members.urls:
        raise BrokerUnavailable(
            f"queue {name!r}: only workers know its delayed messages, and none is running: start one with marq worker"
            if members.settled
            else f"queue {name!r}: only workers know its messages, and the broker ({client.bootstrap_servers}) did not"
            " list them: try again; if that does not help, run marq check"
        )
    return merged(answers, limit, complete=members.settled)


def _show(name: str, found: dict[str, Any], limit: int) -> None:
    messages = found["messages"]
    if messages:
        show(_COLUMNS, messages)
    if len(messages) == limit:
        print(f"the first {limit} of queue {name!r}; --limit shows more, --until those due earlier")
    elif not messages:
        print(f"no delayed messages in queue {name!r}")
    if not found["complete"]:
        print("incomplete: a worker did not respond, or workers are joining and leaving")


#: A message that was delivered before keeps its id, but waits for its retry at another place.
_REFUSED = (
    "not waiting at this place: already delivered or cancelled, in flight, or unknown; marq delayed NAME shows the"
    " place of a message that waits for a retry"
)
_IDS = click.argument("ids", metavar="PLACE...", nargs=-1, required=True)
_QUEUE = click.option("--queue", metavar="NAME", help="Only messages of this queue. Default: of all queues.")


@command(_IDS, _QUEUE, JSON, YES)
async def cancel(setup: Setup, ids: Sequence[str], queue: str | None, as_json: bool, yes: bool) -> int:
    """Cancel delayed messages, by their places in marq delayed; exit 1 if one was no longer delayed."""
    receipts = _receipts(ids, queue)
    messages = "this message" if len(ids) == 1 else f"these {len(ids)} messages"
    confirm(f"Cancel {messages} permanently?", setup.client, yes=yes)
    async with Producer.of(setup.client) as producer:
        outcomes = await producer.cancel(receipts)
    return await _told(setup.client, ids, queue, outcomes, "cancelled", as_json=as_json)


@command(_IDS, _QUEUE, JSON)
async def deliver_now(setup: Setup, ids: Sequence[str], queue: str | None, as_json: bool) -> int:
    """Make delayed messages due now, by their places in marq delayed; exit 1 if one was no longer delayed."""
    receipts = _receipts(ids, queue)
    async with Producer.of(setup.client) as producer:
        outcomes = await producer.reschedule(receipts, delay=0)
    code = await _told(setup.client, ids, queue, outcomes, "due_now", as_json=as_json)
    if any(outcomes):
        await _note_if_paused(setup.client, queue)
    return code


def _receipts(ids: Sequence[str], queue: str | None) -> list[Receipt]:
    name = ANY_QUEUE if queue is None else check_queue_name(queue)
    return [Receipt.of(message_id, name) for message_id in ids]


async def _note_if_paused(client: ClientSettings, queue: str | None) -> None:
    """Say on stderr which queues do not deliver their due messages; without a queue, any may have the messages."""
    try:
        async with Queues.of(client) as queues:
            names = queues.definitions.names() if queue is None else [queue]
            paused = [name for name in names if queues.definitions(name).paused]
    except MarqError:
        # The command has its result, and may not be permitted to read settings.
        return
    if paused:
        say(f"paused queues deliver due messages after marq resume: {', '.join(sorted(paused))}")


async def _told(
    client: ClientSettings, ids: Sequence[str], queue: str | None, outcomes: Sequence[bool], done: str, *, as_json: bool
) -> int:
    by_id = list(zip(ids, outcomes, strict=True))
    if as_json:
        print(json.dumps([{"id": message_id, done: outcome} for message_id, outcome in by_id]))
    else:
        for message_id, outcome in by_id:
            print(f"{message_id}: {done.replace('_', ' ') if outcome else _REFUSED}")
    if queue is not None and not any(outcomes):
        await note_if_unknown(client, queue)
    return 0 if all(outcomes) else 1
