"""Which handlers a worker runs, as one process per group (marq_worker/handlers/supervisor.py runs them).

A worker runs the handler of a queue of its project if marq.toml or a change at run time names one, because every worker
of the project can import it, or if a module of its MARQ_HANDLERS has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from marq.kafka.queue_records import Serving, serving
from marq.settings.default_group import handlers_group
from marq.settings.definitions import Definitions
from marq.settings.removed_handlers import handler_of
from marq.wire.errors import ConfigError

#: No handlers by type.
_NO_TYPES: Mapping[str, Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class HandledQueue:
    """``handler`` is ``module:function``; ``topic``: the queue's own topic.

    ``types`` has the handlers of the queue that are for one type of messages; ``handler`` is then for the others, None
    if no handler is.
    """

    handler: str | None
    concurrency: int
    topic: str | None = None
    types: Mapping[str, str] = field(default_factory=dict)

    @property
    def handlers(self) -> list[str]:
        """All handlers, each once."""
        names = [*self.types.values()] if self.handler is None else [self.handler, *self.types.values()]
        return list(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class HandlerGroup:
    """What one process runs; an equal group needs no new process. The process itself follows which partitions to read.

    ``modules`` have lifespans or middleware for it, besides the modules of its handlers.
    ``transactional``: at least one queue is transactional, so the process acquires the messages of all its queues in
    transactions. ``ordered``: at least one queue is served by key. In both cases it reads only committed records.
    A running process can't change how it reads.
    """

    name: str
    queues: Mapping[str, HandledQueue]
    modules: tuple[str, ...] = ()
    transactional: bool = False
    ordered: bool = False
    #: As in :class:`marq.kafka.queue_records.Serving`.
    changed_at: int = field(default=-1, compare=False)

    @property
    def committed(self) -> bool:
        """Whether the process reads only committed records."""
        return self.transactional or self.ordered

    @property
    def topics(self) -> dict[str, str]:
        return {name: queue.topic for name, queue in self.queues.items() if queue.topic is not None}

    def serving(self, messages: str, queues: Iterable[str], definitions: Definitions | None = None) -> Serving:
        """Return what to read for some of the queues; without definitions, in all partitions."""
        definitions = definitions or Definitions()
        reads = {name: definitions.placement(name).reads for name in self.queues}
        skipped = definitions.skipped
        return serving(messages, queues, self.topics, reads, self.changed_at, skipped, ordered=self.ordered)

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> HandlerGroup:
        queues = {name: _handled(**queue) for name, queue in document["queues"].items()}
        # A worker of an older version does not say whether a queue has ordering; reading committed records is safe.
        ordered = document.get("ordered", True)
        modules, changed_at = tuple(document["modules"]), document["changed_at"]
        return cls(document["name"], queues, modules, document["transactional"], ordered, changed_at)


def _handled(reads: object = None, limited: object = None, **told: Any) -> HandledQueue:
    # A worker of an older version also tells which partitions to read, and whether the queue has limits.
    return HandledQueue(**told)


def handler_groups(
    definitions: Definitions,
    own: Mapping[str, str],
    modules: tuple[str, ...] = (),
    project: str | None = "",
    types: Mapping[str, Mapping[str, str]] = _NO_TYPES,
) -> dict[str, HandlerGroup]:
    """Return the groups whose handlers a worker runs, by name; ``modules`` have lifespans or middleware for all.

    ``own`` and ``project`` as in :func:`marq.settings.removed_handlers.handler_of`. ``types`` has the handlers of the
    worker's MARQ_HANDLERS that are for one type of a queue's messages, by queue and type. Only the worker's own code
    decides about them, not a definition: in a rolling deployment, workers have different types.
    """
    groups: dict[str, dict[str, HandledQueue]] = {}
    for queue in definitions.names():
        handler, typed = handler_of(definitions, queue, own, project), types.get(queue, {})
        if handler is not None or typed:
            settings = definitions.settings(queue)
            group = definitions.group(queue) or handlers_group(project)
            groups.setdefault(group, {})[queue] = HandledQueue(handler, settings.concurrency, settings.topic, typed)
    return {
        name: HandlerGroup(
            name,
            queues,
            modules,
            transactional=bool(_transactional(queues, definitions)),
            ordered=any(definitions.settings(queue).by_key for queue in queues),
            changed_at=definitions.changed_at(queues),
        )
        for name, queues in sorted(groups.items())
    }


def _transactional(queues: Iterable[str], definitions: Definitions) -> list[str]:
    return [queue for queue in queues if definitions.settings(queue).transactional]


def check_transactional(group: HandlerGroup, definitions: Definitions) -> None:
    """Check that a process that was started before a queue became transactional does not serve it."""
    changed = _transactional(group.queues, definitions)
    if changed and not group.transactional:
        raise ConfigError(
            f"group {group.name!r}: queue {changed[0]!r} is transactional, but this process was started before that"
            " change and would not acquire its messages in transactions: the worker starts another process"
        )


def without_handler(definitions: Definitions, group: HandlerGroup) -> list[str]:
    """Return the queues of a group that have no handler here; their messages in our partitions would wait."""
    return [queue for queue in definitions.queues_of(group.name) if queue not in group.queues]
