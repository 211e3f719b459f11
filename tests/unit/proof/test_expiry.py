"""Messages that expire, in histories: a clean one, and what breaks it, found by the property's name."""

from __future__ import annotations

import pytest

from lab.proof.checker import check
from marq.wire.markers import DUE_AT_ONCE, Cause, Kind
from tests.unit.proof.story import (
    LOG,
    QUEUE,
    SECOND,
    SETTINGS,
    Broken,
    Change,
    Events,
    Story,
    decide,
    events_of,
    find,
    judged,
)

#: Message 0 expires by its header, 1 by the setting; 2 in time.
EXPIRES_MS = 10_020
AFTER_MS = EXPIRES_MS - 5_001


def header(time_ms: int) -> tuple[str, bytes]:
    return "marq-expires-at", b"%d" % time_ms


class ExpiryStory(Story):
    def __init__(self) -> None:
        super().__init__()
        self.history.events[0]["queues"] = {QUEUE: {**SETTINGS, "expires_after_ms": AFTER_MS}}

    def send(self, number: int) -> None:
        super().send(number)
        if number == 0:
            self.history.events[-2]["expires_at_ms"] = EXPIRES_MS


def tell(story: ExpiryStory) -> None:
    for number in range(3):
        story.send(number)
    story.take("second", SECOND, 2, 2)
    story.ack("second", SECOND, 2)
    # Its consumer leaves it with the tracker, because it seems to have expired.
    story.acquire("second", SECOND, 0, 0, dues_ms=[DUE_AT_ONCE])
    story.take("second", SECOND, 1, 1)
    story.release("second", SECOND, 1, "")
    story.tick(100)
    story.fire(0, Kind.CANCELLED, 1, Cause.MESSAGE_EXPIRED)
    story.fire(1, Kind.DEAD_LETTERED, 1, Cause.MESSAGE_EXPIRED)
    story.dead(1)


def clean() -> Events:
    return events_of(tell, ExpiryStory)


def test_a_clean_history_passes_and_counts_expired_messages_as_ended() -> None:
    report = check(clean())

    assert [str(finding) for finding in report.findings] == []
    assert (report.message_expired, report.cancelled, report.lost, report.dead, report.acked) == (2, 0, 0, 1, 1)


def test_without_the_trackers_own_events_the_log_alone_shows_it() -> None:
    events = [event for event in clean() if event["op"] != "fire"]
    live_longer(events)

    assert check(events).violations == {"expired": 1}


def test_a_message_that_never_expires_is_redelivered() -> None:
    def tell(story: ExpiryStory) -> None:
        story.send(1)
        story.history.events[-2]["expires_at_ms"] = -1
        story.take("second", SECOND, 1, 1)
        story.release("second", SECOND, 1)
        story.tick(100)
        story.fire(1, Kind.REDELIVERED, 2, Cause.RELEASED)
        story.copy(5, 1, 2, ("marq-error", b"boom"), ("marq-expires-at", b"never"))
        story.take("second", SECOND, 5, 1, 2)
        story.ack("second", SECOND, 5)

    assert judged(tell, ExpiryStory).findings == []


def expire(number: int, time_ms: int) -> Change:
    return lambda events: find(events, "record", offset=number).update(expires_at_ms=time_ms)


def live_longer(events: Events) -> None:
    events[0]["queues"][QUEUE].update(expires_after_ms=20_000)


def redeliver(events: Events) -> None:
    decide(1, "DEAD_LETTERED", kind="REDELIVERED", attempt=2, cause="RELEASED")(events)


def deliver_late(events: Events) -> None:
    story = ExpiryStory()
    story.deliver("second", SECOND, 0, 0)
    events.append({**story.history.events[-1], "log_end": 9, "time_ms": EXPIRES_MS + 10_000})


BROKEN: list[Broken] = [
    ("expired", "a message is dead-lettered before it expires", live_longer),
    ("expired", "a message that never expires is dropped", expire(0, -1)),
    ("expired", "an expired message is redelivered", redeliver),
    ("expired", "an expired message is delivered", deliver_late),
    ("expired", "another attempt is counted", decide(0, "CANCELLED", attempt=2)),
]


def test_a_dropped_message_says_why() -> None:
    events = clean()
    decide(0, "CANCELLED", cause="CANCELLED")(events)

    assert "cancelled" in check(events).violations
    assert f"{LOG}/0" in str(check(events).findings[0])


@pytest.mark.parametrize(("attempts", "violations"), [(0, {}), (1, {"expired": 2})])
def test_a_message_that_expired_before_its_first_delivery_had_no_attempts(
    attempts: int, violations: dict[str, int]
) -> None:
    def tell(story: ExpiryStory) -> None:
        story.send(0)
        story.acquire("second", SECOND, 0, 0, dues_ms=[DUE_AT_ONCE])
        story.tick(100)
        story.fire(0, Kind.DEAD_LETTERED, attempts, Cause.MESSAGE_EXPIRED)
        story.dead(0, attempts)

    assert check(events_of(tell, ExpiryStory)).violations == violations
