"""Publishes the marq.toml of a worker, so that it applies to all workers and clients.

Each worker does so when it starts, before it delivers anything. It only writes differences, and removes what is no
longer in the file, because all workers have the same file. The role ``handlers`` publishes decorated handlers
(app/handlers/handlers_role.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from marq.queues.queues import Queues
from marq.settings.combinations import check_combinations, check_topic
from marq.settings.definitions import DEFAULTS_KEY, Definitions, layer_key
from marq.wire.errors import ConfigError
from marq.wire.names import Names
from marq_worker.config.queues import FILE_LAYER, QueuesFile

log = logging.getLogger("marq.worker")


async def publish(queues: Queues, names: Names, file: QueuesFile) -> None:
    """Write the differences and return when they are read back."""
    documents = differences(queues.definitions, file)
    after = queues.definitions.after(documents)
    check_topics(after, names, file)
    if documents:
        check_combinations(after)
        try:
            await queues.publish(documents)
        except ConfigError as error:
            raise ConfigError(f"{file.path}: {error}") from error
        log.info("%s published: %s", file.path, ", ".join(key.decode() for key in documents))


def differences(definitions: Definitions, file: QueuesFile) -> dict[bytes, Mapping[str, Any] | None]:
    """Return the layers to write, None for those to remove."""
    published = {
        queue: layer for queue in definitions.names() if (layer := definitions.layer("file", queue)) is not None
    }
    layers: dict[bytes, Mapping[str, Any] | None] = {
        layer_key("file", queue): None for queue in sorted(published.keys() - file.queues.keys())
    }
    for queue, document in file.queues.items():
        if published.get(queue) != document:
            layers[layer_key("file", queue)] = document
    schedules = definitions.schedules
    for name in schedules.names():
        if name not in file.schedules and schedules.layer(FILE_LAYER, name) is not None:
            layers[layer_key(FILE_LAYER, name)] = None
    for name, document in file.schedules.items():
        if schedules.layer(FILE_LAYER, name) != document:
            layers[layer_key(FILE_LAYER, name)] = document
    if definitions.defaults != file.defaults:
        layers[DEFAULTS_KEY] = file.defaults or None
    return layers


def check_topics(definitions: Definitions, names: Names, file: QueuesFile) -> None:
    """Check the topics of all queues; same errors as :func:`marq.settings.combinations.check_topic`."""
    try:
        for queue in definitions.names():
            check_topic(definitions, queue, names)
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from error
