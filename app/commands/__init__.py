"""The commands of ``faust -A app``, beside Faust's own; each module here has one, or some that belong together."""

import faust

from app.commands import (
    check,
    dead,
    delayed,
    drain,
    moving,
    pausing,
    peek,
    purge,
    quarantine,
    queue,
    queues,
    redrive,
    rewind,
    schedules,
    send,
    state,
    web_password,
)


def attach(app: faust.App) -> None:
    """Add the commands to an application."""
    check.attach(app)
    dead.attach(app)
    delayed.attach(app)
    drain.attach(app)
    moving.attach(app)
    pausing.attach(app)
    peek.attach(app)
    purge.attach(app)
    quarantine.attach(app)
    queue.attach(app)
    queues.attach(app)
    redrive.attach(app)
    rewind.attach(app)
    schedules.attach(app)
    send.attach(app)
    state.attach(app)
    web_password.attach(app)
