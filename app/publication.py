"""Publishes the queues.toml of a worker, so that it holds for everybody.

Each worker does it at its start, before anything fires. Only what differs is written, so that a restart without a
change writes nothing; and what the file has no more is taken away, since all workers have the same file. What decorated
handlers say is published by the role that runs them (app/handlers_role.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from config.queues import FILE_LAYER, QueuesFile
from marq.core.definitions import DEFAULTS_KEY, Definitions, layer_key
from marq.core.errors import ConfigError
from marq.core.names import Names
from marq.core.schedules import schedule_key
from marq.queues import Queues

log = logging.getLogger("marq.worker")


async def publish(queues: Queues, names: Names, file: QueuesFile) -> None:
    """Write what differs from what is known to all, and return when it is read back.

    Raises:
        ConfigError: two queues would have the same topic, a topic is marq's own, or the right to write is missing.
        BrokerUnavailable: it is not known to be written.
    """
    documents = differences(queues.definitions, file)
    check_topics(queues.definitions.after(documents), names, file)
    if documents:
        await queues.publish(documents)
        log.info("%s published: %s", file.path, ", ".join(key.decode() for key in documents))


def differences(definitions: Definitions, file: QueuesFile) -> dict[bytes, Mapping[str, Any] | None]:
    """Return the layers that are to be written, None for those that are to be taken away."""
    published = {
        queue: layer for queue in definitions.names() if (layer := definitions.layer("file", queue)) is not None
    }
    found: dict[bytes, Mapping[str, Any] | None] = {
        layer_key("file", queue): None for queue in sorted(published.keys() - file.queues.keys())
    }
    for queue, document in file.queues.items():
        if published.get(queue) != document:
            found[layer_key("file", queue)] = document
    schedules = definitions.schedules
    for name in schedules.names():
        if name not in file.schedules and schedules.layer(FILE_LAYER, name) is not None:
            found[schedule_key(FILE_LAYER, name)] = None
    for name, document in file.schedules.items():
        if schedules.layer(FILE_LAYER, name) != document:
            found[schedule_key(FILE_LAYER, name)] = document
    if definitions.defaults != file.defaults:
        found[DEFAULTS_KEY] = file.defaults or None
    return found


def check_topics(definitions: Definitions, names: Names, file: QueuesFile) -> None:
    """Refuse definitions in which a topic belongs to two queues, or to a queue and to marq.

    Raises:
        ConfigError: the text names them.
    """
    owners: dict[str, str] = {}
    for queue in definitions.names():
        topic = definitions.settings(queue).topic
        if topic is None:
            continue
        if names.is_own_topic(topic):
            raise ConfigError(
                f"{file.path}: [queues.{queue}]: topic: {topic!r} is marq's own; a queue without a topic gets its"
                f" messages from {names.messages}"
            )
        if owners.setdefault(topic, queue) != queue:
            raise ConfigError(
                f"{file.path}: queues {owners[topic]!r} and {queue!r} would have the same topic {topic!r}, by what the"
                " file says and what was changed at run time; `faust -A app queue NAME` shows both, and --unset topic"
                " takes a change back"
            )
