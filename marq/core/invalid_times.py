"""First deliveries whose sender said a time that can't be read: they are delivered at once, and somebody must be told.

To hold such a message back would be to lose it: nobody knows until when.
"""

from __future__ import annotations

from collections.abc import Sequence

from marq.core import copies
from marq.core.markers import Acquire, Payloads, payload_of
from marq.core.names import DELIVER_AT_HEADER


class InvalidTimes:
    """What was found since the shell last looked, by queue."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}

    def note(self, batch: Acquire, offsets: Sequence[int]) -> int:
        """Look at messages that are acquired for the first time; return how many have such a time."""
        payloads = batch.payloads
        if isinstance(payloads, Payloads) and not payloads.may_have(DELIVER_AT_HEADER):
            return 0
        invalid = [offset for offset in offsets if _is_invalid(batch, offset)]
        if invalid:
            count, first = self._found.get(batch.queue, (0, copies.record_id(batch.source, invalid[0])))
            self._found[batch.queue] = count + len(invalid), first
        return len(invalid)

    def take(self) -> dict[str, tuple[int, str]]:
        """Return how many were found since the last call, and where the first one stands, by queue."""
        found, self._found = self._found, {}
        return found


def _is_invalid(batch: Acquire, offset: int) -> bool:
    headers = payload_of(batch, offset).headers
    # A copy keeps the header, and was counted when the first record was acquired.
    return copies.has_invalid_deliver_at(headers) and not copies.is_copy(headers)
