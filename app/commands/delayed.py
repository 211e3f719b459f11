"""``faust -A app delayed NAME``: the messages of a queue that wait for their time, as all workers know them."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import click
import faust
from rich.console import Console
from rich.table import Table

from agents.listing import DEFAULT_MESSAGES, MAX_MESSAGES, read_choice
from app.commands.command import command
from app.peers import ask_workers
from app.web import merged
from marq.core.errors import BrokerUnavailable
from marq.core.names import check_queue_name
from marq.settings import ClientSettings


def attach(app: faust.App) -> None:
    """Add the command to an application."""

    @command(
        app,
        click.argument("name"),
        click.option("--limit", default=DEFAULT_MESSAGES, show_default=True, type=click.IntRange(1, MAX_MESSAGES)),
        click.option("--until", metavar="MOMENT", help="Only those due before it: 2030-01-31T08:00:00+00:00."),
        click.option("--json", "as_json", is_flag=True, help="Show them as JSON, with values and headers."),
    )
    async def delayed(self: Any, name: str, limit: int, until: str | None, as_json: bool) -> int:
        """Show which messages of a queue wait for their time, the first due first; exits 1 when some may be missing."""
        check_queue_name(name)
        query = {"state": "delayed", "limit": str(limit), **({} if until is None else {"until": until})}
        # What is not allowed is said here, and not by each worker.
        read_choice(name, query)
        found = await _ask(self.app.client, name, query, limit)
        if as_json:
            print(json.dumps(found))
        else:
            _show(name, found, limit)
        return 0 if found["complete"] else 1


async def _ask(client: ClientSettings, name: str, query: dict[str, str], limit: int) -> dict[str, Any]:
    members, answers = await ask_workers(client, f"api/queues/{quote(name, safe='')}/messages", query)
    if not members.urls:
        why = "no worker runs" if members.settled else "the broker did not tell which workers there are"
        raise BrokerUnavailable(f"queue {name!r}: {why}, and only workers know: start one with faust -A app worker")
    return merged(answers, limit, complete=members.settled)


def _show(name: str, found: dict[str, Any], limit: int) -> None:
    messages = found["messages"]
    if messages:
        table = Table("id", "due", "in", "state", "attempt", "bytes", "value")
        for each in messages:
            value = (each.get("value") or "")[:40]
            cells = (each["due_in_seconds"], each["state"], each["attempt"], each.get("bytes", "?"))
            seconds, *others = cells
            table.add_row(each["place"], each["due"], f"{seconds:,.1f} s", *map(str, others), repr(value))
        Console(width=None).print(table)
    if len(messages) == limit:
        print(f"the first {limit} of queue {name!r}; --limit shows more, --until says up to when")
    elif not messages:
        print(f"no message of queue {name!r} waits for its time")
    if not found["complete"]:
        print("not complete: a worker did not answer, or workers are joining and leaving")
