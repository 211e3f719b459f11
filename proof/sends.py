"""Messages that were sent, and their records in the messages topics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proof.causes import Why
from proof.findings import Report
from proof.trail import Trail

Event = dict[str, Any]


@dataclass(slots=True, eq=False)
class Send:
    """One call of send; its outcome is unknown until its end is known."""

    message: str
    queue: str
    content: str
    numbers: list[int]
    outcome: str = "unknown"
    record: str = ""


class Sends:
    """All calls, by the sender's name for the message; a message that is sent again has several."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Send]] = {}
        self._open: dict[tuple[str, str], Send] = {}

    def take(self, event: Event, number: int) -> None:
        message, key = event["message"], (event["process"], event["message"])
        if event["type"] == "invoke":
            call = Send(message, event["queue"], event["content"], [number])
            self._calls.setdefault(message, []).append(call)
            self._open[key] = call
            return
        call = self._open.pop(key)
        call.numbers.append(number)
        call.outcome = event["type"]
        call.record = event.get("record", "")

    def finish(self, report: Report, trails: Mapping[str, Trail]) -> None:
        """Find the record of each call that succeeded, and the call of each record that began a message."""
        told: dict[str, Send] = {}
        untold: dict[tuple[str, str], list[Send]] = {}
        for calls in self._calls.values():
            report.sent += 1
            for call in calls:
                if call.outcome == "ok":
                    told[call.record] = call
                elif call.outcome == "unknown":
                    untold.setdefault((call.queue, call.content), []).append(call)
            report.accepted += any(call.outcome == "ok" for call in calls)
        records: Counter[str] = Counter()
        for trail in trails.values():
            if trail.id == trail.key:
                self._match(report, trail, told, untold, records)
        for record, call in told.items():
            if not trails[record].id if record in trails else True:
                report.lost += 1
                report.find("lost", f"{call.message}: its record {record} is missing", call.numbers)
        # Each is a message; for its user the second is a duplicate.
        if again := sum(count - 1 for count in records.values()):
            report.causes[int(Why.SENT_AGAIN)] += again

    def _match(
        self,
        report: Report,
        trail: Trail,
        told: Mapping[str, Send],
        untold: Mapping[tuple[str, str], list[Send]],
        records: Counter[str],
    ) -> None:
        call = told.get(trail.key)
        if call is None:
            candidates = untold.get((trail.queue, trail.content))
            if not candidates:
                report.find("from-nowhere", f"{trail.key} of {trail.queue}: it was not sent", trail.events)
                return
            call = candidates.pop()
        elif (call.queue, call.content) != (trail.queue, trail.content):
            text = f"{trail.key}: {trail.queue} {trail.content}, but sent {call.queue} {call.content}"
            report.find("fidelity", text, [*call.numbers, *trail.events])
        trail.events += call.numbers
        records[call.message] += 1
