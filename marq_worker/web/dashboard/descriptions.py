"""Messages, dead letters and partitions as pages and programs show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marq.client.dead_letter import DeadLetter, time_of
from marq_worker.readable import why_dead
from marq_worker.redaction import Redaction
from marq_worker.web.dashboard.dead_letters import KindOfError
from marq_worker.web.message_listing import SHOWN_BYTES


def consumer_of(message: Mapping[str, Any], members: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    """Return the member of the group that holds a message; None if it has left, or reports no holders."""
    for member in members:
        if message.get("holder") in member["holders"]:
            names = consumer_names(members)
            return {name: member[name] for name in ("id", "client_id", "host")} | {"name": names[member["id"]]}
    return None


def consumer_names(members: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the names of a group's members by id: the instance id, or else client and host, and the process if several
    members have these in common."""
    places = [(member["client_id"], member["host"]) for member in members]
    return {
        member["id"]: member["instance_id"]
        or f"{place[0]} on {place[1]}" + (f" (process {member['pid']})" if places.count(place) > 1 else "")
        for member, place in zip(members, places, strict=True)
    }


def names_of_holders(members: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the names of a group's members by the holders of their messages, as the events of a message have them."""
    names = consumer_names(members)
    return {f"{holder:016x}": names[member["id"]] for member in members for holder in member["holders"]}


def dead_letter_described(dead_letter: DeadLetter, redaction: Redaction) -> dict[str, Any]:
    return {
        "id": dead_letter.id,
        "queue": dead_letter.queue,
        "why": why_dead(dead_letter.reason, dead_letter.last_error),
        "reason": dead_letter.reason,
        "error": dead_letter.last_error,
        "traceback": redaction.traceback(dead_letter.traceback),
        "attempt": dead_letter.attempts,
        "sent": dead_letter.first_sent.isoformat(timespec="milliseconds"),
        "dead_lettered_at": dead_letter.dead_lettered_at.isoformat(timespec="milliseconds"),
        "origin": dead_letter.origin,
        "bytes": len(dead_letter.body),
        "value": redaction.text(dead_letter.body, SHOWN_BYTES),
        "headers": redaction.headers(dead_letter.headers.items(), SHOWN_BYTES),
    }


def kind_described(kind: KindOfError, sample: Mapping[str, Any] | None) -> dict[str, Any]:
    first, last = (time_of(spot.dead_lettered_at_ms) for spot in (kind.oldest, kind.newest))
    return {
        "queue": kind.group.queue,
        "kind": kind.group.reason,
        "dead_letters": kind.dead_letters,
        "first_dead_lettered_at": first.isoformat(timespec="seconds"),
        "last_dead_lettered_at": last.isoformat(timespec="seconds"),
        "sample": sample,
    }


def partitions(
    topic: str,
    ends: Mapping[int, int],
    committed: Mapping[int, int],
    sources: Sequence[Mapping[str, Any]],
    members: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the partitions from which a queue is read.

    ``lag``: records that the group has not read, of any queue; ``gap``: from the first open message to the committed
    offset.
    """
    opened = {source["partition"]: source for source in sources if source["topic"] == topic}
    readers = {number: member for member in members for number in member["partitions"].get(topic, ())}
    return [_partition(number, end, committed.get(number), opened.get(number), readers.get(number))
            for number, end in sorted(ends.items())]  # fmt: skip


def _partition(
    number: int, end: int, committed: int | None, opened: Mapping[str, Any] | None, reader: Mapping[str, Any] | None
) -> dict[str, Any]:
    first = None if opened is None else opened["first_open"]
    return {
        "partition": number,
        "consumer": None if reader is None else reader["client_id"],
        "host": None if reader is None else reader["host"],
        "end": end,
        "committed": committed,
        "lag": None if committed is None else max(0, end - committed),
        "first_open": first,
        "gap": None if first is None or committed is None else max(0, committed - first),
        "in_flight": 0 if opened is None else opened["in_flight"],
        "waiting": 0 if opened is None else opened["waiting"],
        "oldest_seconds": None if opened is None else opened["oldest_seconds"],
    }


def open_elsewhere(topic: str, sources: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of open messages that are not records of the topic: delayed by senders, or redriven."""
    return sum(source["in_flight"] + source["waiting"] for source in sources if source["topic"] != topic)


def markers_partitions(workers: Sequence[Mapping[str, Any]], ends: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return the markers partitions with their owners; ``owner`` is None if no worker reported one."""
    owned = {part["partition"]: (worker["url"], part) for worker in workers for part in worker["partitions"]}
    rows = []
    for number in sorted({*ends, *owned}):
        url, part = owned.get(number, (None, {}))
        end, applied = ends.get(number), part.get("applied_offset")
        lag = None if end is None or applied is None else max(0, end - applied - 1)
        rows.append({**part, "partition": number, "owner": url, "end": end, "lag": lag})
    return rows
