"""Judges whether waiting messages are received: queues without consumers, and consumers that receive nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.consumer_watch import NO_CONSUMER_S, has_no_consumer, is_stalled
from agents.statistics import add_up, census_of
from app.checkup.findings import Finding, fine, problem, warning
from app.commands.words import span
from marq.core.definitions import Definitions
from marq.inspector import Waiting

#: Queues that get a finding each; the others share one.
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Backlog:
    """The waiting messages of a queue.

    Args:
        oldest_s: the age of the oldest one, None where that is not known.
        idle_s: seconds since a message of the queue was acquired, None where that is not known.
    """

    queue: str
    waiting: int
    oldest_s: float | None = None
    no_consumer: bool = False
    stalled: bool = False
    idle_s: float | None = None

    def __str__(self) -> str:
        oldest = "" if self.oldest_s is None else f", the oldest for {span(self.oldest_s)}"
        return f"{'1 message waits' if self.waiting == 1 else f'{self.waiting:,} messages wait'}{oldest}"


def told_by(answers: Sequence[Mapping[str, Any]], *, everyone: bool) -> list[Backlog] | None:
    """Return the backlogs that workers report, None if they do not count waiting messages.

    Args:
        answers: the figures of each worker.
        everyone: whether each worker has answered.
    """
    if not census_of(answers, everyone=everyone)["counted"]:
        return None
    return [
        Backlog(
            queue,
            int(figures["waiting"]),
            figures["oldest_waiting_seconds"],
            has_no_consumer(figures),
            is_stalled(figures),
            figures.get("idle_seconds"),
        )
        for queue, figures in sorted(add_up(answers).items())
        if figures.get("waiting")
    ]


def counted(waiting: Waiting, unattended: Collection[str], now_ms: float) -> list[Backlog]:
    """Return the backlogs of queues without consumers that were counted without workers.

    It is not known for how long they have had none, so a queue with only new messages is not reported.
    """
    counts = {**{key.decode("utf-8", "replace"): count for key, count in waiting.strangers.items()}, **waiting.counts}
    backlogs = []
    for queue, count in sorted(counts.items()):
        sent_ms = waiting.oldest_ms.get(queue)
        oldest_s = None if sent_ms is None else max(0.0, (now_ms - sent_ms) / 1000)
        if count and queue in unattended:
            old = oldest_s is None or oldest_s >= NO_CONSUMER_S
            backlogs.append(Backlog(queue, count, oldest_s, no_consumer=old))
    return backlogs


def judge_backlogs(definitions: Definitions, backlogs: Iterable[Backlog], reported: Collection[str]) -> list[Finding]:
    """Judge backlogs, except those of queues that are ``reported`` already because no worker runs their handlers."""
    listed = [each for each in backlogs if each.queue not in reported and not definitions.settings(each.queue).paused]
    lonely, stalled = [each for each in listed if each.no_consumer], [each for each in listed if each.stalled]
    findings = [_no_consumer(each, definitions) for each in lonely[:_SHOWN]] + list(map(_stalled, stalled[:_SHOWN]))
    if len(lonely) > _SHOWN:
        more = len(lonely) - _SHOWN
        findings.append(
            problem(
                "queues", f"{more:,} more have waiting messages and no consumer", advice="see the page / of a worker"
            )
        )
    if len(stalled) > _SHOWN:
        findings.append(warning("queues", f"{len(stalled) - _SHOWN:,} more have consumers that receive nothing"))
    return findings or [fine("waiting messages", f"in {len(listed)} queues, each with a consumer")]


def _no_consumer(backlog: Backlog, definitions: Definitions) -> Finding:
    queue = backlog.queue
    if definitions.settings(queue).handler is not None:
        start = "start a worker with the role handlers (MARQ_ROLES), and the handler's module in MARQ_HANDLERS"
    elif definitions.defines(queue):
        start = f"start its consumer: marq.Consumer({queue!r}), or give the queue a handler"
    else:
        start = (
            f"start its consumer: marq.Consumer({queue!r}). If a sender misspells the name, correct it there and"
            " purge this queue"
        )
    return problem(f"queue {queue}", f"has no consumer; {backlog}", advice=start)


def _stalled(backlog: Backlog) -> Finding:
    since = "" if backlog.idle_s is None else f" for {span(backlog.idle_s)}"
    return warning(
        f"queue {backlog.queue}",
        f"its consumers have received no message{since}, and none is in flight; {backlog}",
        advice=(
            "a circuit breaker is open, a handler blocks the event loop of its consumer, or the consumer's process is"
            " dead and its session has not ended yet: look at its log"
        ),
    )
