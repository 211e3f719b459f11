"""Copies: the sender's record, with marq's headers brought up to date."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.core.deliveries.redelivery_records import Redelivery, reason, redelivery
from marq.core.redeliver_or_dead_letter import Destination, DueAction, dead_letter, resolve_due
from marq.core.storage.rows import LeaseRow, State
from marq.settings.queue import QueueSettings
from marq.wire.error_texts import MAX_TEXT_BYTES, with_traceback
from marq.wire.markers import MAX_TIME_MS, NOW, Cause, Payload, Source
from marq.wire.record_headers import (
    deliver_at_ms,
    first_received_ms,
    has_invalid_deliver_at,
    ordering_key,
    origin,
    record_id,
    sequence,
    sequence_text,
    uncounted,
)

SOURCE = Source("marq.messages", 2)
DIED_MS = 1_700_000_099_000
SENT_MS = 1_700_000_000_000


def fire(
    destination: Destination = Destination.QUEUE, state: State = State.LEASED, attempt: int = 2, text: str = ""
) -> DueAction:
    lease = LeaseRow("emails", 1, attempt, 0, 0, state, True, text)
    return DueAction(SOURCE, 17, lease, destination, attempt, Cause.EXPIRED)


def copy_of(
    fire: DueAction,
    *headers: tuple[str, bytes | None],
    key: bytes | None = b"emails",
    value: bytes | None = b"hello",
    own_topic: bool = False,
    ordered: bool = False,
) -> Redelivery:
    payload = Payload(SENT_MS, 1, key, headers, value)
    return redelivery(fire, payload, DIED_MS, own_topic=own_topic, ordered=ordered)


def test_a_copy_keeps_key_value_and_the_users_headers_in_order() -> None:
    made = copy_of(fire(), ("b", b"1"), ("a", None), ("b", b"2"))

    assert (made.key, made.value) == (b"emails", b"hello")
    assert made.headers[:3] == [("b", b"1"), ("a", None), ("b", b"2")]
    assert made.destination is Destination.QUEUE


#: The headers of a first redelivery, and those that a dead letter has besides.
OURS = {
    "marq-id": b"marq.messages/2/17",
    "marq-attempt": b"2",
    "marq-first-sent": b"%d" % SENT_MS,
    "marq-expired": b"1",
}
DEAD = OURS | {
    "marq-reason": b"2 of 2 attempts used: the last time its lease ran out",
    "marq-origin": b"marq.messages/2/17",
    "marq-dead-lettered-at": b"%d" % DIED_MS,
}
RELEASED = b"2 of 2 attempts used: the last time it was released"
LETTERS = Destination.DEAD_LETTERS
BOOM, TRACE = with_traceback("ValueError: boom", "Traceback: in bill"), {"marq-traceback": b"Traceback: in bill"}
LATER = {"marq-id": b"marq.messages/0/3", "marq-attempt": b"3", "marq-first-sent": b"5"}


@pytest.mark.parametrize(
    ("action", "sent", "expected"),
    [
        pytest.param(fire(), {}, OURS, id="the first one names the first record"),
        pytest.param(
            fire(attempt=4), LATER, OURS | LATER | {"marq-attempt": b"4"}, id="later ones keep id and first time"
        ),
        pytest.param(fire(LETTERS), {}, DEAD, id="a dead letter says why, whence and when"),
        # Otherwise each attempt of a redelivery would count as the first one, and it would be redelivered endlessly.
        pytest.param(fire(), {"marq-dead-lettered-at": b"1"}, OURS, id="a redelivery is no copy of a dead letter"),
        pytest.param(fire(), {"a": b"1", "marq-settled": b"x"}, {"a": b"1"} | OURS, id="a sender's note is dropped"),
        pytest.param(fire(LETTERS), {"marq-settled": b"x"}, DEAD, id="a sender's note is dropped from a dead letter"),
        pytest.param(fire(), {"marq-error": b"older"}, OURS | {"marq-error": b"older"}, id="an expiry keeps the error"),
        pytest.param(
            fire(state=State.RELEASED, text="ValueError: ü"), {"marq-error": b"older"},
            OURS | {"marq-error": "ValueError: ü".encode()}, id="the error of a release replaces the one before",
        ),
        pytest.param(
            fire(state=State.RELEASED, text=BOOM), {"marq-traceback": b"forged"},
            OURS | {"marq-error": b"ValueError: boom"}, id="a redelivery has no traceback",
        ),
        pytest.param(
            fire(LETTERS, State.RELEASED, text=BOOM), {},
            DEAD | TRACE | {"marq-error": b"ValueError: boom", "marq-reason": RELEASED},
            id="a dead letter has the traceback of its last attempt",
        ),
        pytest.param(
            fire(LETTERS, State.REJECTED, text=BOOM), {}, DEAD | TRACE | {"marq-reason": b"ValueError: boom"},
            id="a rejection's traceback is apart from its reason",
        ),
    ],
)  # fmt: skip
def test_a_copy_has_these_headers(action: DueAction, sent: dict[str, bytes], expected: dict[str, bytes]) -> None:
    assert sorted(copy_of(action, *sent.items()).headers) == sorted(expected.items())


@pytest.mark.parametrize("key", [b"customer-7", b"", b"emails", None])
@pytest.mark.parametrize(("destination", "headers"), [(Destination.QUEUE, OURS), (LETTERS, DEAD)])
def test_a_message_of_an_own_topic_gets_its_queues_key_and_keeps_the_senders_in_a_header(
    destination: Destination, headers: dict[str, bytes], key: bytes | None
) -> None:
    made = copy_of(fire(destination), key=key, value=None, own_topic=True)

    assert (made.key, made.value) == (b"emails", None)
    assert dict(made.headers) == headers | ({} if key is None else {"marq-key": key})


@pytest.mark.parametrize(("key", "expected"), [(b"customer-7", b"customer-7"), (b"", None), (None, None)])
def test_the_key_in_an_own_topic_is_the_ordering_key_elsewhere(key: bytes | None, expected: bytes | None) -> None:
    assert ordering_key(copy_of(fire(), key=key, own_topic=True, ordered=True).headers) == expected
    assert ordering_key(copy_of(fire(), key=key, own_topic=True).headers) is None
    assert ordering_key(copy_of(fire(), key=key, ordered=True).headers) is None


def test_a_copy_of_a_copy_keeps_the_senders_key() -> None:
    first = copy_of(fire(), key=b"customer-7", own_topic=True)

    second = copy_of(fire(attempt=3), *first.headers, key=first.key)

    assert second.key == b"emails"
    assert dict(second.headers)["marq-key"] == b"customer-7"


def test_uncounted_releases_in_a_row_are_counted_on_the_message_and_forgotten_by_any_other_end() -> None:
    released = DueAction(
        SOURCE, 17, LeaseRow("q", 0, 3, 0, 0, State.RELEASED, False), Destination.QUEUE, 3, Cause.RELEASED
    )

    first = copy_of(released)
    second = copy_of(released, *first.headers)
    third = copy_of(fire(state=State.RELEASED), *second.headers)

    assert [uncounted(record.headers) for record in (first, second, third)] == [1, 2, 0]
    assert "marq-uncounted" not in dict(third.headers)
    assert "marq-uncounted" not in dict(copy_of(fire(Destination.DEAD_LETTERS), *second.headers).headers)
    assert uncounted([("marq-uncounted", b"many")]) == 0


def received(since_ms: int, state: State = State.LEASED, *, counted: bool = True) -> DueAction:
    lease = LeaseRow("q", 1, 1, 0, since_ms, state, counted)
    return DueAction(SOURCE, 17, lease, Destination.QUEUE, 2, Cause.EXPIRED)


@pytest.mark.parametrize("state", [State.LEASED, State.RELEASED])
def test_a_redelivery_tells_when_the_message_was_first_received(state: State) -> None:
    first = copy_of(received(5, state))
    second = copy_of(received(9, state), *first.headers)
    uncounted = copy_of(received(12, state, counted=False), *second.headers)

    assert [first_received_ms(record.headers) for record in (first, second, uncounted)] == [5, 5, 5]


def test_a_message_that_was_not_received_has_no_such_time() -> None:
    shut_down = copy_of(received(5, State.RELEASED, counted=False))
    due = copy_of(received(5, State.DELAYED))

    assert not any("marq-first-received" in dict(record.headers) for record in (shut_down, due))
    assert first_received_ms([("marq-first-received", b"soon")]) == 0


def delayed(source: Source, place: int = 4_000_000_000, number: int = 17) -> DueAction:
    lease = LeaseRow("q", place, 1, 0, 0, State.DELAYED)
    return DueAction(source, number, lease, Destination.QUEUE, 1, Cause.DUE)


KEYED = ("marq-ordering-key", b"k")


def test_a_message_from_a_delay_with_an_ordering_key_has_the_sequence_of_its_receipt_in_every_delivery() -> None:
    first = copy_of(delayed(Source("~1", 2)), KEYED)
    later = copy_of(fire(), *first.headers)

    expected = b"00000000040000000000000000000000000017"
    assert dict(first.headers)["marq-sequence"] == dict(later.headers)["marq-sequence"] == expected
    assert int(expected) == sequence(4_000_000_000, 17)


def test_a_redriven_message_keeps_its_sequence_and_others_have_none() -> None:
    [kept] = [
        value
        for name, value in copy_of(delayed(Source("marq.dead-letters", 2)), KEYED, ("marq-sequence", b"5")).headers
        if name == "marq-sequence"
    ]

    assert kept == b"5"
    for made in (copy_of(delayed(Source("~1", 2))), copy_of(delayed(SOURCE), KEYED), copy_of(fire(), KEYED)):
        assert "marq-sequence" not in dict(made.headers)


@given(*[st.integers(0, 2**62 - 1)] * 4)
def test_sequences_ascend_by_the_delay_and_then_by_the_number(delay: int, number: int, other: int, its: int) -> None:
    assert (sequence(delay, number) < sequence(other, its)) is ((delay, number) < (other, its))
    # SQS clients may expect 128 bits.
    assert sequence(delay, number) < 2**128
    texts = sequence_text(sequence(delay, number)), sequence_text(sequence(other, its))
    assert (texts[0] < texts[1]) is ((delay, number) < (other, its))
    assert len(texts[0]) == len(texts[1])


def test_a_long_error_is_cut() -> None:
    made = dict(copy_of(fire(state=State.RELEASED, text="x" * 5_000)).headers)

    assert made["marq-error"] == b"x" * MAX_TEXT_BYTES


@pytest.mark.parametrize(
    ("state", "text", "why"),
    [
        (State.REJECTED, "no such user", "no such user"),
        (State.REJECTED, "", "rejected"),
        (State.RELEASED, "boom", "2 of 2 attempts used: the last time it was released"),
        (State.EXHAUSTED, "boom", "2 of 2 attempts used: the last time it was released"),
        (State.LEASED, "", "2 of 2 attempts used: the last time its lease ran out"),
    ],
)
def test_the_reason_says_what_happened_last(state: State, text: str, why: str) -> None:
    assert reason(fire(Destination.DEAD_LETTERS, state, text=text), Payload(SENT_MS, 1, None, (), b"x")) == why


@pytest.mark.parametrize(
    ("state", "counted", "attempts"),
    [
        (State.DELAYED, True, 0),
        (State.LEASED, True, 1),
        (State.LEASED, False, 0),
        (State.RELEASED, True, 1),
        (State.RELEASED, False, 0),
        (State.REJECTED, True, 1),
        (State.EXHAUSTED, True, 1),
    ],
)
@pytest.mark.parametrize("cause", [Cause.TOO_LARGE, Cause.GONE])
def test_a_message_that_can_not_be_delivered_again_has_the_attempts_that_it_used(
    state: State, cause: Cause, attempts: int, *, counted: bool
) -> None:
    action = resolve_due(SOURCE, 17, LeaseRow("emails", 1, 1, 0, 0, state, counted, ""), QueueSettings())

    dead = dead_letter(action, cause)

    assert (dead.destination, dead.attempt) == (Destination.DEAD_LETTERS, attempts)
    # The broker may refuse the dead letter, too.
    assert dead_letter(dead, Cause.TOO_LARGE).attempt == attempts


def test_a_record_of_a_plain_producer_is_a_first_delivery() -> None:
    found = origin(SOURCE, 17, SENT_MS, [("x", b"1")])

    assert found == ("marq.messages/2/17", 1, SENT_MS)
    assert found.id == record_id(SOURCE, 17)


@pytest.mark.parametrize("value", [b"", b"tomorrow", b"-1", b"1.5", b"%d" % 2**62, b"9" * 30, None, "²".encode()])
def test_a_delivery_time_that_can_not_be_read_counts_as_absent_and_is_known_as_invalid(value: bytes | None) -> None:
    headers = [("marq-deliver-at", b"5"), ("marq-deliver-at", value)]

    assert deliver_at_ms(SENT_MS, headers, 0) == NOW
    assert deliver_at_ms(SENT_MS, headers, 1_000) == SENT_MS + 1_000
    assert has_invalid_deliver_at(headers)


def test_the_delay_of_a_queue_leads_to_a_time_that_a_marker_can_express() -> None:
    assert deliver_at_ms(2**63 - 1, [], 1_000) == MAX_TIME_MS


@pytest.mark.parametrize("headers", [[], [("x", b"y")], [("marq-deliver-at", b"x"), ("marq-deliver-at", b"0")]])
def test_a_delivery_time_that_can_be_read_or_is_not_there_is_not_invalid(headers: list[tuple[str, bytes]]) -> None:
    assert not has_invalid_deliver_at(headers)


def test_a_record_without_a_time_has_the_same_time_in_every_delivery() -> None:
    made = redelivery(fire(), Payload(-1, 1, b"emails", (), b"hello"), DIED_MS, own_topic=False, ordered=False)

    assert origin(SOURCE, 1, -1, []).first_sent_ms == origin(SOURCE, 2, DIED_MS, made.headers).first_sent_ms == 0


@pytest.mark.parametrize("attempt", [b"", b"0", b"-1", b"1.5", b"x", b"4294967296", b"9" * 30, None, "²".encode()])
def test_an_attempt_that_is_none_counts_as_the_first(attempt: bytes | None) -> None:
    assert origin(SOURCE, 1, SENT_MS, [("marq-attempt", attempt)]).attempt == 1


@given(
    st.lists(st.tuples(st.sampled_from(["marq-id", "marq-attempt", "marq-first-sent", "x"]), st.none() | st.binary()))
)
def test_any_headers_have_an_origin(headers: list[tuple[str, bytes | None]]) -> None:
    found = origin(SOURCE, 1, SENT_MS, headers)

    assert found.id
    assert 0 < found.attempt < 2**32
    assert found.first_sent_ms >= 0


@given(
    st.lists(st.tuples(st.sampled_from(["marq-id", "marq-first-sent", "x", "y"]), st.none() | st.binary()), max_size=5)
)
def test_a_copy_of_a_copy_differs_only_in_its_counts(headers: list[tuple[str, bytes | None]]) -> None:
    first = copy_of(fire(attempt=2), *headers)

    second = copy_of(fire(attempt=3), *first.headers)

    def without_counts(made: Redelivery) -> list[tuple[str, bytes | None]]:
        return sorted(
            (header for header in made.headers if header[0] not in ("marq-attempt", "marq-expired")), key=repr
        )

    assert without_counts(first) == without_counts(second)
    assert dict(second.headers)["marq-attempt"] == b"3"
    assert dict(second.headers)["marq-expired"] == b"2"
