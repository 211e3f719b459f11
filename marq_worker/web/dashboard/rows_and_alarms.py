"""Rows, alarms and checks of the pages, from the metrics of all workers."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marq.core.storage.handling_times import quantile_ms
from marq.settings.definitions import Definitions
from marq_worker.backlog.consumer_watch import has_no_consumer
from marq_worker.findings import CheckFinding, capitalized
from marq_worker.queue_states import STATES, is_listed, open_breakers, queue_state
from marq_worker.web import conditions
from marq_worker.web.conditions import NAMED
from marq_worker.web.partition_statistics import empty_metrics

PAGE_ROWS = 100

#: Columns of the table of queues: key, heading, description.
COLUMNS: Sequence[tuple[str, str, str]] = (
    ("queue", "Queue", "the name of the queue"),
    ("state", "State", "busy: in flight or being received; waiting: messages wait; no consumer: nothing reads them"),
    ("waiting", "Waiting", "sent, and not received by any consumer yet"),
    ("in_flight", "In flight", "received by a consumer and not finished"),
    ("oldest_waiting_seconds", "Oldest waiting", "age of the oldest waiting message, since it was sent"),
    ("delayed", "Delayed", "delivered or redelivered later"),
    ("dead_letters", "Dead letters", "in their topic; until it is read, by counters that ignore retention"),
    ("arrived_per_second", "Sent/s", "messages sent to the queue per second, including redelivered ones"),
    ("acquired_per_second", "Delivered/s", "messages received by consumers per second, over the last 10 s"),
    ("acked_per_second", "Acked/s", "messages acknowledged per second, over the last 10 s"),
    ("redelivered_per_second", "Redelivered/s", "messages redelivered per second, over the last 10 s"),
    ("p95_seconds", "p95", "95% of the last messages were acknowledged within this time from their delivery"),
    ("consumers", "Consumers", "members of the consumer group that reads the queue"),
)
#: Sort keys; consumers are only looked up for the rows of a page. The age of unfinished messages has no column.
KEYS = (*(key for key, _, _ in COLUMNS if key != "consumers"), "oldest_seconds")
#: Times on the page of a queue, and the share of messages that took no longer.
QUANTILES: Mapping[str, float] = {"p50_seconds": 0.5, "p95_seconds": 0.95, "p99_seconds": 0.99}
#: Totals: sums, sums that are unknown without a backlog counter, and maxima.
_SUMS = ("in_flight", "delayed", "dead_letters", "acquired_per_second", "acked_per_second", "redelivered_per_second")
_COUNTED = ("waiting", "arrived_per_second")
_AGES = ("oldest_seconds", "oldest_waiting_seconds")


@dataclass(frozen=True, slots=True)
class Shown:
    """The rows of the table that an address asks for."""

    sort: str = "queue"
    descending: bool = False
    text: str = ""
    state: str = ""
    page: int = 1

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Shown:
        """Parse an address; values that can't be read get their defaults."""
        sort = query.get("sort", "queue")
        page = query.get("page", "1")
        return cls(
            sort if sort in KEYS else "queue",
            query.get("order") == "desc",
            query.get("q", "").strip()[:200],
            query.get("state", "") if query.get("state", "") in STATES else "",
            max(1, int(page)) if page.isascii() and page.isdigit() and len(page) < 7 else 1,
        )

    def query(self, **changed: Any) -> dict[str, str]:
        """Return the query of other rows, without defaults."""
        query = {
            "q": self.text,
            "state": self.state,
            "sort": self.sort,
            "order": "desc" if self.descending else "",
            "page": self.page,
            **changed,
        }
        defaults = {"q": "", "state": "", "sort": "queue", "order": "", "page": 1}
        return {name: str(value) for name, value in query.items() if value != defaults[name]}

    def of(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the matching rows in order; those with an unknown value come last."""
        wanted = self.text.casefold()
        matching = [
            row for row in rows
            if wanted in row["queue"].casefold() and (not self.state or row["state"] == self.state)
        ]  # fmt: skip
        known = [row for row in matching if row[self.sort] is not None]
        known.sort(key=lambda row: row["queue"])
        known.sort(key=lambda row: row[self.sort], reverse=self.descending)
        return known + [row for row in matching if row[self.sort] is None]


def queue_rows(
    metrics: Mapping[str, Any],
    defined: Iterable[str],
    documents: Mapping[str, Mapping[str, Any]],
    dead: Mapping[str, int] | None = None,
    known: Container[str] | None = None,
) -> list[dict[str, Any]]:
    """Return one row for each queue that has metrics, a definition or dead letters.

    ``dead``: the number of dead letters in their topic; None: use the trackers' counters. ``known``: leave out other
    queues without messages; None: leave out none.
    """
    queues, opened = metrics["queues"], open_breakers(metrics["workers"])
    empty: Mapping[str, float] = empty_metrics()
    if metrics["backlog"]["counted"]:
        empty = {**empty, "waiting": 0, "arrived_per_second": 0.0}
    handled, removed_handlers = metrics.get("handled", {}), metrics.get("removed_handlers", {})

    def state(queue: str) -> str:
        row = queues.get(queue, empty)
        return queue_state(
            row, paused=bool(documents.get(queue, {}).get("paused")), breaker_open=queue in opened,
            removed_handler=queue in removed_handlers, no_consumer=has_no_consumer(row),
        )  # fmt: skip

    rows = [
        _row(queue, queues.get(queue, empty), state(queue), documents.get(queue, {}), handled.get(queue, ()))
        | ({} if dead is None else {"dead_letters": dead.get(queue, 0)})
        for queue in sorted({*queues, *defined, *(dead or ())})
    ]
    return [
        row
        for row in rows
        if is_listed({**queues.get(row["queue"], empty), **row}, known=known is None or row["queue"] in known)
    ]


def _row(
    queue: str, row: Mapping[str, Any], state: str, document: Mapping[str, Any], handled: Sequence[int]
) -> dict[str, Any]:
    paused = document.get("paused", False)
    return {
        "queue": queue,
        "state": state,
        "paused_until": paused if isinstance(paused, str) else None,
        # Only with a backlog counter.
        "waiting": row.get("waiting"),
        "oldest_waiting_seconds": row.get("oldest_waiting_seconds") or None,
        "arrived_per_second": row.get("arrived_per_second"),
        "in_flight": row["in_flight"],
        "delayed": row["waiting_for_delivery"] + row["waiting_for_redelivery"],
        # A redrive to another queue is counted only there.
        "dead_letters": max(0, row["dead_lettered"] - row["redriven"] - row["deleted"]),
        "oldest_seconds": row["oldest_lease_seconds"] or None,
        "acquired_per_second": row["acquired_per_second"],
        "acked_per_second": row["acked_per_second"],
        "redelivered_per_second": row["redelivered_per_second"],
        "p95_seconds": p95_seconds([handled]),
        "consumers": None,
    }


def p95_seconds(handled: Iterable[Sequence[int]]) -> float | None:
    """Return the time within which 95% of messages were handled, from the counts of queues; None without any."""
    p95_ms = quantile_ms([sum(counts) for counts in zip(*filter(None, handled), strict=True)], 0.95)
    return None if p95_ms is None else p95_ms / 1000


def quantiles(counts: Sequence[int]) -> dict[str, float | None]:
    """Return the times within which a share of a queue's messages was handled; None without any."""
    times_ms = {name: quantile_ms(counts, share) for name, share in QUANTILES.items()}
    return {name: None if time_ms is None else time_ms / 1000 for name, time_ms in times_ms.items()}


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    known = {name: [row[name] for row in rows if row[name] is not None] for name in (*_SUMS, *_COUNTED, *_AGES)}
    return {
        "queues": len(rows),
        **{name: sum(known[name]) for name in _SUMS},
        **{name: sum(known[name]) if known[name] else None for name in _COUNTED},
        **{name: max(known[name], default=None) for name in _AGES},
    }


def alarms(metrics: Mapping[str, Any], definitions: Definitions) -> list[str]:
    workers = metrics["workers"]
    texts = [
        *_sentences(conditions.stopped_partitions(workers)),
        *_sentences(conditions.open_circuit_breakers(workers)),
        *_sentences(conditions.blocked_handlers(workers)),
        *_sentences(conditions.quiet_workers(workers)),
        *queue_alarms(metrics["queues"], metrics["removed_handlers"], definitions),
        *_sentences(conditions.recreated_topics(metrics["recreated_topics"])[:NAMED]),
    ]
    missing = [worker["url"] for worker in workers if not worker["answered"]]
    if not metrics["complete"]:
        why = f"no response from {', '.join(missing)}" if missing else "the workers can't be listed now"
        texts.append(f"Metrics are incomplete: {why}.")
    return texts + backlog_alarms(metrics["backlog"])


def queue_alarms(
    queues: Mapping[str, Mapping[str, Any]], removed: Mapping[str, Mapping[str, Any]], definitions: Definitions
) -> list[str]:
    """Return why messages of queues wait."""
    return [
        *_sentences(conditions.without_consumer(conditions.backlogs(queues, removed), definitions)),
        *_sentences(conditions.removed_handlers(removed)[:NAMED]),
    ]


def _sentences(findings: Iterable[CheckFinding]) -> list[str]:
    return [f"{capitalized(finding.subject)}: {finding.found}." for finding in findings]


def backlog_alarms(backlog: Mapping[str, Any]) -> list[str]:
    """Return why more messages may wait than are shown."""
    texts = []
    if backlog["unknown_queues"]:
        texts.append(f"{backlog['unknown_queues']:,} more messages wait in unknown queues: wrong keys?")
    if not backlog["counted"] or backlog["complete"]:
        return texts
    texts += [f"The backlog is incomplete: {trouble}." for trouble in backlog["trouble"]]
    if backlog["switched_off"]:
        texts.append(f"The backlog is incomplete: {backlog['switched_off']} workers do not count (MARQ_COUNT_WAITING).")
    if backlog["uncounted"]:
        texts.append(f"The backlog is still being counted: {backlog['uncounted']:,} records are left to read.")
    return texts


def least(backlog: Mapping[str, Any]) -> str:
    """Return the prefix of counts of waiting messages."""
    return "" if backlog["complete"] else "\N{GREATER-THAN OR EQUAL TO} "


def checks(
    metrics: Mapping[str, Any], markers: Sequence[Mapping[str, Any]], definitions: Definitions
) -> list[dict[str, Any]]:
    """Return the checks of the health page: ``ok``, ``what``, ``found``, and ``advice``."""
    workers, removed = metrics["workers"], metrics["removed_handlers"]
    parts = [part for worker in workers for part in worker["partitions"]]
    owners = sum(part["state"] == "owner" for part in parts)
    quarantined = sum(part["quarantined"] for part in parts)
    late = max((part["lateness_p99_ms"] or 0 for part in parts), default=0)
    behind = max((part["lag"] or 0 for part in markers), default=0)
    unowned = [str(part["partition"]) for part in markers if part["owner"] is None]
    answered = sum(worker["answered"] for worker in workers)
    # A stuck process will handle their messages.
    handled = {queue for _, process in conditions.stuck_processes(workers) for queue in process["queues"]}
    queues = {queue: row for queue, row in metrics["queues"].items() if queue not in handled}
    backlogs = conditions.backlogs(queues, removed)
    rows = (
        (metrics["complete"], "workers respond", f"{answered} of {len(workers)}",
         "For the others, run marq check"),
        (bool(parts), "a tracker runs", f"{owners} of {len(parts)} partitions have an owner that works",
         "Start a worker: marq worker" if answered == len(workers)
         else "A worker does not respond; it may be stopped or blocked: run marq check"),
        (not unowned, "each markers partition has an owner",
         f"partitions {', '.join(unowned)} have none" if unowned else "all have",
         "A rebalance may be running; if this persists, run marq check"),
        (behind < 100_000, "trackers keep up", f"at most {behind:,} marker records behind",
         "Start more workers; otherwise, messages may be redelivered late"),
        (late < 5_000, "leases and delays expire on time", f"99% within {late:,} ms",
         "If no worker ran for a while, wait: this is of the last 10 min. Otherwise, check the workers' CPU load"),
        (not quarantined, "all markers can be read", f"{quarantined:,} quarantined",
         "Find the client that writes invalid markers: see the quarantine topic"),
        _judged("no partition is stopped", conditions.stopped_partitions(workers), "none"),
        _judged("the broker's clock is steady", conditions.clock_jumps(workers), "no jumps"),
        _judged("no circuit breaker is open", conditions.open_circuit_breakers(workers), "none"),
        _judged("handler processes run their event loops", conditions.blocked_handlers(workers), "all do"),
        _judged("no worker is quiet", conditions.quiet_workers(workers), "none"),
        _judged("queues with waiting messages have consumers", conditions.without_consumer(backlogs, definitions),
                "all have"),
        _judged("published handlers run in a worker", conditions.removed_handlers(removed), "all do"),
    )  # fmt: skip
    return [{"ok": bool(ok), "what": what, "found": found, "advice": advice} for ok, what, found, advice in rows]


def _judged(what: str, findings: Iterable[CheckFinding], fine: str) -> tuple[bool, str, str, str]:
    """Return a row that is fine without findings; the same advice is given once."""
    listed = list(findings)
    found = "; ".join(f"{finding.subject}: {finding.found}" for finding in listed)
    advice = dict.fromkeys(capitalized(finding.advice) for finding in listed if finding.advice)
    return not listed, what, found or fine, ". ".join(advice)
