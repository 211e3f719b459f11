"""Records of messages in lines: their keys, and their headers when they are delivered again in their place."""

from __future__ import annotations

from marq.core.deliveries.redelivery_records import redelivery
from marq.core.redeliver_or_dead_letter import Destination, DueAction
from marq.core.storage.rows import LeaseRow, State
from marq.kafka.header_columns import OneHeader
from marq.kafka.records import Records, Row
from marq.leases.held import HeldBatch
from marq.wire.markers import Cause, Payload, Source
from marq.wire.names import ORDERING_KEY_HEADER
from marq.wire.record_headers import ordering_key


def row_of(held: HeldBatch, offset: int, value: bytes | None) -> Row:
    """Return the record of a message with its value."""
    return held.record(offset)._replace(value=value)


def is_leased(held: HeldBatch, offset: int, now_s: float) -> bool:
    """Return whether a message is leased here for long enough to be delivered."""
    if offset not in held.open or held.expiry_s(offset) - now_s < held.lease_s / 2:
        return False
    # A message that has waited for a long time could only be renewed for a shorter time than others.
    return now_s - held.taken_s <= held.lease_s


def line_keys(records: Records, *, own_topic: bool) -> list[bytes | None]:
    """Return the ordering key of each record, None if it has none."""
    if own_topic:
        return [key or None for key in records.keys]
    if records.headers is None:
        return [None] * len(records)
    if isinstance(records.headers, OneHeader) and records.headers.name == ORDERING_KEY_HEADER:
        return [value or None for value in records.headers.values]
    return [ordering_key(headers) for headers in records.headers]


def delivered_again(source: Source, queue: str, row: Row, attempt: int, error: str, counted: bool, cause: Cause) -> Row:
    """Return the record of a message with the headers that its redelivery with this attempt would have."""
    if attempt == 1 and counted and not error:
        return row
    lease = LeaseRow(queue, 0, attempt, 0, 0, State.RELEASED, counted, error)
    action = DueAction(source, row.offset, lease, Destination.QUEUE, attempt, cause)
    # The record keeps its key: a header that repeats it could make the record too large to be acquired again.
    payload = Payload(row.timestamp, attempt, None, row.headers, row.value)
    return row._replace(headers=redelivery(action, payload, 0, own_topic=False).headers)
