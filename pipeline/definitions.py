"""What the queues topic has said of queues, as far as the pipeline needs it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from marq.core.definitions import Definitions
from marq.core.errors import ConfigError


@dataclass
class Said:
    """Over all that the topic still has: a queue whose setting has changed is in here with what it was, too."""

    #: The queue of each topic that is or was a queue's own.
    own_topics: dict[str, str] = field(default_factory=dict)
    #: Queues whose last deliveries may leave no dead letter; "*" stands for all.
    without_dead_letters: set[str] = field(default_factory=set)
    #: The current definitions, with the orders of quarantine.
    definitions: Definitions = field(default_factory=Definitions)


def said(records: Iterable[tuple[bytes | None, bytes | None]]) -> Said:
    """Return what the records of the queues topic, keys and values, have said."""
    found = Said()
    definitions = found.definitions
    for key, value in records:
        with suppress(ConfigError, ValueError):
            queue = definitions.fold(key, None if value is None else json.loads(value))
            for name in [queue] if queue is not None else definitions.names():
                settings = definitions.settings(name)
                if settings.topic is not None:
                    found.own_topics[settings.topic] = name
                if not settings.dead_letter:
                    found.without_dead_letters.add(name)
            if definitions.defaults.get("dead_letter") is False:
                found.without_dead_letters.add("*")
    return found
