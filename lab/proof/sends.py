"""Whether the messages that were sent have their records in the messages topics, and no others have any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lab.proof.causes import Why
from lab.proof.evidence import Evidence, SendCall, Trail, events_of
from lab.proof.findings import Report


def judge_sends(evidence: Evidence) -> None:
    """Find the record of each call that succeeded, and the call of each record that began a message."""
    report, places = evidence.report, evidence.places
    told: dict[str, SendCall] = {}
    untold: dict[tuple[str, str], list[SendCall]] = {}
    for calls in evidence.calls.values():
        report.sent += 1
        for call in calls:
            if call.outcome == "ok":
                _tell(report, told, call)
            elif call.outcome == "unknown":
                untold.setdefault((call.to, call.content), []).append(call)
        report.accepted += any(call.outcome == "ok" for call in calls)
    records: Counter[str] = Counter()
    for place, trails in places.items():
        if began := [trail for trail in trails if trail.began]:
            match = told.get(place) or _unanswered(began, untold)
            if match is None:
                report.find("from-nowhere", f"{began[0]}: it was not sent", events_of(began))
            else:
                _compare(report, began, match)
                records[match.message] += not began[0].duplicate
    for record, call in told.items():
        if not any(trail.id for trail in places.get(record, ())):
            report.lost += 1
            report.find("lost", f"{call.message}: its record {record} is missing", call.numbers)
    _judge_order(evidence, list(told.values()))
    # Each is a message; for its user the second is a duplicate.
    if again := sum(count - 1 for count in records.values() if count):
        report.causes[int(Why.SENT_AGAIN)] += again


def _tell(report: Report, told: dict[str, SendCall], call: SendCall) -> None:
    """Note the record that a call was told; each call has a record of its own, even if the message is a duplicate."""
    former = told.setdefault(call.record, call)
    if former is not call:
        report.lost += 1
        text = f"{call.message}: its record {call.record} was told to the sender of {former.message}, too"
        report.find("lost", text, [*former.numbers, *call.numbers])


def _unanswered(trails: Sequence[Trail], untold: dict[tuple[str, str], list[SendCall]]) -> SendCall | None:
    """Return a call of unknown outcome that may have written a record, and use it up."""
    for to in (_topic(trails), *[trail.queue for trail in trails]):
        if calls := untold.get((to, trails[0].content)):
            return calls.pop()
    return None


def _compare(report: Report, trails: Sequence[Trail], call: SendCall) -> None:
    """Compare a call with its record, which began a message of each queue of its topic."""
    for trail in trails:
        if call.to not in (_topic(trails), trail.queue) or call.content != trail.content:
            text = f"{trail}: {trail.content}, but sent to {call.to}: {call.content}"
            report.find("fidelity", text, [*call.numbers, *trail.events])
        trail.events += call.numbers


def _topic(trails: Sequence[Trail]) -> str:
    return trails[0].source.rpartition("/")[0]


def _judge_order(evidence: Evidence, calls: list[SendCall]) -> None:
    """Judge that the records of an ordering key are in the order of their sender's calls."""
    newest: dict[tuple[str, str, str, str], Trail] = {}
    for call in sorted(calls, key=lambda call: call.numbers[0]):
        for trail in evidence.places.get(call.record, ()):
            if not trail.line:
                continue
            line = call.process, trail.queue, trail.line, trail.source
            before = newest.get(line)
            if before is None or before.offset < trail.offset:
                newest[line] = trail
            else:
                text = f"{trail}: sent after {before} of its ordering key"
                evidence.report.find("misordered", text, [*before.events, *trail.events])
