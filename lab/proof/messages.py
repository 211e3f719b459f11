"""What must hold for messages as a whole: they were sent, copies and facts agree, and callers got true answers.

The log has the questions of callers that rescheduled or cancelled messages, and the answers. The answer to a RESCHEDULE
in time is DONE; to a CANCEL in time, the fact CANCELLED; to a late request, TOO_LATE or the fact that says where the
message went.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from lab.proof.evidence import Evidence, Question, SendCall, Told, Trail
from lab.proof.findings import Report, Why
from lab.proof.fold import CANCELLED, COPIED
from marq.wire.markers import ANY_QUEUE

DONE, TOO_LATE = "DONE", "TOO_LATE"

# --- sending ----------------------------------------------------------------------------------------------------------


def judge_sends(evidence: Evidence) -> None:
    """Find the record of each call that succeeded, and the call of each record that began a message."""
    report, told, untold = evidence.report, dict[str, SendCall](), defaultdict[tuple[str, str], list[SendCall]](list)
    for calls in evidence.calls.values():
        report.sent += 1
        report.accepted += any(call.outcome == "ok" for call in calls)
        for call in calls:
            if call.outcome == "unknown":
                untold[call.to, call.content].append(call)
            # Each call has a record of its own, even if the message is a duplicate.
            elif call.outcome == "ok" and (former := told.setdefault(call.record, call)) is not call:
                report.lost += 1
                text = f"its record {call.record} was told to the sender of {former}, too"
                report.find("lost", call, text, former)
    records: Counter[str] = Counter()
    for place, trails in evidence.places.items():
        if began := [trail for trail in trails if trail.began]:
            match = told.get(place) or _unanswered(began, untold)
            if match is None:
                report.find("from-nowhere", began[0], "it was not sent", *began)
            else:
                _compare(report, began, match)
                records[match.message] += not began[0].duplicate
    for record, call in told.items():
        if not any(trail.id for trail in evidence.places.get(record, ())):
            report.lost += 1
            report.find("lost", call, f"its record {record} is missing")
    _judge_order(evidence, told.values())
    # Each is a message; for its user the second is a duplicate.
    if again := sum(count - 1 for count in records.values() if count):
        report.causes[int(Why.SENT_AGAIN)] += again


def _unanswered(trails: Sequence[Trail], untold: dict[tuple[str, str], list[SendCall]]) -> SendCall | None:
    """Return a call of unknown outcome that may have written a record, and use it up."""
    for to in (trails[0].topic, *[trail.queue for trail in trails]):
        if calls := untold.get((to, trails[0].content)):
            return calls.pop()
    return None


def _compare(report: Report, trails: Sequence[Trail], call: SendCall) -> None:
    """Compare a call with its record, which began a message of each queue of its topic."""
    for trail in trails:
        if call.to not in (trail.topic, trail.queue) or call.content != trail.content:
            report.find("fidelity", trail, f"{trail.content}, but sent to {call.to}: {call.content}", call)
        trail.events += call.events


def _judge_order(evidence: Evidence, calls: Collection[SendCall]) -> None:
    """Judge that the records of an ordering key are in the order of their sender's calls."""
    newest: dict[tuple[str, str, str, str], Trail] = {}
    for call in sorted(calls, key=lambda call: call.events[0]):
        for trail in evidence.places.get(call.record, ()):
            before = newest.get(line := (call.process, trail.queue, trail.line, trail.source)) if trail.line else None
            if before is not None and before.offset >= trail.offset:
                evidence.report.find("misordered", trail, f"sent after {before} of its ordering key", before)
            elif trail.line:
                newest[line] = trail


# --- answers ----------------------------------------------------------------------------------------------------------


def judge_answers(report: Report, trail: Trail, trails: Sequence[Trail]) -> None:
    """Judge the answers in the log, and those that callers received; ``trails``: of the messages concerned."""
    for answer in trail.answers:
        if not _is_true(trail, answer, trails):
            asked = [question for question in trail.questions if question.holder == answer.holder]
            report.find("answered", trail, f"{answer.outcome} at {answer.offset}, questions: {asked}", *trails)
    for told in trail.told:
        if wrong := _wrong(trail, told, trails):
            report.find(wrong, trail, f"{told.kind} by {told.holder} was reported as {told.outcome}", *trails)


def _is_true(trail: Trail, answer: Told, trails: Sequence[Trail]) -> bool:
    """Whether an earlier question has this answer; of several messages, one that was in time counts."""

    def between(question: Question, offsets: Sequence[int]) -> bool:
        return any(question.offset < offset < answer.offset for offset in offsets)

    for question in trail.questions:
        if question.holder != answer.holder or question.offset >= answer.offset:
            continue
        own = [other for other in trails if other.queue == question.queue]
        if answer.outcome == DONE:
            # The log may have an ACK between the two, which the tracker had not read when it answered.
            left = between(question, [fact.offset for other in own for fact in other.facts])
            true = question.kind == "RESCHEDULE" and question.in_time and not left
        else:
            closed = [offset for other in own for offset, standing in other.changes if standing is None]
            true = not question.in_time or between(question, closed)
        if true:
            return True
    return False


def _wrong(trail: Trail, told: Told, trails: Sequence[Trail]) -> str:
    """Return the violated property, or "": the first answer in the log after the question decides.

    A caller reads the end of the log before it asks, so it may also use a fact from before its question.
    """
    if told.kind == "CANCEL" and told.outcome == DONE:
        cancelled = any({fact.kind for fact in other.facts} == {CANCELLED} for other in trails)
        return "" if cancelled else "cancelled"
    asked_at = min([question.offset for question in trail.questions if question.holder == told.holder], default=-1)
    outcomes = [(reply.offset, reply.outcome) for reply in trail.answers if reply.holder == told.holder]
    for fact in (fact for other in trails for fact in other.facts):
        done = told.kind == "CANCEL" and fact.kind == CANCELLED
        # Of the messages of several queues, one that was not in time decides nothing.
        if trail.queue != ANY_QUEUE or done:
            outcomes.append((fact.offset, DONE if done else TOO_LATE))
    before = [outcome for offset, outcome in outcomes if offset < asked_at]
    after = [outcome for offset, outcome in sorted(outcomes) if offset > asked_at]
    return "" if told.outcome in [*before, *after[:1]] else "answered"


# --- copies -----------------------------------------------------------------------------------------------------------


def judge_copies(report: Report, root: Trail, trails: Sequence[Trail]) -> None:
    """Judge that each copy has a fact, and each fact a copy, with the original content."""
    facts, copies, errors = Counter[int](), Counter[int](), defaultdict[int, set[str]](set)
    queues = {root.queue, *(trail.queue for trail in trails if trail.redriven)}
    for trail in trails:
        for fact in trail.facts[:1]:
            if fact.kind in COPIED:
                facts[fact.attempt] += 1
                released = fact.before if fact.cause == "RELEASED" else None
                errors[fact.attempt].add(released.text if released is not None else "")
    for trail in trails:
        if trail is root or trail.redriven:
            continue
        copies[trail.attempt] += trail.committed
        copied, sent = (trail.content, trail.first_sent_ms), (root.content, root.time_ms)
        if copied != sent:
            report.find("fidelity", trail, f"{copied}, {root}: {sent}", root)
        if trail.queue not in queues:
            report.find("misplaced", trail, f"a copy of {root}")
        told = errors.get(trail.attempt, {""})
        if trail.committed and not told & {"", trail.error}:
            report.find("fidelity", trail, f"error {trail.error!r}, one of {told} was given")
    if facts != +copies:
        report.find("transaction", root, f"facts of attempts {dict(facts)}, copies {dict(copies)}", *trails)


# --- deduplication ids ------------------------------------------------------------------------------------------------


def judge_duplicate(report: Report, trail: Trail) -> None:
    """Judge a message whose deduplication id was accepted before: it never leaves the log of markers."""
    report.deduplicated += 1
    judge_answers(report, trail, [trail])
    if trail.decisions or trail.facts:
        report.find("duplicate", trail, "it was delivered")


def judge_ids(evidence: Evidence) -> None:
    """Judge that one tracker decided about each deduplication id: no other knows which ids it has accepted."""
    logs_of: dict[tuple[str, str], str] = {}
    for name, log in evidence.logs.items():
        for own_id in log.ids:
            if (other := logs_of.setdefault(own_id, name)) != name:
                evidence.report.find("duplicate", f"deduplication id {own_id}", f"in {other} and {name}")
