"""What a polled message says about itself to other processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from marq.core.deliveries.redelivery_records import redelivery
from marq.core.redeliver_or_dead_letter import Destination, DueAction
from marq.core.storage.rows import LeaseRow, State
from marq.kafka.records import Row
from marq.wire.markers import Cause, Headers, Payload, Source
from marq_worker.sqs.polling import described

DAY_MS = 86_400_000
SENT_MS = 1_700_000_000_000
DUE_MS = SENT_MS + 30 * DAY_MS
P0 = Source("marq.messages", 0)


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

    assert described(message).available_ms == available_ms
