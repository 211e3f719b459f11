"""``faust -A app delayed NAME``: the messages of a queue that wait for their time, as all workers know them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click
import faust

from agents.listing import DEFAULT_MESSAGES, MAX_MESSAGES, read_choice
from app.commands.command import command
from app.commands.tables import Column, show
from app.commands.watching import WATCH, looked
from app.commands.words import span
from app.peers import ask_workers
from app.web import merged
from marq.core.errors import BrokerUnavailable
from marq.core.names import check_queue_name
from marq.settings import ClientSettings
from marq.topics import ensure_topics

_COLUMNS = (
    Column("id"),
    Column("in", right=True),
    Column("state", rank=2),
    Column("attempt", rank=4, right=True),
    Column("bytes", rank=3, right=True),
    Column("due", rank=5),
    Column("value", least=10),
)


def attach(app: faust.App) -> None:
    """Add the command to an application."""

    @command(
        app,
        click.argument("name"),
        click.option("--limit", default=DEFAULT_MESSAGES, show_default=True, type=click.IntRange(1, MAX_MESSAGES)),
        click.option("--until", metavar="MOMENT", help="Only those due before it: 2030-01-31T08:00:00+00:00."),
        WATCH,
        click.option("--json", "as_json", is_flag=True, help="Show them as JSON, with values and headers."),
    )
    async def delayed(self: Any, name: str, limit: int, until: str | None, watch: float | None, as_json: bool) -> int:
        """Show which messages of a queue wait for their time, the first due first; exits 1 when some may be missing."""
        check_queue_name(name)
        query = {"state": "delayed", "limit": str(limit), **({} if until is None else {"until": until})}
        # What is not allowed is said here, and not by each worker.
        read_choice(name, query)
        # So that a broker that is away, or another program at its address, is what is said to be wrong.
        await ensure_topics(self.app.client)
        found = await looked(
            lambda: _ask(self.app.client, name, query, limit),
            lambda found: _show(name, found, limit),
            watch=watch,
            as_json=as_json,
        )
        return 0 if found["complete"] else 1


async def _ask(client: ClientSettings, name: str, query: dict[str, str], limit: int) -> dict[str, Any]:
    members, answers = await ask_workers(client, f"api/queues/{quote(name, safe='')}/messages", query)
    if not members.urls:
        raise BrokerUnavailable(
            f"queue {name!r}: no worker runs, and only workers know: start one with faust -A app worker"
            if members.settled
            else f"queue {name!r}: only workers know, and the broker ({client.bootstrap_servers}) did not tell which of"
            " them there are: try again, and if that goes on look at faust -A app check"
        )
    return merged(answers, limit, complete=members.settled)


def _row(message: dict[str, Any]) -> tuple[str, ...]:
    value = repr(message.get("value") or "")[1:-1]
    return (
        message["place"],
        span(message["due_in_seconds"]),
        message["state"],
        str(message["attempt"]),
        str(message.get("bytes", "?")),
        message["due"],
        value,
    )


def _show(name: str, found: dict[str, Any], limit: int) -> None:
    messages = found["messages"]
    if messages:
        show(_COLUMNS, [_row(each) for each in messages])
    if len(messages) == limit:
        print(f"the first {limit} of queue {name!r}; --limit shows more, --until says up to when")
    elif not messages:
        print(f"no message of queue {name!r} waits for its time")
    if not found["complete"]:
        print("not complete: a worker did not answer, or workers are joining and leaving")
