"""Decorated handlers that no worker runs any more: how they are noticed, and when their definitions expire.

The layer of a decorator (:mod:`marq.settings.definitions`) must outlive the worker that wrote it, because a restart
must not move its queue to another group. But if the handler is removed from all workers, the layer would keep consumers
away for good. So workers confirm their handlers, by records of the queues topic, and a tracker removes layers without
confirmations.

Only time in which the observer was running and reading the topic counts. No clocks are compared, and if no tracker
runs, nothing expires. A queue that moves to another group, or back, resumes from the furthest position of all groups
(:mod:`marq.kafka.committed_offsets`), so an expiry neither loses nor repeats a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from marq.settings.definitions import Definitions, confirmed_key, layer_key

#: Layers whose handlers every worker runs; decorated handlers need the module.
_FOR_ALL = ("file", "change")
#: Interval between two confirmations of a queue's handler, by any worker that has it.
CONFIRM_S = 300.0
#: Times without a confirmation after which a handler counts as removed, and after which its layer expires.
REMOVED_S, EXPIRY_S = CONFIRM_S + 60.0, 3 * CONFIRM_S


@dataclass
class Confirmations:
    """Adds up, from one look to the next, for how long the handlers of queues have not been confirmed."""

    #: The last confirmation of each queue's handler, and the seconds since.
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def look(self, definitions: Definitions, queues: Iterable[str], passed_s: float) -> dict[str, float]:
        """Return for how many seconds each queue's handler was not confirmed, since its first look at the earliest.

        ``passed_s``: the seconds that count since the last look.
        """
        before, self._seen = self._seen, {}
        for queue in queues:
            last = definitions.confirmed(queue)
            known, unconfirmed_s = before.get(queue, (None, 0.0))
            self._seen[queue] = (last, unconfirmed_s + passed_s if known == last else 0.0)
        return {queue: unconfirmed_s for queue, (_, unconfirmed_s) in self._seen.items()}


def handler_of(definitions: Definitions, queue: str, own: Mapping[str, str], project: str | None = "") -> str | None:
    """Return the handler that a worker of a project runs for a queue, if any; ``own``: those of its MARQ_HANDLERS.

    It does not have the code of another project's handlers. ``project`` is None for a worker that has neither a name
    nor a marq.toml, and so has no code but that of its MARQ_HANDLERS.
    """
    if queue not in own and definitions.project(queue) not in (None, project):
        return None
    layers = [definitions.layer(name, queue) or {} for name in _FOR_ALL]
    return definitions.settings(queue).handler if any("handler" in layer for layer in layers) else own.get(queue)


def decorated(definitions: Definitions) -> dict[str, str]:
    """Return the decorated handler of each queue that has one, even if another layer overrides it."""
    layers = {queue: definitions.layer("handler", queue) or {} for queue in definitions.names()}
    return {queue: str(layer["handler"]) for queue, layer in layers.items() if "handler" in layer}


def module_of(handler: str) -> str:
    return handler.partition(":")[0]


def removal(queues: Iterable[str]) -> dict[bytes, Mapping[str, Any] | None]:
    """Return the records that remove the decorated handlers of queues.

    They also take back the confirmations: a worker that does run the handlers, but could not confirm them, sees that
    and publishes them again.
    """
    gone = sorted(queues)
    return dict.fromkeys([*map(confirmed_key, gone), *[layer_key("handler", queue) for queue in gone]])
