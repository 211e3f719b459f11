"""Deduplication ids in histories: a clean one, and what breaks it."""

from __future__ import annotations

from typing import Any

from lab.proof import history
from lab.proof.checker import check
from lab.proof.history import Event
from marq.wire.markers import Cause, Delay, Fact, Kind, Payload, RequestOutcome, Source
from marq.wire.names import schedule_topic, synthetic_topic
from tests.unit.proof.story import MARKERS, QUEUE, SETTINGS, TRACKER, Broken, Events, events_of, value
from tests.unit.proof.test_delays import CANCELLER, DRAWN, NAME, DelayedStory, about

WINDOW_MS = 2_000


class StoryOfIds(DelayedStory):
    """The queue remembers ids for two seconds."""

    def __init__(self) -> None:
        super().__init__()
        settings = {**SETTINGS, "deduplication_window_ms": WINDOW_MS}
        self.history.events[0]["queues"] = {QUEUE: settings}

    def send(self, number: int, own_id: str, key: str = "", source: Source = DRAWN) -> None:
        headers = [("marq-deduplication-id", own_id.encode())]
        headers += [("marq-ordering-key", key.encode())] if key else []
        payload = Payload(4_000 + number, 1, b"q", headers, value(number))
        with self.sending(number, history.name_of(source, number)):
            self.mark(Delay(QUEUE, 1, source, [number], [0], True, None, [payload]))

    def deliver_now(self, number: int) -> None:
        self.tick()
        self.end(number, Kind.DELIVERED, Cause.DUE)
        self.arrive(10 + number, number, f"{NAME}/{number}", 4_000 + number)


def tell(story: StoryOfIds) -> None:
    story.send(0, "a")
    story.deliver_now(0)
    # Dropped, also after the delivery of the first one; so it can't be cancelled.
    story.send(1, "a")
    story.ask(CANCELLER, 1)
    story.answer(CANCELLER, 1, RequestOutcome.TOO_LATE)
    story.told("cancel", CANCELLER, 1, RequestOutcome.TOO_LATE)
    # Another id, an id of another key, and the same id when the window has passed.
    story.send(2, "b")
    story.deliver_now(2)
    story.send(3, "a", key="k")
    story.deliver_now(3)
    story.tick(WINDOW_MS)
    story.send(4, "a")
    story.deliver_now(4)


def clean() -> Events:
    return events_of(tell, StoryOfIds)


def test_a_clean_history_passes_and_a_dropped_message_is_not_lost() -> None:
    report = check(clean())

    assert [str(finding) for finding in report.findings] == []
    assert (report.sent, report.delivered, report.deduplicated, report.lost) == (5, 4, 1, 0)
    assert report.summary()["deduplicated"] == 1


def test_the_event_of_a_delay_has_ids_only_if_they_count() -> None:
    def ids(topic: str, own_id: bytes | None) -> Any:
        headers = [] if own_id is None else [("marq-deduplication-id", own_id)]
        batch = Delay(QUEUE, 1, Source(topic, 0), [0], [0], True, None, [Payload(1, 1, b"q", headers, b"x")])
        return history.marker(MARKERS, 0, 1, batch).get("deduplication_ids")

    assert ids(synthetic_topic(1), b"a") == [f"-.{history.digest(b'a')}"]
    assert [ids(synthetic_topic(1), None), ids("marq.dead-letters", b"a"), ids(schedule_topic("s", "1"), b"a")] == [
        None, None, None,
    ]  # fmt: skip


def deliver_the_duplicate(events: Events) -> None:
    delivered = about(events, "DELIVERED", 0)
    events.append({**delivered, "offset": 90, "offsets": [1]})


def decide_about_the_duplicate(events: Events) -> None:
    fire: Event = about(events, "DELIVERED", 0, "fire")
    events.append({**fire, "offset": 1})


def send_it_to_another_tracker(events: Events) -> None:
    story = StoryOfIds()
    story.send(9, "a", source=Source(synthetic_topic(2), 0))
    events += [
        {**event, "process": "marq.markers/1"} if event["op"] == "marker" else event
        for event in story.history.events[4:]
    ]


def forget_to_deliver(number: int) -> Any:
    """Drop a message that should be delivered."""

    def change(events: Events) -> None:
        fact = about(events, "DELIVERED", number)
        fire = about(events, "DELIVERED", number, "fire")
        ids = (f"{NAME}/{number}", f"marq.messages/0/{10 + number}")
        events[:] = [
            event for event in events
            if event not in (fact, fire)
            and event.get("id") not in ids
            and event.get("record") != ids[1]
            and not (event.get("source") == "marq.messages/0" and event.get("offsets") == [10 + number])
        ]  # fmt: skip

    return change


BROKEN: list[Broken] = [
    ("duplicate", "a duplicate is delivered", deliver_the_duplicate),
    ("duplicate", "a tracker decides to deliver a duplicate", decide_about_the_duplicate),
    ("duplicate", "two trackers decide about an id", send_it_to_another_tracker),
    ("lost", "a message is dropped although its window has passed", forget_to_deliver(4)),
    ("not-drained", "a message of another key is dropped", forget_to_deliver(3)),
]


def test_a_fact_of_the_first_message_does_not_end_the_window() -> None:
    def told(story: StoryOfIds) -> None:
        tell(story)
        story.mark(Fact(Kind.DELIVERED, QUEUE, TRACKER, DRAWN, [1], [1], [Cause.DUE]))

    assert "duplicate" in check(events_of(told, StoryOfIds)).violations
