"""``faust -A app cancel ID`` and ``deliver-now ID``: what becomes of messages that wait for their time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click
import faust

from app.commands.command import command, confirm
from marq.producer import Producer
from marq.receipt import Receipt
from marq.settings import ClientSettings

_IDS = click.argument("ids", metavar="ID...", nargs=-1, required=True)
_JSON = click.option("--json", "as_json", is_flag=True, help="Show the outcomes as JSON.")


def attach(app: faust.App) -> None:
    """Add the commands to an application."""

    @command(app, _IDS, _JSON, click.option("--yes", is_flag=True, help="Do not ask."))
    async def cancel(self: Any, ids: Sequence[str], as_json: bool, yes: bool) -> int:
        """Cancel messages that wait for their time; exits 1 when one was not waiting any more."""
        receipts = [Receipt.of(each) for each in ids]
        messages = "this message" if len(ids) == 1 else f"these {len(ids)} messages"
        confirm(f"Cancel {messages} for good?", yes=yes)
        async with _producer(self.app.client) as producer:
            outcomes = await producer.cancel(receipts)
        return _told(ids, outcomes, "cancelled", as_json=as_json)

    @command(app, _IDS, _JSON)
    async def deliver_now(self: Any, ids: Sequence[str], as_json: bool) -> int:
        """Deliver messages that wait for their time at once; exits 1 when one was not waiting any more."""
        receipts = [Receipt.of(each) for each in ids]
        async with _producer(self.app.client) as producer:
            outcomes = await producer.reschedule(receipts, delay=0)
        return _told(ids, outcomes, "delivered", as_json=as_json)


def _producer(client: ClientSettings) -> Producer:
    return Producer.of(client)


def _told(ids: Sequence[str], outcomes: Sequence[bool], done: str, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps([{"id": each, done: outcome} for each, outcome in zip(ids, outcomes, strict=True)]))
    else:
        for each, outcome in zip(ids, outcomes, strict=True):
            print(f"{each}: {done if outcome else 'not waiting: delivered or cancelled before, held, or not known'}")
    return 0 if all(outcomes) else 1
