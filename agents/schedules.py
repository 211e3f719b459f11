"""The schedules of one markers partition: what its owner writes for them, and what is told of them to people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from agents.surroundings import Surroundings
from marq.core.fires import Fire
from marq.core.markers import Batch, Payload
from marq.core.names import PREVIOUS_HEADER
from marq.core.planner import Planner
from marq.core.schedules import Schedule
from marq.core.tracker import Tracker
from marq.cron import Times

if TYPE_CHECKING:
    from agents.ownership import Ownership


class Scheduling:
    """Plans for the schedules of one partition, one plan at a time."""

    def __init__(self, partition: int, around: Surroundings) -> None:
        self.times = Times()
        self.planner = Planner(
            partition, around.markers_partitions, around.schedules, self.times, around.max_message_bytes
        )
        #: The offset of the last marker that was written for a plan: the next one is made when that has been read.
        self._written = -1

    def plan(self, tracker: Tracker, monotonic_ms: int) -> list[Batch]:
        """Return what is to be written now, in one transaction."""
        return self.planner.plan(tracker, monotonic_ms) if tracker.book.applied >= self._written else []

    def has_to_plan(self, tracker: Tracker) -> bool:
        """Whether there may be something to write now."""
        return tracker.book.applied >= self._written and self.planner.has_to_plan(tracker)

    def follow(self, tracker: Tracker, fires: Sequence[Fire], monotonic_ms: int) -> Sequence[Batch]:
        """Return what follows these messages, to be written in one transaction with them."""
        return self.planner.follow(tracker, fires, monotonic_ms)

    def written(self, offset: int) -> None:
        """Note that a plan was written, up to this offset."""
        self._written = offset


def described(owners: Iterable[Ownership]) -> list[dict[str, Any]]:
    """Return the schedules whose homes are partitions of this worker, for programs."""
    return [
        _described(owner, schedule)
        for owner in owners
        if owner.state == "owner"
        for schedule in owner.scheduling.planner.schedules()
    ]


def _described(owner: Ownership, schedule: Schedule) -> dict[str, Any]:
    scheduling, book = owner.scheduling, owner.tracker.book
    source = scheduling.planner.source(schedule)
    opened, last_s = book.open_in(source), book.last_number(source)
    if opened:
        last_s = _previous(owner.payload(source, min(opened)))
    return {
        "name": schedule.name,
        "queue": schedule.queue,
        "cron": schedule.cron,
        "timezone": schedule.timezone,
        "enabled": schedule.enabled,
        "catch_up": schedule.catch_up,
        "next": _moment(min([lease.due_ms for lease in opened.values()], default=None)),
        "last": _moment(None if last_s is None else last_s * 1000),
        "problem": scheduling.planner.problem(schedule) or scheduling.times.problems.get(schedule.name, ""),
    }


def _previous(payload: Payload | None) -> int | None:
    found = dict(payload.headers).get(PREVIOUS_HEADER) if payload is not None else None
    return None if found is None else int(found)


def _moment(ms: int | None) -> str | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat()
