"""What a delivery says about its message, and how it passes between endpoints."""

from __future__ import annotations

import json
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.client.message_token import Token
from marq.core.deliveries.redelivery_records import redelivery
from marq.core.redeliver_or_dead_letter import Destination, DueAction
from marq.core.storage.rows import LeaseRow, State
from marq.kafka.records import Row
from marq.wire.markers import Cause, Headers, Payload, Source
from marq_worker.sqs.deliveries import SqsDelivery

DAY_MS = 86_400_000
SENT_MS = 1_700_000_000_000
DUE_MS = SENT_MS + 30 * DAY_MS
P0 = Source("marq.messages", 0)
DELIVERY = SqsDelivery(Token("emails", 2**64 - 1, P0, 2**40), "marq.messages/0/7", 1, SENT_MS, b"x", {})


def delivered(state: State, attempt: int, since_ms: int, headers: Headers = ()) -> Headers:
    """Return the headers of the record that a tracker sends."""
    lease = LeaseRow("emails", 0, attempt, 0, since_ms, state)
    action = DueAction(P0, 3, lease, Destination.QUEUE, attempt + (state is State.LEASED), Cause.DUE)
    return tuple(redelivery(action, Payload(SENT_MS, 1, None, headers, b"x"), 0, own_topic=False).headers)


FIRST = delivered(State.DELAYED, 1, SENT_MS)


@pytest.mark.parametrize(
    ("headers", "timestamp_ms", "available_ms"),
    [
        # As it was sent, without and with headers of the sender.
        ((), SENT_MS, SENT_MS),
        ((("a", b"1"),), SENT_MS, SENT_MS),
        # Sent, or redriven, with a delay: the first delivery, and one after a lease that ended an hour later.
        (FIRST, DUE_MS, DUE_MS),
        (delivered(State.LEASED, 1, DUE_MS + 60_000, FIRST), DUE_MS + 3_600_000, DUE_MS + 60_000),
        # The same one after a later lease.
        (
            delivered(State.LEASED, 2, DUE_MS + DAY_MS, delivered(State.LEASED, 1, DUE_MS + 60_000, FIRST)),
            DUE_MS + 2 * DAY_MS,
            DUE_MS + 60_000,
        ),
        # In its place in a queue with ordering: nothing tells when it was first received.
        (delivered(State.LEASED, 1, 0, FIRST), DUE_MS, DUE_MS),
    ],
)
def test_a_message_is_available_since_its_first_delivery(
    headers: Headers, timestamp_ms: int, available_ms: int
) -> None:
    held = SimpleNamespace(
        queue="emails", holder=1, source=P0, record=lambda offset: Row(offset, timestamp_ms, b"emails", b"x", headers)
    )
    message: Any = SimpleNamespace(_batch=held, _offset=7, body=b"x", headers={})
    consumer: Any = SimpleNamespace(broker_ms=lambda: available_ms + 2_000, left_s=lambda message: 30)

    delivery = SqsDelivery.of(message, consumer)

    assert (delivery.available_ms, delivery.age_s) == (available_ms, 2)


@pytest.mark.parametrize("member", ["available_ms", "received_ms"])
def test_the_age_of_a_message_is_unknown_without_both_times(member: str) -> None:
    delivery = DELIVERY._replace(available_ms=5_000, received_ms=7_000)
    assert delivery.age_s == 2

    assert delivery._replace(**{member: 0}).age_s == 0  # type: ignore[arg-type]


@given(st.binary(), st.dictionaries(st.text(), st.none() | st.binary(), max_size=3), st.integers(1, 2**32 - 1))
def test_a_delivery_passes_unchanged_between_endpoints(
    body: bytes, headers: dict[str, bytes | None], attempt: int
) -> None:
    sent = SqsDelivery(DELIVERY.token, DELIVERY.id, attempt, SENT_MS, body, headers, 7, 5, "url", 9, 100.0)

    assert SqsDelivery.read(json.loads(json.dumps(sent.document(40.0))), 40.0) == sent


def test_a_lease_seems_to_end_earlier_at_another_endpoint_by_the_time_that_its_request_took() -> None:
    """Never later, although the clocks of the endpoints have nothing in common and an answer may wait for long."""
    sent = DELIVERY._replace(until_s=1_000.0)

    assert SqsDelivery.read(sent.document(990.0), 7.0).until_s == 17.0
    assert SqsDelivery.read(DELIVERY.document(990.0), 7.0).until_s == inf
