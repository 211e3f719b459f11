"""The commands of ``marq`` and ``faust -A app``; each is imported when it is needed."""

from importlib import import_module

import click

#: The commands, by purpose.
SECTIONS = {
    "Queues": ("queues", "queue", "pause", "resume", "purge", "drain", "replay", "schedules"),
    "Messages": ("send", "peek", "delayed", "cancel", "deliver-now", "dead", "redrive"),
    "Operation": ("check", "state", "quarantine", "web-password"),
}
#: The modules of commands that share one.
_MODULES = {
    "pause": "queue",
    "resume": "queue",
    "drain": "purge",
    "cancel": "delayed",
    "deliver-now": "delayed",
    "redrive": "dead",
}


def load(name: str) -> click.Command:
    """Return the command with a name."""
    function = name.replace("-", "_")
    loaded: click.Command = getattr(import_module(f"{__name__}.{_MODULES.get(name, function)}"), function)
    return loaded


def attach() -> None:
    """Add the commands to ``faust``, where they replace Faust's own of the same name."""
    from faust.cli.faust import cli

    for names in SECTIONS.values():
        for name in names:
            cli.add_command(load(name), name)
