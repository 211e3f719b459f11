"""``marq schedules``: all schedules and their next times, as reported by the workers, or one and its last runs."""

from __future__ import annotations

import json
from typing import Any

import click

from marq.queues.schedules import Schedules
from marq.settings.schedule_definitions import schedule_document
from marq.wire.errors import ConfigError
from marq.wire.names import closest_name
from marq_worker.commands.command import JSON, Setup, command, open_queues
from marq_worker.commands.terminal import Column, cell, show
from marq_worker.web.peers import ask_workers
from marq_worker.web.statistics import by_name

_COLUMNS = (
    Column("schedule", cell("name"), least=12),
    Column("queue", cell("queue"), least=10, rank=2),
    Column("cron", cell("cron"), rank=1),
    Column("time zone", cell("timezone"), rank=4),
    Column("next", cell("next"), least=16),
    Column("last", cell("last"), rank=3),
    Column("note", lambda schedule: schedule["problem"] or ("" if schedule["enabled"] else "disabled"), least=12),
)
_RUNS = (Column("last runs", cell("time")), Column("message", cell("id")))


@command(click.argument("name", required=False), JSON)
async def schedules(setup: Setup, name: str | None, as_json: bool) -> int:
    """Show all schedules and their next times, or one and its last runs; exit 1 if a worker did not respond."""
    client = setup.client
    async with open_queues(client) as queues:
        known = {
            schedule.name: {"name": schedule.name, **schedule_document(schedule)}
            for schedule in Schedules.of(queues).list()
        }
    if name is not None:
        if name not in known:
            close = closest_name(name, known)
            hint = f"did you mean {close!r}?" if close else "`marq schedules` lists all"
            raise ConfigError(f"unknown schedule {name!r}; {hint}")
        known = {name: known[name]}
    answer: dict[str, Any] = {"complete": True, "schedules": []}
    if known:
        members, answers = await ask_workers(client, "api/schedules")
        answer = by_name(answers, complete=members.settled and bool(members.urls))
    metrics = {schedule["name"]: schedule for schedule in answer["schedules"]}
    for schedule, document in known.items():
        document.update({key: metrics.get(schedule, {}).get(key) for key in ("next", "last", "runs", "problem")})
    document = {"complete": answer["complete"], "schedules": list(known.values())}
    print(json.dumps(document)) if as_json else _show(document, runs=name is not None)
    return 0 if document["complete"] else 1


def _show(document: dict[str, Any], *, runs: bool) -> None:
    if document["schedules"]:
        show(_COLUMNS, document["schedules"])
    else:
        print("no schedules: define them in marq.toml, [schedules.NAME], or with marq.Schedules")
    if runs:
        last = [run for schedule in document["schedules"] for run in schedule["runs"] or ()]
        show(_RUNS, last) if last else print("no runs since it was defined, changed or resumed")
    if not document["complete"]:
        print("incomplete: no worker runs, one did not respond, or workers are joining and leaving")
