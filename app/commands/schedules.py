"""``faust -A app schedules``: what comes again and again, and when each comes next, as the workers know it."""

from __future__ import annotations

import json
from typing import Any

import click
import faust

from app.commands.command import command
from app.commands.tables import Column, show
from app.peers import ask_workers
from app.web import by_name
from marq.core.schedules import schedule_document
from marq.queues import Queues
from marq.schedules import Schedules
from marq.topics import ensure_topics

_COLUMNS = (
    Column("schedule", least=12),
    Column("queue", least=10, rank=2),
    Column("cron", rank=1),
    Column("time zone", rank=4),
    Column("next", least=16),
    Column("last", rank=3),
    Column("note", least=12),
)


def attach(app: faust.App) -> None:
    """Add the command to an application."""

    @command(app, click.option("--json", "as_json", is_flag=True, help="Show them as JSON, with values and headers."))
    async def schedules(self: Any, as_json: bool) -> int:
        """Show all schedules and when each comes next; exits 1 when no worker, or not each of them, told about that."""
        client = self.app.client
        await ensure_topics(client)
        async with Queues.of(client) as queues:
            known = {each.name: {"name": each.name, **schedule_document(each)} for each in Schedules.of(queues).list()}
        told: dict[str, Any] = {"complete": True, "schedules": []}
        if known:
            members, answers = await ask_workers(client, "api/schedules")
            told = by_name(answers, complete=members.settled and bool(members.urls))
        figures = {each["name"]: each for each in told["schedules"]}
        for name, document in known.items():
            document.update({key: figures.get(name, {}).get(key) for key in ("next", "last", "problem")})
        found = {"complete": told["complete"], "schedules": list(known.values())}
        print(json.dumps(found)) if as_json else _show(found)
        return 0 if found["complete"] else 1


def _row(schedule: dict[str, Any]) -> tuple[str, ...]:
    cells = (schedule[key] or "" for key in ("name", "queue", "cron", "timezone", "next", "last"))
    return (*cells, schedule["problem"] or ("" if schedule["enabled"] else "switched off"))


def _show(found: dict[str, Any]) -> None:
    if found["schedules"]:
        show(_COLUMNS, [_row(each) for each in found["schedules"]])
    else:
        print("no schedules: define them in queues.toml, [schedules.NAME], or with marq.Schedules")
    if not found["complete"]:
        print("not complete: no worker runs, one did not answer, or workers are joining and leaving")
