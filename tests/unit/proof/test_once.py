"""What is done once: dead letters that are sent back, and messages of queues that deliver at most once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from marq.core.markers import Cause, Delay, Discard, Fact, Kind, Payload, Source, Spend
from proof import history
from proof.checker import check
from proof.findings import Report
from proof.history import Event
from tests.unit.proof.story import DEAD, FIRST, LEASE_MS, LOG, QUEUE, SECOND, SETTINGS, SOURCE, TRACKER, Story, value

LETTERS = Source("marq.dead-letters", 0)
ASKER = 31
NOTE = b'{"offsets": [[0, 0]], "became": "redriven", "queue": "q", "by": "1f"}'


class OnceStory(Story):
    """Message 0 is rejected and redriven; then others are spent."""

    def spend_from_now_on(self) -> None:
        settings = {QUEUE: {**SETTINGS, "delivery": "at-most-once"}}
        self.history.add("marq.queues/0", "ok", "settings", version=1, queues=settings)

    def spend(self, process: str, holder: int, offset: int) -> None:
        self.said(process, "spend", holder, [offset])
        self.mark(Spend(QUEUE, holder, SOURCE, [offset], LEASE_MS))

    def redrive(self, number: int, letter: int = 0) -> None:
        """Ask, and have it delivered."""
        place = {"source": DEAD, "offsets": [letter]}
        self.history.add("asker", "invoke", "redrive", **place)
        headers = [("marq-id", b"%s/%d" % (LOG.encode(), number)), ("marq-first-sent", b"%d" % (5_000 + number))]
        payload = Payload(1, 1, b"q", headers, value(number))
        self.mark(Delay(QUEUE, ASKER, LETTERS, [letter], [0], True, letter, [payload]))
        self.tick()
        self.history.events.append(history.note(DEAD, NOTE))
        self.history.add(
            "tracker", "invoke", "fire", holder=self.name(TRACKER), source=DEAD, offset=letter, kind="DELIVERED",
            attempt=1, cause="DUE", log="marq.markers/0", applied=self.offset - 1, tick=self.tick_at,
        )  # fmt: skip
        self.mark(Fact(Kind.DELIVERED, QUEUE, TRACKER, LETTERS, [letter], [1], [Cause.DUE]))
        self.history.add("asker", "ok", "redrive", **place)


def bury(story: OnceStory) -> None:
    """Message 0 becomes a dead letter."""
    story.send(0)
    story.take("first", FIRST, 0, 0)
    story.reject("first", FIRST, 0)
    story.tick()
    story.fire(0, Kind.DEAD_LETTERED, 1, Cause.REJECTED)
    story.dead(0)


def redriven(story: OnceStory) -> None:
    bury(story)
    story.redrive(0)
    story.copy(10, 0, 1)
    story.take("second", SECOND, 10, 0, 1)
    story.ack("second", SECOND, 10)


def spent(story: OnceStory) -> None:
    """Two are handed out, and one of them is abandoned, for its consumer is killed; a third is given back unseen."""
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


def judged(*told: Callable[[OnceStory], None]) -> Report:
    story = OnceStory()
    for each in told:
        each(story)
    return check(story.history.events)


def events_of(told: Callable[[OnceStory], None]) -> list[Event]:
    story = OnceStory()
    told(story)
    return copy.deepcopy(story.history.events)


def test_a_dead_letter_that_is_redriven_is_delivered_once_more_and_that_is_no_duplicate() -> None:
    report = judged(redriven)

    assert [str(finding) for finding in report.findings] == []
    assert (report.dead, report.redriven, report.duplicates, report.lost, report.delivered) == (1, 1, 0, 0, 2)


def test_a_redrive_that_is_asked_for_again_changes_nothing() -> None:
    def again(story: OnceStory) -> None:
        redriven(story)
        asked = next(event for event in story.history.events if event.get("kind") == "DELAY")
        story.history.events.append({**asked, "offset": story.offset, "time_ms": story.time_ms})

    assert judged(again).findings == []


def test_a_dead_letter_that_is_deleted_is_dead_and_not_lost() -> None:
    def deleted(story: OnceStory) -> None:
        bury(story)
        story.mark(Discard(QUEUE, ASKER, LETTERS, [0]))
        story.history.events.append(history.note(DEAD, NOTE.replace(b"redriven", b"deleted")))

    report = judged(deleted)

    assert [str(finding) for finding in report.findings] == []
    assert (report.dead, report.redriven, report.lost) == (1, 0, 0)


def test_what_is_spent_and_not_finished_is_counted() -> None:
    report = judged(spent)

    assert [str(finding) for finding in report.findings] == []
    assert (report.abandoned, report.acked, report.redelivered, report.lost, report.duplicates) == (1, 2, 1, 0, 0)


# --- what breaks it ---------------------------------------------------------------------------------------------------


def redrive_what_is_no_letter(events: list[Event]) -> None:
    events[:] = [event for event in events if event["op"] != "dead"]


def say_that_it_is_redriven(events: list[Event]) -> None:
    events.append({"process": "asker", "type": "ok", "op": "redrive", "source": DEAD, "offsets": [7]})


def note_it_twice(events: list[Event]) -> None:
    events.append(next(event for event in events if event["op"] == "note"))


def redrive_another_value(events: list[Event]) -> None:
    next(event for event in events if event.get("kind") == "DELAY")["contents"] = ["-.something-else.-"]


def send_the_letter_back_twice(events: list[Event]) -> None:
    delivered = [event for event in events if event["op"] == "marker" and event["kind"] == "DELIVERED"]
    events.append({**delivered[0], "offset": 90})


def copy_the_letter_twice(events: list[Event]) -> None:
    events.append({**next(event for event in events if event.get("id") and event["op"] == "record"), "offset": 20})


def forget_the_redriven(events: list[Event]) -> None:
    """It was asked for, and nothing follows."""
    events[:] = [event for event in events if event.get("kind") != "DELIVERED" and event["op"] != "fire"]


REDRIVEN_BROKEN: list[tuple[str, Callable[[list[Event]], None]]] = [
    ("redriven", redrive_what_is_no_letter),
    ("redriven", say_that_it_is_redriven),
    ("redriven", note_it_twice),
    ("redriven", forget_the_redriven),
    ("not-drained", forget_the_redriven),
    ("fidelity", redrive_another_value),
    ("fired-twice", send_the_letter_back_twice),
    ("transaction", copy_the_letter_twice),
]


def spend_nothing(events: list[Event]) -> None:
    events[:] = [event for event in events if event["op"] != "spend" and event.get("kind") != "SPEND"]


def see_it_before_it_is_spent(events: list[Event]) -> None:
    seen = next(event for event in events if event["op"] == "deliver")
    events.remove(seen)
    events.insert(next(index for index, event in enumerate(events) if event["op"] == "spend"), seen)


def see_it_twice(events: list[Event]) -> None:
    events.append(next(event for event in events if event["op"] == "deliver"))


def deliver_what_is_spent_again(events: list[Event]) -> None:
    for event in events:
        if event.get("kind") == "ABANDONED":
            event["kind"] = "REDELIVERED"


def abandon_what_is_not_spent(events: list[Event]) -> None:
    for event in events:
        if event.get("kind") == "REDELIVERED":
            event["kind"] = "ABANDONED"


SPENT_BROKEN: list[tuple[str, Callable[[list[Event]], None]]] = [
    ("spent", spend_nothing),
    ("spent", see_it_before_it_is_spent),
    ("spent", see_it_twice),
    ("spent", deliver_what_is_spent_again),
    ("spent", abandon_what_is_not_spent),
]
BROKEN = [*REDRIVEN_BROKEN, *SPENT_BROKEN]


@pytest.mark.parametrize(("broken", "change"), BROKEN, ids=lambda each: getattr(each, "__name__", each))
def test_a_history_that_breaks_a_property_is_found_by_its_name(
    broken: str, change: Callable[[list[Event]], None]
) -> None:
    events = events_of(redriven if (broken, change) in REDRIVEN_BROKEN else spent)
    change(events)

    report = check(events)

    assert broken in report.violations, [str(finding) for finding in report.findings]


def test_what_a_queue_delays_is_not_handed_out_at_once() -> None:
    def told(story: OnceStory) -> None:
        settings = {QUEUE: {**SETTINGS, "delay_ms": 500}}
        story.history.add("marq.queues/0", "ok", "settings", version=1, queues=settings)
        story.send(0)
        story.take("first", FIRST, 0, 0)
        story.ack("first", FIRST, 0)

    assert judged(told).violations == {"early": 1}
