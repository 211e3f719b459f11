"""Messages that expire, in histories: a clean one, and what breaks it, found by the property's name."""

from __future__ import annotations

from lab.proof.checker import check
from lab.proof.history import Event
from marq.wire.markers import DUE_AT_ONCE, Acquire, Cause, Kind, Payload
from tests.unit.proof.story import (
    LEASE_MS,
    LOG,
    QUEUE,
    SECOND,
    SETTINGS,
    SOURCE,
    Broken,
    Change,
    Events,
    Story,
    events_of,
    find,
    judged,
    value,
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

    def leave(self, offset: int) -> None:
        """Leave a message with the tracker, because it seems to have expired."""
        self.said("second", "acquire", SECOND, [offset])
        payload = Payload(1, 1, b"q", (), value(offset))
        self.mark(Acquire(QUEUE, SECOND, SOURCE, [offset], LEASE_MS, offset, [payload], [DUE_AT_ONCE]))
        self.said("second", "commit", SECOND, [offset])


def tell(story: ExpiryStory) -> None:
    for number in range(3):
        story.send(number)
    story.take("second", SECOND, 2, 2)
    story.ack("second", SECOND, 2)
    story.leave(0)
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


def decide(number: int, before: str, **otherwise: object) -> Change:
    """Change a tracker's decision and its fact."""

    def change(events: Events) -> None:
        for event in events:
            if _decides(event, number, before):
                event |= otherwise | {f"{name}s": [value] for name, value in otherwise.items() if name != "kind"}

    return change


def _decides(event: Event, number: int, kind: str) -> bool:
    return event.get("kind") == kind and number in (event.get("offset"), *event.get("offsets", ()))


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
