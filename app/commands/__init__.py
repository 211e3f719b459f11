"""The commands of ``faust -A app``, beside Faust's own; each module here has one."""

import faust


def attach(app: faust.App) -> None:
    """Add the commands to an application."""
