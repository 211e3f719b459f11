"""What a receiver of polls keeps: deliveries on their way between endpoints, and deleted messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from marq.client.token import Token
from marq.wire.markers import Source
from marq_worker.app.sqs.receiving import (
    DELETED_S,
    LONG_POLL_S,
    MAX_DELETED,
    Deleted,
    Delivery,
    end_of_poll_s,
)

TOKEN = Token("emails", 2**64 - 1, Source("marq.messages", 3), 2**40)


def delivery(message_id: str = "marq.messages/3/7", attempt: int = 1) -> Delivery:
    return Delivery(TOKEN, message_id, attempt, 1_700_000_000_000, b"x", {})


@given(st.binary(), st.dictionaries(st.text(), st.none() | st.binary(), max_size=3), st.integers(1, 2**32 - 1))
def test_a_delivery_passes_unchanged_between_endpoints(
    body: bytes, headers: dict[str, bytes | None], attempt: int
) -> None:
    sent = Delivery(TOKEN, "marq.messages/3/7", attempt, 1_700_000_000_000, body, headers)

    assert Delivery.read(sent.document()) == sent


def test_only_later_deliveries_of_a_deleted_message_are_ended() -> None:
    deleted = Deleted()
    deleted.add("a", 2)

    assert [deleted.concerns(delivery("a", attempt)) for attempt in (1, 2, 3)] == [False, False, True]
    assert not deleted.concerns(delivery("b", 3))


def test_a_deletion_counts_for_a_minute() -> None:
    now_s = 0.0
    deleted = Deleted(lambda: now_s)
    deleted.add("a", 1)

    now_s = DELETED_S - 1
    assert deleted.concerns(delivery("a", 2))
    now_s = DELETED_S
    assert not deleted.concerns(delivery("a", 2))


def test_the_oldest_deletions_are_forgotten_first() -> None:
    deleted = Deleted()
    for number in range(MAX_DELETED + 1):
        deleted.add(str(number), 1)

    assert not deleted.concerns(delivery("0", 2))
    assert deleted.concerns(delivery("1", 2))


def test_long_polls_end_together_and_never_too_early() -> None:
    assert [end_of_poll_s(now_s, 20) for now_s in (100.0, 100.1, 100.5, 100.51)] == [120.0, 120.5, 120.5, 121.0]


def test_short_polls_end_in_time() -> None:
    assert end_of_poll_s(100.1, LONG_POLL_S - 1) == 100.1 + LONG_POLL_S - 1
