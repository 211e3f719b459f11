"""What pages show of figures: rows of queues with their state, sorted and filtered as an address says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.consumer_watch import has_no_consumer
from agents.statistics import empty_figures
from app.commands.words import span
from marq.core.handling_times import quantile_ms

#: Rows of the table of queues on one page.
PAGE_ROWS = 100

#: Columns of the table of queues: key, heading, what it means.
COLUMNS: Sequence[tuple[str, str, str]] = (
    ("queue", "Queue", "the name of the queue"),
    (
        "state",
        "State",
        "busy: messages are in flight or being received; waiting: messages wait; no consumer: nothing reads them",
    ),
    ("waiting", "Waiting", "sent, and taken by nobody yet"),
    ("in_flight", "In flight", "leased to a consumer now"),
    ("oldest_waiting_seconds", "Oldest waiting", "age of the oldest waiting message, since it was sent"),
    ("delayed", "Delayed", "wait for their time, or to be delivered again"),
    (
        "dead",
        "Dead",
        "dead letters in their topic; until these are read, by counters, which know nothing of retention",
    ),
    ("oldest_seconds", "Oldest open", "age of the oldest open message, since it was first received"),
    (
        "arrived_per_second",
        "Sent/s",
        "messages that came for the queue per second, copies included, while a census counts",
    ),
    ("in_per_second", "Delivered/s", "messages taken by consumers per second, over the last 10 s"),
    ("acked_per_second", "Ack/s", "messages acknowledged per second, over the last 10 s"),
    ("redelivered_per_second", "Again/s", "messages sent to the queue again per second, over the last 10 s"),
    (
        "p95_seconds",
        "p95",
        "95 % were worked on no longer than this, from delivery to acknowledgement, over the last minute",
    ),
    ("consumers", "Consumers", "members of the consumer group that reads the queue"),
)
#: By which rows are sorted: of consumers only those are known, and asked for, that a page shows.
KEYS = tuple(key for key, _, _ in COLUMNS if key != "consumers")
STATES = ("busy", "waiting", "idle", "no consumer", "paused", "breaker open")
#: Queues that one alarm names.
_NAMED = 10


@dataclass(frozen=True, slots=True)
class Shown:
    """Which rows of the table an address asks for."""

    sort: str = "queue"
    descending: bool = False
    text: str = ""
    state: str = ""
    page: int = 1

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Shown:
        """Return what an address says; what can't be read is taken for not said."""
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
        """Return the address of other rows, without what is the default."""
        said = {
            "q": self.text,
            "state": self.state,
            "sort": self.sort,
            "order": "desc" if self.descending else "",
            "page": self.page,
            **changed,
        }
        defaults = {"q": "", "state": "", "sort": "queue", "order": "", "page": 1}
        return {name: str(value) for name, value in said.items() if value != defaults[name]}

    def of(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows that fit, in order; those of which a figure is not known come last."""
        wanted = self.text.casefold()
        found = [
            row for row in rows
            if wanted in row["queue"].casefold() and (not self.state or row["state"] == self.state)
        ]  # fmt: skip
        known = [row for row in found if row[self.sort] is not None]
        known.sort(key=lambda row: row["queue"])
        known.sort(key=lambda row: row[self.sort], reverse=self.descending)
        return known + [row for row in found if row[self.sort] is None]


def queue_rows(
    figures: Mapping[str, Any],
    defined: Iterable[str],
    documents: Mapping[str, Mapping[str, Any]],
    dead: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Return one row for each queue that has figures, is defined, or has dead letters.

    ``dead``: how many those are, by their topic; None: by the trackers' counters.
    """
    queues, opened = figures["queues"], open_breakers(figures["workers"])
    empty: Mapping[str, float] = empty_figures()
    if figures["census"]["counted"]:
        empty = {**empty, "waiting": 0, "arrived_per_second": 0.0}
    handled = figures.get("handled", {})
    return [
        _row(queue, queues.get(queue, empty), opened.get(queue, ""), documents.get(queue, {}), handled.get(queue, ()))
        | ({} if dead is None else {"dead": dead.get(queue, 0)})
        for queue in sorted({*queues, *defined, *(dead or ())})
    ]


def _row(
    queue: str, row: Mapping[str, Any], breaker: str, document: Mapping[str, Any], handled: Sequence[int]
) -> dict[str, Any]:
    p95_ms = quantile_ms(handled, 0.95)
    return {
        "queue": queue,
        "state": _state(row, breaker, paused=bool(document.get("paused"))),
        # Only where a census is taken.
        "waiting": row.get("waiting"),
        "oldest_waiting_seconds": row.get("oldest_waiting_seconds") or None,
        "arrived_per_second": row.get("arrived_per_second"),
        "in_flight": row["in_flight"],
        "delayed": row["waiting_for_delivery"] + row["waiting_for_redelivery"],
        # Of a redrive to another queue the counters know only where it went.
        "dead": max(0, row["dead"] - row["redriven"] - row["discarded"]),
        "oldest_seconds": row["oldest_lease_seconds"] or None,
        "in_per_second": row["acquired_per_second"],
        "acked_per_second": row["acked_per_second"],
        "redelivered_per_second": row["redelivered_per_second"],
        "p95_seconds": None if p95_ms is None else p95_ms / 1000,
        "consumers": None,
    }


def _state(row: Mapping[str, Any], breaker: str, *, paused: bool) -> str:
    if paused:
        return "paused"
    if breaker:
        return "breaker open"
    if has_no_consumer(row):
        return "no consumer"
    if row["in_flight"] or row["acquired_per_second"] or row["acked_per_second"]:
        return "busy"
    return "waiting" if row.get("waiting") else "idle"


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the tiles show."""
    sums = {
        name: sum(row[name] for row in rows)
        for name in ("in_flight", "delayed", "dead", "in_per_second", "acked_per_second", "redelivered_per_second")
    }
    waiting = [row["waiting"] for row in rows if row["waiting"] is not None]
    arrived = [row["arrived_per_second"] for row in rows if row["arrived_per_second"] is not None]
    oldest, oldest_waiting = (
        [row[name] for row in rows if row[name] is not None] for name in ("oldest_seconds", "oldest_waiting_seconds")
    )
    return {
        **sums,
        "queues": len(rows),
        "waiting": sum(waiting) if waiting else None,
        "arrived_per_second": sum(arrived) if arrived else None,
        "oldest_seconds": max(oldest, default=None),
        "oldest_waiting_seconds": max(oldest_waiting, default=None),
    }


def open_breakers(workers: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the queues whose circuit breaker is not closed, with its state."""
    return {
        queue: breaker["state"]
        for worker in workers
        for process in worker.get("handlers", ())
        for queue, breaker in process.get("breakers", {}).items()
        if breaker["state"] != "closed"
    }


def alarms(figures: Mapping[str, Any]) -> list[str]:
    """Return what somebody who is called at night must know first."""
    found = [
        f"Markers partition {part['partition']} stands still: {part['alarm']}"
        for worker in figures["workers"]
        for part in worker["partitions"]
        if part["alarm"]
    ]
    found += [
        f"The circuit breaker of {queue} is {state}: what its handler calls fails"
        for queue, state in sorted(open_breakers(figures["workers"]).items())
    ]
    found += no_consumer_alarms(figures["queues"])
    missing = [worker["url"] for worker in figures["workers"] if not worker["answered"]]
    if not figures["complete"]:
        why = f"no answer from {', '.join(missing)}" if missing else "it is not known now which workers there are"
        found.append(f"Figures are not complete: {why}.")
    return found + census_alarms(figures["census"])


def without_consumer(queues: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the queues that have waiting messages and no consumer, those with the oldest message first."""
    queue_names = [queue for queue, row in queues.items() if has_no_consumer(row)]
    return sorted(queue_names, key=lambda queue: (-queues[queue]["oldest_waiting_seconds"], queue))


def no_consumer_alarms(queues: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one alarm for each queue without a consumer, and one that counts the queues beyond the named ones."""
    queue_names = without_consumer(queues)
    alarms = [
        f"Queue {queue} has no consumer: {_messages(queues[queue]['waiting'])},"
        f" the oldest for {span(queues[queue]['oldest_waiting_seconds'])}."
        for queue in queue_names[:_NAMED]
    ]
    more = len(queue_names) - _NAMED
    return [*alarms, f"{more:,} more queues with waiting messages have no consumer."] if more > 0 else alarms


def _messages(count: int) -> str:
    return "1 message waits" if count == 1 else f"{count:,} messages wait"


def census_alarms(census: Mapping[str, Any]) -> list[str]:
    """Return why more may wait than is shown."""
    found = []
    if census["others"]:
        found.append(f"{census['others']:,} more messages wait in queues that nobody has defined or read: wrong keys?")
    if not census["counted"] or census["complete"]:
        return found
    found += [f"What waits is not all counted: {trouble}." for trouble in census["trouble"]]
    if census["switched_off"]:
        found.append(
            f"What waits is not all counted: {census['switched_off']} workers run without a census (MARQ_CENSUS)."
        )
    if census["uncounted"]:
        found.append(f"What waits is still being counted: {census['uncounted']:,} records are left to read.")
    return found


def least(census: Mapping[str, Any]) -> str:
    """Return what stands before counts of what waits."""
    return "" if census["complete"] else "\N{GREATER-THAN OR EQUAL TO} "


def checks(figures: Mapping[str, Any], markers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what is looked at for the page of health: ``ok``, ``what``, ``found``, and what to do."""
    parts = [part for worker in figures["workers"] for part in worker["partitions"]]
    owners = sum(part["state"] == "owner" for part in parts)
    jumps = [part for part in parts if part["clock_jump_ms"]]
    quarantined = sum(part["quarantined"] for part in parts)
    late = max((part["lateness_p99_ms"] or 0 for part in parts), default=0)
    behind = max((part["lag"] or 0 for part in markers), default=0)
    standing = [part["partition"] for part in parts if part["alarm"]]
    unowned = [part["partition"] for part in markers if part["owner"] is None]
    opened = open_breakers(figures["workers"])
    answered = sum(worker["answered"] for worker in figures["workers"])
    unread = without_consumer(figures["queues"])
    rows = (
        (figures["complete"], "workers answer", f"{answered} of {len(figures['workers'])}",
         "Look at those that do not: faust -A app check"),
        (bool(parts), "a tracker runs", f"{owners} of {len(parts)} partitions have an owner that works",
         "Start a worker: faust -A app worker -l info"),
        (not unowned, "each markers partition has an owner", _listed(unowned) or "all",
         "A rebalance may be under way; if it stays so: faust -A app check"),
        (not standing, "no partition stands still", _listed(standing) or "none does",
         "The alarm on the overview says why, and which command to run"),
        (behind < 100_000, "trackers keep up", f"at most {behind:,} marker records behind",
         "Start more workers; messages may come back late meanwhile"),
        (late < 5_000, "leases and delays end in time", f"99 % within {late:,} ms", "Look at the workers' processors"),
        (not jumps, "the broker's clock is steady", _listed([part["partition"] for part in jumps]) or "it is",
         "Set the brokers' clocks by NTP"),
        (not quarantined, "all markers can be read", f"{quarantined:,} were put aside",
         "Look at the quarantine topic: who writes there?"),
        (not opened, "no circuit breaker is open", ", ".join(sorted(opened)) or "none is",
         "Mend what the handlers of these queues call"),
        (not unread, "queues with waiting messages have consumers", _without(unread) or "all have",
         "Start the consumers or handlers of these queues, or purge them"),
    )  # fmt: skip
    return [{"ok": bool(ok), "what": what, "found": found, "advice": advice} for ok, what, found, advice in rows]


def _without(queues: Sequence[str]) -> str:
    more = f" and {len(queues) - _NAMED:,} more" if len(queues) > _NAMED else ""
    return f"{', '.join(queues[:_NAMED])}{more} {'has' if len(queues) == 1 else 'have'} none" if queues else ""


def _listed(partitions: Sequence[int]) -> str:
    return f"partitions {', '.join(map(str, partitions))}" if partitions else ""
