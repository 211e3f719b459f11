"""The role ``handlers`` of a worker: which handlers it runs, checked at its start and followed afterwards."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from mode import Service

from marq.consumer.session import TOPIC_RETRY_S
from marq.handlers.typed import HandlersByType
from marq.queues.queues import Queues
from marq.settings.combinations import ORIGINS, check_queue
from marq.settings.definitions import Definitions, confirmed_key, layer_key
from marq.settings.queue import queue_settings, settings_document
from marq.settings.removed_handlers import CONFIRM_S, EXPIRY_S, Confirmations, decorated, module_of
from marq.wire.errors import ConfigError, MarqError
from marq_worker.config.queues import FILE_LAYER
from marq_worker.handlers.handler_groups import HandlerGroup, handler_groups, without_handler
from marq_worker.handlers.loaded_handlers import (
    decorated_settings,
    load_handlers_of,
    load_modules,
    modules_in,
    surrounding,
    without_handlers,
)
from marq_worker.handlers.supervisor import HandlersProcesses
from marq_worker.publication import check_owner, listed, with_project

log = logging.getLogger("marq.handlers")

#: Seconds between checks for handlers to confirm.
LOOK_S = 10.0


class HandlersRole(Service):
    """Keeps the handler processes in step with the definitions of queues.

    ``missing_topics`` returns which of some queues have own topics that do not exist, and why they can't be served.
    """

    def __init__(
        self,
        modules: tuple[str, ...],
        processes: HandlersProcesses,
        queues: Queues,
        missing_topics: Callable[[Mapping[str, str]], Awaitable[Mapping[str, str]]],
    ) -> None:
        super().__init__()
        handlers = load_modules(modules)
        self._modules = modules
        self._surrounding = surrounding(modules)
        #: Settings from the decorators in our modules, by queue.
        self.documents = {queue: queue_handlers.document for queue, queue_handlers in handlers.items()}
        self._own = {
            queue: queue_handlers.name for queue, queue_handlers in handlers.items() if queue_handlers.name is not None
        }
        self._types = {
            queue: queue_handlers.types for queue, queue_handlers in handlers.items() if queue_handlers.types
        }
        self._confirmations = Confirmations()
        self.processes = processes
        self._queues = queues
        self._missing_topics = missing_topics
        self._incomplete: dict[str, list[str]] = {}
        #: Queues that are not served because their own topics don't exist, and the errors.
        self._without: Mapping[str, str] = {}
        #: Why topics could not be looked up.
        self._trouble = ""
        #: The project whose handlers it runs, as in :func:`marq.settings.removed_handlers.handler_of`.
        self.project: str | None = ""
        self._end_listening: Callable[[], None] = lambda: None

    def publication(self, definitions: Definitions) -> dict[bytes, Mapping[str, Any] | None]:
        return publication(definitions, self.documents, self._modules, self.project or "")

    async def publish(self) -> None:
        """Write the records of our handlers, and say which ones it removes."""
        records = self.publication(self._queues.definitions)
        await self._queues.publish(records)
        if removed := [key for key, document in records.items() if document is None]:
            log.warning("project %s removed definitions that its code no longer has: %s", self.project, listed(removed))
        for text in overridden(self._queues.definitions, self.documents):
            log.info("%s", text)
        for text in unpublished(self._groups(self._queues.definitions), self.documents):
            log.warning("%s", text)

    def check(self, definitions: Definitions) -> None:
        """Check what would run with these definitions."""
        check(definitions, self._groups(definitions), self._own)

    def _groups(self, definitions: Definitions) -> dict[str, HandlerGroup]:
        return handler_groups(definitions, self._own, self._surrounding, self.project, self._types)

    async def on_start(self) -> None:
        """Run handlers as the definitions say, now and after each change."""
        await self._look_for_topics()
        for module in without_handlers(self._modules):
            inner = modules_in(module)
            log.warning(
                "MARQ_HANDLERS: module %r has no function with @marq.handler(...), so none of its functions run%s",
                module,
                f"; it is a package, so name its modules: {', '.join(inner)}" if inner else "",
            )
        await self.add_runtime_dependency(self.processes)
        self._end_listening = self._queues.listen(self._follow)
        self._follow()

    async def on_stop(self) -> None:
        self._end_listening()

    def groups(self) -> dict[str, HandlerGroup]:
        """Return the groups whose handlers this worker runs, as its definitions are now."""
        return self._groups(self._queues.definitions)

    @Service.task
    async def _confirm(self) -> None:
        before_s = time.monotonic()
        while not self.should_stop:
            now_s = time.monotonic()
            passed_s, before_s = now_s - before_s, now_s
            try:
                await self.confirm(passed_s)
            except Exception as error:  # the end of this task would end the worker
                log.warning("handlers could not be confirmed, retrying: %r", error)
            await asyncio.sleep(LOOK_S)

    @Service.task
    async def _watch_topics(self) -> None:
        while not self.should_stop:
            await asyncio.sleep(TOPIC_RETRY_S)
            if await self._look_for_topics():
                self._follow()

    async def _look_for_topics(self) -> bool:
        """Look which queues have lost their own topics; return whether that has changed.

        Such a queue must not stop the others: its group's process goes on without it until the topic exists again.
        """
        groups = self.groups()
        try:
            missing = await self._missing_topics({q: t for group in groups.values() for q, t in group.topics.items()})
        except MarqError as error:
            if str(error) != self._trouble:
                log.warning("the topics of queues could not be looked up, retrying: %s", error)
            self._trouble = str(error)
            return False
        self._trouble = ""
        for queue in missing.keys() - self._without.keys():
            log.error("queue not served, retrying: queue=%s error=%s", queue, missing[queue])
        for queue in self._without.keys() - missing.keys():
            log.info("queue served from now on: queue=%s", queue)
        changed, self._without = missing.keys() != self._without.keys(), missing
        return changed

    async def confirm(self, passed_s: float) -> None:
        """Confirm our handlers if no worker has done so for a while, so that their layers do not expire."""
        definitions = self._queues.definitions
        unconfirmed_s = self._confirmations.look(definitions, self.documents, passed_s)
        if all(definitions.confirmed(queue) for queue in unconfirmed_s):
            due = [queue for queue, seconds in unconfirmed_s.items() if seconds >= CONFIRM_S]
            await self._queues.publish({confirmed_key(queue): {} for queue in due})
        else:
            # A tracker has removed them, because this worker was cut off for long.
            await self.publish()

    def _follow(self) -> None:
        definitions, groups = self._queues.definitions, self.groups()
        incomplete = {name: rest for name, group in groups.items() if (rest := without_handler(definitions, group))}
        for name, rest in incomplete.items():
            if self._incomplete.get(name) != rest:
                log.warning("%s", part_of_group(groups[name], rest, definitions))
        self._incomplete = incomplete
        served = {
            name: replace(group, queues={q: handled for q, handled in group.queues.items() if q not in self._without})
            for name, group in groups.items()
        }
        self.processes.want({name: group for name, group in served.items() if group.queues})


def publication(
    definitions: Definitions, documents: Mapping[str, Mapping[str, Any]], modules: Collection[str], project: str = ""
) -> dict[bytes, Mapping[str, Any] | None]:
    """Return the records that publish the handlers of ``modules``, by queue, and confirm that a worker has them.

    Layers of other modules and projects stay: other workers may run them. A layer of ours that no handler defines any
    more is removed, unless our project has no name: another project may have a module of the same name. It expires.

    Raises ConfigError if a queue is another project's.
    """
    ours = {*modules, *(module_of(str(document["handler"])) for document in documents.values())}
    layers: dict[bytes, Mapping[str, Any] | None] = {confirmed_key(queue): {} for queue in documents}
    for queue, handler in decorated(definitions).items():
        removed = queue not in documents and any(f"{module_of(handler)}.".startswith(f"{m}.") for m in ours)
        if removed and project and definitions.publisher("handler", queue) == project:
            layers[layer_key("handler", queue)] = None
    for queue, document in documents.items():
        key, publisher = layer_key("handler", queue), definitions.publisher("handler", queue)
        check_owner(key, definitions.project(queue), project, f"handler {document['handler']}: ")
        if definitions.layer("handler", queue) != document or publisher != project:
            layers[key] = with_project(document, project)
    return layers


def overridden(definitions: Definitions, documents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return which settings of decorators have no effect, because a stronger layer has another value."""
    texts = []
    for queue, document in documents.items():
        current = settings_document(definitions.settings(queue))
        decorated = settings_document(queue_settings(document))
        for key in document.keys() - {"handler"}:
            if current[key] != decorated[key]:
                origin = ORIGINS[definitions.origin(queue, key)]
                texts.append(
                    f"queue {queue!r}: {key} = {current[key]} ({origin}) overrides {key} = {decorated[key]} of"
                    f" @marq.handler ({document['handler']})"
                )
    return sorted(texts)


def unpublished(groups: Mapping[str, HandlerGroup], own: Collection[str]) -> list[str]:
    """Return which settings of decorators no worker publishes, because only marq.toml names their handlers."""
    return [
        f"queue {queue!r}: the settings of @marq.handler ({handled.handler}) have no effect: {', '.join(keys)};"
        f" MARQ_HANDLERS does not list the module {module_of(handled.handler)!r}: add it, or set them in marq.toml"
        for group in groups.values()
        for queue, handled in group.queues.items()
        if queue not in own and handled.handler is not None and (keys := decorated_settings(queue, handled.handler))
    ]


def check(definitions: Definitions, groups: Mapping[str, HandlerGroup], own: Mapping[str, str]) -> None:
    """Check that each queue has one importable handler, and each group handlers for all its queues; and the settings
    of decorators.

    A missing decorated handler is not an error, because it may have been removed.
    """
    for queue, name in own.items():
        named = (definitions.layer("file", queue) or {}).get("handler")
        if named not in (None, name):
            raise ConfigError(
                f"queue {queue!r} has two handlers: {named} in marq.toml, and {name}, by its "
                "decorator: remove one of them"
            )
    for group in groups.values():
        for queue, handled in group.queues.items():
            check_schedules(definitions, queue, load_handlers_of(queue, handled))
            if definitions.layer("handler", queue) is not None:
                check_queue(definitions, queue)
        rest = without_handler(definitions, group)
        check_projects(definitions, group, rest)
        if lacks_handler(definitions, rest):
            raise ConfigError(part_of_group(group, rest, definitions))


def check_schedules(definitions: Definitions, queue: str, handlers: HandlersByType) -> None:
    """Check that the handlers of a queue can decode the values of the schedules in marq.toml.

    Otherwise each of their messages would become a dead letter, perhaps only weeks after the deployment.
    """
    for schedule in definitions.schedules.current.values():
        if schedule.queue == queue and definitions.schedules.layer(FILE_LAYER, schedule.name) is not None:
            try:
                handlers.check_value(schedule.type or None, schedule.value.encode())
            except ConfigError as error:
                raise ConfigError(f"schedule {schedule.name!r}: {error}") from error


def check_projects(definitions: Definitions, group: HandlerGroup, rest: Collection[str]) -> None:
    """Check that no queue of a group that this worker runs is another project's."""
    ours = next(iter(group.queues))
    for queue in rest:
        owner, project = definitions.project(queue), definitions.project(ours)
        if owner is not None and owner != project:
            raise ConfigError(
                f"group {group.name!r} has queue {ours!r} of {_named(project)} and queue {queue!r} of {_named(owner)}."
                " A worker reads all queues of a group, but runs only its own project's handlers, so messages of the"
                " other would wait: give the queues of one project another group (`group` in their settings)"
            )


def _named(project: str | None) -> str:
    return f"project {project!r}" if project else "a project without a name"


def lacks_handler(definitions: Definitions, queues: Collection[str]) -> bool:
    """Return whether one of these queues has no handler in any worker."""
    return any(definitions.settings(queue).handler is None for queue in queues)


def part_of_group(group: HandlerGroup, rest: list[str], definitions: Definitions) -> str:
    """Explain which queues of a group have no handler in this worker."""
    elsewhere = [f"{queue!r} ({name})" for queue in rest if (name := definitions.settings(queue).handler) is not None]
    modules = (
        f" MARQ_HANDLERS does not list the modules of {', '.join(elsewhere)}: add them. A handler that was removed from"
        f" all workers expires after {EXPIRY_S / 60:.0f} min, or with `marq queue NAME --forget`."
        if elsewhere
        else ""
    )
    return (
        f"group {group.name!r}: this worker has handlers for {', '.join(map(repr, group.queues))}, but none for "
        f"{', '.join(map(repr, rest))}, whose messages wait in the partitions assigned to it. A worker reads all "
        f"queues of a group: define a handler for each, or move queues without one to another group "
        f"(`group` in their settings).{modules}"
    )
