"""Whether those who moved or cancelled messages were told the truth.

The log has the questions and the answers. A RESCHEDULE that came in time is answered with DONE; a CANCEL that came in
time with the fact CANCELLED; whatever came too late with TOO_LATE, or with the fact that says where the message went.
"""

from __future__ import annotations

from proof.findings import Report
from proof.fold import CANCELLED
from proof.trail import Told, Trail

DONE, TOO_LATE = "DONE", "TOO_LATE"


def judge_answers(report: Report, trail: Trail) -> None:
    """Judge the answers in the log, and what people were told."""
    for answer in trail.answers:
        if not _is_true(trail, answer):
            text = f"{trail.key}: {answer.outcome} at {answer.offset}, asked was {_asked(trail, answer.holder)}"
            report.find("answered", text, trail.events)
    for told in trail.told:
        wrong = _wrong(trail, told)
        if wrong:
            report.find(wrong, f"{trail.key}: {told.kind} by {told.holder} is said to be {told.outcome}", trail.events)


def _asked(trail: Trail, holder: str) -> list[str]:
    return [
        f"{each.kind} at {each.offset}, in time: {each.in_time}" for each in trail.questions if each.holder == holder
    ]


def _is_true(trail: Trail, answer: Told) -> bool:
    """Whether some question before it has this answer."""
    before = [each for each in trail.questions if each.holder == answer.holder and each.offset < answer.offset]
    if answer.outcome == DONE:
        # An ACK may stand between the two: the tracker answered before it read that.
        return any(
            each.kind == "RESCHEDULE" and each.in_time and not _left(trail, each.offset, answer) for each in before
        )
    return any(not each.in_time or _closed(trail, each.offset, answer) for each in before)


def _left(trail: Trail, since: int, answer: Told) -> bool:
    return any(since < fact.offset < answer.offset for fact in trail.facts)


def _closed(trail: Trail, since: int, answer: Told) -> bool:
    return any(since < offset < answer.offset and standing is None for offset, standing in trail.changes)


def _wrong(trail: Trail, told: Told) -> str:
    """Return the property that does not hold, or nothing: what stands first in the log after the question decides.

    Whoever asks looks where the log ends before it asks, so it may find a fact that stands before its question, too.
    """
    facts = {fact.kind for fact in trail.facts}
    if told.kind == "CANCEL" and told.outcome == DONE:
        return "" if facts == {CANCELLED} else "cancelled"
    asked_at = min([each.offset for each in trail.questions if each.holder == told.holder], default=-1)
    found = [(each.offset, each.outcome) for each in trail.answers if each.holder == told.holder]
    for fact in trail.facts:
        cancelled = told.kind == "CANCEL" and fact.kind == CANCELLED
        found.append((fact.offset, DONE if cancelled else TOO_LATE))
    before = [outcome for offset, outcome in found if offset < asked_at]
    after = [outcome for offset, outcome in sorted(found) if offset > asked_at]
    return "" if told.outcome in [*before, *after[:1]] else "answered"
