"""The queues from which SQS clients can receive: those that have no other consumers."""

from __future__ import annotations

from marq.settings.queue import QueueSettings
from marq_worker.sqs.characters import FIFO_SUFFIX, is_fifo


def why_not_pollable(name: str, settings: QueueSettings, group: str | None) -> str | None:
    """Return why SQS clients can't receive from a queue with these settings; None if they can."""
    if settings.handler is not None:
        return "it has a handler"
    if group is not None:
        return f"the consumers of the group {group!r} receive its messages"
    if settings.ordered and not is_fifo(name):
        return f'it has ordering = "key", and its name does not end in {FIFO_SUFFIX}'
    return None
