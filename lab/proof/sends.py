"""Messages that were sent, and their records in the messages topics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.proof.causes import Why
from lab.proof.evidence_types import Trail, events_of
from lab.proof.findings import Report

Event = dict[str, Any]


@dataclass(slots=True, eq=False)
class Send:
    """One call of send; its outcome is unknown until its end is known."""

    process: str
    message: str
    #: The queue, or the topic that queues name.
    to: str
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
            to = event.get("topic", event["queue"])
            call = Send(event["process"], message, to, event["content"], [number])
            self._calls.setdefault(message, []).append(call)
            self._open[key] = call
            return
        call = self._open.pop(key)
        call.numbers.append(number)
        call.outcome = event["type"]
        call.record = event.get("record", "")

    def finish(self, report: Report, places: Mapping[str, Sequence[Trail]]) -> None:
        """Find the record of each call that succeeded, and the call of each record that began a message."""
        told: dict[str, Send] = {}
        untold: dict[tuple[str, str], list[Send]] = {}
        for calls in self._calls.values():
            report.sent += 1
            for call in calls:
                if call.outcome == "ok":
                    _tell(report, told, call)
                elif call.outcome == "unknown":
                    untold.setdefault((call.to, call.content), []).append(call)
            report.accepted += any(call.outcome == "ok" for call in calls)
        records: Counter[str] = Counter()
        for place, trails in places.items():
            began = [trail for trail in trails if trail.began]
            if began:
                self._match(report, began, told.get(place), untold, records)
        for record, call in told.items():
            if not any(trail.id for trail in places.get(record, ())):
                report.lost += 1
                report.find("lost", f"{call.message}: its record {record} is missing", call.numbers)
        _judge_order(report, places, told.values())
        # Each is a message; for its user the second is a duplicate.
        if again := sum(count - 1 for count in records.values() if count):
            report.causes[int(Why.SENT_AGAIN)] += again

    def _match(
        self,
        report: Report,
        trails: Sequence[Trail],
        call: Send | None,
        untold: Mapping[tuple[str, str], list[Send]],
        records: Counter[str],
    ) -> None:
        """Find the call of a record, which began a message of each queue of its topic."""
        topic = trails[0].source.rpartition("/")[0]
        if call is None:
            to = (topic, *[trail.queue for trail in trails])
            calls = next((calls for place in to if (calls := untold.get((place, trails[0].content)))), None)
            if not calls:
                report.find("from-nowhere", f"{trails[0]}: it was not sent", events_of(trails))
                return
            call = calls.pop()
        for trail in trails:
            if call.to not in (topic, trail.queue) or call.content != trail.content:
                text = f"{trail}: {trail.content}, but sent to {call.to}: {call.content}"
                report.find("fidelity", text, [*call.numbers, *trail.events])
            trail.events += call.numbers
        records[call.message] += not trails[0].duplicate


def _tell(report: Report, told: dict[str, Send], call: Send) -> None:
    """Note the record that a call was told; each call has a record of its own, even if the message is a duplicate."""
    former = told.setdefault(call.record, call)
    if former is not call:
        report.lost += 1
        text = f"{call.message}: its record {call.record} was told to the sender of {former.message}, too"
        report.find("lost", text, [*former.numbers, *call.numbers])


def _judge_order(report: Report, places: Mapping[str, Sequence[Trail]], calls: Iterable[Send]) -> None:
    """Judge that the records of an ordering key are in the order of their sender's calls."""
    newest: dict[tuple[str, str, str, str], Trail] = {}
    for call in sorted(calls, key=lambda call: call.numbers[0]):
        for trail in places.get(call.record, ()):
            if not trail.line:
                continue
            line = call.process, trail.queue, trail.line, trail.source
            before = newest.get(line)
            if before is None or before.offset < trail.offset:
                newest[line] = trail
            else:
                text = f"{trail}: sent after {before} of its ordering key"
                report.find("misordered", text, [*before.events, *trail.events])
