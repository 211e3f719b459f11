"""``marq queues``: all queues, their messages and whether they make progress."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import click

from marq.dead_letters.dead_letters import DeadLetters
from marq.kafka.inspector import MAX_SCANNED, Inspector, Waiting
from marq.queues.known_queues import consumed_queues
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq_worker.backlog.consumer_watch import NO_CONSUMER_S, has_no_consumer, unattended
from marq_worker.commands.command import JSON, Setup, command, open_groups, open_queues
from marq_worker.commands.open_messages import OpenReport, told_by_workers
from marq_worker.commands.terminal import WATCH, Alarm, Column, cell, duration, interval, looked, number, show
from marq_worker.queue_states import ALARMING, PAUSED, is_listed, queue_state
from marq_worker.readable import paused


def _state(row: Mapping[str, Any]) -> str:
    state: str = row["state"]
    if state == PAUSED:
        return paused(row["paused_until"])
    return Alarm(state) if state in ALARMING else state


_COLUMNS = (
    Column("queue", cell("queue"), least=16),
    Column("state", _state, rank=1),
    Column("waiting", lambda row: f"{row['least']}{row['waiting']:,}", right=True),
    Column("in flight", number("in_flight"), right=True),
    Column(
        "delayed", lambda row: f"{row['waiting_for_delivery'] + row['waiting_for_redelivery']:,}", right=True, rank=2
    ),
    Column("dead letters", number("dead_letters"), right=True),
    Column("oldest", duration("oldest_waiting_seconds"), right=True, rank=3),
    Column("acked/s", lambda row: f"{row['acked_per_second']:,.0f}", right=True, rank=4),
    Column("group", cell("group"), rank=5),
)
#: Interval between two counts of dead letters with --watch, each of which reads their topic.
_COUNT_DEAD_S = 30.0


@command(click.option(
        "--scan", default=MAX_SCANNED, show_default=True, type=click.IntRange(1),
        help="Read at most this many records to count waiting messages if the workers do not count them.",
    ),
    WATCH,
    JSON,
)  # fmt: skip
async def queues(setup: Setup, scan: int, watch: str | None, as_json: bool) -> int:
    """Show all queues and their messages; exit 1 if some metrics are missing."""
    client = setup.client
    async with open_queues(client) as followed, DeadLetters.of(client) as letters:
        dead = _Dead(letters)

        async def look() -> dict[str, Any]:
            definitions = followed.definitions
            told = await told_by_workers(client)
            consumed = await consumed_queues(client)
            names = {*definitions.names(), *told.queues, *consumed}
            if told.backlog:
                waiting = _by_backlog(told)
                lonely = {queue for queue, metrics in told.queues.items() if has_no_consumer(metrics)}
            else:
                waiting = await Inspector(client, definitions).waiting(names, scan)
                lonely = await _unattended(client, definitions, waiting)
            return described(definitions, told, waiting, await dead.counts(), names, lonely, consumed)

        shown = await looked(look, _show, watch=interval(watch), as_json=as_json)
    return 0 if shown["complete"] else 1


class _Dead:
    """Counts the dead letters of each queue, not too often."""

    def __init__(self, letters: DeadLetters) -> None:
        self._letters = letters
        self._known: Counter[str] = Counter()
        self._counted_s = float("-inf")

    async def counts(self) -> Counter[str]:
        if time.monotonic() - self._counted_s > _COUNT_DEAD_S:
            counts: Counter[str] = Counter()
            for count in await self._letters.count():
                counts[count.queue] += count.dead_letters
            self._known, self._counted_s = counts, time.monotonic()
        return self._known


def _by_backlog(told: OpenReport) -> Waiting:
    now_ms = time.time() * 1000
    return Waiting(
        counts=Counter({queue: int(metrics["waiting"]) for queue, metrics in told.queues.items()}),
        oldest_ms={
            queue: int(now_ms - metrics["oldest_waiting_seconds"] * 1000)
            for queue, metrics in told.queues.items()
            if metrics["waiting"]
        },
    )


def described(
    definitions: Definitions,
    told: OpenReport,
    waiting: Waiting,
    dead: Mapping[str, int],
    names: Iterable[str],
    lonely: Collection[str] = (),
    consumed: Collection[str] = (),
) -> dict[str, Any]:
    """Return the metrics of all queues for programs; ``lonely``: those with waiting messages and no consumer.

    ``consumed``: those with a consumer group. Unknown queues without messages are left out.
    """
    unknown = {key.decode("utf-8", "replace"): count for key, count in waiting.unknown_keys.items()}
    now_ms, complete = time.time() * 1000, told.complete and waiting.complete
    rows = []
    for name in sorted({*names, *dead, *unknown}):
        oldest_ms = waiting.oldest_ms.get(name)
        metrics, settings = told.queues.get(name, {}), definitions.settings(name)
        count = waiting.counts[name] + unknown.get(name, 0)
        messages = {"waiting": count, **told.of(name), "dead_letters": dead.get(name, 0)}
        if not is_listed(messages, known=name in definitions.names() or name in consumed or not complete):
            continue
        removed_handler = told.removed_handlers.get(name, {}).get("handler")
        no_consumer = name in lonely and not settings.paused
        rows.append(
            {
                "queue": name,
                "defined": name in definitions.names(),
                "state": queue_state(
                    {**metrics, "waiting": count},
                    paused=settings.paused,
                    breaker_open=name in told.open_breakers,
                    removed_handler=removed_handler is not None,
                    no_consumer=no_consumer,
                ),
                "paused": settings.paused,
                "paused_until": settings.paused_until,
                "no_consumer": no_consumer,
                "removed_handler": removed_handler,
                "group": definitions.group(name),
                **messages,
                "oldest_waiting_seconds": None if oldest_ms is None else max(0.0, (now_ms - oldest_ms) / 1000),
                "acked_per_second": metrics.get("acked_per_second", 0.0),
            }
        )
    return {
        "complete": complete,
        "workers": told.workers,
        "waiting_complete": waiting.complete,
        "backlog": told.backlog,
        "scanned": waiting.scanned,
        "queues": rows,
    }


def _show(document: dict[str, Any]) -> None:
    least = "" if document["waiting_complete"] else "≥ "
    rows = [{"least": least, **row} for row in document["queues"]]
    if rows:
        show(_COLUMNS, rows)
    else:
        print("no queue is defined or has had messages; to send one: marq send NAME VALUE")
    if not document["workers"]:
        print("in-flight and delayed messages are unknown, because no worker runs; start one with marq worker")
    elif not document["complete"] and document["waiting_complete"]:
        print("incomplete: a worker did not respond, or workers are joining and leaving")
    if not document["waiting_complete"]:
        print(f"waiting: only {document['scanned']:,} records were read; --scan reads more")


async def _unattended(client: ClientSettings, definitions: Definitions, waiting: Waiting) -> set[str]:
    """Return the queues without a consumer whose oldest message has waited for at least ``NO_CONSUMER_S``."""
    until_ms = (time.time() - NO_CONSUMER_S) * 1000
    old = [queue for queue, sent_ms in waiting.oldest_ms.items() if waiting.counts[queue] and sent_ms <= until_ms]
    if not old:
        return set()
    async with open_groups(client) as admin:
        return await unattended(admin, client.names, definitions, old)
