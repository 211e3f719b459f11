"""``marq check``: finds problems, with advice."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from marq.kafka.role_permissions import ROLES
from marq_worker.check.examination import Examination
from marq_worker.check.permissions import WORKER
from marq_worker.commands.command import JSON, Setup, command
from marq_worker.findings import exit_code, report


@command(click.option(
        "--role", "roles", multiple=True, type=click.Choice(list(ROLES)), default=[WORKER], show_default=True,
        help="Role whose permissions to check, for the user in the settings; repeatable.",
    ),
    JSON,
)  # fmt: skip
async def check(setup: Setup, roles: Sequence[str], as_json: bool) -> int:
    """Find problems and show how to fix them; changes nothing, and exits 1 if there is a problem."""
    findings = await Examination(setup.settings, setup.client, roles).run()
    print(json.dumps(report(findings)) if as_json else "\n".join(map(str, findings)))
    return exit_code(findings)
