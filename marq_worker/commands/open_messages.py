"""Open messages as the workers report them, or without workers, as found in the changelog and the markers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marq.kafka.inspector import Inspector
from marq.kafka.owned_partitions import OPEN, open_counts
from marq.settings.client import ClientSettings
from marq_worker.handlers.handler_watch import merged
from marq_worker.queue_states import open_breakers
from marq_worker.web.partition_statistics import add_up, backlog_of
from marq_worker.web.peers import ask_workers


@dataclass(frozen=True)
class OpenReport:
    """``queues``: metrics by queue; ``complete``: whether all markers partitions were read far enough."""

    queues: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    complete: bool = True
    workers: int = 0
    #: True if waiting messages were counted too.
    backlog: bool = False
    #: Removed handlers by queue, as :meth:`agents.removed_handlers.RemovedHandlers.metrics`.
    removed_handlers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: The queues whose circuit breaker is not closed.
    open_breakers: frozenset[str] = frozenset()
    #: The workers' answers.
    answers: Sequence[Mapping[str, Any]] = ()

    def of(self, queue: str) -> dict[str, int]:
        metrics = self.queues.get(queue, {})
        return {name: int(metrics.get(name, 0)) for name in OPEN}


async def told_by_workers(client: ClientSettings, ends: Mapping[int, int] | None = None) -> OpenReport:
    """Ask the workers; ``ends``: how far each markers partition must have been read."""
    members, answers = await ask_workers(client, "api/queues")
    metrics = [answer for answer in answers if answer is not None]
    everyone = members.settled and None not in answers
    # With ``ends``, the owners' positions show whether another worker may have more.
    complete = (members.settled if ends is not None else everyone) and covers(metrics, ends)
    backlog = backlog_of(metrics, everyone=everyone and complete)["complete"]
    breakers = frozenset(open_breakers(metrics))
    return OpenReport(add_up(metrics), complete, len(members.urls), backlog, merged(metrics), breakers, metrics)


def covers(answers: Sequence[Mapping[str, Any]], ends: Mapping[int, int] | None) -> bool:
    """Return whether the owners in these answers have read each markers partition to its end."""
    applied = {
        part["partition"]: part["applied_offset"]
        for answer in answers
        for part in answer["partitions"]
        if part["state"] == "owner" and not part["alarm"]
    }
    if ends is None:
        return bool(applied)
    return all(applied.get(partition, -1) >= end - 1 for partition, end in ends.items())


async def opened(client: ClientSettings, inspector: Inspector, ends: Mapping[int, int]) -> OpenReport:
    """Return the unfinished messages when the markers have been read up to ``ends``, with or without workers.

    The result is not complete if a running worker has not read that far.
    """
    reported = await told_by_workers(client, ends)
    if reported.complete or reported.workers:
        return reported
    return OpenReport(open_counts((await inspector.owned(ends=ends)).values()))
