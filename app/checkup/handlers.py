"""The handlers that a worker with these settings would run: whether they can be imported, and serve whole groups."""

from __future__ import annotations

from agents.handler_groups import handler_groups, without_handler
from agents.handlers import load_handler, load_modules
from app.checkup.findings import Finding, fine, problem
from app.handlers_role import part_of_group, publication
from app.publication import differences
from config.queues import QueuesFile
from marq.core.definitions import Definitions
from marq.core.errors import ConfigError


def judge_handlers(definitions: Definitions, file: QueuesFile, modules: tuple[str, ...]) -> list[Finding]:
    """Import what a worker would import after it has published what it knows, and judge what it would run.

    Blocks for as long as the modules take.
    """
    try:
        decorated = load_modules(modules)
    except ConfigError as error:
        return [problem("handlers", str(error))]
    after = definitions.after(differences(definitions, file))
    after = after.after(publication(after, {each.queue: each.document for each in decorated}, modules))
    groups = handler_groups(after, {each.queue: each.name for each in decorated})
    findings = []
    for group in groups.values():
        for queue, handled in group.queues.items():
            try:
                load_handler(queue, handled.handler)
            except ConfigError as error:
                findings.append(problem("handlers", str(error)))
        rest = without_handler(after, group)
        if rest:
            findings.append(problem("handlers", part_of_group(group, rest, after)))
    queues = [queue for group in groups.values() for queue in group.queues]
    return findings or ([fine("handlers", f"can be imported: {', '.join(queues)}")] if queues else [])
