"""The group whose consumers receive the messages of a queue, if its settings name no group."""

from __future__ import annotations

from marq.settings.queue import QueueSettings

#: The group of queues that have a handler and name no group.
HANDLERS_GROUP = "handlers"


def group_of(settings: QueueSettings) -> str | None:
    """Return the named group of a queue with these settings, None for a group of its own."""
    return settings.group or (HANDLERS_GROUP if settings.handler else None)
