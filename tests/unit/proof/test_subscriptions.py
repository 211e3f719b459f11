"""Histories of two queues that name one topic: each record is a message of both, and each is judged on its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.proof.checker import check
from lab.proof.evidence import Question, Told, TrackerFact, Trail
from lab.proof.findings import Report
from lab.proof.history import Event, holder_name
from lab.proof.messages import judge_answers
from marq.wire.markers import ANY_QUEUE
from tests.unit.proof.story import MARKERS, QUEUE, SETTINGS, TRACKER, Change, Events, clean, find, omit

OTHER, TOPIC = "audit", "marq.messages"
#: Offsets in the markers log that are doubled, to make room for the other queue's markers.
OFFSETS = ("applied", "tick", "fenced_at")


def for_both(event: Event) -> Iterator[Event]:
    """Yield an event of the clean story, and the same one of the other queue."""
    event = {**event, **{name: 2 * event[name] for name in OFFSETS if event.get(name) is not None}}
    if event["op"] == "marker":
        event["offset"] *= 2
    if "applied" in event:
        # The other queue's marker was read, too.
        event["applied"] += 1
    if event["op"] == "quarantine":
        event["origin"] = f"{MARKERS}/{2 * int(event['origin'].rpartition('/')[2])}"
    if "queues" in event:
        event["queues"] = {QUEUE: SETTINGS, OTHER: SETTINGS}
    if event["op"] == "send":
        event["topic"] = TOPIC
    yield event
    if event.get("queue") != QUEUE or event["op"] == "send":
        return
    other = {**event, "queue": OTHER}
    if event["op"] in ("marker", "dead"):
        other["offset"] += 1
    if event.get("holder", holder_name(TRACKER)) != holder_name(TRACKER):
        other["holder"] = "f" + event["holder"][1:]
    if event["op"] == "deliver":
        other["group"] = f"marq.queue.{OTHER}"
    yield other


def both() -> Events:
    return [doubled for event in clean() for doubled in for_both(event)]


def test_each_queue_finishes_each_record() -> None:
    report = check(both())

    assert [str(finding) for finding in report.findings] == []
    summary = report.summary()
    assert {name: summary[name] for name in ("sent", "accepted", "acked", "dead", "redelivered", "expired_unread")} == {
        "sent": 5, "accepted": 5, "acked": 6, "dead": 2, "redelivered": 4, "expired_unread": 2,
    }  # fmt: skip
    assert (summary["duplicates"], summary["causes"], summary["expiries"]) == (2, {"1": 2}, {"1": 2})


def forget_the_others(events: Events) -> None:
    """The other queue reads nothing, and nothing is removed."""
    own = [event for event in events if event.get("queue") != OTHER or event["op"] == "record"]
    events[:] = [event for event in own if event["op"] != "truncate"]


def acknowledge_for_the_other(events: Events) -> None:
    """An ACK ends the other queue's message."""
    events.remove(find(events, "marker", kind="ACK", queue=OTHER, offsets=[0]))
    find(events, "marker", kind="ACK", queue=QUEUE, offsets=[0])["queue"] = OTHER


def send_the_copy_to_the_other(events: Events) -> None:
    events.remove(find(events, "record", offset=6, queue=OTHER))
    find(events, "record", offset=6, queue=QUEUE)["queue"] = OTHER


BROKEN: list[tuple[str, str, Change]] = [
    ("lost", "the other queue reads nothing", forget_the_others),
    ("not-durable", "an ACK names the other queue", acknowledge_for_the_other),
    ("transaction", "a redelivery goes to the other queue", send_the_copy_to_the_other),
    ("transaction", "only one queue's redelivery is written", omit("record", queue=OTHER, offset=5)),
    ("rejected", "only one queue keeps its dead letter", omit("dead", queue=OTHER)),
    ("not-drained", "only one queue's message is acknowledged", omit("marker", kind="ACK", queue=OTHER, offsets=[6])),
]


@pytest.mark.parametrize(("broken", "how", "change"), BROKEN, ids=[how for _, how, _ in BROKEN])
def test_what_one_queue_does_does_not_count_for_the_other(broken: str, how: str, change: Change) -> None:
    change(events := both())

    assert broken in check(events).violations, how


def test_an_ack_without_a_queue_is_of_its_holders_queue() -> None:
    events = both()
    for queue in (QUEUE, OTHER):
        find(events, "marker", kind="ACK", queue=queue, offsets=[0])["queue"] = ANY_QUEUE

    assert [str(finding) for finding in check(events).findings] == []


@pytest.mark.parametrize(("told", "findings"), [("DONE", 0), ("TOO_LATE", 1)])
def test_of_a_request_for_any_queue_the_fact_of_one_queue_decides_nothing(told: str, findings: int) -> None:
    """One queue's message was cancelled before, and the other queue's moved in time: seed 14357 of the simulation."""
    place, asker = "orders/0/0", holder_name(9)
    cancelled = Trail(
        QUEUE, place, facts=(TrackerFact("CANCELLED", 1, "CANCELLED", holder_name(TRACKER), MARKERS, 25, None, 2),)
    )
    moved = Trail(OTHER, place)
    request = Trail(
        ANY_QUEUE,
        place,
        questions=(
            Question(QUEUE, "RESCHEDULE", asker, 24, in_time=False),
            Question(OTHER, "RESCHEDULE", asker, 24, in_time=True),
        ),
        answers=(Told("RESCHEDULE", asker, "DONE", 27),),
        told=(Told("RESCHEDULE", asker, told),),
    )
    report = Report()

    judge_answers(report, request, [cancelled, moved])

    assert len(report.findings) == findings
