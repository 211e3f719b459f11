"""Whether copies and their facts agree, and whether callers that rescheduled or cancelled messages got true answers.

The log has the questions and the answers. The answer to a RESCHEDULE in time is DONE; to a CANCEL in time, the fact
CANCELLED; to a late request, TOO_LATE or the fact that says where the message went.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from lab.proof.evidence import MarkersLog, Question, Told, Trail, events_of
from lab.proof.findings import Report
from lab.proof.fold import CANCELLED, COPIED
from marq.wire.markers import ANY_QUEUE

DONE, TOO_LATE = "DONE", "TOO_LATE"


def judge_answers(report: Report, trail: Trail, trails: Sequence[Trail]) -> None:
    """Judge the answers in the log, and those that callers received; ``trails``: of the messages concerned."""
    for answer in trail.answers:
        if not _is_true(trail, answer, trails):
            text = f"{trail}: {answer.outcome} at {answer.offset}, questions: {_asked(trail, answer.holder)}"
            report.find("answered", text, events_of(trails))
    for told in trail.told:
        wrong = _wrong(trail, told, trails)
        if wrong:
            report.find(
                wrong, f"{trail}: {told.kind} by {told.holder} was reported as {told.outcome}", events_of(trails)
            )


def judge_duplicate(report: Report, trail: Trail) -> None:
    """Judge a message whose deduplication id was accepted before: it never leaves the log of markers."""
    report.deduplicated += 1
    judge_answers(report, trail, [trail])
    if trail.decisions or trail.facts:
        report.find("duplicate", f"{trail}: it was delivered", trail.events)


def judge_ids(report: Report, logs: Mapping[str, MarkersLog]) -> None:
    """Judge that one tracker decided about each deduplication id: no other knows which ids it has accepted."""
    logs_of: dict[tuple[str, str], str] = {}
    for name, log in logs.items():
        for own_id in log.ids:
            if (other := logs_of.setdefault(own_id, name)) != name:
                report.find("duplicate", f"deduplication id {own_id} in {other} and {name}")


def _asked(trail: Trail, holder: str) -> list[str]:
    return [
        f"{question.kind} at {question.offset}, in time: {question.in_time}"
        for question in trail.questions
        if question.holder == holder
    ]


def _is_true(trail: Trail, answer: Told, trails: Sequence[Trail]) -> bool:
    """Whether an earlier question has this answer; of several messages, one that was in time counts."""
    before = [
        question for question in trail.questions if question.holder == answer.holder and question.offset < answer.offset
    ]
    if answer.outcome == DONE:
        # The log may have an ACK between the two, which the tracker had not read when it answered.
        return any(
            question.kind == "RESCHEDULE" and question.in_time and not _left(question, answer, trails)
            for question in before
        )
    return any(not question.in_time or _closed(question, answer, trails) for question in before)


def _left(question: Question, answer: Told, trails: Sequence[Trail]) -> bool:
    facts = (fact for trail in trails if trail.queue == question.queue for fact in trail.facts)
    return any(question.offset < fact.offset < answer.offset for fact in facts)


def _closed(question: Question, answer: Told, trails: Sequence[Trail]) -> bool:
    changes = (change for trail in trails if trail.queue == question.queue for change in trail.changes)
    return any(question.offset < offset < answer.offset and standing is None for offset, standing in changes)


def _wrong(trail: Trail, told: Told, trails: Sequence[Trail]) -> str:
    """Return the violated property, or "": the first answer in the log after the question decides.

    A caller reads the end of the log before it asks, so it may also use a fact from before its question.
    """
    facts = [fact for copy in trails for fact in copy.facts]
    cancelled = any(copy.facts and {fact.kind for fact in copy.facts} == {CANCELLED} for copy in trails)
    if told.kind == "CANCEL" and told.outcome == DONE:
        return "" if cancelled else "cancelled"
    asked_at = min([question.offset for question in trail.questions if question.holder == told.holder], default=-1)
    outcomes = [(reply.offset, reply.outcome) for reply in trail.answers if reply.holder == told.holder]
    for fact in facts:
        done = told.kind == "CANCEL" and fact.kind == CANCELLED
        # Of the messages of several queues, one that was not in time decides nothing.
        if trail.queue == ANY_QUEUE and not done:
            continue
        outcomes.append((fact.offset, DONE if done else TOO_LATE))
    before = [outcome for offset, outcome in outcomes if offset < asked_at]
    after = [outcome for offset, outcome in sorted(outcomes) if offset > asked_at]
    return "" if told.outcome in [*before, *after[:1]] else "answered"


def judge_copies(report: Report, root: Trail, trails: list[Trail]) -> None:
    """Judge that each copy has a fact, and each fact a copy, with the original content."""
    facts: Counter[int] = Counter()
    copies: Counter[int] = Counter()
    errors: dict[int, set[str]] = defaultdict(set)
    queues = {root.queue, *(trail.queue for trail in trails if trail.redriven)}
    for trail in trails:
        for fact in trail.facts[:1]:
            if fact.kind in COPIED:
                facts[fact.attempt] += 1
                told = fact.before is not None and fact.cause == "RELEASED"
                errors[fact.attempt].add(fact.before.text if told else "")  # type: ignore[union-attr]
        if trail is not root and not trail.redriven:
            _judge_copy(report, root, trail, queues)
            copies[trail.attempt] += trail.committed
    if facts != +copies:
        text = f"{root}: facts of attempts {dict(facts)}, copies {dict(copies)}"
        report.find("transaction", text, events_of(trails))
    for trail in trails:
        told_errors = errors.get(trail.attempt, {""})
        if trail is not root and not trail.redriven and trail.committed and not told_errors & {"", trail.error}:
            text = f"{trail}: error {trail.error!r}, one of {told_errors} was given"
            report.find("fidelity", text, trail.events)


def _judge_copy(report: Report, root: Trail, trail: Trail, queues: Collection[str]) -> None:
    copied, sent = (trail.content, trail.first_sent_ms), (root.content, root.time_ms)
    if copied != sent:
        report.find("fidelity", f"{trail}: {copied}, {root}: {sent}", events_of([root, trail]))
    if trail.queue not in queues:
        report.find("misplaced", f"{trail}, a copy of {root}", trail.events)
