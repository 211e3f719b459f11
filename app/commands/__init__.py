"""The commands of ``faust -A app``, beside Faust's own; each module here has one."""

import faust

from app.commands import check, dead, delayed, moving, queue, redrive, schedules


def attach(app: faust.App) -> None:
    """Add the commands to an application."""
    check.attach(app)
    dead.attach(app)
    delayed.attach(app)
    moving.attach(app)
    queue.attach(app)
    redrive.attach(app)
    schedules.attach(app)
