"""Counts messages that are delivered immediately because their ``marq-deliver-at`` can't be read as a time.

The tracker does not hold back such a message, because it could not know when to deliver it.
"""

from __future__ import annotations

from collections.abc import Sequence

from marq.wire.markers import Acquire, may_have, payload_of
from marq.wire.names import DELIVER_AT_HEADER
from marq.wire.record_headers import has_invalid_deliver_at, is_redelivery, record_id


class InvalidTimes:
    """The messages that were found since the last :meth:`take`, by queue."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}

    def note(self, batch: Acquire, offsets: Sequence[int]) -> int:
        """Look at messages that are acquired for the first time; return how many have such a time."""
        if not may_have(batch.payloads, DELIVER_AT_HEADER):
            return 0
        invalid = [offset for offset in offsets if _is_invalid(batch, offset)]
        if invalid:
            count, first = self._found.get(batch.queue, (0, record_id(batch.source, invalid[0])))
            self._found[batch.queue] = count + len(invalid), first
        return len(invalid)

    def take(self) -> dict[str, tuple[int, str]]:
        """Return how many were found since the last call and the record id of the first one, by queue."""
        found, self._found = self._found, {}
        return found


def _is_invalid(batch: Acquire, offset: int) -> bool:
    headers = payload_of(batch, offset).headers
    # A redelivery keeps the header, and was counted when the first record was acquired.
    return has_invalid_deliver_at(headers) and not is_redelivery(headers)
