"""``faust -A app check``: what is wrong with an installation, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click
import faust

from app.checkup.examination import Examination
from app.checkup.findings import exit_code, report
from app.checkup.rights import WORKER
from app.commands.command import command
from marq.core.rights import ROLES


def attach(app: faust.App) -> None:
    """Add the command to an application."""

    @command(
        app,
        click.option(
            "--role", "roles", multiple=True, type=click.Choice(list(ROLES)), default=[WORKER], show_default=True,
            help="Whose rights to look for, of the user that the settings name. Repeatable.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Show the findings as JSON."),
    )  # fmt: skip
    async def check(self: Any, roles: Sequence[str], as_json: bool) -> int:
        """Look for what is wrong, and say what to do; changes nothing, and exits 1 when there is a problem."""
        findings = await Examination(self.app.settings, self.app.client, roles).run()
        print(json.dumps(report(findings)) if as_json else "\n".join(map(str, findings)))
        return exit_code(findings)
