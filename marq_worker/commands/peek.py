"""``marq peek NAME``: the waiting messages of a queue, without receiving them."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import click

from marq.kafka.inspector import MAX_SCANNED, Inspector
from marq.wire.names import check_queue_name
from marq_worker.commands.command import JSON, Setup, command, open_queues
from marq_worker.commands.terminal import Column, cell, number, quoted, show
from marq_worker.commands.unknown import note_if_unknown
from marq_worker.readable import span
from marq_worker.redaction import Redaction
from marq_worker.web.message_listing import waiting_described

DEFAULT_MESSAGES, MAX_MESSAGES = 20, 10_000

_COLUMNS = (
    Column("id", cell("id")),
    Column("waits for", lambda message: _age(message["sent"]), rank=1, right=True),
    Column("attempt", cell("attempt"), rank=3, right=True),
    Column("bytes", number("bytes"), rank=2, right=True),
    Column("value", lambda message: quoted(message["value"]), least=20),
)


@command(click.argument("name"),
    click.option(
        "--limit", default=DEFAULT_MESSAGES, show_default=True, type=click.IntRange(1, MAX_MESSAGES),
        help="Show at most this many messages.",
    ),
    click.option(
        "--scan", default=MAX_SCANNED, show_default=True, type=click.IntRange(1),
        help="Read at most this many records of the topic, which other queues may share.",
    ),
    JSON,
)  # fmt: skip
async def peek(setup: Setup, name: str, limit: int, scan: int, as_json: bool) -> int:
    """Show the messages of a queue that have waited longest, without receiving them; exit 1 if --scan cut the list."""
    check_queue_name(name)
    client = setup.client
    async with open_queues(client) as queues:
        messages, complete = await Inspector(client, queues.definitions).peek(name, limit, scan)
        settings = queues.definitions(name)
    shown = [waiting_described(message, settings, Redaction()) for message in messages]
    if as_json:
        print(json.dumps({"queue": name, "complete": complete, "messages": shown}))
    else:
        _show(name, shown, limit, scan, complete=complete)
    if not shown:
        await note_if_unknown(client, name)
    return 0 if complete else 1


def _show(name: str, messages: list[dict[str, Any]], limit: int, scan: int, *, complete: bool) -> None:
    if messages:
        show(_COLUMNS, messages)
    else:
        print(f"no messages are waiting in queue {name!r}" + ("" if complete else f" in the first {scan:,} records"))
    if len(messages) == limit:
        print(f"the first {limit}; --limit shows more")
    if not complete:
        print(f"incomplete: more than {scan:,} records of the topic are waiting; --scan reads more")


def _age(sent: str) -> str:
    return span(time.time() - datetime.fromisoformat(sent).timestamp())
