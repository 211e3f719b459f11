"""What is done once: dead letters that are sent back, and messages of queues that deliver at most once."""

from __future__ import annotations

from lab.proof import history
from marq.wire.markers import Cause, Delay, Discard, Dispatch, Kind, Payload, Source
from tests.unit.proof.story import (
    DEAD,
    FIRST,
    LEASE_MS,
    LOG,
    OTHER_CONTENT,
    QUEUE,
    SECOND,
    SETTINGS,
    SOURCE,
    TRACKER,
    Broken,
    Change,
    Events,
    Story,
    change,
    events_of,
    find,
    judged,
    keep,
    repeat,
    value,
)

LETTERS = Source("marq.dead-letters", 0)
ASKER = 31
NOTE = b'{"offsets": [[0, 0]], "became": "redriven", "queue": "q", "by": "1f"}'


class OnceStory(Story):
    """Message 0 is rejected and redriven; then others are spent."""

    def spend_from_now_on(self) -> None:
        settings = {QUEUE: {**SETTINGS, "delivery": "at-most-once"}}
        self.history.add("marq.queues/0", "ok", "settings", version=1, queues=settings)

    def spend(self, process: str, holder: int, offset: int) -> None:
        self.said(process, "dispatch", holder, [offset])
        self.mark(Dispatch(QUEUE, holder, SOURCE, [offset], LEASE_MS))

    def redrive(self, number: int, letter: int = 0) -> None:
        """Ask, and have it delivered."""
        place = {"source": DEAD, "offsets": [letter]}
        self.history.add("asker", "invoke", "redrive", **place)
        headers = [("marq-id", b"%s/%d" % (LOG.encode(), number)), ("marq-first-sent", b"%d" % (5_000 + number))]
        payload = Payload(1, 1, b"q", headers, value(number))
        self.mark(Delay(QUEUE, ASKER, LETTERS, [letter], [0], True, letter, [payload]))
        self.tick()
        self.history.events.append(history.note(DEAD, NOTE))
        self.fire(letter, Kind.DELIVERED, 1, Cause.DUE, LETTERS)
        self.history.add("asker", "ok", "redrive", **place)


def bury(story: OnceStory) -> None:
    """Message 0 becomes a dead letter."""
    story.send(0)
    story.take("first", FIRST, 0, 0)
    story.reject("first", FIRST, 0)
    story.tick()
    story.fire(0, Kind.DEAD_LETTERED, 1, Cause.REJECTED)
    story.dead(0)


def tell_redriven(story: OnceStory) -> None:
    bury(story)
    story.redrive(0)
    story.copy(10, 0, 1)
    story.take("second", SECOND, 10, 0, 1)
    story.ack("second", SECOND, 10)


def tell_spent(story: OnceStory) -> None:
    """Two messages are delivered, one is abandoned because its consumer is killed, and a third is released unseen."""
    story.spend_from_now_on()
    for number in range(3):
        story.send(number)
        story.acquire("first", FIRST, number, number)
    for number in range(2):
        story.spend("first", FIRST, number)
        story.deliver("first", FIRST, number, number)
    story.ack("first", FIRST, 0)
    story.kill("first")
    story.tick(2 * LEASE_MS)
    story.fire(1, Kind.ABANDONED, 1, Cause.EXPIRED)
    story.fire(2, Kind.REDELIVERED, 2, Cause.EXPIRED)
    story.copy(10, 2, 2)
    story.acquire("second", SECOND, 10, 2, 2)
    story.spend("second", SECOND, 10)
    story.deliver("second", SECOND, 10, 2, 2)
    story.ack("second", SECOND, 10)


def test_a_dead_letter_that_is_redriven_is_delivered_once_more_and_that_is_no_duplicate() -> None:
    report = judged(tell_redriven, OnceStory)

    assert [str(finding) for finding in report.findings] == []
    assert (report.dead, report.redriven, report.duplicates, report.lost, report.delivered) == (1, 1, 0, 0, 2)


def test_a_redrive_that_is_asked_for_again_changes_nothing() -> None:
    def again(story: OnceStory) -> None:
        tell_redriven(story)
        asked = next(event for event in story.history.events if event.get("kind") == "DELAY")
        story.history.events.append({**asked, "offset": story.offset, "time_ms": story.time_ms})

    assert judged(again, OnceStory).findings == []


def test_an_owner_may_note_a_redrive_again_after_a_transaction_with_an_unknown_outcome() -> None:
    def unconfirmed(story: OnceStory) -> None:
        tell_redriven(story)
        story.history.add(
            "tracker", "ok", "own", holder=story.name(TRACKER), log="marq.markers/0", fenced_at=story.offset, position=0
        )
        story.history.events.append(history.note(DEAD, NOTE))

    def contradicted(story: OnceStory) -> None:
        unconfirmed(story)
        story.history.events[-1]["became"] = "deleted"

    assert judged(unconfirmed, OnceStory).findings == []
    assert [finding.property for finding in judged(contradicted, OnceStory).findings] == ["redriven"]


def test_a_dead_letter_that_is_deleted_is_dead_and_not_lost() -> None:
    def deleted(story: OnceStory) -> None:
        bury(story)
        story.mark(Discard(QUEUE, ASKER, LETTERS, [0]))
        story.history.events.append(history.note(DEAD, NOTE.replace(b"redriven", b"deleted")))

    report = judged(deleted, OnceStory)

    assert [str(finding) for finding in report.findings] == []
    assert (report.dead, report.redriven, report.lost) == (1, 0, 0)


def test_what_is_spent_and_not_finished_is_counted() -> None:
    report = judged(tell_spent, OnceStory)

    assert [str(finding) for finding in report.findings] == []
    assert (report.abandoned, report.acked, report.redelivered, report.lost, report.duplicates) == (1, 2, 1, 0, 0)


# --- what breaks it ---------------------------------------------------------------------------------------------------


def redriven() -> Events:
    return events_of(tell_redriven, OnceStory)


def spent() -> Events:
    return events_of(tell_spent, OnceStory)


def forget_the_redriven(events: Events) -> None:
    events[:] = [event for event in events if event.get("kind") != "DELIVERED" and event["op"] != "fire"]


def copy_the_letter_twice(events: Events) -> None:
    events.append({**next(event for event in events if event.get("id") and event["op"] == "record"), "offset": 20})


REDRIVEN_BROKEN: list[Broken] = [
    ("redriven", "there is no such dead letter", keep(lambda event: event["op"] != "dead")),
    ("redriven", "another dead letter is said to be sent back", repeat("redrive", {}, offsets=[7])),
    ("redriven", "it is noted twice", repeat("note", {})),
    ("redriven", "nothing follows", forget_the_redriven),
    ("not-drained", "what was asked for waits", forget_the_redriven),
    ("fidelity", "another value is redriven", change("marker", {"kind": "DELAY"}, contents=[OTHER_CONTENT])),
    ("fired-twice", "the dead letter is sent back twice", repeat("marker", {"kind": "DELIVERED"}, offset=90)),
    ("transaction", "the dead letter is copied twice", copy_the_letter_twice),
]


def deliver_before_dispatch(events: Events) -> None:
    seen = find(events, "deliver")
    events.remove(seen)
    events.insert(next(index for index, event in enumerate(events) if event["op"] == "dispatch"), seen)


def say_instead(kind: str, other: str) -> Change:
    def change(events: Events) -> None:
        for event in events:
            if event.get("kind") == kind:
                event["kind"] = other

    return change


SPENT_BROKEN: list[Broken] = [
    (
        "dispatched",
        "nothing is spent",
        keep(lambda event: event["op"] != "dispatch" and event.get("kind") != "DISPATCH"),
    ),
    ("dispatched", "a message is delivered before it is dispatched", deliver_before_dispatch),
    ("dispatched", "a message is delivered twice", repeat("deliver", {})),
    ("dispatched", "what is spent is delivered again", say_instead("ABANDONED", "REDELIVERED")),
    ("dispatched", "what is not spent is abandoned", say_instead("REDELIVERED", "ABANDONED")),
]


def test_messages_of_a_queue_with_delay_are_not_delivered_at_once() -> None:
    def told(story: OnceStory) -> None:
        settings = {QUEUE: {**SETTINGS, "delay_ms": 500}}
        story.history.add("marq.queues/0", "ok", "settings", version=1, queues=settings)
        story.send(0)
        story.take("first", FIRST, 0, 0)
        story.ack("first", FIRST, 0)

    assert judged(told, OnceStory).violations == {"early": 1}
