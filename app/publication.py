"""Publishes what a worker knows of queues, so that it holds for everybody: its queues.toml, and its decorated handlers.

Each worker does it at its start, before anything fires. Only what differs is written, so that a restart without a
change writes nothing. What the file has no more is taken away, since all workers have the same file. Of handlers only
those are taken away that were in this worker's modules: others are in the code of other workers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from config.queues import QueuesFile
from marq.core.definitions import DEFAULTS_KEY, Definitions, layer_key
from marq.core.errors import ConfigError
from marq.core.names import Names
from marq.queues import Queues

log = logging.getLogger("marq.worker")

Document = Mapping[str, Any]


async def publish(
    queues: Queues, names: Names, file: QueuesFile, handlers: Mapping[str, Document], modules: Collection[str]
) -> None:
    """Write what differs from what is known to all, and return when it is read back.

    ``handlers``: the documents of decorated handlers by queue, all that are in ``modules``.

    Raises:
        ConfigError: two queues would have the same topic, a topic is marq's own, or the right to write is missing.
        BrokerUnavailable: it is not known to be written.
    """
    documents = differences(queues.definitions, file, handlers, modules)
    check_topics(queues.definitions.after(documents), names, file)
    if documents:
        await queues.publish(documents)
        log.info("definitions published: %s", ", ".join(key.decode() for key in documents))


def differences(
    definitions: Definitions, file: QueuesFile, handlers: Mapping[str, Document], modules: Collection[str]
) -> dict[bytes, Document | None]:
    """Return the layers that are to be written, None for those that are to be taken away."""
    wanted: dict[tuple[str, str], Document | None] = {
        **{("file", queue): document for queue, document in file.queues.items()},
        **{("handler", queue): document for queue, document in handlers.items()},
    }
    for queue in definitions.names():
        if definitions.layer("file", queue) is not None:
            wanted.setdefault(("file", queue), None)
        if _is_in(definitions.layer("handler", queue), modules):
            wanted.setdefault(("handler", queue), None)
    found = {
        layer_key(layer, queue): document
        for (layer, queue), document in wanted.items()
        if document != definitions.layer(layer, queue)
    }
    if file.defaults != definitions.defaults:
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


def _is_in(document: Document | None, modules: Collection[str]) -> bool:
    module = (document or {}).get("handler", "").partition(":")[0]
    return any(module == each or module.startswith(f"{each}.") for each in modules)
