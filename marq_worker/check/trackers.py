"""The running trackers, from the members of their group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from marq.kafka.group_members import DescribedMember
from marq.wire.names import Names
from marq_worker.check.findings import CheckFinding, fine, problem, warning
from marq_worker.client_id import Identity
from marq_worker.handlers.handler_watch import merged, removed
from marq_worker.handlers.stuck_processes import StuckProcess, quiet_workers, stuck_processes
from marq_worker.web.liveness_and_readiness import MAX_LOOP_LAG_SECONDS
from marq_worker.web.partition_statistics import recreated, recreated_topics

#: A partition has stalled if its owner has read none of the available records for this long. On a busy machine a record
#: may wait for seconds.
STALLED_S = 10.0


@dataclass(frozen=True, slots=True)
class Page:
    """A worker's markers partitions from its page, None if it did not answer; ``metrics``: the whole page.

    ``silent``: it accepted a connection, as the kernel does for a stopped process, and did not answer in time.
    """

    url: str
    partitions: Sequence[Mapping[str, Any]] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    silent: bool = False


#: What to do about a worker that accepts connections and does not answer.
SILENT = (
    "a signal (SIGSTOP) has stopped its process, its event loop is blocked, or it lacks CPU time. If ps shows its state"
    " as T, resume it with kill -CONT"
)


def judge_members(
    names: Names, members: Sequence[DescribedMember], *, begun: bool, silent: str | None = None
) -> Iterator[CheckFinding]:
    """Judge the trackers; ``begun``: whether the topics exist, that is, something has run before.

    ``silent``: the address of this machine's web port, if a process listens there that does not answer.
    """
    subject = "trackers"
    if not members:
        finding = f"none is running: group {names.app_id} has no members"
        start = ["marq worker"]
        if silent is not None:
            advice = f"a process at {silent} accepts connections, but does not answer. If it is a worker: {SILENT}"
            yield problem(subject, finding, advice=advice)
        elif not begun:
            yield warning(subject, finding, advice="start one", commands=start)
        else:
            advice = "until one runs, leases do not expire and released messages are not redelivered. Start one"
            yield problem(subject, finding, advice=advice, commands=start)
        return
    yield fine(subject, f"{len(members)} in group {names.app_id}: {'; '.join(map(str, members))}")
    yield from _judge_differences(names, members)


def judge_pages(pages: Sequence[Page], partitions: int | None = None) -> list[CheckFinding]:
    """Judge the workers' pages; ``partitions``: the number of markers partitions, None if not known."""
    return [
        *chain.from_iterable(map(_judge_page, pages)),
        *_judge_owners(pages, partitions or 0),
        *_judge_handlers(pages),
        *_judge_processes(pages),
        *_judge_quiet(pages),
        *_judge_recreated(pages),
    ]


def _judge_handlers(pages: Sequence[Page]) -> list[CheckFinding]:
    return [
        warning(f"queue {queue}", removed(queue, **report))
        for queue, report in sorted(merged([page.metrics for page in pages]).items())
    ]


def stuck(pages: Iterable[Page]) -> list[StuckProcess]:
    """Return the stuck handler processes that pages report."""
    return stuck_processes({**page.metrics, "url": page.url} for page in pages)


def _judge_processes(pages: Sequence[Page]) -> list[CheckFinding]:
    """Judge handler processes as /healthz does: a short blockage may be over soon."""
    return [
        (problem if process.stopped or process.blocked_s > MAX_LOOP_LAG_SECONDS else warning)(
            f"group {process.group}", process.found, advice=process.advice
        )
        for process in stuck(pages)
    ]


def _judge_quiet(pages: Sequence[Page]) -> list[CheckFinding]:
    return [
        warning(
            f"worker {url}",
            "it is quiet: its running handlers continue, but it takes no more messages",
            advice="let it take messages again on the dashboard's page of workers, or send it SIGCONT; or stop it",
        )
        for url in quiet_workers({**page.metrics, "url": page.url} for page in pages)
    ]


def _judge_recreated(pages: Sequence[Page]) -> list[CheckFinding]:
    # A worker of an older version tells nothing about it.
    reports = [page.metrics.get("recreated_topics", ()) for page in pages]
    return [warning(f"queue {topic['queue']}", recreated(**topic)) for topic in recreated_topics(reports)]


def _judge_owners(pages: Sequence[Page], partitions: int) -> Iterator[CheckFinding]:
    if not pages or any(page.partitions is None for page in pages):
        # A worker that does not answer may own them.
        return
    taken = {part["partition"] for page in pages for part in page.partitions or ()}
    if free := sorted(set(range(partitions)) - taken):
        yield warning(
            "markers partitions",
            f"no worker owns {', '.join(map(str, free))}",
            advice="a worker may be starting or stopping: run the check again. If this persists, see the worker's log",
        )


def _judge_page(page: Page) -> Iterator[CheckFinding]:
    if page.silent:
        yield warning(
            f"worker {page.url}",
            "it accepts connections, but does not answer, so the alarms of its partitions are unknown",
            advice=f"{SILENT}. Its log may show what blocks it",
        )
    elif page.partitions is None:
        yield warning(
            f"worker {page.url}",
            "its web server does not answer, so the alarms of its partitions are unknown",
            advice="set MARQ_WEB_BIND of each worker to an address that others can reach, or run check there",
        )
    else:
        for part in page.partitions:
            yield from _judge_partition(page.url, part)


def _judge_partition(url: str, partition: Mapping[str, Any]) -> Iterator[CheckFinding]:
    subject = f"markers partition {partition['partition']}"
    # The worker measures this itself, and counts only the time in which it was running.
    stalled_s = partition.get("stalled_seconds", 0.0)
    if partition["alarm"]:
        yield problem(subject, f"stalled: {partition['alarm']}", advice=_mend(str(partition["alarm"])))
    elif partition["state"] != "owner":
        yield warning(
            subject,
            f"it is {partition['state']} at {url}; until it has an owner, its leases do not expire",
            advice=(
                "a new owner reads its table first: run the check again. If it is waiting, the broker does not"
                " answer or rejects its requests: see its log"
            ),
        )
    elif stalled_s >= STALLED_S:
        yield problem(
            subject,
            f"it is {partition['lag']:,} records behind, and {url} has read none for {stalled_s:.0f} s",
            advice=(
                "the worker lacks CPU time, its disk is full, or a transaction is open in the markers topic: see"
                " its log and /readyz; restart it if they show nothing"
            ),
        )
    if partition["clock_jump_ms"]:
        yield warning(
            subject,
            f"the broker's clock jumped by {partition['clock_jump_ms'] / 1000:g} s, as seen by {url}",
            advice="synchronize the brokers' clocks with NTP; meanwhile the tracker uses its own clock for leases",
        )


def _mend(alarm: str) -> str:
    if "marq quarantine" in alarm:
        return "no message is lost: see docs/operations/troubleshooting.md, 'Markers of a newer version'"
    return "see docs/operations/troubleshooting.md, 'Stopped partitions'"


def _judge_differences(names: Names, members: Sequence[DescribedMember]) -> Iterator[CheckFinding]:
    """Warn if workers differ, except in the definitions of different projects."""
    identities = {identity for member in members if (identity := Identity.read(member.client_id)) is not None}
    different = ["versions"] if len({identity.version for identity in identities}) > 1 else []
    files = Counter(
        project
        for project, _ in {(identity.project, identity.fingerprint) for identity in identities if identity.publishes}
    )
    different += [
        f"definitions of queues in project {project}" if project else "definitions of queues"
        for project, count in sorted(files.items())
        if count > 1
    ]
    if different:
        yield warning(
            "trackers",
            f"they have different {' and '.join(different)}",
            expected="the same for all workers of a project, with the same MARQ_QUEUES_FILE",
            advice=(
                f"a rolling deploy is in progress, or two projects share MARQ_PREFIX={names.prefix}. Restart the"
                " outdated workers, or give each project a name (MARQ_PROJECT) or its own prefix"
            ),
        )
