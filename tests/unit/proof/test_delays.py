"""Delayed messages in histories: a clean one, and what breaks each property of theirs, found by the property's name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from marq.core.markers import (
    Acquire,
    Answer,
    Batch,
    Cancel,
    Cause,
    Delay,
    Fact,
    Kind,
    Outcome,
    Payload,
    Reschedule,
    Source,
)
from marq.core.names import drawn_topic
from proof import history
from proof.checker import check
from proof.findings import Report
from proof.history import Event
from tests.unit.proof.story import DEAD, LEASE_MS, LOG, MARKERS, QUEUE, SECOND, SOURCE, TRACKER, Story, value

DRAWN = Source(drawn_topic(1), 0)
NAME = history.log_name(DRAWN)
MOVER, CANCELLER, LATE = 21, 22, 23
LATER_MS = 5_000


class DelayedStory(Story):
    """Messages 0 to 3 are delayed by their sender, and 4 is a record with a header."""

    def delay(self, *numbers: int, delay_ms: int = 100, from_offset: int | None = None) -> None:
        for number in numbers:
            said = {"message": str(number), "queue": QUEUE, "content": content(number)}
            self.history.add("producer", "invoke", "send", **said)
        payloads = [Payload(4_000 + number, 1, b"q", (), value(number)) for number in numbers]
        self.mark(Delay(QUEUE, 1, DRAWN, numbers, [delay_ms] * len(numbers), True, from_offset, payloads))
        for number in numbers:
            said = {"message": str(number), "queue": QUEUE, "content": content(number)}
            self.history.add("producer", "ok", "send", **said, record=f"{NAME}/{number}")

    def ask(self, holder: int, number: int, time_ms: int | None = None) -> None:
        """Move a message, or cancel it (None)."""
        names = {"holder": self.name(holder), "source": NAME, "offsets": [number]}
        self.history.add("asker", "invoke", "cancel" if time_ms is None else "reschedule", **names)
        batch: Batch = (
            Cancel(QUEUE, holder, DRAWN, [number])
            if time_ms is None
            else Reschedule(QUEUE, holder, DRAWN, [number], [time_ms], True)
        )
        self.mark(batch)

    def told(self, op: str, holder: int, number: int, outcome: Outcome) -> None:
        names = {"holder": self.name(holder), "source": NAME, "offsets": [number], "outcomes": [outcome.name]}
        self.history.add("asker", "ok", op, **names)

    def answer(self, holder: int, number: int, outcome: Outcome) -> None:
        self.mark(Answer(QUEUE, holder, DRAWN, [number], [outcome]))

    def end(self, number: int, kind: Kind, cause: Cause, source: Source = DRAWN) -> None:
        """Decide, and write the fact."""
        self.history.add(
            "tracker", "invoke", "fire", holder=self.name(TRACKER), source=history.log_name(source), offset=number,
            kind=kind.name, attempt=1, cause=cause.name, log=MARKERS, applied=self.offset - 1, tick=self.tick_at,
        )  # fmt: skip
        self.mark(Fact(kind, QUEUE, TRACKER, source, [number], [1], [cause]))

    def arrive(self, offset: int, number: int, of: str, first_sent_ms: int, *headers: tuple[str, bytes]) -> None:
        """Be copied to the queue, and acknowledged."""
        own = [("marq-id", of.encode()), ("marq-attempt", b"1"), ("marq-first-sent", b"%d" % first_sent_ms)]
        self.record(offset, number, *headers, *own)
        self.take("second", SECOND, offset, number, 1)
        self.ack("second", SECOND, offset)


def content(number: int) -> str:
    return history.content(QUEUE, b"q", value(number), ())


def tell(story: DelayedStory) -> None:
    story.delay(0, 1, 2, 3)
    send_by_header(story)
    story.ask(CANCELLER, 1)
    story.ask(MOVER, 2, LATER_MS)
    story.answer(MOVER, 2, Outcome.DONE)
    story.told("reschedule", MOVER, 2, Outcome.DONE)
    story.tick()
    story.end(1, Kind.CANCELLED, Cause.CANCELLED)
    story.told("cancel", CANCELLER, 1, Outcome.DONE)
    story.tick(200)
    for number in (0, 3):
        story.end(number, Kind.DELIVERED, Cause.DUE)
        story.arrive(10 + number, number, f"{NAME}/{number}", 4_000 + number)
    story.ask(LATE, 3)
    story.answer(LATE, 3, Outcome.TOO_LATE)
    story.told("cancel", LATE, 3, Outcome.TOO_LATE)
    story.tick(LATER_MS)
    story.end(2, Kind.DELIVERED, Cause.DUE)
    story.arrive(15, 2, f"{NAME}/2", 4_002)
    story.end(4, Kind.DELIVERED, Cause.DUE, SOURCE)
    story.arrive(16, 4, f"{LOG}/4", 5_004, ("marq-deliver-at", b"12000"))


def send_by_header(story: DelayedStory) -> None:
    header = ("marq-deliver-at", b"12000")
    said = {"message": "4", "queue": QUEUE, "content": content(4)}
    story.history.add("producer", "invoke", "send", **said)
    story.record(4, 4, header)
    story.history.add("producer", "ok", "send", **said, record=f"{LOG}/4")
    story.said("second", "acquire", SECOND, [4])
    payload = Payload(1, 1, b"q", (header,), value(4))
    story.mark(Acquire(QUEUE, SECOND, SOURCE, [4], LEASE_MS, 4, [payload], [12_000]))
    story.said("second", "commit", SECOND, [4])


def clean() -> list[Event]:
    story = DelayedStory()
    tell(story)
    return copy.deepcopy(story.history.events)


def judged(told: Callable[[DelayedStory], None]) -> Report:
    story = DelayedStory()
    told(story)
    return check(story.history.events)


def test_a_clean_history_passes_and_its_figures_are_right() -> None:
    report = check(clean())

    assert [str(finding) for finding in report.findings] == []
    names = ("sent", "accepted", "delayed", "cancelled", "acked", "lost", "waiting", "duplicates")
    assert {name: getattr(report, name) for name in names} == {
        "sent": 5, "accepted": 5, "delayed": 5, "cancelled": 1, "acked": 4, "lost": 0, "waiting": 0, "duplicates": 0,
    }  # fmt: skip


def test_what_is_not_due_at_the_end_is_counted_and_what_is_due_is_not_drained() -> None:
    waiting = judged(lambda story: story.delay(0))
    overdue = judged(lambda story: (story.delay(0), story.tick(101))[0])

    assert (waiting.findings, waiting.waiting) == ([], 1)
    assert overdue.violations == {"not-drained": 1, "lost": 1}


# --- what breaks it ---------------------------------------------------------------------------------------------------


def find(events: list[Event], kind: str, number: int, op: str = "marker") -> Event:
    """Return the first such marker about a delayed message, or another event of one."""
    for event in events:
        about = event.get("offsets", [event.get("offset")])
        if event["op"] == op and event.get("source") == NAME and number in about and event.get("kind", kind) == kind:
            return event
    raise AssertionError(f"no {op} {kind} {number}")


def forget_a_delay(events: list[Event]) -> None:
    """What was accepted stands nowhere."""
    delayed = find(events, "DELAY", 0)
    for name in ("offsets", "times_ms", "attempts", "contents", "timestamps_ms"):
        delayed[name] = delayed[name][1:]
    events[:] = [event for event in events if not _is_about(event, 0, 10)]


def _is_about(event: Event, number: int, copied: int) -> bool:
    if event.get("source") == NAME:
        return number in (event.get("offset"), *event.get("offsets", ())) and event.get("kind") != "DELAY"
    named = event.get("record") == f"{LOG}/{copied}" or event.get("id") == f"{NAME}/{number}"
    return named or (event.get("source") == LOG and event.get("offsets") == [copied])


def deliver_before_its_time(events: list[Event]) -> None:
    find(events, "DELAY", 0)["times_ms"][0] = 1_000


def deliver_at_the_old_time(events: list[Event]) -> None:
    find(events, "RESCHEDULE", 2)["times_ms"] = [2 * LATER_MS]


def hand_out_what_a_header_delays(events: list[Event]) -> None:
    story = DelayedStory()
    story.deliver("second", SECOND, 4, 4)
    events.append(story.history.events[-1])


def deliver_twice(events: list[Event]) -> None:
    events.append({**find(events, "DELIVERED", 0), "offset": 90})
    events.append({**next(event for event in events if event.get("id") == f"{NAME}/0"), "offset": 20})


def deliver_without_a_fact(events: list[Event]) -> None:
    events.append({**next(event for event in events if event.get("id") == f"{NAME}/0"), "offset": 20})


def consume_an_attempt(events: list[Event]) -> None:
    find(events, "DELIVERED", 0)["attempts"] = [2]
    find(events, "DELIVERED", 0, "fire")["attempt"] = 2


def deliver_for_another_cause(events: list[Event]) -> None:
    find(events, "DELIVERED", 0)["causes"] = ["RELEASED"]
    find(events, "DELIVERED", 0, "fire")["cause"] = "RELEASED"


def deliver_what_is_cancelled(events: list[Event]) -> None:
    find(events, "CANCELLED", 1).update(kind="DELIVERED", causes=["DUE"])
    find(events, "CANCELLED", 1, "fire").update(kind="DELIVERED", cause="DUE")


def cancel_what_nobody_cancels(events: list[Event]) -> None:
    find(events, "DELIVERED", 0).update(kind="CANCELLED", causes=["CANCELLED"])
    find(events, "DELIVERED", 0, "fire").update(kind="CANCELLED", cause="CANCELLED")


def say_that_it_is_cancelled(events: list[Event]) -> None:
    """Of a message that has left."""
    next(event for event in events if event["op"] == "cancel" and "TOO_LATE" in event.get("outcomes", ())).update(
        outcomes=["DONE"]
    )


def say_that_it_was_too_late(events: list[Event]) -> None:
    next(event for event in events if event["op"] == "reschedule" and "outcomes" in event)["outcomes"] = ["TOO_LATE"]


def answer_that_it_was_too_late(events: list[Event]) -> None:
    find(events, "ANSWERED", 2)["outcomes"] = ["TOO_LATE"]


def answer_that_it_is_moved(events: list[Event]) -> None:
    find(events, "ANSWERED", 3)["outcomes"] = ["DONE"]


def answer_although_it_left(events: list[Event]) -> None:
    """It was moved in time, but a copy had been on its way."""
    left = find(events, "DELIVERED", 2)
    answer = find(events, "ANSWERED", 2)
    events.remove(answer)
    events.append({**answer, "offset": left["offset"] + 50})


def answer_nobody(events: list[Event]) -> None:
    find(events, "ANSWERED", 2)["holder"] = history.holder_name(99)


def change_a_value(events: list[Event]) -> None:
    next(event for event in events if event.get("id") == f"{NAME}/0")["content"] = "-.something-else.-"


def change_when_it_was_first_sent(events: list[Event]) -> None:
    find(events, "DELAY", 0)["timestamps_ms"][0] = 1


def forget_its_time(events: list[Event]) -> None:
    """It is never delivered."""
    events[:] = [
        event for event in events
        if not _is_about(event, 0, 10) or (event["op"] == "send" and event.get("record") == f"{NAME}/0")
    ]  # fmt: skip


BROKEN: list[tuple[str, Callable[[list[Event]], None]]] = [
    ("lost", forget_a_delay),
    ("lost", forget_its_time),
    ("not-drained", forget_its_time),
    ("early", deliver_before_its_time),
    ("early", hand_out_what_a_header_delays),
    ("moved", deliver_at_the_old_time),
    ("fired-twice", deliver_twice),
    ("transaction", deliver_without_a_fact),
    ("attempts", consume_an_attempt),
    ("wrong-cause", deliver_for_another_cause),
    ("cancelled", deliver_what_is_cancelled),
    ("cancelled", cancel_what_nobody_cancels),
    ("cancelled", say_that_it_is_cancelled),
    ("answered", say_that_it_was_too_late),
    ("answered", answer_that_it_was_too_late),
    ("answered", answer_that_it_is_moved),
    ("answered", answer_although_it_left),
    ("answered", answer_nobody),
    ("fidelity", change_a_value),
    ("fidelity", change_when_it_was_first_sent),
]


@pytest.mark.parametrize(("broken", "change"), BROKEN, ids=lambda each: getattr(each, "__name__", each))
def test_a_history_that_breaks_a_property_is_found_by_its_name(
    broken: str, change: Callable[[list[Event]], None]
) -> None:
    events = clean()
    change(events)

    report = check(events)

    assert broken in report.violations, [str(finding) for finding in report.findings]


@pytest.mark.parametrize("broken", ["early", "moved", "attempts", "wrong-cause", "cancelled"])
def test_without_the_trackers_own_events_the_log_alone_shows_what_is_wrong(broken: str) -> None:
    for name, change in BROKEN:
        if name == broken:
            events = clean()
            change(events)

            report = check([event for event in events if event["op"] != "fire"])

            assert broken in report.violations, change.__name__


# --- what is allowed --------------------------------------------------------------------------------------------------


def test_a_delay_that_is_written_again_counts_once_when_it_says_what_is_known() -> None:
    def told(story: DelayedStory) -> None:
        story.delay(0, from_offset=0)
        again = {**find(story.history.events, "DELAY", 0)}
        story.tick(200)
        story.end(0, Kind.DELIVERED, Cause.DUE)
        story.arrive(10, 0, f"{NAME}/0", 4_000)
        story.history.events.append({**again, "offset": story.offset, "time_ms": story.time_ms + 1})
        story.offset += 1
        story.tick(500)

    assert [str(finding) for finding in judged(told).findings] == []


def test_a_question_while_the_copy_is_on_its_way_is_too_late_when_the_fact_comes() -> None:
    def told(story: DelayedStory) -> None:
        story.delay(0, 1)
        story.tick(200)
        story.ask(CANCELLER, 0)
        story.ask(MOVER, 1, LATER_MS)
        for number in (0, 1):
            story.mark(Fact(Kind.DELIVERED, QUEUE, TRACKER, DRAWN, [number], [1], [Cause.DUE]))
            story.arrive(10 + number, number, f"{NAME}/{number}", 4_000 + number)
        story.answer(MOVER, 1, Outcome.TOO_LATE)
        story.told("cancel", CANCELLER, 0, Outcome.TOO_LATE)
        story.told("reschedule", MOVER, 1, Outcome.TOO_LATE)

    assert [str(finding) for finding in judged(told).findings] == []


def test_who_finds_the_fact_before_its_question_stands_in_the_log_needs_no_answer() -> None:
    """A question that was slow, and a tracker that stopped meanwhile: as it happens in the simulation."""

    def told(story: DelayedStory) -> None:
        story.delay(0)
        story.tick(200)
        story.end(0, Kind.DELIVERED, Cause.DUE)
        story.arrive(10, 0, f"{NAME}/0", 4_000)
        story.ask(MOVER, 0, 50)
        story.told("reschedule", MOVER, 0, Outcome.TOO_LATE)

    assert [str(finding) for finding in judged(told).findings] == []


def test_a_cancel_that_comes_while_a_dead_letter_is_on_its_way_is_too_late() -> None:
    """The copy was too large: the simulation's seed 41 of the hard case of sizes."""

    def told(story: DelayedStory) -> None:
        story.history.events[1]["bytes"] = 0
        story.delay(0)
        story.tick(200)
        story.ask(CANCELLER, 0)
        story.tick()
        story.mark(Fact(Kind.DEAD_LETTERED, QUEUE, TRACKER, DRAWN, [0], [1], [Cause.TOO_LARGE]))
        headers = [("marq-id", f"{NAME}/0".encode()), ("marq-attempt", b"1"), ("marq-first-sent", b"4000")]
        headers += [("marq-reason", b"large"), ("marq-origin", f"{NAME}/0".encode())]
        story.history.events.append(history.record(DEAD, 0, 1, QUEUE, b"q", value(0), headers, op="dead"))
        story.told("cancel", CANCELLER, 0, Outcome.TOO_LATE)

    assert [str(finding) for finding in judged(told).findings] == []


def test_who_asks_again_may_be_answered_again() -> None:
    def told(story: DelayedStory) -> None:
        story.delay(0)
        story.ask(MOVER, 0, 50)
        story.answer(MOVER, 0, Outcome.DONE)
        story.tick(200)
        story.end(0, Kind.DELIVERED, Cause.DUE)
        story.arrive(10, 0, f"{NAME}/0", 4_000)
        story.ask(MOVER, 0, 50)
        story.answer(MOVER, 0, Outcome.TOO_LATE)
        story.told("reschedule", MOVER, 0, Outcome.DONE)

    assert [str(finding) for finding in judged(told).findings] == []
