"""The lines of a worker's start: who it is, what it runs, and when it is ready."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from mode import Service

from marq.version import VERSION
from marq_worker.config.settings import AppSettings, Role
from marq_worker.handlers.handler_groups import HandlerGroup
from marq_worker.web.liveness_and_readiness import Reason

log = logging.getLogger("marq.worker")

#: Queues that are listed.
MAX_QUEUES = 8
#: How often to look whether the worker is ready, and how often to say why it is not.
LOOK_S, REMIND_S = 0.25, 30.0


def introduction(settings: AppSettings, groups: Mapping[str, HandlerGroup] | None, dashboard: str) -> Iterator[str]:
    """Yield the lines that say who a worker is and what it runs.

    ``groups``: the handlers that it runs, None without that role; ``dashboard``: its address, empty without one.
    """
    project = f"project {settings.project}" if settings.project else "no project"
    yield (
        f"Marq {VERSION}: namespace {settings.prefix} on {settings.bootstrap_servers}, {project},"
        f" roles {', '.join(sorted(settings.roles))}"
    )
    if groups is not None:
        yield from _handlers(groups)
    if dashboard and Role.WEB in settings.roles:
        yield f"dashboard on {dashboard}"


def _handlers(groups: Mapping[str, HandlerGroup]) -> Iterator[str]:
    queues = [(name, queue, group.name) for group in groups.values() for name, queue in group.queues.items()]
    for name, queue, group in sorted(queues, key=lambda row: row[0])[:MAX_QUEUES]:
        yield f"queue {name}: {', '.join(queue.handlers)}, concurrency {queue.concurrency}, group {group}"
    if len(queues) > MAX_QUEUES:
        yield f"and {len(queues) - MAX_QUEUES:,} more queues with handlers; marq queues lists them"
    if not queues:
        yield "no handlers: to run some, name their modules in MARQ_HANDLERS, or set handler in marq.toml"


class StartReport(Service):
    """Logs when a worker is ready, and until then now and then why it is not.

    ``not_ready`` returns the reasons; the worker began at ``begun_s`` of the monotonic clock.
    """

    def __init__(
        self, begun_s: float, not_ready: Callable[[], Awaitable[Sequence[Reason]]], partitions: Callable[[], int]
    ) -> None:
        super().__init__()
        self._begun_s = begun_s
        self._not_ready = not_ready
        self._partitions = partitions

    @Service.task
    async def _report(self) -> None:
        reminded_s = time.monotonic()
        while not self.should_stop:
            reasons, now_s = await self._not_ready(), time.monotonic()
            if not reasons:
                log.info("ready in %.1f s, owns %d markers partitions", now_s - self._begun_s, self._partitions())
                return
            if now_s - reminded_s >= REMIND_S:
                reminded_s = now_s
                text = "; ".join(f"{reason.subject}: {reason.found}" for reason in reasons)
                log.info("not ready after %.0f s: %s", now_s - self._begun_s, text)
            await asyncio.sleep(LOOK_S)
