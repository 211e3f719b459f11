"""Queues with ordering: each rule is broken in a history, and found by its name; right histories pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lab.proof.checker import check
from lab.proof.evidence import MarkersClock
from marq.wire.markers import (
    LAST,
    Cause,
    Fact,
    Kind,
    Release,
    Resume,
    Resumed,
)
from marq.wire.names import DELIVER_AT_HEADER
from marq.wire.ordered_holders import ordered_holder
from tests.unit.proof.story import (
    LEASE_MS,
    LOG,
    MARKERS,
    QUEUE,
    SETTINGS,
    SOURCE,
    TRACKER,
    Story,
    events_of,
    find,
    judged,
)

KEY = b"key"
#: Their RESUMEs are at these places.
FIRST, SECOND, LATE = ordered_holder(0, 1), ordered_holder(2, 2), ordered_holder(20, 3)


class OrderedStory(Story):
    """Messages of one ordering key; a delivery names the end of the log and its time."""

    def __init__(self) -> None:
        super().__init__()
        settings = {QUEUE: {**SETTINGS, "ordering": "key"}}
        self.history.add("marq.queues/0", "ok", "settings", version=1, queues=settings)

    def record(self, offset: int, number: int, *headers: tuple[str, bytes], committed: bool = True) -> None:
        super().record(offset, number, ("marq-ordering-key", KEY), *headers, committed=committed)

    def acquire(self, process: str, holder: int, offset: int, number: int, attempt: int = 1, **columns: Any) -> None:
        super().acquire(process, holder, offset, number, attempt, in_order=True, **columns)

    def deliver(self, process: str, holder: int, offset: int, number: int, attempt: int = 1, **fields: object) -> None:
        super().deliver(process, holder, offset, number, attempt, log_end=self.offset, time_ms=self.time_ms, **fields)

    def resume(self, offset: int, asker: int = 7) -> None:
        """A consumer asks about all messages from an offset on."""
        asked_at = self.mark(Resume(QUEUE, asker, SOURCE, [offset], onwards=True))
        self.mark(Resumed(QUEUE, asker, SOURCE, [offset], asked_at, 0, [(0, 3)], [0], [0], [0], [""]))


def in_order(story: OrderedStory) -> None:
    """Message 0 is released once, 1 outlives its consumer, 2 fails for the last time."""
    for number in range(3):
        story.send(number)
    for number in range(3):
        story.acquire("first", FIRST, number, number)
    story.deliver("first", FIRST, 0, 0)
    story.release("first", FIRST, 0)
    story.take("first", FIRST, 0, 0, 2)
    story.ack("first", FIRST, 0)
    story.deliver("first", FIRST, 1, 1)
    story.kill("first")
    story.resume(0)
    story.tick(LEASE_MS)
    story.take("second", SECOND, 1, 1, 2)
    story.ack("second", SECOND, 1)
    story.take("second", SECOND, 2, 2, 3)
    story.release("second", SECOND, 2, delay_ms=LAST)
    story.tick()
    story.fire(2, Kind.DEAD_LETTERED, 3, Cause.RELEASED)
    story.dead(2, 3)


def early(story: OrderedStory) -> None:
    """Message 1 is delivered when the handler of message 0 has returned, before its ACK is durable."""
    begin(story)
    story.history.add("first", "invoke", "ack", holder=story.name(FIRST), queue=QUEUE, source=LOG, offsets=[0])
    story.deliver("first", FIRST, 1, 1)
    story.ack("first", FIRST, 0)
    story.ack("first", FIRST, 1)


def unasked(story: OrderedStory) -> None:
    """Message 1 is delivered before a client asks to end message 0."""
    begin(story)
    story.deliver("first", FIRST, 1, 1)
    story.ack("first", FIRST, 0)
    story.ack("first", FIRST, 1)


def begin(story: OrderedStory) -> None:
    for number in range(2):
        story.send(number)
        story.acquire("first", FIRST, number, number)
    story.deliver("first", FIRST, 0, 0)


def released_too_soon(story: OrderedStory) -> None:
    """A release is not an end."""
    begin(story)
    story.release("first", FIRST, 0)
    story.deliver("first", FIRST, 1, 1)
    story.ack("first", FIRST, 1)
    story.take("first", FIRST, 0, 0, 2)
    story.ack("first", FIRST, 0)


def both_at_once(story: OrderedStory) -> None:
    """Another consumer delivers message 0 although its lease is not over."""
    begin(story)
    story.kill("first")
    story.resume(0)
    story.take("second", SECOND, 0, 0, 2)
    story.ack("second", SECOND, 0)
    story.take("second", SECOND, 1, 1)
    story.ack("second", SECOND, 1)


def late_release(story: OrderedStory) -> None:
    """A release of the first attempt comes after the second one has begun; it does not end the second's flight."""
    begin(story)
    story.release("first", FIRST, 0)
    story.take("first", FIRST, 0, 0, 2)
    story.mark(Release(QUEUE, FIRST, SOURCE, [0], [0], True, ["boom"]))
    story.kill("first")
    story.take("second", SECOND, 0, 0, 3)
    story.ack("second", SECOND, 0)
    story.deliver("first", FIRST, 1, 1)
    story.ack("first", FIRST, 1)


def delivered_after_its_end(story: OrderedStory) -> None:
    """A consumer that resumed after the ACK of message 0 delivers it."""
    begin(story)
    story.ack("first", FIRST, 0)
    story.deliver("first", FIRST, 1, 1)
    story.kill("first")
    while story.offset < 20:
        story.tick()
    story.resume(0)
    story.deliver("second", LATE, 0, 0, 2)
    story.ack("first", FIRST, 1)


def copied(story: OrderedStory, start: int = 0) -> None:
    """Message 0 is redelivered behind message 1; rightly so if its consumer reads on from ``start`` behind it."""
    story.send(0)
    story.take("first", FIRST, 0, 0)
    if start:
        story.kill("first")
        story.history.add(LOG, "ok", "truncate", offset=start)
        story.resume(start)
    else:
        story.release("first", FIRST, 0, delay_ms=LAST)
    # Whether a handler has seen a leased message whose record is gone is unknown, so that delivery does not count.
    attempt, cause = (1, Cause.EXPIRED) if start else (2, Cause.RELEASED)
    story.tick(LEASE_MS)
    story.redeliver(cause, attempt)


def fired_in_place(story: OrderedStory) -> None:
    """A tracker redelivers a message that keeps its place."""
    story.send(0)
    story.take("first", FIRST, 0, 0)
    story.kill("first")
    story.tick(2 * LEASE_MS)
    story.redeliver(Cause.EXPIRED)


def same_attempt(story: OrderedStory) -> None:
    """Message 0 is delivered again without counting the first delivery."""
    story.send(0)
    story.take("first", FIRST, 0, 0)
    story.release("first", FIRST, 0)
    story.take("first", FIRST, 0, 0)
    story.ack("first", FIRST, 0)


def without_cause(story: OrderedStory) -> None:
    """Message 0 is delivered again, and nothing befell its consumer."""
    story.send(0)
    story.take("first", FIRST, 0, 0)
    story.tick(LEASE_MS)
    story.take("second", SECOND, 0, 0, 2)
    story.ack("second", SECOND, 0)


def delivered_late(story: OrderedStory) -> None:
    """Its first consumer delivers message 0 after the second one has finished the same attempt."""
    story.send(0)
    story.acquire("first", FIRST, 0, 0, counted=False)
    story.resume(0)
    story.tick(LEASE_MS)
    story.take("second", SECOND, 0, 0)
    story.ack("second", SECOND, 0)
    story.deliver("first", FIRST, 0, 0)
    story.ack("first", FIRST, 0)


def without_key(story: OrderedStory) -> None:
    """Messages without a key are lines of their own."""
    early(story)
    for event in story.history.events:
        event.pop("line", None)


def delayed(story: OrderedStory) -> None:
    """Message 0 has a delivery time, and message 1 does not wait for it."""
    due_ms = story.time_ms + 500
    with story.sending(0, f"{LOG}/0"):
        story.record(0, 0, (DELIVER_AT_HEADER, b"%d" % due_ms))
    story.send(1)
    story.acquire("first", FIRST, 0, 0, dues_ms=[due_ms])
    story.take("first", FIRST, 1, 1)
    story.ack("first", FIRST, 1)
    story.tick(500)
    story.fire(0, Kind.DELIVERED, 1, Cause.DUE)
    story.copy(2, 0, 1)
    story.take("first", FIRST, 2, 0)
    story.ack("first", FIRST, 2)


def delivered_before_its_time(story: OrderedStory) -> None:
    delayed(story)
    story.deliver("first", FIRST, 0, 0)


def delayed_without_a_time(story: OrderedStory) -> None:
    delayed(story)
    del find(story.history.events, "record", offset=0)["deliver_at_ms"]


def sent_in_another_order(story: OrderedStory) -> None:
    """Message 1 is in the log before message 0, although its sender sent message 0 first."""
    with story.sending(0, f"{LOG}/2"):
        story.send(1)
        story.record(2, 0)
    for offset, number in ((1, 1), (2, 0)):
        story.take("first", FIRST, offset, number)
        story.ack("first", FIRST, offset)


BROKEN: list[tuple[str, Callable[[OrderedStory], None]]] = [
    ("misordered", sent_in_another_order),
    ("order", early),
    ("order", unasked),
    ("order", released_too_soon),
    ("exclusion", both_at_once),
    ("exclusion", late_release),
    ("order", delivered_after_its_end),
    ("no-copy", copied),
    ("no-copy", fired_in_place),
    ("no-copy", delayed_without_a_time),
    ("early", delivered_before_its_time),
    ("dead-letter", copied),
    ("attempts", same_attempt),
    ("unexplained", without_cause),
    ("unexplained", delivered_late),
]


@pytest.mark.parametrize(("name", "told"), BROKEN, ids=[told.__name__ for _, told in BROKEN])
def test_a_broken_rule_is_found(name: str, told: Callable[[OrderedStory], None]) -> None:
    report = judged(told, OrderedStory)

    assert name in report.violations, report.findings


def test_messages_delivered_in_order_and_in_place_pass() -> None:
    report = judged(in_order, OrderedStory)

    assert report.findings == []
    assert (report.delivered, report.acked, report.dead, report.duplicates, report.causes) == (5, 2, 1, 1, {1: 1})


@pytest.mark.parametrize(("target", "cause"), [("first", 2), (MARKERS, 11)])
def test_a_consumer_with_a_wrong_clock_may_deliver_after_its_lease(target: str, cause: int) -> None:
    """The clock of a suspended machine stops; a log's clock that jumps ends leases early."""

    def told(story: OrderedStory) -> None:
        story.history.add("nemesis", "info", "clock", target=target)
        delivered_late(story)

    report = judged(told, OrderedStory)

    assert (report.findings, report.duplicates, report.causes) == ([], 1, {cause: 1})


def test_a_message_with_a_delivery_time_takes_its_place_when_it_is_due() -> None:
    assert judged(delayed, OrderedStory).findings == []


def test_messages_without_a_key_are_not_in_order() -> None:
    assert judged(without_key, OrderedStory).findings == []


def test_a_message_whose_record_is_gone_is_redelivered_behind_the_others() -> None:
    assert judged(lambda story: copied(story, 1), OrderedStory).findings == []


def test_a_copy_in_another_partition_is_found() -> None:
    events = events_of(lambda story: copied(story, 1), OrderedStory)
    copy = find(events, "record", offset=1)
    copy["process"] = "marq.messages/1"

    assert "misplaced" in check(events).violations


def test_an_ordering_key_in_two_partitions_is_found() -> None:
    """Message 1 ends before message 0 is delivered, and each is the only one in its partition."""

    def told(story: OrderedStory) -> None:
        for number in (0, 1):
            story.send(number)
        for number in (1, 0):
            story.take("first", FIRST, number, number)
            story.ack("first", FIRST, number)
        elsewhere = "marq.messages/1"
        find(story.history.events, "record", offset=1)["process"] = elsewhere
        for event in story.history.events:
            if event.get("record") == f"{LOG}/1":
                event["record"] = f"{elsewhere}/1"
            if event.get("offsets") == [1] and event.get("source") == LOG:
                event["source"] = elsewhere

    assert judged(told, OrderedStory).violations == {"misplaced": 2}


def test_without_the_ends_of_logs_a_delivery_is_judged_by_what_was_asked_before() -> None:
    def hidden(told: Callable[[OrderedStory], None]) -> dict[str, int]:
        events = events_of(told, OrderedStory)
        for event in events:
            if event["op"] == "deliver":
                del event["log_end"], event["time_ms"]
        return dict(check(events).violations)

    assert (hidden(in_order), hidden(early)) == ({}, {})
    assert hidden(unasked) == {"order": 1}


def test_the_time_of_a_delivery_says_where_the_log_ended() -> None:
    events = events_of(early, OrderedStory)
    for event in events:
        event.pop("log_end", None)

    assert set(check(events).violations) == {"order", "exclusion"}


def test_a_release_after_a_delivery_by_its_time_is_not_one_before_it() -> None:
    """A start that never reached the log does not count; the second delivery of attempt 1 fails and is released."""

    def told(story: OrderedStory) -> None:
        story.send(0)
        story.acquire("first", FIRST, 0, 0, counted=False)
        story.deliver("first", FIRST, 0, 0)
        story.history.add("nemesis", "info", "pause", target="first")
        story.tick(2 * LEASE_MS)
        story.take("first", FIRST, 0, 0)
        story.tick()
        story.release("first", FIRST, 0)
        story.take("first", FIRST, 0, 0, 2)
        story.ack("first", FIRST, 0)

    events = events_of(told, OrderedStory)
    assert check(events).violations == {}
    for event in events:
        event.pop("log_end", None)
    assert check(events).violations == {}


@pytest.mark.parametrize(("late", "violations"), [(False, {"attempts": 1}), (True, {})])
def test_a_release_that_is_written_after_the_question_counts_no_attempt(late: bool, violations: dict[str, int]) -> None:
    """Simulated seed 7241: the ACQUIRE was based on an answer from before the former holder's RELEASE."""

    def told(story: OrderedStory) -> None:
        story.send(0)
        story.acquire("first", FIRST, 0, 0, counted=False)
        story.deliver("first", FIRST, 0, 0)
        story.history.add("nemesis", "info", "pause", target="first")
        story.tick(2 * LEASE_MS)
        for step in ("ask", "release") if late else ("release", "ask"):
            if step == "ask":
                story.resume(0)
            else:
                story.release("first", FIRST, 0)
        story.take("second", SECOND, 0, 0)
        story.ack("second", SECOND, 0)

    assert judged(told, OrderedStory).violations == violations


def test_a_holder_knows_its_own_release_without_a_question() -> None:
    def told(story: OrderedStory) -> None:
        story.send(0)
        story.acquire("first", FIRST, 0, 0)
        story.deliver("first", FIRST, 0, 0)
        story.kill("first")
        story.tick(2 * LEASE_MS)
        story.resume(0)
        story.take("second", SECOND, 0, 0, 2)
        story.release("second", SECOND, 0)
        story.take("second", SECOND, 0, 0, 2)
        story.ack("second", SECOND, 0)

    assert judged(told, OrderedStory).violations == {"attempts": 1}


def test_a_consumer_asks_again_when_the_lease_of_another_holder_has_ended() -> None:
    """The answer was that the lease lasts; the other holder has failed since."""

    def told(story: OrderedStory) -> None:
        story.send(0)
        story.acquire("first", FIRST, 0, 0, counted=False)
        story.deliver("first", FIRST, 0, 0)
        story.resume(0)
        story.release("first", FIRST, 0)
        story.take("second", SECOND, 0, 0)
        story.ack("second", SECOND, 0)

    assert judged(told, OrderedStory).violations == {"attempts": 1}


def test_where_a_log_ended_is_known_although_its_clock_was_set_back() -> None:
    clock = MarkersClock()
    for offset, time_ms in enumerate([100, 200, 300, 150, 250, 350]):
        clock.note(offset, time_ms, time_ms, 0)

    assert [clock.end_at(time_ms) for time_ms in (99, 149, 250, 260, 400)] == [0, 1, 5, 5, 6]
    # A delivery before the step is judged by too much of the log, never by too little.
    assert clock.end_at(200) >= 2


def test_a_message_that_waits_for_a_stopped_tracker_is_stranded() -> None:
    def told(story: OrderedStory) -> None:
        story.send(0)
        story.mark(Resume(QUEUE, 7, SOURCE, [0], onwards=True))
        story.history.add("tracker", "ok", "halt", log=MARKERS, reason="gone")

    report = judged(told, OrderedStory)

    assert (report.findings, report.stranded) == ([], 1)


def test_a_fact_of_a_message_in_its_place_needs_no_decision_event() -> None:
    def told(story: OrderedStory) -> None:
        story.send(0)
        story.take("first", FIRST, 0, 0)
        story.kill("first")
        story.tick(2 * LEASE_MS)
        story.mark(Fact(Kind.REDELIVERED, QUEUE, TRACKER, SOURCE, [0], [2], [Cause.EXPIRED]))

    assert "no-copy" in judged(told, OrderedStory).violations
