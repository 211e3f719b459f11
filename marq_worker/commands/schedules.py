"""``marq schedules``: all schedules and their next times, as reported by the workers."""

from __future__ import annotations

import json
from typing import Any

from marq.queues.schedules import Schedules
from marq.settings.schedule_definitions import schedule_document
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


@command(JSON)
async def schedules(setup: Setup, as_json: bool) -> int:
    """Show all schedules and their next times; exit 1 if a worker did not respond."""
    client = setup.client
    async with open_queues(client) as queues:
        known = {
            schedule.name: {"name": schedule.name, **schedule_document(schedule)}
            for schedule in Schedules.of(queues).list()
        }
    answer: dict[str, Any] = {"complete": True, "schedules": []}
    if known:
        members, answers = await ask_workers(client, "api/schedules")
        answer = by_name(answers, complete=members.settled and bool(members.urls))
    metrics = {schedule["name"]: schedule for schedule in answer["schedules"]}
    for name, document in known.items():
        document.update({key: metrics.get(name, {}).get(key) for key in ("next", "last", "problem")})
    document = {"complete": answer["complete"], "schedules": list(known.values())}
    print(json.dumps(document)) if as_json else _show(document)
    return 0 if document["complete"] else 1


def _show(document: dict[str, Any]) -> None:
    if document["schedules"]:
        show(_COLUMNS, document["schedules"])
    else:
        print("no schedules: define them in marq.toml, [schedules.NAME], or with marq.Schedules")
    if not document["complete"]:
        print("incomplete: no worker runs, one did not respond, or workers are joining and leaving")
