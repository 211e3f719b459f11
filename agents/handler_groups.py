"""What the handlers processes of one worker are to do: decided here, done by app/handlers_processes.py.

Each group of queues with handlers has a process of its own. A worker runs the handler of a queue if queues.toml or a
change at run time names one, for then every worker can import it, or if a module of its own MARQ_HANDLERS has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from marq.core.definitions import HANDLERS_GROUP, Definitions
from marq.core.errors import ConfigError
from marq.core.queue import AT_LEAST_ONCE, AT_MOST_ONCE
from marq.core.spread import Partitions
from marq.serving import Serving, serving

#: Layers whose handlers every worker runs; that of the decorator is only for workers that have the module.
_FOR_ALL = ("file", "change")


@dataclass(frozen=True, slots=True)
class HandledQueue:
    """``handler`` is ``module:function``; ``topic`` is a topic of the queue's own; ``reads``: of the messages topic."""

    handler: str
    concurrency: int
    topic: str | None = None
    reads: Partitions = None


@dataclass(frozen=True, slots=True)
class HandlerGroup:
    """What one process runs; two that are equal need no other process."""

    name: str
    queues: Mapping[str, HandledQueue]

    @property
    def topics(self) -> dict[str, str]:
        """The topic of each queue that has one of its own."""
        return {name: queue.topic for name, queue in self.queues.items() if queue.topic is not None}

    def serving(self, messages: str, queues: Iterable[str]) -> Serving:
        """Return what to read for some of the queues."""
        return serving(messages, queues, self.topics, {name: queue.reads for name, queue in self.queues.items()})

    def document(self) -> dict[str, Any]:
        """Return what :meth:`read` makes the same group of."""
        return asdict(self)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> HandlerGroup:
        return cls(document["name"], {name: _handled(**queue) for name, queue in document["queues"].items()})


def _handled(reads: Iterable[int] | None, **told: Any) -> HandledQueue:
    # JSON has no tuples.
    return HandledQueue(reads=None if reads is None else tuple(reads), **told)


def handler_of(definitions: Definitions, queue: str, own: Mapping[str, str]) -> str | None:
    """Return the handler that a worker runs for a queue, None: none; ``own`` are those of its MARQ_HANDLERS."""
    layers = [definitions.layer(name, queue) or {} for name in _FOR_ALL]
    return definitions.settings(queue).handler if any("handler" in layer for layer in layers) else own.get(queue)


def handler_groups(definitions: Definitions, own: Mapping[str, str]) -> dict[str, HandlerGroup]:
    """Return the groups of which a worker runs handlers, by name."""
    found: dict[str, dict[str, HandledQueue]] = {}
    for queue in definitions.names():
        handler = handler_of(definitions, queue, own)
        if handler is not None:
            settings, reads = definitions.settings(queue), definitions.placement(queue).reads
            group = definitions.group(queue) or HANDLERS_GROUP
            found.setdefault(group, {})[queue] = HandledQueue(handler, settings.concurrency, settings.topic, reads)
    return {name: HandlerGroup(name, queues) for name, queues in sorted(found.items())}


def check_delivery(group: HandlerGroup, definitions: Definitions) -> None:
    """Check that no queue with a handler promises more than handlers of workers can.

    Raises:
        ConfigError: one delivers at most once.
    """
    for queue, each in group.queues.items():
        if definitions.settings(queue).delivery == AT_MOST_ONCE:
            raise ConfigError(
                f"queue {queue!r} delivers at most once, and workers run its handler {each.handler}: they don't start"
                " messages in transactions, so one could be delivered twice. Take the handler away and run it by"
                f" marq.Consumer({queue!r}).run(…), or set delivery = {AT_LEAST_ONCE!r}"
            )


def without_handler(definitions: Definitions, group: HandlerGroup) -> list[str]:
    """Return the queues of a group that have no handler here: nobody reads them in the partitions given to us."""
    return [queue for queue in definitions.queues_of(group.name) if queue not in group.queues]
