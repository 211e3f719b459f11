"""The commands of ``faust -A app``, in addition to Faust's own; importing a module registers its commands."""

from marq_worker.app.commands import (
    check,
    dead,
    delayed,
    peek,
    purge,
    quarantine,
    queue,
    queues,
    replay,
    schedules,
    send,
    state,
    web_password,
)  # fmt: skip
from marq_worker.app.commands.command import attach

__all__ = (
    "attach", "check", "dead", "delayed", "peek", "purge", "quarantine", "queue", "queues", "replay", "schedules",
    "send", "state", "web_password",
)  # fmt: skip
