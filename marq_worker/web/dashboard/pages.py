"""The data of each page, which is also its JSON equivalent.

A GET never changes anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from marq.core.storage.rows import HELD, State
from marq.settings.queue import AT_MOST_ONCE
from marq.wire.errors import ConfigError, MarqError
from marq.wire.names import check_queue_name
from marq_worker import queue_states
from marq_worker.web.dashboard import rows_and_alarms
from marq_worker.web.dashboard.actions import NotThere
from marq_worker.web.dashboard.buttons import in_time
from marq_worker.web.dashboard.forms import read_filters
from marq_worker.web.dashboard.queries import CONSUMERS_WAIT_S, DEFAULT_RANGE, DashboardQueries, has_several
from marq_worker.web.dashboard.tasks import Tasks
from marq_worker.web.dashboard.timeline import status_after
from marq_worker.web.dashboard.waiting_search import WaitingSearch
from marq_worker.web.message_listing import (
    BLOCKED_S,
    DEFAULT_MESSAGES,
    MAX_MESSAGES,
    STATES,
    UNRELEASABLE,
    can_be_released,
    read_number,
)

#: Kinds of errors of dead letters on the page, the newest first.
MAX_KINDS = 200
#: Running handlers on the page, those that have run for longest.
MAX_CALLS = 200
#: Minutes in the tables next to the charts.
_TABLE_MINUTES = 15
#: Actions for messages of a state.
_OF_STATE: Mapping[str, Sequence[str]] = {
    "waiting": (),
    "in_flight": ("release",),
    "delayed": ("deliver-now", "cancel"),
    "dead": ("redrive", "delete"),
}
#: Names of the states of messages in flight.
HELD_STATES = frozenset(state.name.lower() for state in HELD)
#: Status of an open message that is not in flight, by its state.
_OPEN_STATUSES = {
    State.DELAYED.name.lower(): "delayed",
    State.RELEASED.name.lower(): "delayed until its redelivery",
    State.REJECTED.name.lower(): "being dead-lettered",
    State.EXHAUSTED.name.lower(): "being dead-lettered",
    State.CANCELLED.name.lower(): "being cancelled",
    State.WAITING_IN_ORDER.name.lower(): "waits for its next attempt, ahead of later messages with its key",
}
#: Filters for messages of a state, besides the id.
_FILTERS: Mapping[str, Sequence[str]] = {
    "in_flight": ("error", "attempts", "minutes"),
    "delayed": ("error", "attempts", "minutes"),
    "dead": ("reason", "error", "minutes"),
    "waiting": ("text", "header", "attempts", "minutes"),
}
_SHOWN_FILTERS = ("error", "reason", "id", "attempts", "minutes", "text", "header")

Data = dict[str, Any]
Query = Mapping[str, str]


class Pages:
    """Collects the data of pages, from the query of a request and the parameters in its path."""

    def __init__(self, namespace: DashboardQueries, tasks: Tasks) -> None:
        self._namespace = namespace
        self._tasks = tasks

    async def overview(self, query: Query) -> Data:
        # Concurrently: a worker that does not respond is waited for once.
        statistics, past = await asyncio.gather(
            self._namespace.statistics(), self._namespace.history("", _range(query))
        )
        defined = self._namespace.defined()
        documents = self._namespace.documents(sorted({*statistics["queues"], *defined}))
        dead, _ = self._namespace.dead_counts()
        known = await self._namespace.known(statistics)
        queue_rows = rows_and_alarms.queue_rows(statistics, defined, documents, dead, known)
        shown = rows_and_alarms.Shown.read(query)
        fitting = shown.of(queue_rows)
        pages = max(1, -(-len(fitting) // rows_and_alarms.PAGE_ROWS))
        first = (min(shown.page, pages) - 1) * rows_and_alarms.PAGE_ROWS
        here = fitting[first : first + rows_and_alarms.PAGE_ROWS]
        counts = await self._namespace.consumers([row["queue"] for row in here], CONSUMERS_WAIT_S)
        for row in here:
            row["consumers"] = counts.get(row["queue"])
        return {
            "complete": statistics["complete"],
            "alarms": rows_and_alarms.alarms(statistics, self._namespace.definitions()),
            "totals": {
                **rows_and_alarms.totals(queue_rows),
                "p95_seconds": rows_and_alarms.p95_seconds(statistics["handled"].values()),
            },
            "least": rows_and_alarms.least(statistics["backlog"]),
            "rows": here,
            "fitting": len(fitting),
            "first": first,
            "page": first // rows_and_alarms.PAGE_ROWS + 1,
            "pages": pages,
            "columns": rows_and_alarms.COLUMNS,
            "sortable": rows_and_alarms.KEYS,
            "states": queue_states.STATES,
            "shown": shown,
            **self._charts(past),
            "workers": len(statistics["workers"]),
        }

    async def queue(self, query: Query, queue: str) -> Data:
        name = check_queue_name(queue)
        if query.get("scope") == "worker":
            return await self._namespace.queue(name, query)
        _, details, past = await asyncio.gather(
            self._namespace.check_known(name),
            self._namespace.queue(name, query),
            self._namespace.history(name, _range(query)),
        )
        metrics = details["statistics"]
        row = self._row(name, metrics, details["handled"], details["backlog"])
        row["consumers"] = None if details["consumers"] is None else len(details["consumers"])
        return {
            **details,
            "alarms": [
                *rows_and_alarms.queue_alarms(
                    {name: metrics} if metrics else {},
                    {name: details["removed_handler"]} if details["removed_handler"] else {},
                    self._namespace.definitions(),
                ),
                *rows_and_alarms.backlog_alarms(details["backlog"]),
            ],
            "least": rows_and_alarms.least(details["backlog"]),
            "blocked": metrics["blocked_keys"] if metrics else 0,
            "row": row,
            "times": {
                "wait": rows_and_alarms.quantiles(details["waited"]),
                "run": rows_and_alarms.quantiles(details["handled"]),
            },
            **self._charts(past),
            "possible": _of_queue(row["state"]),
            "counts": _counts(row),
        }

    def _charts(self, past: Mapping[str, Any]) -> Data:
        return {
            "range": past.get("range", DEFAULT_RANGE),
            "ranges": self._namespace.ranges(),
            "windows_problem": past.get("problem"),
            "past": minutes(past) if "range" not in past else values(past),
        }

    def _row(
        self, queue: str, metrics: Mapping[str, Any] | None, handled: Sequence[int], backlog: Mapping[str, Any]
    ) -> Data:
        statistics = {
            "queues": {queue: metrics} if metrics else {},
            "handled": {queue: handled},
            "workers": [],
            "backlog": backlog,
        }
        dead, _ = self._namespace.dead_counts()
        here = None if dead is None else {queue: dead.get(queue, 0)}
        [row] = rows_and_alarms.queue_rows(statistics, [queue], self._namespace.documents([queue]), here)
        return row

    async def messages(self, query: Query, queue: str) -> Data:
        name = check_queue_name(queue)
        # The kind of dead letters without a reason is empty.
        query = {key: value for key, value in query.items() if value or key == "kind"}
        state = query.get("state", "delayed")
        if query.get("scope") == "worker":
            return await self._namespace.messages(name, query)
        if state not in _OF_STATE:
            raise ConfigError(f"state={state}: expected one of {', '.join(_OF_STATE)}")
        limit = read_number(query, "limit", DEFAULT_MESSAGES, MAX_MESSAGES)
        _, listed, statistics = await asyncio.gather(
            self._namespace.check_known(name),
            self._messages_of(name, state, query, limit),
            self._namespace.statistics(),
        )
        row = self._row(name, statistics["queues"].get(name), (), statistics["backlog"])
        return {
            "queue": name,
            "state": state,
            "counts": _counts(row),
            "least": rows_and_alarms.least(statistics["backlog"]),
            "shown": {name: query.get(name, "") for name in _SHOWN_FILTERS}
            | {"kind": query.get("kind"), "limit": limit},
            "filters": _FILTERS[state],
            "search": WaitingSearch.read(query) if state == "waiting" else None,
            "possible": _possible_in(state, listed["messages"], at_most_once=self._is_at_most_once(name)),
            "unreleasable": UNRELEASABLE,
            **listed,
        }

    async def _messages_of(self, queue: str, state: str, query: Mapping[str, str], limit: int) -> Data:
        if state == "waiting":
            return await self._namespace.waiting(queue, limit, WaitingSearch.read(query))
        if state == "dead":
            filters = read_filters(query, [query["id"]] if "id" in query else [])
            dead_letters = await in_time(self._namespace.dead_letters(queue, limit, filters))
            return {"complete": True, "messages": dead_letters}
        assert state in STATES, "those that trackers list"
        if "id" in query:
            # Not from the list, which has only the first ones.
            story = await self._namespace.message(query["id"].strip(), queue, None)
            fits = _is_open_in(story["now"], queue, state)
            # Without events, a redelivery of the message may be open at an unknown place.
            known_place = bool(story["events"]) or not story["missing"]
            complete = story["complete"] and story["cut"] is None and known_place
            return {"complete": complete, "messages": [story["now"]] if fits else []}
        return await self._namespace.messages(queue, {**query, "state": state, "limit": str(limit)})

    async def message(self, query: Query) -> Data:
        identity, since = query.get("id", "").strip(), query.get("since", "")
        since_ms = int(since) if since.isascii() and since.isdigit() and len(since) < 16 else None
        queue = query.get("queue", "").strip()
        if queue:
            await self._namespace.check_known(check_queue_name(queue))
        story = await self._namespace.message(identity, queue, since_ms)
        dead_letter, searched = await self._dead_letter(story)
        dead = (*_OF_STATE["dead"], "resend")
        possible = dead if dead_letter is not None else self._possible_now(story["now"])
        return {
            **story,
            "dead_letter": dead_letter,
            "dead_letters_read": searched,
            "status": _status(story, dead_letter, dead_letters_read=searched),
            "possible": possible,
            "held": story["now"] is not None and story["now"]["state"] in HELD_STATES,
        }

    def _possible_now(self, now: Mapping[str, Any] | None) -> Sequence[str]:
        return () if now is None else _possible(now, at_most_once=self._is_at_most_once(now["queue"]))

    def _is_at_most_once(self, queue: str) -> bool:
        return bool(self._namespace.documents([queue])[queue]["delivery"] == AT_MOST_ONCE)

    async def _dead_letter(self, story: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, bool]:
        """Return the dead letter of a message, if any, and whether the dead letters could be read."""
        events = [event["kind"] for event in story["events"]]
        never = events and "DEAD_LETTERED" not in events and story["cut"] is None and not story["missing"]
        if never or story["now"] is not None or has_several(story):
            return None, True
        try:
            dead_letters = await in_time(self._namespace.dead_letters(story["queue"] or None, 1, {"id": [story["id"]]}))
        except MarqError:
            return None, False
        return (dead_letters[0] if dead_letters else None), True

    async def dead(self, query: Query) -> Data:
        queue = query.get("queue", "").strip() or None
        filters = read_filters({key: value for key, value in query.items() if value}, [])
        if queue is not None:
            await self._namespace.check_known(check_queue_name(queue))
        kinds = await in_time(self._namespace.kinds(queue, filters))
        return {
            "queue": queue or "",
            "shown": {name: query.get(name, "") for name in ("error", "reason", "minutes")},
            "dead_letters": sum(kind["dead_letters"] for kind in kinds),
            "kinds_in_all": len(kinds),
            "kinds": kinds[:MAX_KINDS],
            "read_at": self._namespace.dead_counts()[1],
            "tasks": (await self.tasks(query))["tasks"],
        }

    async def workers(self, query: Query) -> Data:
        statistics, groups, running = await asyncio.gather(
            self._namespace.statistics(), self._namespace.groups(), self._namespace.running({})
        )
        workers = statistics["workers"]
        versions = {version for worker in workers if (version := worker["process"]["version"]) is not None}
        return {
            "complete": statistics["complete"] and running["complete"],
            "versions": sorted(versions),
            "workers": workers,
            "running": running["calls"][:MAX_CALLS],
            "running_in_all": len(running["calls"]),
            "silent": running["silent"],
            "groups": groups,
        }

    async def health(self, query: Query) -> Data:
        statistics = await self._namespace.statistics()
        markers = await self._namespace.markers(statistics)
        return {
            "checks": rows_and_alarms.checks(statistics, markers, self._namespace.definitions()),
            "markers": markers,
            "configuration": self._namespace.configuration(),
        }

    async def history(self, query: Query) -> Data:
        return await self._namespace.history(query.get("queue", ""), query)

    async def tasks(self, query: Query) -> Data:
        return await self._namespace.tasks([task.told() for task in self._tasks.all()], query)

    async def task(self, query: Query, task: str) -> Data:
        return {"task": await self.task_of_any_worker(task)}

    async def task_of_any_worker(self, identity: str) -> Data:
        """Return a task. Raises NotThere if no responding worker knows it."""
        for task in (await self.tasks({}))["tasks"]:
            if task["id"] == identity:
                return dict(task)
        raise NotThere(
            f"no responding worker knows task {identity}: its worker has stopped, is not a tracker, or has dropped it."
            " Requests that it has made still take effect"
        )


def _of_queue(state: str) -> Sequence[str]:
    return ("send", "resume" if state == "paused" else "pause", "purge")


def _counts(row: Mapping[str, Any]) -> Data:
    """Return the number of a queue's messages in each state, by the values of ``state=``."""
    return {state: row["dead_letters" if state == "dead" else state] for state in _OF_STATE}


def _possible_in(state: str, messages: Sequence[Mapping[str, Any]], *, at_most_once: bool) -> Sequence[str]:
    """Return the actions for listed messages of a queue: none if no operator can release any of them."""
    if state != "in_flight":
        return _OF_STATE[state]
    states = [message.get("state") for message in messages] or [None]
    return _OF_STATE[state] if any(can_be_released(name, at_most_once=at_most_once) for name in states) else ()


def _possible(now: Mapping[str, Any], *, at_most_once: bool) -> Sequence[str]:
    """Return the actions for an open message of a queue."""
    if now["state"] not in HELD_STATES:
        return _OF_STATE["delayed"]
    return _OF_STATE["in_flight"] if can_be_released(now["state"], at_most_once=at_most_once) else ()


def _status(story: Mapping[str, Any], dead_letter: object, *, dead_letters_read: bool) -> str:
    """Return the status of a message in words; "unknown" if something that may have it could not be read."""
    if story["now"] is not None:
        state = story["now"]["state"]
        if state == State.WAITING_IN_ORDER.name.lower() and story["now"].get("due_in_seconds", 0) > BLOCKED_S:
            return "blocks its key until it is delivered now or cancelled"
        return _OPEN_STATUSES.get(state, "in flight" if state in HELD_STATES else state)
    if dead_letter is not None:
        return "dead letter"
    if has_several(story):
        return "several queues"
    if not (story["known"] and story["complete"] and dead_letters_read) or story["cut"] is not None:
        return "unknown"
    return status_after(story["events"], story["missing"])


def _is_open_in(now: Mapping[str, Any] | None, queue: str, state: str) -> bool:
    """Return whether an open message belongs to a queue, in a state that trackers list."""
    return (
        now is not None
        and now["queue"] == queue
        and now["state"] in [open_state.name.lower() for open_state in STATES[state]]
    )


def _range(query: Query) -> Query:
    """Return the part of a page's query that is about charts."""
    return {"range": query["range"]} if "range" in query else {}


def values(past: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the windows of a chart, newest first: the charts as a table."""
    rows = [
        {"time": time_s, **{name: series[index] for name, series in past["series"].items()}}
        for index, time_s in enumerate(past["times"])
    ]
    return [row for row in reversed(rows) if row["sent_per_second"] is not None]


def minutes(past: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the last sample of each minute, newest first: the charts as a table."""
    samples: dict[int, dict[str, Any]] = {}
    for index, time_s in enumerate(past["times"]):
        sample = {name: series[index] for name, series in past["series"].items()}
        if any(value is not None for value in sample.values()):
            samples[time_s // 60] = {"time": time_s, **sample}
    return [samples[minute] for minute in sorted(samples, reverse=True)][:_TABLE_MINUTES]
