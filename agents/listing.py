"""The open messages of one queue, as the partitions of this worker know them: for people and programs that look."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agents.ownership import Ownership
from agents.tracker import TrackerOwners
from marq.core.copies import origin, record_id
from marq.core.errors import ConfigError
from marq.core.markers import Payload, Source
from marq.core.names import RESERVED_HEADER
from marq.core.rows import HELD, WAITING, Lease, State

#: What can be asked for, and which messages that is.
STATES: Mapping[str, tuple[State, ...]] = {"in_flight": HELD, "delayed": WAITING}
#: Messages of one answer at the most, and how many there are when nobody says.
MAX_MESSAGES, DEFAULT_MESSAGES = 1_000, 100
#: Bytes of a value, or of a header's, that are shown.
SHOWN_BYTES = 1_024
#: Messages that are looked at without giving way to others: some milliseconds.
_AT_ONCE = 20_000


@dataclass(frozen=True, slots=True)
class Choice:
    """Which messages of a queue: the first ``limit`` by due time, due before ``until_ms`` if that is given."""

    queue: str
    states: tuple[State, ...]
    limit: int = DEFAULT_MESSAGES
    until_ms: int | None = None

    def fits(self, lease: Lease) -> bool:
        """Whether a message is one of those, as far as its lease says."""
        return (
            lease.queue == self.queue
            and lease.state in self.states
            and (self.until_ms is None or lease.due_ms < self.until_ms)
        )


def read_choice(queue: str, query: Mapping[str, str]) -> Choice:
    """Return what an address asks for.

    Raises:
        ConfigError: a parameter is not allowed.
    """
    state = query.get("state", "delayed")
    if state not in STATES:
        raise ConfigError(f"state={state}: expected one of {', '.join(STATES)}")
    limit = query.get("limit", str(DEFAULT_MESSAGES))
    if not limit.isascii() or not limit.isdigit() or not 0 < int(limit) <= MAX_MESSAGES:
        raise ConfigError(f"limit={limit}: expected a whole number from 1 to {MAX_MESSAGES}")
    until = query.get("until")
    return Choice(queue, STATES[state], int(limit), None if until is None else _read_moment(until))


def _read_moment(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ConfigError(f"until={text}: expected a moment with a time zone, as in 2030-01-31T08:00:00+00:00")
    return int(moment.timestamp() * 1000)


async def open_messages(owners: TrackerOwners, choice: Choice) -> list[dict[str, Any]]:
    """Return the messages of this worker's partitions, the first due first."""
    found: list[tuple[int, Source, int, Lease, Ownership]] = []
    for owner in list(owners.owned.values()):
        for source, some in _in_pieces(owner):
            fitting = [(lease.due_ms, source, number, lease, owner) for number, lease in some if choice.fits(lease)]
            found = heapq.nsmallest(choice.limit, [*found, *fitting], key=lambda each: each[:3])
            await asyncio.sleep(0)
    return [_described(*each) for each in found]


def _in_pieces(owner: Ownership) -> Iterator[tuple[Source, list[tuple[int, Lease]]]]:
    for source, leases in owner.tracker.book.leases_by_source():
        for start in range(0, len(leases), _AT_ONCE):
            yield source, leases[start : start + _AT_ONCE]


def _described(due_ms: int, source: Source, number: int, lease: Lease, owner: Ownership) -> dict[str, Any]:
    now_ms = owner.tracker.estimate_ms(int(time.monotonic() * 1000))
    payload = owner.payload(source, number)
    place = record_id(source, number)
    shown: dict[str, Any] = {
        "id": place,
        "place": place,
        "queue": lease.queue,
        "state": lease.state.name.lower(),
        "due": _moment(due_ms),
        "due_in_seconds": (due_ms - now_ms) / 1000,
        "since": _moment(lease.since_ms),
        "attempt": lease.attempt,
        "error": lease.text,
    }
    return shown if payload is None else {**shown, **_content(source, number, payload)}


def _content(source: Source, number: int, payload: Payload) -> dict[str, Any]:
    past = origin(source, number, payload.timestamp_ms, payload.headers)
    return {
        "id": past.id,
        "sent": _moment(past.first_sent_ms),
        "bytes": len(payload.value or b""),
        "value": _text(payload.value),
        "headers": {name: _text(value) for name, value in payload.headers if not name.startswith(RESERVED_HEADER)},
    }


def _text(value: bytes | None) -> str | None:
    """Return the beginning of a value, as far as it is text."""
    return None if value is None else value[:SHOWN_BYTES].decode("utf-8", "replace")


def _moment(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        # Further off than a calendar goes.
        return "never"
