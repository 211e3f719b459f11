"""Delayed messages in histories: a clean one, and what breaks each property of theirs, found by the property's name."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lab.proof import history
from lab.proof.checker import check
from lab.proof.history import Event
from marq.wire.markers import (
    Answer,
    Batch,
    Cancel,
    Cause,
    Delay,
    Fact,
    Kind,
    Payload,
    RequestOutcome,
    Reschedule,
    Source,
)
from marq.wire.names import synthetic_topic
from tests.unit.proof.story import (
    DEAD,
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
    decide,
    events_of,
    find,
    judged,
    repeat,
    value,
)

DRAWN = Source(synthetic_topic(1), 0)
NAME = history.log_name(DRAWN)
MOVER, CANCELLER, LATE = 21, 22, 23
COPY, DONE, TOO_LATE = {"id": f"{NAME}/0"}, {"outcomes": ["DONE"]}, {"outcomes": ["TOO_LATE"]}
LATER_MS = 5_000


class DelayedStory(Story):
    """Messages 0 to 3 are delayed by their sender, and 4 is a record with a header."""

    def delay(self, *numbers: int, delay_ms: int = 100, from_offset: int | None = None) -> None:
        payloads = [Payload(4_000 + number, 1, b"q", (), value(number)) for number in numbers]
        with ExitStack() as sending:
            for number in numbers:
                sending.enter_context(self.sending(number, f"{NAME}/{number}"))
            self.mark(Delay(QUEUE, 1, DRAWN, numbers, [delay_ms] * len(numbers), True, from_offset, payloads))

    def ask(self, holder: int, number: int, time_ms: int | None = None) -> None:
        """Move a message, or cancel it (None)."""
        self._note("invoke", "cancel" if time_ms is None else "reschedule", holder, number)
        batch: Batch = (
            Cancel(QUEUE, holder, DRAWN, [number])
            if time_ms is None
            else Reschedule(QUEUE, holder, DRAWN, [number], [time_ms], True)
        )
        self.mark(batch)

    def told(self, op: str, holder: int, number: int, outcome: RequestOutcome) -> None:
        self._note("ok", op, holder, number, outcomes=[outcome.name])

    def _note(self, type_: str, op: str, holder: int, number: int, **fields: object) -> None:
        names = {"holder": self.name(holder), "queue": QUEUE, "source": NAME, "offsets": [number]}
        self.history.add("asker", type_, op, **names, **fields)

    def answer(self, holder: int, number: int, outcome: RequestOutcome) -> None:
        self.mark(Answer(QUEUE, holder, DRAWN, [number], [outcome]))

    def end(self, number: int, kind: Kind, cause: Cause, source: Source = DRAWN) -> None:
        """Decide, and write the fact."""
        self.fire(number, kind, 1, cause, source)

    def arrive(self, offset: int, number: int, of: str, first_sent_ms: int, *headers: tuple[str, bytes]) -> None:
        """Be copied to the queue, and acknowledged."""
        own = [("marq-id", of.encode()), ("marq-attempt", b"1"), ("marq-first-sent", b"%d" % first_sent_ms)]
        self.record(offset, number, *headers, *own)
        self.take("second", SECOND, offset, number, 1)
        self.ack("second", SECOND, offset)


def tell(story: DelayedStory) -> None:
    story.delay(0, 1, 2, 3)
    send_by_header(story)
    story.ask(CANCELLER, 1)
    story.ask(MOVER, 2, LATER_MS)
    story.answer(MOVER, 2, RequestOutcome.DONE)
    story.told("reschedule", MOVER, 2, RequestOutcome.DONE)
    story.tick()
    story.end(1, Kind.CANCELLED, Cause.CANCELLED)
    story.told("cancel", CANCELLER, 1, RequestOutcome.DONE)
    story.tick(200)
    for number in (0, 3):
        story.end(number, Kind.DELIVERED, Cause.DUE)
        story.arrive(10 + number, number, f"{NAME}/{number}", 4_000 + number)
    story.ask(LATE, 3)
    story.answer(LATE, 3, RequestOutcome.TOO_LATE)
    story.told("cancel", LATE, 3, RequestOutcome.TOO_LATE)
    story.tick(LATER_MS)
    story.end(2, Kind.DELIVERED, Cause.DUE)
    story.arrive(15, 2, f"{NAME}/2", 4_002)
    story.end(4, Kind.DELIVERED, Cause.DUE, SOURCE)
    story.arrive(16, 4, f"{LOG}/4", 5_004, ("marq-deliver-at", b"12000"))


def send_by_header(story: DelayedStory) -> None:
    with story.sending(4, f"{LOG}/4"):
        story.record(4, 4, ("marq-deliver-at", b"12000"))
    story.acquire("second", SECOND, 4, 4, dues_ms=[12_000])


def clean() -> Events:
    return events_of(tell, DelayedStory)


def test_a_clean_history_passes_and_its_statistics_are_right() -> None:
    report = check(clean())

    assert [str(finding) for finding in report.findings] == []
    names = ("sent", "accepted", "delayed", "cancelled", "acked", "lost", "waiting", "duplicates")
    assert {name: getattr(report, name) for name in names} == {
        "sent": 5, "accepted": 5, "delayed": 5, "cancelled": 1, "acked": 4, "lost": 0, "waiting": 0, "duplicates": 0,
    }  # fmt: skip


def test_what_is_not_due_at_the_end_is_counted_and_what_is_due_is_not_drained() -> None:
    waiting = judged(lambda story: story.delay(0), DelayedStory)
    overdue = judged(lambda story: (story.delay(0), story.tick(101))[0], DelayedStory)

    assert (waiting.findings, waiting.waiting) == ([], 1)
    assert overdue.violations == {"not-drained": 1, "lost": 1}


# --- what breaks it ---------------------------------------------------------------------------------------------------


def about(events: Events, kind: str, number: int, op: str = "marker") -> Event:
    """Return the first such marker about a delayed message, or another event of one."""
    for event in events:
        numbers = event.get("offsets", [event.get("offset")])
        if event["op"] == op and event.get("source") == NAME and number in numbers and event.get("kind", kind) == kind:
            return event
    raise AssertionError(f"no {op} {kind} {number}")


def forget_a_delay(events: Events) -> None:
    """What was accepted stands nowhere."""
    delayed = about(events, "DELAY", 0)
    for name in ("offsets", "times_ms", "attempts", "contents", "timestamps_ms"):
        delayed[name] = delayed[name][1:]
    events[:] = [event for event in events if not _is_about(event, 0, 10)]


def _is_about(event: Event, number: int, copied: int) -> bool:
    if event.get("source") == NAME:
        return number in (event.get("offset"), *event.get("offsets", ())) and event.get("kind") != "DELAY"
    named = event.get("record") == f"{LOG}/{copied}" or event.get("id") == f"{NAME}/{number}"
    return named or (event.get("source") == LOG and event.get("offsets") == [copied])


def deliver_a_delayed_record(events: Events) -> None:
    story = DelayedStory()
    story.deliver("second", SECOND, 4, 4)
    events.append(story.history.events[-1])


def deliver_twice(events: Events) -> None:
    events.append({**about(events, "DELIVERED", 0), "offset": 90})
    events.append({**find(events, "record", id=f"{NAME}/0"), "offset": 20})


def delay(**otherwise: Any) -> Change:
    return lambda events: about(events, "DELAY", 0).update(otherwise)


def answer(number: int, **otherwise: Any) -> Change:
    return lambda events: about(events, "ANSWERED", number).update(otherwise)


def answer_although_it_left(events: Events) -> None:
    """It was moved in time, but a copy had been on its way."""
    left = about(events, "DELIVERED", 2)
    answer = about(events, "ANSWERED", 2)
    events.remove(answer)
    events.append({**answer, "offset": left["offset"] + 50})


def forget_its_time(events: Events) -> None:
    """It is never delivered."""
    events[:] = [
        event for event in events
        if not _is_about(event, 0, 10) or (event["op"] == "send" and event.get("record") == f"{NAME}/0")
    ]  # fmt: skip


BROKEN: list[Broken] = [
    ("lost", "what was accepted stands nowhere", forget_a_delay),
    ("lost", "a message is never delivered", forget_its_time),
    ("not-drained", "a message stays where it is", forget_its_time),
    ("early", "a message comes before its time", delay(times_ms=[1_000, 100, 100, 100])),
    ("early", "a message is delivered although a header delays it", deliver_a_delayed_record),
    (
        "moved", "a message comes at its old time",
        lambda events: about(events, "RESCHEDULE", 2).update(times_ms=[2 * LATER_MS]),
    ),
    ("fired-twice", "a message is delivered twice", deliver_twice),
    ("transaction", "a copy has no fact", repeat("record", COPY, offset=20)),
    ("attempts", "a delay uses up an attempt", decide(0, "DELIVERED", attempt=2)),
    ("wrong-cause", "what is due is taken for released", decide(0, "DELIVERED", cause="RELEASED")),
    ("cancelled", "what is cancelled is delivered", decide(1, "CANCELLED", kind="DELIVERED", cause="DUE")),
    ("cancelled", "a cancellation without a request", decide(0, "DELIVERED", kind="CANCELLED", cause="CANCELLED")),
    ("cancelled", "a late cancel is answered with DONE", change("cancel", TOO_LATE, outcomes=["DONE"])),
    ("answered", "a timely request is answered with TOO_LATE", change("reschedule", DONE, **TOO_LATE)),
    ("answered", "a tracker answers that it was too late", answer(2, **TOO_LATE)),
    ("answered", "a tracker answers that it is moved", answer(3, **DONE)),
    ("answered", "a tracker answers although it has left", answer_although_it_left),
    ("answered", "a tracker answers another client", answer(2, holder=history.holder_name(99))),
    ("fidelity", "a copy has another value", change("record", COPY, content=OTHER_CONTENT)),
    ("fidelity", "a copy was first sent at another time", delay(timestamps_ms=[1, 4_001, 4_002, 4_003])),
]  # fmt: skip


# --- what is allowed --------------------------------------------------------------------------------------------------


def test_a_delay_that_is_written_again_counts_once_when_it_says_what_is_known() -> None:
    def told(story: DelayedStory) -> None:
        story.delay(0, from_offset=0)
        again = {**about(story.history.events, "DELAY", 0)}
        story.tick(200)
        story.end(0, Kind.DELIVERED, Cause.DUE)
        story.arrive(10, 0, f"{NAME}/0", 4_000)
        story.history.events.append({**again, "offset": story.offset, "time_ms": story.time_ms + 1})
        story.offset += 1
        story.tick(500)

    assert [str(finding) for finding in judged(told, DelayedStory).findings] == []


def test_a_question_while_the_copy_is_on_its_way_is_too_late_when_the_fact_comes() -> None:
    def told(story: DelayedStory) -> None:
        story.delay(0, 1)
        story.tick(200)
        story.ask(CANCELLER, 0)
        story.ask(MOVER, 1, LATER_MS)
        for number in (0, 1):
            story.mark(Fact(Kind.DELIVERED, QUEUE, TRACKER, DRAWN, [number], [1], [Cause.DUE]))
            story.arrive(10 + number, number, f"{NAME}/{number}", 4_000 + number)
        story.answer(MOVER, 1, RequestOutcome.TOO_LATE)
        story.told("cancel", CANCELLER, 0, RequestOutcome.TOO_LATE)
        story.told("reschedule", MOVER, 1, RequestOutcome.TOO_LATE)

    assert [str(finding) for finding in judged(told, DelayedStory).findings] == []


def test_a_client_that_reads_the_fact_before_its_request_needs_no_answer() -> None:
    """A question that was slow, and a tracker that stopped meanwhile: as it happens in the simulation."""

    def told(story: DelayedStory) -> None:
        story.delay(0)
        story.tick(200)
        story.end(0, Kind.DELIVERED, Cause.DUE)
        story.arrive(10, 0, f"{NAME}/0", 4_000)
        story.ask(MOVER, 0, 50)
        story.told("reschedule", MOVER, 0, RequestOutcome.TOO_LATE)

    assert [str(finding) for finding in judged(told, DelayedStory).findings] == []


def test_a_cancel_that_comes_while_a_dead_letter_is_on_its_way_is_too_late() -> None:
    """The copy was too large: the simulation's seed 41 of the hard case of sizes."""

    def told(story: DelayedStory) -> None:
        story.history.events[1]["bytes"] = 0
        story.delay(0)
        story.tick(200)
        story.ask(CANCELLER, 0)
        story.tick()
        story.mark(Fact(Kind.DEAD_LETTERED, QUEUE, TRACKER, DRAWN, [0], [0], [Cause.TOO_LARGE]))
        headers = [("marq-id", f"{NAME}/0".encode()), ("marq-attempt", b"0"), ("marq-first-sent", b"4000")]
        headers += [("marq-reason", b"large"), ("marq-origin", f"{NAME}/0".encode())]
        story.history.events.append(history.record(DEAD, 0, 1, QUEUE, b"q", value(0), headers, op="dead"))
        story.told("cancel", CANCELLER, 0, RequestOutcome.TOO_LATE)

    assert [str(finding) for finding in judged(told, DelayedStory).findings] == []


def test_a_message_that_is_moved_after_the_tracker_found_it_expired_ends() -> None:
    """The move came too late, though it would have let the message live longer: the simulation's seed 7125."""

    def told(story: DelayedStory) -> None:
        story.history.events[0]["queues"] = {QUEUE: {**SETTINGS, "expires_after_ms": 1_000}}
        story.delay(0)
        story.tick(1_200)
        story.ask(MOVER, 0, 50)
        story.tick(60)
        story.mark(Fact(Kind.CANCELLED, QUEUE, TRACKER, DRAWN, [0], [1], [Cause.MESSAGE_EXPIRED]))
        story.told("reschedule", MOVER, 0, RequestOutcome.TOO_LATE)

    assert [str(finding) for finding in judged(told, DelayedStory).findings] == []


def test_a_repeated_request_may_be_answered_again() -> None:
    def told(story: DelayedStory) -> None:
        story.delay(0)
        story.ask(MOVER, 0, 50)
        story.answer(MOVER, 0, RequestOutcome.DONE)
        story.tick(200)
        story.end(0, Kind.DELIVERED, Cause.DUE)
        story.arrive(10, 0, f"{NAME}/0", 4_000)
        story.ask(MOVER, 0, 50)
        story.answer(MOVER, 0, RequestOutcome.TOO_LATE)
        story.told("reschedule", MOVER, 0, RequestOutcome.DONE)

    assert [str(finding) for finding in judged(told, DelayedStory).findings] == []
