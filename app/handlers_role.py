"""The role ``handlers`` of a worker: which handlers it runs, checked at its start and followed afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from agents.handler_groups import HandlerGroup, check_delivery, handler_groups, without_handler
from agents.handlers import load_handler, load_modules
from app.handlers_processes import HandlersProcesses
from marq.core.definitions import Definitions, layer_key
from marq.core.errors import ConfigError
from marq.queues import Queues
from marq.settings import ClientSettings
from marq.topics import Topics, own_topics

log = logging.getLogger("marq.handlers")


class HandlersRole:
    """Keeps the handlers processes in step with the definitions of queues.

    Raises:
        ConfigError: a module can't be imported, or has two handlers for one queue.
    """

    def __init__(self, modules: tuple[str, ...], processes: Callable[[], HandlersProcesses]) -> None:
        decorated = load_modules(modules)
        self._modules = modules
        #: What the decorated handlers of our modules say of their queues.
        self.documents = {each.queue: each.document for each in decorated}
        self._own = {each.queue: each.name for each in decorated}
        self._make_processes = processes
        self._processes: HandlersProcesses | None = None
        self._incomplete: dict[str, list[str]] = {}
        self._end_listening: Callable[[], None] = lambda: None

    def publication(self, definitions: Definitions) -> dict[bytes, Mapping[str, Any] | None]:
        """Return what to write so that all know which queues our modules have handlers for."""
        return publication(definitions, self.documents, self._modules)

    async def check(self, definitions: Definitions, client: ClientSettings, topics: Topics) -> None:
        """Check what would have to be run if these were the definitions.

        Raises:
            ConfigError: a handler can't be imported, a queue has two, another queue of its group has none, or a
                queue's own topic can't be used.
            BrokerUnavailable: no broker answered in time.
        """
        groups = handler_groups(definitions, self._own)
        check(definitions, groups, self._own)
        await own_topics(client, [topic for group in groups.values() for topic in group.topics.values()], topics)

    def start(self, queues: Queues) -> None:
        """Run handlers as the definitions say, now and after each change."""
        self._processes = processes = self._make_processes()

        def follow() -> None:
            self._follow(queues.definitions, processes)

        self._end_listening = queues.listen(follow)
        follow()

    async def stop(self) -> None:
        """Stop all handlers."""
        self._end_listening()
        if self._processes is not None:
            await self._processes.stop()

    def figures(self) -> list[dict[str, Any]]:
        """What each process is, for people."""
        return [] if self._processes is None else self._processes.figures()

    def _follow(self, definitions: Definitions, processes: HandlersProcesses) -> None:
        groups = handler_groups(definitions, self._own)
        incomplete = {name: rest for name, group in groups.items() if (rest := without_handler(definitions, group))}
        for name, rest in incomplete.items():
            if self._incomplete.get(name) != rest:
                log.warning("%s", part_of_group(groups[name], rest, definitions))
        self._incomplete = incomplete
        processes.want(groups)


def publication(
    definitions: Definitions, said: Mapping[str, Mapping[str, Any]], modules: Collection[str]
) -> dict[bytes, Mapping[str, Any] | None]:
    """Return the layers to write so that all know of the handlers that ``modules`` have, by queue.

    What other modules say stays: others may run them. What a module of ours said once and says no more is removed.
    """
    ours = {*modules, *map(_module, said.values())}
    documents: dict[bytes, Mapping[str, Any] | None] = {}
    for queue in definitions.names():
        before = definitions.layer("handler", queue)
        if before is not None and queue not in said and any(f"{_module(before)}.".startswith(f"{m}.") for m in ours):
            documents[layer_key("handler", queue)] = None
    for queue, document in said.items():
        if definitions.layer("handler", queue) != document:
            documents[layer_key("handler", queue)] = document
    return documents


def _module(document: Mapping[str, Any]) -> str:
    return str(document.get("handler")).partition(":")[0]


def check(definitions: Definitions, groups: Mapping[str, HandlerGroup], own: Mapping[str, str]) -> None:
    """Check that each queue has one handler, which can be imported, and each group has a handler for all its queues.

    No such queue may deliver at most once.

    Raises:
        ConfigError: not so.
    """
    for queue, name in own.items():
        named = (definitions.layer("file", queue) or {}).get("handler")
        if named not in (None, name):
            raise ConfigError(
                f"queue {queue!r} has two handlers: {named} in queues.toml, and {name}, which is decorated for it; "
                "a queue has one: take one of them away"
            )
    for group in groups.values():
        check_delivery(group, definitions)
        for queue, each in group.queues.items():
            load_handler(queue, each.handler)
        rest = without_handler(definitions, group)
        if rest:
            raise ConfigError(part_of_group(group, rest, definitions))


def part_of_group(group: HandlerGroup, rest: list[str], definitions: Definitions) -> str:
    """Say of which queues of a group this worker has no handler."""
    elsewhere = [f"{queue!r} ({name})" for queue in rest if (name := definitions.settings(queue).handler) is not None]
    modules = (
        f" Of {', '.join(elsewhere)} the module is not in MARQ_HANDLERS: name it there; or, if that handler is no more,"
        " run `faust -A app queue NAME --forget`."
        if elsewhere
        else ""
    )
    return (
        f"group {group.name!r}: this worker has handlers for {', '.join(map(repr, group.queues))}, and none for "
        f"{', '.join(map(repr, rest))}, whose messages wait in the partitions that it is given. Whoever reads for a "
        f"group does so for all of its queues: give each a handler, or put those without one into another group "
        f"(`group` in their settings).{modules}"
    )
