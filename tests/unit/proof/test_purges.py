"""Histories with a PURGE: which messages it ends, and that none of them is delivered."""

from __future__ import annotations

from lab.proof.checker import check
from marq.wire.markers import Cause, Kind, Purge
from tests.unit.proof.story import FIRST, LOG, QUEUE, SECOND, SOURCE, Broken, Events, Story, omit

REQUESTER = 0x99


def purged(*, in_flight: bool = False) -> Events:
    """Message 0 is in flight, 1 waits for its redelivery, 2 is unread, and 3 came later."""
    story = Story()
    for number in range(4):
        story.send(number)
    for number in range(2):
        story.take("first", FIRST, number, number)
    story.release("first", FIRST, 1)
    story.mark(Purge(QUEUE, REQUESTER, SOURCE, [3], in_flight))
    story.tick()
    story.fire(1, Kind.CANCELLED, 1, Cause.CANCELLED)
    if in_flight:
        story.fire(0, Kind.CANCELLED, 1, Cause.CANCELLED)
    story.ack("first", FIRST, 0)
    story.take("first", FIRST, 3, 3)
    story.ack("first", FIRST, 3)
    return story.history.events


def deliver_an_unread_one(events: Events) -> None:
    story = Story()
    story.take("second", SECOND, 2, 2)
    for event in story.history.events[4:]:
        # After the PURGE, which ends the message.
        events.append({**event, "offset": 90, "time_ms": 90_000} if event["op"] == "marker" else event)


BROKEN: list[Broken] = [
    ("purged", "an unread message is delivered after the purge", deliver_an_unread_one),
    ("lost", "a message is never read, and the PURGE is missing", omit("marker", kind="PURGE")),
    ("cancelled", "a message waits for its redelivery, and the PURGE is missing", omit("marker", kind="PURGE")),
]


def test_a_purge_ends_waiting_and_unread_messages() -> None:
    report = check(purged())

    assert ([str(finding) for finding in report.findings], report.purged, report.cancelled) == ([], 1, 1)


def test_a_purge_of_messages_in_flight_ends_them_too() -> None:
    report = check(purged(in_flight=True))

    assert ([str(finding) for finding in report.findings], report.purged, report.cancelled) == ([], 1, 2)


def test_a_purge_of_another_queue_or_source_ends_nothing() -> None:
    for other in ({"queue": "other"}, {"source": f"{LOG[:-1]}7"}):
        events = purged()
        next(event for event in events if event.get("kind") == "PURGE").update(other)

        assert "lost" in check(events).violations
