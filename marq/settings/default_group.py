"""The group whose consumers receive the messages of a queue, if its settings name no group.

A worker reads all queues of a group, and has the handlers of its own project only. So each project has its own group:
in a shared one, messages of the other project would wait in the partitions assigned to its workers.
"""

from __future__ import annotations

from marq.settings.queue import QueueSettings

#: The group of queues that have a handler and name no group, if their project has no name.
HANDLERS_GROUP = "handlers"


def handlers_group(project: str | None) -> str:
    """Return the group of a project's queues that have a handler and name no group."""
    return f"{HANDLERS_GROUP}.{project}" if project else HANDLERS_GROUP


def group_of(settings: QueueSettings, project: str | None) -> str | None:
    """Return the named group of a project's queue with these settings, None for a group of its own."""
    return settings.group or (handlers_group(project) if settings.handler else None)
