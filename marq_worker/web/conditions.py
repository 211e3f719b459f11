"""Conditions that an operator should know about, judged from the statistics of workers.

``marq check`` prints these findings; the dashboard shows them as alarms and as checks of its health page. Statistics
are those of :func:`marq_worker.web.statistics.namespace_statistics`; processes of an older version lack some keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marq.settings.definitions import Definitions
from marq_worker.backlog.consumer_watch import has_no_consumer, is_stalled
from marq_worker.findings import CheckFinding, problem, warning
from marq_worker.handlers.handler_watch import removed
from marq_worker.queue_states import open_breakers
from marq_worker.readable import span
from marq_worker.web.liveness_and_readiness import MAX_LOOP_LAG_SECONDS

#: A partition has stalled if its owner has read none of the available records for this long. On a busy machine a record
#: may wait for seconds.
STALLED_S = 10.0
#: Queues that get a finding each; the others share one.
NAMED = 10
#: Advice for a worker that accepts connections but does not answer.
SILENT = (
    "a signal (SIGSTOP) has stopped its process, its event loop is blocked, or it lacks CPU time. If ps shows its state"
    " as T, resume it with kill -CONT"
)

Workers = Sequence[Mapping[str, Any]]


# --- workers and their partitions -------------------------------------------------------------------------------------


def silent_workers(workers: Workers) -> list[CheckFinding]:
    return [
        warning(
            f"worker {worker['url']}",
            "it accepts connections, but does not answer, so the alarms of its partitions are unknown",
            advice=f"{SILENT}. Its log may show what blocks it",
        )
        if worker.get("silent")
        else warning(
            f"worker {worker['url']}",
            "its web server does not answer, so the alarms of its partitions are unknown",
            advice="set MARQ_WEB_BIND of each worker to an address that others can reach, or run check there",
        )
        for worker in workers
        if not worker["answered"]
    ]


def partitions_without_owner(workers: Workers, count: int) -> Iterator[CheckFinding]:
    """Judge the owners of ``count`` markers partitions."""
    owned = set()
    for url, part in _partitions(workers):
        owned.add(part["partition"])
        if part["state"] != "owner" and not part["alarm"]:
            yield warning(
                _markers(part),
                f"it is {part['state']} at {url}; until it has an owner, its leases do not expire",
                advice=(
                    "a new owner reads its table first: run the check again. If it is waiting, the broker does not"
                    " answer or rejects its requests: see its log"
                ),
            )
    # A worker that does not answer may own the others.
    free = sorted(set(range(count)) - owned) if workers and all(worker["answered"] for worker in workers) else ()
    if free:
        yield warning(
            "markers partitions",
            f"no worker owns {', '.join(map(str, free))}",
            advice="a worker may be starting or stopping: run the check again. If this persists, see the worker's log",
        )


def stopped_partitions(workers: Workers) -> list[CheckFinding]:
    return [
        problem(
            _markers(part),
            f"stalled: {part['alarm']}",
            advice=(
                "no message is lost: see docs/operations/troubleshooting.md, 'Markers of a newer version'"
                if "marq quarantine" in part["alarm"]
                else "see docs/operations/troubleshooting.md, 'Stopped partitions'"
            ),
        )
        for _, part in _partitions(workers)
        if part["alarm"]
    ]


def stalled_partitions(workers: Workers) -> list[CheckFinding]:
    return [
        problem(
            _markers(part),
            f"it is {part['lag']:,} records behind, and {url} has read none for {part['stalled_seconds']:.0f} s",
            advice=(
                "the worker lacks CPU time, its disk is full, or a transaction is open in the markers topic: see"
                " its log and /readyz; restart it if they show nothing"
            ),
        )
        for url, part in _partitions(workers)
        # The worker measures this itself, and counts only the time in which it was running.
        if part["state"] == "owner" and not part["alarm"] and part.get("stalled_seconds", 0.0) >= STALLED_S
    ]


def clock_jumps(workers: Workers) -> list[CheckFinding]:
    return [
        warning(
            _markers(part),
            f"the broker's clock jumped by {part['clock_jump_ms'] / 1000:g} s, as seen by {url}",
            advice="synchronize the brokers' clocks with NTP; meanwhile the tracker uses its own clock for leases",
        )
        for url, part in _partitions(workers)
        if part["clock_jump_ms"]
    ]


def quiet_workers(workers: Workers) -> list[CheckFinding]:
    """Judge workers that an operator has made quiet, so that a handler process takes no more messages."""
    return [
        warning(
            f"worker {worker['url']}",
            "it is quiet: its running handlers continue, but it takes no more messages",
            advice="let it take messages again on the dashboard's page of workers, or send it SIGCONT; or stop it",
        )
        for worker in workers
        if any(process.get("quiet") for process in worker["handlers"])
    ]


def _partitions(workers: Workers) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((worker["url"], part) for worker in workers for part in worker["partitions"])


def _markers(part: Mapping[str, Any]) -> str:
    return f"markers partition {part['partition']}"


# --- handler processes ------------------------------------------------------------------------------------------------


def stuck_processes(workers: Workers) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the handler processes that take no messages, each with the address of its worker.

    A handler blocks their event loop, or a signal has stopped them. Kafka removes a stopped process from its group
    after the session timeout, so it must not be taken for a missing worker.
    """
    return [
        (worker["url"], process)
        for worker in workers
        for process in worker["handlers"]
        if process.get("pid") and (process.get("blocked_seconds") or process.get("stopped"))
    ]


def blocked_handlers(workers: Workers) -> Iterator[CheckFinding]:
    """Judge handler processes as /healthz does: a short blockage may be over soon."""
    for url, process in stuck_processes(workers):
        subject, pid, blocked_s = f"group {process['group']}", process["pid"], process["blocked_seconds"]
        where = f"handler process {pid} of {url}"
        if process.get("stopped"):
            yield problem(
                subject,
                f"{where} was stopped by a signal (SIGSTOP), so no handler of its queues runs",
                advice=f"resume it on that machine with kill -CONT {pid}; after a kill -9 {pid}, its worker starts"
                " another",
            )
        else:
            yield (problem if blocked_s > MAX_LOOP_LAG_SECONDS else warning)(
                subject,
                f"{process.get('blocked_by') or 'a handler'} has blocked the event loop of {where} for {blocked_s:.0f}"
                " s",
                advice="write the handler as a plain function (def), or run the blocking call with asyncio.to_thread;"
                " the log of the worker shows the stack",
            )


# --- queues -----------------------------------------------------------------------------------------------------------


def open_circuit_breakers(workers: Workers) -> list[CheckFinding]:
    return [
        warning(
            f"queue {queue}",
            f"its circuit breaker is {state}, because its handler keeps failing",
            advice="repair the service that the handler calls",
        )
        for queue, state in sorted(open_breakers(workers).items())
    ]


def removed_handlers(reports: Mapping[str, Mapping[str, Any]]) -> list[CheckFinding]:
    """Judge the handlers that no worker runs any more, by queue."""
    return [warning(f"queue {queue}", removed(queue, **report)) for queue, report in sorted(reports.items())]


def recreated_topics(topics: Iterable[Mapping[str, Any]]) -> list[CheckFinding]:
    return [
        warning(
            f"queue {topic['queue']}",
            f"its topic {topic['topic']} was deleted and created again, noticed {topic['seconds'] // 60:.0f} min ago:"
            " its records are new messages, and unfinished messages of the former topic are redelivered",
        )
        for topic in topics
    ]


@dataclass(frozen=True, slots=True)
class Backlog:
    """The waiting messages of a queue.

    ``oldest_s``: age of the oldest one; ``idle_s``: seconds since a message was acquired; None if not known.
    """

    queue: str
    waiting: int
    oldest_s: float | None = None
    no_consumer: bool = False
    stalled: bool = False
    idle_s: float | None = None

    def __str__(self) -> str:
        oldest = "" if self.oldest_s is None else f", the oldest for {span(self.oldest_s)}"
        return f"{waiting_messages(self.waiting)}{oldest}"


def waiting_messages(count: int) -> str:
    return "1 message waits" if count == 1 else f"{count:,} messages wait"


def backlogs(queues: Mapping[str, Mapping[str, Any]], handler_removed: Collection[str]) -> list[Backlog]:
    """Return the backlogs of queues with waiting messages, from the metrics of all workers."""
    return [
        Backlog(
            queue,
            int(metrics["waiting"]),
            metrics["oldest_waiting_seconds"],
            has_no_consumer(metrics),
            # Without a handler, a consumer of the group receives nothing; another finding says so.
            is_stalled(metrics) and queue not in handler_removed,
            metrics.get("idle_seconds"),
        )
        for queue, metrics in sorted(queues.items())
        if metrics.get("waiting")
    ]


def without_consumer(listed: Iterable[Backlog], definitions: Definitions) -> list[CheckFinding]:
    """Return a finding for each queue without a consumer, those with the oldest message first."""
    lonely = sorted(
        (backlog for backlog in listed if backlog.no_consumer),
        key=lambda backlog: (-(backlog.oldest_s or 0.0), backlog.queue),
    )
    findings = [_no_consumer(backlog, definitions) for backlog in lonely[:NAMED]]
    if len(lonely) > NAMED:
        more = f"{len(lonely) - NAMED:,} more have waiting messages and no consumer"
        findings.append(problem("queues", more, advice="see `marq queues`"))
    return findings


def _no_consumer(backlog: Backlog, definitions: Definitions) -> CheckFinding:
    queue = backlog.queue
    if definitions.settings(queue).handler is not None:
        start = "start a worker with the role handlers (MARQ_ROLES) and with the handler's module in MARQ_HANDLERS"
    elif definitions.defines(queue):
        start = (
            f"start its consumer: marq.Consumer({queue!r}), or the SQS clients that receive from it; or give the queue"
            " a handler"
        )
    else:
        start = (
            f"start its consumer: marq.Consumer({queue!r}). If a sender misspells the name, correct it there and"
            " purge this queue"
        )
    return problem(f"queue {queue}", f"has no consumer; {backlog}", advice=start)


def stalled_queues(listed: Iterable[Backlog]) -> list[CheckFinding]:
    """Return a finding for each queue whose consumers receive nothing."""
    stalled = [backlog for backlog in listed if backlog.stalled]
    findings = [_stalled(backlog) for backlog in stalled[:NAMED]]
    if len(stalled) > NAMED:
        findings.append(warning("queues", f"{len(stalled) - NAMED:,} more have consumers that receive nothing"))
    return findings


def _stalled(backlog: Backlog) -> CheckFinding:
    since = "" if backlog.idle_s is None else f" for {span(backlog.idle_s)}"
    return warning(
        f"queue {backlog.queue}",
        f"its consumers have received no message{since}, and none is in flight; {backlog}",
        advice=(
            "a circuit breaker is open, a handler blocks its consumer's event loop, SQS clients have stopped polling,"
            " or the consumer's process has died and its session has not expired yet: see its log"
        ),
    )


# --- all of them ------------------------------------------------------------------------------------------------------


def judge_workers(statistics: Mapping[str, Any], partitions: int = 0) -> list[CheckFinding]:
    """Judge the workers of a namespace; ``partitions``: the number of markers partitions, 0 if not known."""
    workers = statistics["workers"]
    return [
        *silent_workers(workers),
        *stopped_partitions(workers),
        *partitions_without_owner(workers, partitions),
        *stalled_partitions(workers),
        *clock_jumps(workers),
        *removed_handlers(statistics["removed_handlers"]),
        *blocked_handlers(workers),
        *quiet_workers(workers),
        *open_circuit_breakers(workers),
        *recreated_topics(statistics["recreated_topics"]),
    ]
