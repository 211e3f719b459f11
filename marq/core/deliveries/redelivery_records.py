"""The redelivery of a message: the sender's record, with Marq's headers brought up to date."""

from __future__ import annotations

from typing import NamedTuple

from marq.core.redeliver_or_dead_letter import Destination, DueAction, due_time_ms
from marq.core.storage.rows import State
from marq.wire.error_texts import cut_text, cut_traceback, error_of, traceback_of
from marq.wire.large_messages import left_out
from marq.wire.markers import Cause, Headers, Payload
from marq.wire.names import (
    ATTEMPT_HEADER,
    DEAD_LETTERED_AT_HEADER,
    DELIVER_AT_HEADER,
    ERROR_HEADER,
    EXPIRED_HEADER,
    FIRST_RECEIVED_HEADER,
    FIRST_SENT_HEADER,
    ID_HEADER,
    KEY_HEADER,
    ORDERING_KEY_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
    SEQUENCE_HEADER,
    SETTLED_HEADER,
    TRACEBACK_HEADER,
    UNCOUNTED_HEADER,
    is_synthetic,
)
from marq.wire.record_headers import (
    expired,
    first_received_ms,
    ordering_key,
    origin,
    record_id,
    sequence,
    sequence_text,
    uncounted,
)

#: How the reason of a dead letter begins if its value was too large for Marq's topics.
LEFT_OUT = "too large, so its value is only in its own record"
#: How it begins if the message's record was removed before the message could be delivered again.
GONE = "lost, because the record is gone"
#: How it begins if the message has expired.
MESSAGE_EXPIRED = "expired"


class Redelivery(NamedTuple):
    """A record to send to the topic of ``destination``, which is never NOWHERE."""

    destination: Destination
    key: bytes
    value: bytes | None
    headers: list[tuple[str, bytes]]


def redelivery(fire: DueAction, payload: Payload, now_ms: int, *, own_topic: bool, ordered: bool = False) -> Redelivery:
    """Return the record to send for a due message; ``now_ms`` is the log's clock.

    ``own_topic``: the message comes from a topic that does not belong to Marq. Other programs read that topic, too, so
    redeliveries are not written there. The key of every redelivery is its queue's name; the sender's key is kept in a
    header, and with ``ordered`` also in the header of the ordering key.
    """
    name = fire.lease.queue.encode()
    past = origin(fire.source, fire.offset, payload.timestamp_ms, payload.headers)
    own: list[tuple[str, bytes]] = [
        (ID_HEADER, past.id.encode()),
        (ATTEMPT_HEADER, b"%d" % fire.attempt),
        (FIRST_SENT_HEADER, b"%d" % past.first_sent_ms),
    ]
    if payload.key is not None and (own_topic or payload.key != name):
        own.append((KEY_HEADER, payload.key))
    if own_topic and ordered and payload.key:
        own.append((ORDERING_KEY_HEADER, payload.key))
    if (due_ms := due_time_ms(fire.lease, fire.source)) is not None:
        # From here on, the time after which the message expires counts.
        own.append((DELIVER_AT_HEADER, b"%d" % due_ms))
    if _sent_as_delay(fire) and ordering_key(payload.headers) is not None:
        # Only its tracker knows where the DELAY is.
        own.append((SEQUENCE_HEADER, sequence_text(sequence(fire.lease.holder, fire.offset)).encode()))
    if _was_received(fire) and not first_received_ms(payload.headers):
        own.append((FIRST_RECEIVED_HEADER, b"%d" % fire.lease.since_ms))
    if fire.lease.text and fire.lease.state in (State.RELEASED, State.EXHAUSTED):
        own.append((ERROR_HEADER, cut_text(error_of(fire.lease.text))))
    if fire.destination is Destination.DEAD_LETTERS:
        own += [
            (REASON_HEADER, reason(fire, payload, now_ms).encode()),
            (ORIGIN_HEADER, record_id(fire.source.log, fire.offset).encode()),
            (DEAD_LETTERED_AT_HEADER, b"%d" % now_ms),
        ]
        if traceback := traceback_of(fire.lease.text):
            own.append((TRACEBACK_HEADER, cut_traceback(traceback).encode("utf-8", "replace")))
    times_expired = 0
    if fire.cause is Cause.EXPIRED:
        times_expired = expired(payload.headers) + 1
    elif fire.lease.state is State.RELEASED and not fire.lease.counted:
        own.append((UNCOUNTED_HEADER, b"%d" % (uncounted(payload.headers) + 1)))
        # No handler has ended it since.
        times_expired = expired(payload.headers)
    if times_expired:
        own.append((EXPIRED_HEADER, b"%d" % times_expired))
    # A sender may have written the header of a note or a dead letter. With the latter, each redelivery would count as a
    # copy of a dead letter, and so as the first attempt.
    replaced = {UNCOUNTED_HEADER, EXPIRED_HEADER, SETTLED_HEADER, DEAD_LETTERED_AT_HEADER, TRACEBACK_HEADER}
    replaced.update(name for name, _ in own)
    kept: Headers = [header for header in payload.headers if header[0] not in replaced]
    return Redelivery(fire.destination, name, payload.value, [*kept, *own])  # type: ignore[list-item]


def _sent_as_delay(fire: DueAction) -> bool:
    """Return whether a message is in a sender's DELAY: a redriven dead letter keeps the sequence that it had."""
    return fire.lease.state is State.DELAYED and is_synthetic(fire.source.topic)


def _was_received(fire: DueAction) -> bool:
    """Return whether a consumer has received a message, and its row tells when."""
    lease = fire.lease
    return lease.state in (State.LEASED, State.RELEASED) and lease.counted and lease.since_ms > 0


def reason(fire: DueAction, payload: Payload, now_ms: int = 0) -> str:
    """Explain why a message became a dead letter, at the log's clock ``now_ms``."""
    if fire.expired_ms is not None:
        late_s = max(now_ms - fire.expired_ms, 0) / 1000
        error = error_of(fire.lease.text)
        before = f"; before that: {cut_text(error).decode()}" if error else ""
        return f"{MESSAGE_EXPIRED} {late_s:.1f} s before it could be delivered{before}"
    if fire.cause is Cause.TOO_LARGE:
        if note := left_out(payload):
            return f"{LEFT_OUT}: {note}"
        return "too large for the messages topic with the headers that are added on redelivery"
    if fire.cause is Cause.GONE:
        error = error_of(fire.lease.text)
        return f"{GONE}: {left_out(payload)}" + (f"; before that: {cut_text(error).decode()}" if error else "")
    if fire.lease.state is State.REJECTED:
        return cut_text(error_of(fire.lease.text) or "rejected").decode()
    used = f"{fire.attempt} of {fire.attempt} attempts used"
    if fire.lease.state is not State.LEASED:
        return f"{used}: the last time it was released"
    expired_before = expired(payload.headers)
    if not expired_before:
        return f"{used}: the last time its lease ran out"
    before = "the time before" if expired_before == 1 else f"the {expired_before} times before"
    why = "the process of its handler died, or the handler did not return"
    return f"{used}: the last time its lease ran out, as {before}: {why}"
