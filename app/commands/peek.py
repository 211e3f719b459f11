"""``faust -A app peek NAME``: what waits in a queue, as it stands there; nobody's lease begins."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

import click
import faust

from app.commands.command import command
from app.commands.tables import Column, show
from app.commands.words import span, text
from marq.core.copies import record_id
from marq.core.names import RESERVED_HEADER, check_queue_name
from marq.core.queue import QueueSettings
from marq.inspector import MAX_SCANNED, Inspector, Peeked
from marq.queues import Queues
from marq.topics import ensure_topics

DEFAULT_MESSAGES, MAX_MESSAGES = 20, 10_000

_COLUMNS = (
    Column("id"),
    Column("waits for", rank=1, right=True),
    Column("attempt", rank=3, right=True),
    Column("bytes", rank=2, right=True),
    Column("value", least=20),
)


def attach(app: faust.App) -> None:
    """Add the command to an application."""

    @command(
        app,
        click.argument("name"),
        click.option("--limit", default=DEFAULT_MESSAGES, show_default=True, type=click.IntRange(1, MAX_MESSAGES)),
        click.option(
            "--scan", default=MAX_SCANNED, show_default=True, type=click.IntRange(1),
            help="Records of the topic to read at the most, which it shares with other queues.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Show them as JSON, with headers."),
    )  # fmt: skip
    async def peek(self: Any, name: str, limit: int, scan: int, as_json: bool) -> int:
        """Show the messages of a queue that have waited longest, without taking them; exits 1 when --scan cut it."""
        check_queue_name(name)
        client = self.app.client
        await ensure_topics(client)
        async with Queues.of(client) as queues:
            messages, complete = await Inspector(client, queues.definitions).peek(name, limit, scan)
            settings = queues.definitions(name)
        found = [described(each, settings) for each in messages]
        if as_json:
            print(json.dumps({"queue": name, "complete": complete, "messages": found}))
        else:
            _show(name, found, limit, scan, complete=complete)
        return 0 if complete else 1


def described(message: Peeked, settings: QueueSettings) -> dict[str, Any]:
    """Return a message for programs; of a long value the beginning, as far as it is text."""
    row, due_ms = message.row, message.deliver_at_ms(settings)
    return {
        "id": message.id,
        "place": record_id(message.source, row.offset),
        "sent": _moment(message.sent_ms),
        "attempt": message.attempt,
        "not_before": None if due_ms is None else _moment(due_ms),
        "bytes": len(row.value or b""),
        "value": text(row.value),
        "headers": {name: text(value) for name, value in row.headers if not name.startswith(RESERVED_HEADER)},
    }


def _show(name: str, found: list[dict[str, Any]], limit: int, scan: int, *, complete: bool) -> None:
    now_s = time.time()
    show(
        _COLUMNS,
        [
            (
                each["id"],
                span(now_s - datetime.fromisoformat(each["sent"]).timestamp()),
                str(each["attempt"]),
                f"{each['bytes']:,}",
                repr(each["value"] or "")[1:-1],
            )
            for each in found
        ],
    ) if found else print(f"nothing waits in queue {name!r}" + ("" if complete else f" in the first {scan:,} records"))
    if len(found) == limit:
        print(f"the first {limit}; --limit shows more")
    if not complete:
        print(f"not complete: more than {scan:,} records of the topic wait; --scan reads more")


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
