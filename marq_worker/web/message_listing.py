"""Open messages and schedules of this worker's partitions, for pages, commands and programs."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from marq.client.uptime import uptime_ms
from marq.core.storage.rows import HELD, WAITING, LeaseRow, State
from marq.kafka.inspector import Peeked
from marq.settings.durations import moment_of
from marq.settings.queue import QueueSettings
from marq.settings.schedule_definitions import Schedule
from marq.wire.error_texts import error_of, traceback_of
from marq.wire.errors import ConfigError
from marq.wire.markers import BLOCKED_MS, Payload, Source
from marq.wire.record_headers import message_type, origin, previous_runs_s, previous_time_s, record_id
from marq_worker.owner.ownership import Ownership
from marq_worker.owner.tracker_owners import TrackerOwners
from marq_worker.redaction import Redaction

#: States that a query can ask for.
STATES: Mapping[str, tuple[State, ...]] = {"in_flight": HELD, "delayed": WAITING}
#: States of messages that no operator can release, because the consumer would not notice. A dispatched message would be
#: delivered twice. An ordered message is delivered again only by that consumer.
_UNRELEASABLE = (State.DISPATCHED, State.LEASED_IN_ORDER)
UNRELEASABLE = tuple(state.name.lower() for state in _UNRELEASABLE)
#: A message that waits for longer blocks its ordering key until an operator acts; no backoff is as long.
BLOCKED_S = BLOCKED_MS / 2 / 1000
#: Messages of one answer: maximum and default.
MAX_MESSAGES, DEFAULT_MESSAGES = 1_000, 100
#: Maximum if the query asks only for places.
MAX_PLACES = 10_000
#: Bytes of a value, or of a header's, to show.
SHOWN_BYTES = 1_024
#: Largest numbers in a query: deliveries, and minutes (ten years).
MAX_ATTEMPTS, MAX_MINUTES = 1_000_000, 5_270_400
_MAX_DIGITS = 12
#: Messages to process before yielding to other tasks: some milliseconds.
_AT_ONCE = 20_000


def can_be_released(state: str | None, *, at_most_once: bool) -> bool:
    """Return whether an operator can release a message in this state, of a queue that delivers at most once or not.

    The consumer would not notice: it may dispatch the message later, and the redelivery would be a second delivery.
    """
    return not at_most_once and state not in UNRELEASABLE


@dataclass(frozen=True, slots=True)
class Choice:
    """The first ``limit`` messages of a queue by due time, due before ``until_ms`` if set.

    ``error``: part of the error or reason of the release, case-folded; ``attempts``, ``older_ms``: minimum number of
    deliveries and minimum age; ``places``: return only places, of messages that an action can affect.
    """

    queue: str
    states: tuple[State, ...]
    limit: int = DEFAULT_MESSAGES
    until_ms: int | None = None
    error: str = ""
    attempts: int = 1
    older_ms: int = 0
    places: bool = False

    def fits(self, lease: LeaseRow, now_ms: int) -> bool:
        return (
            lease.queue == self.queue
            and lease.state in self.states
            and not (self.places and lease.state in _UNRELEASABLE)
            and (self.until_ms is None or lease.due_ms < self.until_ms)
            and lease.attempt >= self.attempts
            and (not self.older_ms or now_ms - lease.since_ms >= self.older_ms)
            and (not self.error or self.error in error_of(lease.text).casefold())
        )


def read_choice(queue: str, query: Mapping[str, str]) -> Choice:
    state = query.get("state", "delayed")
    if state not in STATES:
        raise ConfigError(f"state={state}: expected one of {', '.join(STATES)}")
    places = query.get("only") == "places"
    limit = read_number(query, "limit", DEFAULT_MESSAGES, MAX_PLACES if places else MAX_MESSAGES)
    until = query.get("until")
    until_ms = None if until is None else _read_moment(until)
    return Choice(
        queue,
        STATES[state],
        limit,
        until_ms,
        query.get("error", "").casefold(),
        read_number(query, "attempts", 1, MAX_ATTEMPTS),
        read_number(query, "minutes", 0, MAX_MINUTES, least=0) * 60_000,
        places,
    )


def read_number(query: Mapping[str, str], name: str, default: int, most: int, least: int = 1) -> int:
    text = query.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS or not least <= int(text) <= most:
        raise ConfigError(f"{name}={text}: expected a whole number from {least} to {most}")
    return int(text)


def _read_moment(text: str) -> int:
    moment = moment_of(text)
    if moment is None:
        raise ConfigError(f"until={text}: expected a time with a time zone, as in 2030-01-31T08:00:00+00:00")
    return int(moment.timestamp() * 1000)


async def open_messages(owners: TrackerOwners, choice: Choice, redaction: Redaction) -> list[dict[str, Any]]:
    """Return the messages of this worker's partitions, in order of their due times."""
    first: list[tuple[int, Source, int, LeaseRow, Ownership]] = []
    for owner in list(owners.owned.values()):
        now_ms = owner.tracker.estimate_ms(uptime_ms())
        for source, some in in_pieces(owner):
            fitting = [
                (lease.due_ms, source, number, lease, owner) for number, lease in some if choice.fits(lease, now_ms)
            ]
            first = heapq.nsmallest(choice.limit, [*first, *fitting], key=lambda message: message[:3])
            await asyncio.sleep(0)
    if choice.places:
        return [{"place": record_id(source, number), "due": moment(due_ms)} for due_ms, source, number, *_ in first]
    shown = []
    for message in first:
        shown.append(described(*message, redaction))
        await asyncio.sleep(0)
    return shown


def open_message(
    owners: TrackerOwners, queue: str, source: Source, number: int, redaction: Redaction
) -> dict[str, Any] | None:
    """Return one open message, of ANY_QUEUE or of one queue; None if this worker does not own it.

    Without the id of its topic's incarnation, the source stands for any incarnation.
    """
    for owner in owners.owned.values():
        book = owner.tracker.book
        for place in (source, *book.incarnations(source)):
            lease = book.open_in(queue, place).get(number)
            if lease is not None:
                return described(lease.due_ms, place, number, lease, owner, redaction)
    return None


async def sources_of(owners: TrackerOwners, queue: str) -> list[dict[str, Any]]:
    """Return the partitions of a queue's open messages, those of this worker, without ids of incarnations.

    For each source: the numbers of messages in flight and waiting, the offset of the first open message, and the age
    of the oldest in seconds.
    """
    by_source: dict[Source, dict[str, Any]] = {}
    for owner in list(owners.owned.values()):
        now_ms = owner.tracker.estimate_ms(uptime_ms())
        for source, some in in_pieces(owner):
            ours = [(number, lease) for number, lease in some if lease.queue == queue]
            if ours:
                _add_source(by_source, source.log, ours, now_ms)
            await asyncio.sleep(0)
    return list(by_source.values())


def _add_source(
    by_source: dict[Source, dict[str, Any]], source: Source, some: Sequence[tuple[int, LeaseRow]], now_ms: int
) -> None:
    first = min(number for number, _ in some)
    held = sum(lease.state in HELD for _, lease in some)
    age_s = max(0.0, (now_ms - min(lease.since_ms for _, lease in some)) / 1000)
    row = by_source.setdefault(
        source,
        {"topic": source.topic, "partition": source.partition, "first_open": first, "in_flight": 0, "waiting": 0,
         "oldest_seconds": 0.0},
    )  # fmt: skip
    row["first_open"] = min(row["first_open"], first)
    row["in_flight"] += held
    row["waiting"] += len(some) - held
    row["oldest_seconds"] = max(row["oldest_seconds"], age_s)


def in_pieces(owner: Ownership) -> Iterator[tuple[Source, list[tuple[int, LeaseRow]]]]:
    """Yield the open messages of a partition, in pieces of one source each."""
    for source, leases in owner.tracker.book.leases_by_source():
        for start in range(0, len(leases), _AT_ONCE):
            yield source, leases[start : start + _AT_ONCE]


def described(
    due_ms: int, source: Source, number: int, lease: LeaseRow, owner: Ownership, redaction: Redaction
) -> dict[str, Any]:
    """Return an open message as pages and programs show it, with its payload if that is known."""
    now_ms = owner.tracker.estimate_ms(uptime_ms())
    payload = owner.engine.payload(lease.queue, source, number)
    place = record_id(source, number)
    shown: dict[str, Any] = {
        "id": place,
        "place": place,
        "queue": lease.queue,
        "state": lease.state.name.lower(),
        "due": moment(due_ms),
        # A message that is slightly overdue is due now: the owner sends it after its next TICK.
        "due_in_seconds": max(0.0, (due_ms - now_ms) / 1000),
        "since": moment(lease.since_ms),
        "attempt": lease.attempt,
        "error": error_of(lease.text),
        "traceback": redaction.traceback(traceback_of(lease.text)),
        # A message that waits in its place keeps its last holder.
        "holder": lease.holder if lease.state in HELD else 0,
    }
    # Until a lease outlives a flush, the payload may be only in the message's record.
    return shown if payload is None or payload.left else {**shown, **_content(source, number, payload, redaction)}


def _content(source: Source, number: int, payload: Payload, redaction: Redaction) -> dict[str, Any]:
    past = origin(source, number, payload.timestamp_ms, payload.headers)
    return {
        "id": past.id,
        "type": message_type(payload.headers),
        "sent": moment(past.first_sent_ms),
        "bytes": len(payload.value or b""),
        "value": redaction.text(payload.value, SHOWN_BYTES),
        "headers": redaction.headers(payload.headers, SHOWN_BYTES),
    }


def moment(ms: int) -> str:
    """Return a time of the log in ISO 8601, UTC."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        # Beyond the last date of the calendar.
        return "never"


def waiting_described(message: Peeked, settings: QueueSettings, redaction: Redaction) -> dict[str, Any]:
    """Return a waiting message as pages and commands show it."""
    row, due_ms = message.row, message.deliver_at_ms(settings)
    return {
        "id": message.id,
        "place": record_id(message.source, row.offset),
        "type": message_type(row.headers),
        "sent": moment(message.sent_ms),
        "not_before": None if due_ms is None else moment(due_ms),
        "attempt": message.attempt,
        "bytes": len(row.value or b""),
        "value": redaction.text(row.value, SHOWN_BYTES),
        "headers": redaction.headers(message.headers, SHOWN_BYTES),
    }


def described_schedules(owners: Iterable[Ownership]) -> list[dict[str, Any]]:
    """Return the schedules whose home partitions this worker owns."""
    return [
        _schedule(owner, schedule)
        for owner in owners
        if owner.state == "owner"
        for schedule in owner.engine.planner.schedules()
    ]


def _schedule(owner: Ownership, schedule: Schedule) -> dict[str, Any]:
    planner, book = owner.engine.planner, owner.tracker.book
    source = planner.source(schedule)
    opened, last_s = book.open_in(schedule.queue, source), book.last_number(source)
    runs_s = [] if last_s is None else [last_s]
    if opened:
        payload = owner.engine.payload(schedule.queue, source, min(opened))
        last_s, runs_s = previous_time_s(payload), previous_runs_s(payload)
    return {
        "name": schedule.name,
        "queue": schedule.queue,
        "cron": schedule.cron,
        "timezone": schedule.timezone,
        "enabled": schedule.enabled,
        "catch_up": schedule.catch_up,
        "next": _moment_or_none(min([lease.due_ms for lease in opened.values()], default=None)),
        "last": _moment_or_none(None if last_s is None else last_s * 1000),
        # A time before the last change has a message of another source.
        "last_id": record_id(source, last_s) if last_s in runs_s else None,
        "runs": [{"time": _moment_or_none(run_s * 1000), "id": record_id(source, run_s)} for run_s in runs_s],
        "problem": planner.problem(schedule) or owner.times.problems.get(schedule.name, ""),
    }


def _moment_or_none(ms: int | None) -> str | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat()
