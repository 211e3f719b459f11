"""Interrupted attempts: an attempt that a shutdown cuts short does not count, except after many in a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marq.wire.record_headers import uncounted

if TYPE_CHECKING:
    from marq.consumer.message import Message

#: After this many uncounted releases in a row the next interrupted attempt counts. Otherwise a message whose handlers
#: are always interrupted, as in a deployment that keeps crashing, would be redelivered forever.
MAX_UNCOUNTED = 100


def release_interrupted(message: Message) -> None:
    """Release a message whose handler was cancelled; the attempt does not count."""
    counted = uncounted(message._record.headers) >= MAX_UNCOUNTED
    error = f"interrupted, as {MAX_UNCOUNTED} times before" if counted else ""
    message._held.release(message._offset, 0, counted=counted, error=error)
