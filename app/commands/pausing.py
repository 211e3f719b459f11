"""``faust -A app pause NAME`` and ``resume NAME``: nothing of a queue is delivered for a while."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click
import faust

from app.commands.command import command
from marq.core.names import check_queue_name
from marq.queues import Queues
from marq.settings import ClientSettings
from marq.topics import ensure_topics

_NAMES = click.argument("names", metavar="NAME...", nargs=-1, required=True)
_JSON = click.option("--json", "as_json", is_flag=True, help="Show the answer as JSON.")


def attach(app: faust.App) -> None:
    """Add the commands to an application."""

    @command(app, _NAMES, _JSON)
    async def pause(self: Any, names: Sequence[str], as_json: bool) -> None:
        """Deliver nothing of a queue until it is resumed; what is being worked on ends, and messages may be sent."""
        await _switch(self.app.client, names, as_json, paused=True)

    @command(app, _NAMES, _JSON)
    async def resume(self: Any, names: Sequence[str], as_json: bool) -> None:
        """Deliver messages of a queue again that was paused."""
        await _switch(self.app.client, names, as_json, paused=False)


async def _switch(client: ClientSettings, names: Sequence[str], as_json: bool, *, paused: bool) -> None:
    for name in names:
        check_queue_name(name)
    await ensure_topics(client)
    outcomes = []
    async with Queues.of(client) as queues:
        for name in dict.fromkeys(names):
            before = queues[name].paused
            after = await (queues.pause(name) if paused else queues.resume(name))
            outcomes.append({"queue": name, "paused": after.paused, "changed": after.paused != before})
    if as_json:
        print(json.dumps(outcomes))
        return
    for each in outcomes:
        state = "paused: nothing of it is delivered until `resume`" if each["paused"] else "delivers"
        print(f"queue {each['queue']}: {state}{'' if each['changed'] else ', as it was before'}")
