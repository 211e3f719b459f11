"""``marq replay NAME``: delivers messages again that a queue has already delivered."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from dataclasses import asdict
from datetime import UTC, datetime

import click

from marq.admin import replay as replaying
from marq.admin.replay import Replayed, Start, new_id
from marq.client.receipt import Receipt
from marq.wire.errors import ConfigError
from marq.wire.markers import Source
from marq.wire.names import check_queue_name
from marq.wire.record_headers import record_id
from marq_worker.commands.command import DRY_RUN, INTERRUPTED, JSON, YES, Setup, command, say
from marq_worker.commands.confirmation import confirm
from marq_worker.commands.terminal import bar, seconds
from marq_worker.commands.unknown import note_if_unknown


@command(
    click.argument("name"),
    click.option("--since", metavar="AGE", help="Messages sent in the last AGE (90s, 1h30m, 7d), or since a time."),
    click.option("--from", "place", metavar="OFFSET", help="Replay one partition, starting at topic/partition/offset."),
    click.option("--id", "identity", metavar="ID", help="Continue an interrupted replay."),
    DRY_RUN,
    JSON,
    YES,
)
async def replay(
    setup: Setup, name: str, since: str | None, place: str | None, identity: str | None, dry_run: bool, as_json: bool,
    yes: bool,
) -> int:  # fmt: skip
    """Deliver finished messages of a queue again; unfinished ones are not affected."""
    check_queue_name(name)
    start, identity = read_start(since, place), identity or new_id()
    client, interrupted, done = setup.client, False, 0
    replayed = await replaying.replay(client, name, start, identity=identity, dry_run=True)
    if replayed.messages and not dry_run:
        confirm(f"Deliver {replayed.messages} messages of queue {name!r} again?", client, yes=yes)
        # Printed first: a command that is killed prints nothing more, and another id would duplicate messages.
        say(f"if this is interrupted, continue with: replay {shlex.quote(name)} {further(start, identity)}")
        with bar(f"replaying {name}") as progress:
            try:
                replayed = await replaying.replay(client, name, start, identity=identity, progress=progress)
            except asyncio.CancelledError:
                interrupted, done = True, progress.done
    reached = {"queue": name, **asdict(replayed), "dry_run": dry_run, "interrupted": interrupted}
    if interrupted:
        reached["messages"] = done
    text = interrupted_after(done, replayed, start) if interrupted else said(name, replayed, dry_run=dry_run)
    print(json.dumps(reached) if as_json else text)
    if not replayed.messages:
        await note_if_unknown(client, name)
    return INTERRUPTED if interrupted else 0


def read_start(since: str | None, place: str | None) -> Start:
    if (since is None) == (place is None):
        raise ConfigError("replay: give --since 2h (or a time), or --from topic/partition/offset")
    if place is not None:
        receipt = Receipt.of(place)
        return Start(place=(Source(receipt.topic, receipt.partition), receipt.offset))
    try:
        moment = datetime.fromisoformat(since or "")
    except ValueError:
        return Start(max(0, int((time.time() - seconds("--since", since or "")) * 1000)))
    if moment.tzinfo is None:
        raise ConfigError(f"--since {since}: expected a time with a time zone, as in 2030-01-31T08:00:00+00:00")
    return Start(max(0, round(moment.timestamp() * 1000)))


def further(start: Start, identity: str) -> str:
    """Return the options that continue a replay from the same moment."""
    if start.place is not None:
        source, offset = start.place
        return f"--from {record_id(source, offset)} --id {identity}"
    moment = datetime.fromtimestamp((start.time_ms or 0) / 1000, UTC)
    return f"--since {moment.isoformat(timespec='milliseconds')} --id {identity}"


def interrupted_after(done: int, replayed: Replayed, start: Start) -> str:
    # The last batch may have been written, too.
    return (
        f"interrupted: at least {done:,} of {replayed.messages:,} messages are delivered again; continue with"
        f" {further(start, replayed.id)}"
    )


def said(name: str, replayed: Replayed, *, dry_run: bool) -> str:
    verb = "would be delivered again" if dry_run else "are delivered again"
    left = f"; {replayed.unfinished:,} are unfinished and not affected" if replayed.unfinished else ""
    return f"queue {name!r}: {replayed.messages:,} messages {verb}{left}"
