"""Messages that have expired: the tracker ends them when they are due, by the log's clock."""

from __future__ import annotations

from typing import Any

import pytest

from marq.core.deliveries.dead_letter_records import redriven
from marq.core.deliveries.redelivery_records import redelivery
from marq.core.redeliver_or_dead_letter import Destination, DueAction, due_time_ms, fitting, resolve_due, unexpired
from marq.core.storage.rows import LeaseRow, State
from marq.settings.queue import QueueSettings, queue_settings
from marq.wire.large_messages import gone
from marq.wire.markers import Cause, Headers, Kind, Payload, Source
from marq.wire.names import synthetic_topic
from marq.wire.record_headers import expires_at_ms, without_copied

SOURCE = Source("marq.messages", 2)
SENT_MS = 1_000_000


def lease(
    state: State = State.LEASED, *, attempt: int = 1, due_ms: int = 0, since_ms: int = 0, counted: bool = True,
    text: str = "",
) -> LeaseRow:  # fmt: skip
    return LeaseRow("q", 9, attempt, due_ms, since_ms, state, counted, text)


def payload(*headers: tuple[str, bytes]) -> Payload:
    return Payload(SENT_MS, 1, b"q", headers, b"value")


def due(row: LeaseRow, message: Payload, now_ms: int, source: Source = SOURCE, **settings: Any) -> DueAction:
    rules = QueueSettings(**settings)
    return unexpired(resolve_due(source, 7, row, rules), message, now_ms, rules)


def at(time_ms: int) -> tuple[str, bytes]:
    return "marq-expires-at", b"%d" % time_ms


@pytest.mark.parametrize("state", [State.LEASED, State.RELEASED, State.DELAYED])
@pytest.mark.parametrize(("now_ms", "expired"), [(SENT_MS + 4_999, False), (SENT_MS + 5_000, True)])
def test_a_message_is_not_sent_to_its_queue_from_its_expiry_on(state: State, now_ms: int, *, expired: bool) -> None:
    action = due(lease(state), payload(at(SENT_MS + 5_000)), now_ms)

    assert action.destination is (Destination.NOWHERE if expired else Destination.QUEUE)
    assert (action.cause is Cause.MESSAGE_EXPIRED) is expired
    assert (action.fact_kind is Kind.CANCELLED) is expired


def test_an_expired_message_becomes_a_dead_letter_if_its_queue_says_so() -> None:
    row = lease(State.RELEASED, text="boom")
    action = due(row, payload(at(SENT_MS)), SENT_MS + 2_500, expired="dead-letter")

    assert (action.destination, action.fact_kind) == (Destination.DEAD_LETTERS, Kind.DEAD_LETTERED)
    headers = dict(redelivery(action, payload(at(SENT_MS)), SENT_MS + 2_500, own_topic=False).headers)
    assert headers["marq-reason"] == b"expired 2.5 s before it could be delivered; before that: boom"
    assert headers["marq-attempt"] == b"1"


@pytest.mark.parametrize(
    ("row", "attempts"),
    [
        (lease(State.DELAYED), 0),
        (lease(State.DELAYED, attempt=3), 2),
        (lease(State.RELEASED, counted=False), 0),
        (lease(State.RELEASED, attempt=2), 2),
        (lease(attempt=2), 2),
    ],
)
def test_a_dead_letter_that_expired_has_the_number_of_attempts_before(row: LeaseRow, attempts: int) -> None:
    action = due(row, payload(at(SENT_MS)), SENT_MS, expired="dead-letter")

    assert (action.destination, action.attempt) == (Destination.DEAD_LETTERS, attempts)


def test_a_queue_without_dead_letters_drops_expired_messages_too() -> None:
    action = due(lease(), payload(at(SENT_MS)), SENT_MS, expired="dead-letter", dead_letter=False)

    assert (action.destination, action.fact_kind) == (Destination.NOWHERE, Kind.CANCELLED)


@pytest.mark.parametrize(
    ("row", "cause", "kind"),
    [
        (lease(State.REJECTED), Cause.REJECTED, Kind.DEAD_LETTERED),
        (lease(State.EXHAUSTED), Cause.RELEASED, Kind.DEAD_LETTERED),
        (lease(attempt=5), Cause.EXPIRED, Kind.DEAD_LETTERED),
        (lease(State.CANCELLED), Cause.CANCELLED, Kind.CANCELLED),
        (lease(State.DISPATCHED), Cause.EXPIRED, Kind.ABANDONED),
    ],
)
def test_a_message_that_would_not_be_delivered_ends_as_before(row: LeaseRow, cause: Cause, kind: Kind) -> None:
    action = due(row, payload(at(1)), SENT_MS)

    assert (action.cause, action.fact_kind) == (cause, kind)


def test_messages_of_a_queue_with_ordering_do_not_expire() -> None:
    assert due(lease(), payload(at(1)), SENT_MS, ordering="key").destination is Destination.QUEUE


def test_a_message_that_has_expired_is_not_reported_as_gone() -> None:
    left = gone("marq.messages/2/7", SENT_MS)
    action = fitting(due(lease(), left, SENT_MS + 60_000, expires_after_ms=60_000), left, 1_000_000)

    assert (action.cause, action.destination) == (Cause.MESSAGE_EXPIRED, Destination.NOWHERE)


def expiry(headers: Headers = (), *, after_ms: int | None = None, delay_ms: int = 0) -> int | None:
    return expires_at_ms(SENT_MS, headers, delay_ms=delay_ms, expires_after_ms=after_ms)


def test_the_earlier_of_both_limits_applies() -> None:
    assert expiry() is None
    assert expiry([at(5)]) == 5
    assert expiry(after_ms=70) == SENT_MS + 70
    assert expiry([at(SENT_MS + 69)], after_ms=70) == SENT_MS + 69
    assert expiry([at(SENT_MS + 71)], after_ms=70) == SENT_MS + 70


@pytest.mark.parametrize("value", [b"", b"soon", b"-1", b"1.5", b"%d" % 2**62])
def test_an_unreadable_time_counts_as_absent(value: bytes) -> None:
    assert expiry([("marq-expires-at", value)]) is None
    assert expiry([("marq-expires-at", value)], after_ms=1) == SENT_MS + 1


def test_the_setting_counts_from_the_first_time_of_sending_or_the_due_time() -> None:
    first = ("marq-first-sent", b"%d" % (SENT_MS - 500))
    assert expiry([first], after_ms=70) == SENT_MS - 430
    assert expiry([first], after_ms=70, delay_ms=1_000) == SENT_MS + 570
    assert expiry([first, ("marq-deliver-at", b"%d" % (SENT_MS + 9))], after_ms=70, delay_ms=1_000) == SENT_MS + 79
    # A time in the past means now.
    assert expiry([("marq-deliver-at", b"1")], after_ms=70) == SENT_MS + 70


def test_a_message_may_say_that_it_never_expires() -> None:
    assert expiry([("marq-expires-at", b"never")], after_ms=1) is None


def test_the_due_time_of_a_delayed_message_is_kept_for_its_redeliveries() -> None:
    row, source = lease(State.DELAYED, due_ms=SENT_MS + 90_000, since_ms=SENT_MS), Source(synthetic_topic(1), 0)
    action = due(row, payload(), SENT_MS + 90_100, source, expires_after_ms=60_000)
    sent = redelivery(action, payload(), SENT_MS + 90_100, own_topic=False)

    assert action.destination is Destination.QUEUE
    assert expires_at_ms(SENT_MS + 90_100, sent.headers, delay_ms=0, expires_after_ms=60_000) == SENT_MS + 150_000


@pytest.mark.parametrize(
    ("row", "source", "due_ms"),
    [
        (lease(State.DELAYED, due_ms=5, since_ms=3), SOURCE, 5),
        (lease(State.DELAYED, due_ms=3, since_ms=3), SOURCE, None),
        (lease(State.DELAYED, due_ms=2, since_ms=3), Source(synthetic_topic(1), 0), 3),
        (lease(State.RELEASED, due_ms=5, since_ms=3), SOURCE, None),
    ],
    ids=["delayed", "left with the tracker", "sent with a time in the past", "released"],
)
def test_only_a_delayed_message_has_a_due_time(row: LeaseRow, source: Source, due_ms: int | None) -> None:
    assert due_time_ms(row, source) == due_ms


def test_a_redriven_dead_letter_does_not_expire() -> None:
    class Letter:
        offset, partition, timestamp, key, value = 3, 0, SENT_MS, b"q", b"value"
        headers = (at(5), ("marq-reason", b"expired"), ("tenant", b"acme"))

    headers = redriven(Letter(), "q").headers

    assert headers == (("tenant", b"acme"), ("marq-expires-at", b"never"))
    assert expires_at_ms(SENT_MS, headers, delay_ms=0, expires_after_ms=1) is None


def test_the_copy_of_a_dead_letter_does_not_have_its_expiry() -> None:
    headers = (at(5), ("marq-type", b"t"), ("marq-dead-lettered-at", b"6"))

    assert without_copied(headers, own_topic=True) == (("marq-type", b"t"),)
    assert without_copied(headers[:2], own_topic=True) == headers[:2]


def test_a_queue_can_turn_off_the_default() -> None:
    assert queue_settings({"expires_after": 60}).expires_after_ms == 60_000
    assert queue_settings({"expires_after": 60}, {"expires_after": False}).expires_after_ms is None
