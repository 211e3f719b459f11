"""Publishes the marq.toml of a worker, so that it applies to all workers and clients.

Each worker does so when it starts, before it delivers anything. It only writes differences. The role ``handlers``
publishes decorated handlers (marq_worker/handlers/handlers_role.py).

Several projects may share a namespace, and a worker may be started in the wrong directory or with the wrong brokers.
So a start removes only what its own project has published: its records name it. A project without a name can't tell
its own records from those of another one, so it removes nothing. Without a marq.toml, a worker publishes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from marq.queues.queues import Queues
from marq.settings.combinations import check_combinations, check_topic
from marq.settings.definitions import DEFAULTS_KEY, Definitions, defaults_key, layer_key
from marq.settings.schedule_definitions import PROJECT, project_of
from marq.wire.errors import ConfigError
from marq.wire.names import Names
from marq_worker.config.queues import FILE_LAYER, QueuesFile

log = logging.getLogger("marq.worker")

Record = Mapping[str, Any]


async def publish(queues: Queues, names: Names, file: QueuesFile) -> None:
    """Write the differences and return when they are read back."""
    before = queues.definitions
    documents = differences(before, file)
    after = before.after(documents)
    check_topics(after, names, file)
    if not file.present:
        log.info(
            "%s does not exist: this worker publishes no settings but those in its handlers' code", file.path.absolute()
        )
    known = published(before)
    # New defaults change queues that others may have defined.
    replaced = [key for key in documents if key in known or (key == DEFAULTS_KEY and before.names())]
    if documents:
        check_combinations(after)
        try:
            await queues.publish(documents)
        except ConfigError as error:
            raise ConfigError(f"{file.path}: {error}") from error
        if written := [key for key in documents if documents[key] is not None]:
            log.info("%s published: %s", file.path, listed(written))
    if removed := [key for key in replaced if documents[key] is None]:
        log.warning(
            "project %s removed definitions that %s no longer has: %s", file.project, file.path, listed(removed)
        )
    if file.present and not file.project and (replaced or (left := left_over(after, file))):
        changed = f"replaced {listed(replaced)}" if replaced else f"kept {listed(left)}"
        log.warning(
            "%s names no project, so Marq can't tell which definitions are its own: it %s. Set a name in marq.toml:"
            ' [settings] project = "NAME"',
            file.path,
            changed,
        )


def differences(definitions: Definitions, file: QueuesFile) -> dict[bytes, Record | None]:
    """Return the records to write, None for those to remove; raise ConfigError if one is another project's."""
    if not file.present:
        return {}
    known, wanted = published(definitions), _wanted(definitions, file)
    for key in wanted:
        check_owner(key, project_of(known.get(key)), file.project, f"{file.path}: ")
    for queue in file.queues:
        # A decorator of another project may define it.
        check_owner(layer_key("file", queue), definitions.project(queue), file.project, f"{file.path}: ")
    ours = [key for key, document in known.items() if file.project and project_of(document) == file.project]
    return {
        **{key: None for key in ours if key not in wanted},
        **{key: document for key, document in wanted.items() if known.get(key) != document},
    }


def left_over(definitions: Definitions, file: QueuesFile) -> list[bytes]:
    """Return the records that name no project and are not in the file: they may be another project's."""
    wanted = _wanted(definitions, file)
    return [key for key, document in published(definitions).items() if not project_of(document) and key not in wanted]


def published(definitions: Definitions) -> dict[bytes, Record]:
    """Return the records of the marq.toml files of all projects."""
    records: dict[bytes, Record] = {}
    if definitions.defaults_owner is not None:
        records[DEFAULTS_KEY] = with_project(definitions.defaults(), definitions.defaults_owner)
    for project in definitions.projects_with_defaults():
        records[defaults_key(project)] = with_project(definitions.defaults(project), project)
    for queue in definitions.names():
        if (layer := definitions.layer("file", queue)) is not None:
            records[layer_key("file", queue)] = with_project(layer, definitions.publisher("file", queue))
    schedules = definitions.schedules
    for name in schedules.names():
        if (layer := schedules.layer(FILE_LAYER, name)) is not None:
            records[layer_key(FILE_LAYER, name)] = with_project(layer, schedules.publisher(name))
    return records


def _wanted(definitions: Definitions, file: QueuesFile) -> dict[bytes, Record]:
    records = file.records
    owner, same = definitions.defaults_owner, definitions.defaults() == file.defaults
    # The first project decides about the queues that no named project defines: a later one must not change what others
    # use. A project that gets its name takes over its own defaults.
    first = owner is None and all(
        definitions.project(queue) == file.project or queue in file.queues for queue in definitions.names()
    )
    if file.project and records and (first or owner == file.project or (owner == "" and same)):
        records[DEFAULTS_KEY] = with_project(file.defaults, file.project)
    elif not file.project and owner and same:
        records.pop(DEFAULTS_KEY, None)
    return records


def with_project(document: Record, project: str | None) -> Record:
    """Return a document with the name of the project that publishes it."""
    return {**document, PROJECT: project} if project else document


def check_owner(key: bytes, owner: str | None, project: str, source: str) -> None:
    """Check that a record, which a project is about to write, is not another project's; ``source`` begins the error."""
    if not owner or owner == project:
        return
    layer, _, name = key.decode().partition(":")
    this = f"project {project!r}" if project else "this project, which has no name"
    setting = "MARQ_PROJECT" if project else "`project` in [settings] of marq.toml, or MARQ_PROJECT"
    same = f"If both are the same project, name this one {owner!r} ({setting})."
    if key == DEFAULTS_KEY:
        raise ConfigError(
            f"{source}[defaults]: project {owner!r} has published those of this namespace, and {this} has others."
            f" {same} Otherwise give this project a name of its own"
        )
    noun = "schedule" if layer == FILE_LAYER else "queue"
    forget = "" if layer == FILE_LAYER else f", or, if that project is gone, run `marq queue {name} --forget`"
    raise ConfigError(
        f"{source}{noun} {name!r} is defined by project {owner!r} and by {this}, but it can belong to only one. {same}"
        f" Otherwise rename the {noun} in one of them{forget}"
    )


def listed(keys: Iterable[bytes]) -> str:
    """Return what some records define, for logs."""
    return ", ".join(map(defined, keys))


def defined(key: bytes) -> str:
    """Return what a record defines, for logs."""
    layer, _, name = key.decode().partition(":")
    if layer == DEFAULTS_KEY.decode():
        return f"[defaults] of project {name}" if name else "[defaults]"
    return f"schedule {name}" if layer == FILE_LAYER else f"queue {name}"


def check_topics(definitions: Definitions, names: Names, file: QueuesFile) -> None:
    """Check the topics of all queues; same errors as :func:`marq.settings.combinations.check_topic`."""
    try:
        for queue in definitions.names():
            check_topic(definitions, queue, names)
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from error
